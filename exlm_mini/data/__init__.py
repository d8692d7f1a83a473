"""Turn text, molecules or the sentences of a grammar into masked batches of token ids.

``toy`` defines languages with a known distribution; ``sources`` reads files, LMDB and the hub.
``corpus`` prepares the data of a run: ``pipeline`` turns ``shards`` of documents, which survive an
interruption, into ``packs`` of rows. ``masking`` draws the masks, ``batches`` puts rows together.
"""
