"""States alignment: the sum over all paths through the state graph (§4.3, Appendix H).

Shapes: B rows, M targets, L states.

A path visits one state per target, always moving forward: it starts in state 0, ends in the last
state, and its score is the product of its emissions and transitions. The sum of all paths' scores
is the likelihood of the targets (``dag_log_likelihood``). The same graph yields the posteriors of
states and edges (``posteriors``) and the best path (``viterbi``); without targets, ``greedy``,
``lookahead`` and ``best_path`` decode it. The backends (``BACKENDS``) differ in speed, not in their
results. ``dag_loss`` offers the sum as a loss for other models.
"""

from exlm_mini.alignment.api import (
    BACKENDS,
    Backend,
    Posteriors,
    dag_log_likelihood,
    fastest,
    posteriors,
    viterbi,
)
from exlm_mini.alignment.decoders import Decoded, best_path, greedy, lookahead
from exlm_mini.alignment.drop_in import dag_loss, torch_dag_loss

__all__ = [
    "BACKENDS",
    "Backend",
    "Decoded",
    "Posteriors",
    "best_path",
    "dag_log_likelihood",
    "dag_loss",
    "fastest",
    "greedy",
    "lookahead",
    "posteriors",
    "torch_dag_loss",
    "viterbi",
]
