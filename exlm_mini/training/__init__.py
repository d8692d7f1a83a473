"""Training: ``trainer`` makes ``step`` after step, ``checkpoint`` and ``run_directory`` keep them.

``parts`` makes model, batches, optimiser and schedule from the settings, ``processes`` spreads a
step over devices, ``evaluation`` measures on held-out rows, ``cost`` and ``dry_run`` say beforehand
what a run takes.
"""
