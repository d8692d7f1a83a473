"""From text, molecules or a grammar to masked batches of token ids.

``toy`` languages have a known distribution; ``text``, ``smiles`` and ``sources`` read files, LMDB
and the hub. ``corpus`` makes what a run trains on: small ones in one go (``building``), large
ones in resumable stages (``prepare``), both stored as ``packs``. ``masking`` draws the masks,
``batches`` puts rows together.
"""
