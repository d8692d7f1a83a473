"""Whether a task and a model suit each other; asked before anything is trained.

Shapes: R rows, C labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from exlm_lab.downstream.task import Task
from exlm_mini.config import UserError
from exlm_mini.data.tokenizer import Tokenizer, on_one_line
from exlm_mini.reading.pretrained import Pretrained

MAX_UNKNOWN = 0.1
"""Of all tokens of the training texts: with more, the vocabulary is that of another corpus."""
EXAMPLES_LOOKED_AT = 1000
"""To say which pieces of text a vocabulary lacks."""
AROMATIC = ("c", "n")
"""What a vocabulary of Kekulé spelling, with explicit double bonds in its rings, never has."""


def check_input(task: Task, pretrained: Pretrained) -> None:
    """Refuse a model that was not trained on what the task consists of.

    Raises:
        UserError: naming both.
    """
    if task.input != pretrained.input:
        raise UserError(
            f"{task.name} consists of {task.input}, and {pretrained.path} was trained on "
            f"{pretrained.input}; give a checkpoint that was trained on {task.input}"
        )


def check_unknown(
    task: Task,
    texts: Sequence[tuple[str, ...]],
    unknown_share: float,
    max_unknown: float,
    pretrained: Pretrained,
) -> None:
    """Refuse data that the vocabulary of the model was not made for.

    Args:
        task: what kind of text it is.
        texts: of the training examples.
        unknown_share: of their tokens that are [UNK].
        max_unknown: the largest share that is borne; none where the language is our own.
        pretrained: whose vocabulary it is.

    Raises:
        UserError: naming the share of [UNK] and what it mostly stands for.
    """
    # Every word of the small language is in its own vocabulary.
    limit = 0.0 if task.input == "toy" else max_unknown
    if unknown_share <= limit:
        return
    some = [text for example in texts[:EXAMPLES_LOOKED_AT] for text in example]
    lost = Counter(p for text in some for p in pretrained.tokenizer.unknown_pieces(text))
    shown = ", ".join(on_one_line(piece)[:20] for piece, _ in lost.most_common(5))
    why = ""
    if lost.keys() & {*AROMATIC} and _is_kekule(task, pretrained.tokenizer):
        why = (
            "; it was learned from Kekulé spelling, without aromatic c and n, and these molecules "
            "are aromatic"
        )
    other = "" if task.input == "toy" else ", or allow more with --max-unknown"
    raise UserError(
        f"{task.name}: {unknown_share:.1%} of the training tokens (more than {limit:.1%}) are not "
        f"in the vocabulary of {pretrained.path}, such as {shown}{why}; give a checkpoint whose "
        f"tokenizer was made for such data{other}"
    )


def _is_kekule(task: Task, tokenizer: Tokenizer) -> bool:
    """Whether a vocabulary was learned from molecules without aromatic atoms."""
    return task.input == "smiles" and all(map(tokenizer.unknown_pieces, AROMATIC))


def check_scorable(task: Task, part: str, labels: np.ndarray) -> None:
    """Refuse rows that have no score, whatever is predicted for them.

    Args:
        task: its kind says how it is scored.
        part: which rows.
        labels: theirs; empty where they are secret.

    Raises:
        UserError: no label has a yes and a no, so that there is no ROC curve.
    """
    if task.kind != "labels" or not len(labels):
        return
    has_both_C = (labels == 1).any(axis=0) & (labels == 0).any(axis=0)
    if not has_both_C.any():
        raise UserError(
            f"{task.name}: no label has both a yes and a no among the {len(labels)} rows of the "
            f"part {part}, so there is no ROC curve to score; choose another --data.split, or "
            "give data with both answers"
        )
