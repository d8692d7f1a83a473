"""The workshop: what repeats the paper's experiments and measures speed.

``downstream`` fine-tunes on GLUE, SQuAD and MoleculeNet (Tables 6, 8 and 11), ``experiments``
sweeps over settings and holds the study, ``benchmarks`` measures time and memory. Commands:
``finetune predict embed sweep bench``. It imports ``exlm_mini``, never the other way round.

Every mistake of the user raises ``UserError``, as in ``exlm_mini``.
"""
