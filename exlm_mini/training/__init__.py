"""Training: ``loop`` runs ``step`` after step, ``checkpoint`` and ``run_directory`` keep it.

``pretraining`` says what is learned from masked rows; fine-tuning, in the lab, has the same loop.
``parts`` makes model, batches, optimiser and schedule from the settings, ``processes`` spreads a
step over devices, ``evaluation`` measures on held-out rows, ``cost`` and ``dry_run`` say beforehand
what a run takes.
"""
