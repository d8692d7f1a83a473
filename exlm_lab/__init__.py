"""The workshop: code that repeats the paper's experiments and measures speed.

``downstream`` fine-tunes on GLUE, SQuAD and MoleculeNet (Tables 6, 8 and 11), ``experiments``
runs the sweeps and the study, and ``benchmarks`` measures time and memory. Commands:
``finetune predict embed sweep bench``. ``exlm_lab`` imports ``exlm_mini``, never the reverse.

A mistake of the user raises ``UserError``, as in ``exlm_mini``.
"""
