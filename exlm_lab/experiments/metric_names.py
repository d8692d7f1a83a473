"""Every number a sweep records of a model: its name, and how tables and figures call it."""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """How tables and figures call a number."""

    title: str
    unit: str
    meaning: str


PROBE = "probe_accuracy"
_MARGINAL = "each lost token predicted by itself"
METRICS = {
    # ---- all models ----
    "lost_share": Metric("lost tokens", "share", "tokens with all copies masked"),
    "lost_per_row": Metric("lost tokens per row", "tokens", "mean number"),
    "entropy_bits": Metric(
        "entropy", "bits", f"of the prediction (Appendices E, Q.1), {_MARGINAL}; mean"
    ),
    "cross_entropy_bits": Metric(
        "cross-entropy", "bits", f"-log2 of the true word, {_MARGINAL}; mean"
    ),
    "accuracy": Metric("accuracy", "share", f"likeliest word is the true one, {_MARGINAL}"),
    "confidence": Metric("confidence", "share", "probability given to that word; mean"),
    "calibration_error": Metric(
        "calibration error", "share", "expected distance of confidence and accuracy, 15 bins"
    ),
    "frequency_bits": Metric(
        "frequencies", "bits", "-log2 of the true word's frequency in training rows; mean"
    ),
    "bits_per_row": Metric(
        "bits per row",
        "bits",
        "-log2 P(all lost tokens of a row | context); the product of single predictions, and for "
        "ExLM the sum over paths",
    ),
    "bits_per_mask": Metric(
        "bits per lost token", "bits", "bits per row / lost tokens per row"
    ),
    "perplexity": Metric("perplexity", "words", "2 to the bits per lost token (Appendix G)"),
    "linked_bits": Metric(
        "won by links",
        "bits",
        "cross-entropy of a row's single predictions, summed, - bits per row; 0 for MLM, below 0 "
        "where probability is lost to fillings of another length",
    ),
    "dependence_bits": Metric(
        "won by links, the length given",
        "bits",
        "won by links, where only fillings of the right length are compared; 0 where a path "
        "settles each word by itself",
    ),
    # ---- Repeated MLM ----
    "visible_entropy_bits": Metric(
        "entropy beside a visible copy", "bits", "of masked copies of tokens that are not lost"
    ),
    # ---- ExLM ----
    "state_entropy_bits": Metric(
        "entropy within a state", "bits", "of the prediction once the path is known; mean"
    ),
    "masks_skipped_share": Metric(
        "masks skipped", "share", "no state of the mask on the path, given the words; mean"
    ),
    "masks_used_twice_share": Metric(
        "masks used twice", "share", "two or more of its states on the path, given the words"
    ),
    "clones_used": Metric(
        "clones used",
        "clones",
        "2 to the entropy of the clone index of visited states over all data, given the words; 1 "
        "to k",
    ),
    "clones_open": Metric(
        "clones open",
        "clones",
        "2 to the entropy of the clone index of visited states in one mask, before any word is "
        "known; mean, 1 to k",
    ),
    "specialisation_bits": Metric(
        "specialisation",
        "bits",
        "Jensen-Shannon divergence of two clones' words, mean over pairs and masks; 0 to 1",
    ),
    "used_specialisation_bits": Metric(
        "specialisation by use",
        "bits",
        "the same of all clones, weighted by how likely paths visit them; 0 to log2 k",
    ),
    # ---- toy language ----
    "optimum_entropy_bits": Metric(
        "optimal entropy", "bits", f"of the true distribution, {_MARGINAL}; mean"
    ),
    "optimum_accuracy": Metric("optimal accuracy", "share", "of the true distribution"),
    "excess_bits": Metric(
        "excess", "bits", f"KL(true || model), {_MARGINAL}: cross-entropy - optimal entropy"
    ),
    "missed_share": Metric(
        "missed",
        "share",
        "excess / bits that the visible words tell of a lost token; 0 for the truth, 1 for a "
        "model that knows places alone",
    ),
    "floor_bits_per_row": Metric(
        "floor", "bits", "sum of marginal entropies of a row's lost tokens; mean"
    ),
    "joint_bits_per_row": Metric(
        "joint entropy", "bits", "of a row's lost tokens, the visible words given; mean"
    ),
    "total_correlation_bits": Metric("total correlation", "bits", "floor - joint entropy"),
    "captured_bits": Metric("captured", "bits", "floor - bits per row"),
    "captured_error_bits": Metric("error of captured", "bits", "standard error over rows"),
    "captured_share": Metric(
        "captured share",
        "share",
        "captured / total correlation; below 0 for worse than the floor",
    ),
    "linked_share": Metric(
        "share won by links", "share", "won by links / total correlation; 1 for the truth"
    ),
    PROBE: Metric(
        "read by a probe",
        "share",
        "latents a linear classifier names, taught with 60 sentences, the model left as it is",
    ),
}
"""Every number of ``measure``, in the order of tables."""
