"""Training: ``trainer`` makes each ``step``, ``checkpoint`` and ``run_directory`` store the
results.

``parts`` makes model, batches, optimiser and schedule from the settings, ``processes`` spreads a
step over devices, ``evaluation`` measures on held-out rows, ``cost`` and ``dry_run`` estimate
beforehand what a run needs.
"""
