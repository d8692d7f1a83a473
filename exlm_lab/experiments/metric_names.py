"""Every number that ``measure`` records of a model."""

from __future__ import annotations

DOWNSTREAM = "downstream"
PROBE = "probe_accuracy"
METRICS = {
    # ---- all models; "alone": each lost token predicted by itself ----
    "lost_share": ("share", "tokens with all copies masked"),
    "lost_per_row": ("tokens", "lost tokens of a row, mean"),
    "entropy_bits": ("bits", "of the prediction alone (Appendices E, Q.1), mean"),
    "cross_entropy_bits": ("bits", "-log2 of the true word, alone, mean"),
    "accuracy": ("share", "likeliest word is the true one, alone"),
    "frequency_bits": ("bits", "-log2 of the true word's frequency in training rows, mean"),
    "bits_per_row": (
        "bits",
        "-log2 P(all lost tokens of a row | context); the product of single predictions, and for "
        "ExLM the sum over paths",
    ),
    "bits_per_mask": ("bits", "bits per row / lost tokens per row"),
    "linked_bits": (
        "bits",
        "won by links: cross-entropy of a row's single predictions, summed, - bits per row; 0 for "
        "MLM, below 0 where probability is lost to fillings of another length",
    ),
    "dependence_bits": (
        "bits",
        "won by links, where only fillings of the right length are compared; 0 where a path "
        "settles each word by itself",
    ),
    # ---- ExLM ----
    "clones_used": (
        "clones",
        "2 to the entropy of the clone index of visited states over all data, given the words; 1 "
        "to k",
    ),
    "specialisation_bits": (
        "bits",
        "Jensen-Shannon divergence of two clones' words, mean over pairs and masks; 0 to 1",
    ),
    # ---- toy language ----
    "optimum_entropy_bits": ("bits", "entropy of the true distribution, alone, mean"),
    "excess_bits": ("bits", "KL(true || model), alone: cross-entropy - optimal entropy"),
    "missed_share": (
        "share",
        "excess / information of the visible words on a lost token, bits; 0 for the truth, 1 for "
        "a model that predicts from places alone",
    ),
    "floor_bits_per_row": ("bits", "sum of marginal entropies of a row's lost tokens, mean"),
    "joint_bits_per_row": ("bits", "joint entropy of these, the visible words given, mean"),
    "total_correlation_bits": ("bits", "floor - joint entropy"),
    "captured_bits": ("bits", "floor - bits per row"),
    PROBE: (
        "share",
        "latents a linear classifier names, taught with 60 sentences, the model left as it is",
    ),
}
"""Unit and meaning by name, in the order of tables."""
WAYS = ("at_once", "at_once_best_of_16", "in_turn", "at_once_sampled", "in_turn_sampled")
"""In which molecules are filled in; see ``reading.filling``."""
SHARES = {name for name, (unit, _) in METRICS.items() if unit == "share"} | {
    "validation_mask_accuracy",
    "read_structure",  # of ``frozen``
    *(f"{what}_{way}" for what in ("readable", "exact") for way in WAYS),
}
"""Shown in percent."""
