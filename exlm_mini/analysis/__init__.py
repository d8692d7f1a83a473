"""What the paper measures about trained models, and what it leaves to be measured.

How uncertain a model is about lost words (``repeated_entropy_bits``, Appendix E) and where that
sits in a graph of states (``path_entropy``, Appendix P). For a batch of rows read by ExLM
(``read_rows``): what each mask may be by itself and how uncertain its states are (Appendix Q.1),
which states paths visit (``path_visits``), how far the clones of a mask differ
(``pairwise_divergence_bits``). How many bits of total correlation a model captures (``Captured``),
and whether its probabilities can be believed (``reliability_curve``).
"""

from exlm_mini.analysis.calibration import (
    Reliability,
    calibration_error,
    reliability_curve,
)
from exlm_mini.analysis.captured import Captured
from exlm_mini.analysis.divergence import (
    divergence_bits,
    effective_number,
    pairwise_divergence_bits,
)
from exlm_mini.analysis.entropy import (
    PathEntropy,
    entropy_bits,
    fully_masked,
    mean_over_copies,
    path_entropy,
    repeated_entropy_bits,
)
from exlm_mini.analysis.states import RowReading, read_rows
from exlm_mini.analysis.visits import Visits, path_visits

__all__ = [
    "Captured",
    "PathEntropy",
    "Reliability",
    "RowReading",
    "Visits",
    "calibration_error",
    "divergence_bits",
    "effective_number",
    "entropy_bits",
    "fully_masked",
    "mean_over_copies",
    "pairwise_divergence_bits",
    "path_entropy",
    "path_visits",
    "read_rows",
    "reliability_curve",
    "repeated_entropy_bits",
]
