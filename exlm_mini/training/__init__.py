"""Training: ``trainer`` makes each ``step``, ``checkpoint`` and ``run_directory`` store the
results.

``parts`` builds the masker and the model from the settings, ``step`` the batches and the optimiser.
``processes`` spreads a step over devices, ``evaluation`` measures on held-out rows, and ``cost``
and ``dry_run`` estimate in advance what a run needs.
"""
