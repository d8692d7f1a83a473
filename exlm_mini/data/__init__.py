"""From text, molecules or a grammar to masked batches of token ids.

``toy`` languages have a known distribution; ``sources`` reads files, LMDB and the hub. ``corpus``
makes what a run trains on: documents, tokenizer, token ids (``pipeline``, in ``shards`` that
survive a kill), rows, and the ``packs`` (``building``). ``masking`` draws the masks, ``batches``
puts rows together.
"""
