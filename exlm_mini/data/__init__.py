"""From text, molecules or a grammar to masked batches of token ids.

``toy`` languages have a known distribution; ``sources`` reads files, LMDB and the hub. ``corpus``
makes what a run trains on: the ``pipeline`` turns ``shards`` of documents, which survive a kill,
into ``packs`` of rows. ``masking`` draws the masks, ``batches`` puts rows together.
"""
