"""States alignment: the sum over all paths through the state graph (§4.3, Appendix H).

Shapes: B rows, M targets, L states.

A path visits one state per target, always moving forward: it starts in state 0, ends in the last
state, and scores the product of its emissions and transitions. Summed over all paths that is the
likelihood of the targets (``dag_log_likelihood``; ``dag_loss`` for other models). The same graph
yields the posteriors of states and edges (``posteriors``) and the best path (``viterbi``). The
backends differ in speed, not in their answers (``BACKENDS``).
"""

from exlm_mini.alignment.api import (
    BACKENDS,
    Backend,
    Posteriors,
    dag_log_likelihood,
    dag_loss,
    fastest,
    posteriors,
    viterbi,
)

__all__ = [
    "BACKENDS",
    "Backend",
    "Posteriors",
    "dag_log_likelihood",
    "dag_loss",
    "fastest",
    "posteriors",
    "viterbi",
]
