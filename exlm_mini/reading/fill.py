"""What a model reads in a text with masks, as JSON or as a table."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from exlm_mini.data.tokenizer import Tokenizer, on_one_line, visible
from exlm_mini.reading.decoding import Reading, top_tokens
from exlm_mini.reading.trained import Trained, fill_in
from exlm_mini.training.parts import num_copies

LINE_WIDTH = 100
"""Where there is no terminal."""


def as_json(
    trained: Trained, text: str, masked_ids_BN: Tensor, reading: Reading, top: int
) -> dict[str, Any]:
    """The reading as one JSON object; the schema is in the docstring of ``exlm_mini.fill``."""
    tokenizer = trained.tokenizer
    top_of_masks = _top(tokenizer, reading.log_token_SV, top)
    masks = [
        {"mask": i + 1, **_token(tokenizer, token_id), "top": top_of_masks[i]}
        for i, token_id in enumerate(reading.token_ids_S.tolist())
    ]
    out = {
        "run": str(trained.run),
        "step": trained.step,
        "objective": trained.config.objective,
        "text": text,
        "filled": fill_in(tokenizer, masked_ids_BN, reading.token_ids_S),
        "joint_probability": _probability(reading.log_joint),
        "joint_bits": _bits(reading.log_joint),
        "masks": masks,
        **dict.fromkeys(
            ("states", "path", "path_probability", "fit_probability", "transition")
        ),
    }
    states, graph = reading.states, reading.graph
    if states is not None:
        owners, clones = states.owner_L.tolist(), states.clone_L.tolist()
        tops = _top(tokenizer, states.log_token_LV, top)
        out["states"] = [
            {
                "label": label,
                "mask": owner if 0 < owner <= len(masks) else None,
                "clone": clone,
                "top": tokens,
            }
            for label, owner, clone, tokens in zip(
                states.labels, owners, clones, tops, strict=True
            )
        ]
    if states is not None and graph is not None:
        out["path"] = [states.labels[u] for u in graph.path_M.tolist()]
        out["path_probability"] = _probability(graph.log_path)
        out["fit_probability"] = _probability(graph.log_fit)
        out["transition"] = graph.log_transition_LL.exp().tolist()
    return out


def as_table(
    trained: Trained, text: str, masked_ids_BN: Tensor, reading: Reading, top: int
) -> Iterator[str]:
    """The reading as lines of plain text."""
    tokenizer, states, graph = trained.tokenizer, reading.states, reading.graph
    chosen = [visible(tokenizer, token_id) for token_id in reading.token_ids_S.tolist()]
    yield f"run     {trained.run}, step {trained.step}"
    yield f"model   {trained.model_in_words}"
    yield f"text    {on_one_line(text)}"
    filled = fill_in(tokenizer, masked_ids_BN, reading.token_ids_S)
    yield f"filled  {on_one_line(filled)}"
    sums = "the masks are independent"
    if states is not None and graph is not None:
        labels = [states.labels[u] for u in graph.path_M.tolist()]
        steps = [f"{label} {token}" for label, token in zip(labels[1:-1], chosen, strict=True)]
        yield f"path    {' -> '.join([labels[0], *steps, labels[-1]])}"
        yield f"        {_amount(graph.log_path)}, the best path: its transitions and tokens"
        sums = "these tokens by all paths"
    yield f"joint   {_amount(reading.log_joint)}, {sums}"
    if states is not None and graph is not None:
        yield f"fit     {_amount(graph.log_fit)}, one step per mask, whatever the tokens"
    yield ""
    copies = num_copies(trained.config)
    mean = f"; mean over {copies} copies" if copies > 1 else ""
    yield f"Each mask by itself: likeliest tokens{mean}"
    num_masks = len(chosen)
    labels = [str(i + 1) for i in range(num_masks)]
    yield from _token_lines(tokenizer, labels, reading.log_token_SV, top)
    if states is None:
        return
    yield ""
    on_path = set(graph.path_M[1:-1].tolist()) if graph is not None else set()
    yield "Each state (mask.clone): likeliest tokens" + ("; * on the best path" * bool(on_path))
    # The states of the boundaries are of interest only where they speak for a mask.
    owners = states.owner_L.tolist()
    shown = [u for u, o in enumerate(owners) if 0 < o <= num_masks or u in on_path]
    labels = [states.labels[u] + ("*" if u in on_path else "") for u in shown]
    yield from _token_lines(tokenizer, labels, states.log_token_LV[shown], top)
    if states is not None and graph is not None:
        yield ""
        yield "Transitions: the row hands over to the column"
        yield from _matrix_lines(states.labels, graph.log_transition_LL.exp())


def _token(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    return {
        "id": token_id,
        "token": tokenizer.token(token_id),
        "text": tokenizer.decode([token_id]),
    }


def _top(tokenizer: Tokenizer, log_token_XV: Tensor, count: int) -> list[list[dict[str, Any]]]:
    """The likeliest tokens of each row."""
    token_ids_XC, probability_XC = top_tokens(log_token_XV, count, tokenizer.special_ids)
    return [
        [
            {**_token(tokenizer, token_id), "probability": probability}
            for token_id, probability in zip(ids, probabilities, strict=True)
        ]
        for ids, probabilities in zip(
            token_ids_XC.tolist(), probability_XC.tolist(), strict=True
        )
    ]


def _token_lines(
    tokenizer: Tokenizer, labels: Sequence[str], log_token_XV: Tensor, count: int
) -> Iterator[str]:
    """One line per row of tokens with probabilities, in columns."""
    cells = [
        [f"{visible(tokenizer, t['id'])} {t['probability']:.2f}" for t in row]
        for row in _top(tokenizer, log_token_XV, count)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    label_width = max(map(len, labels))
    for label, row in zip(labels, cells, strict=True):
        aligned = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        yield f"  {label.ljust(label_width)}  {aligned}".rstrip()


def _matrix_lines(labels: list[str], probability_LL: Tensor) -> Iterator[str]:
    """The matrix with two decimals and a dot for 0.00, in blocks of columns that fit a line."""
    label_width = max(map(len, labels))
    rows = [[f"{p:.2f}" for p in row] for row in probability_LL.tolist()]
    start, line_width = 0, shutil.get_terminal_size((LINE_WIDTH, 24)).columns
    while start < len(labels):
        line, end = " " * (2 + label_width), start
        while end < len(labels) and (
            end == start or len(line) + 1 + _column_width(labels[end]) <= line_width
        ):
            line += " " + labels[end].rjust(_column_width(labels[end]))
            end += 1
        if start:
            yield ""
        yield line
        # Edges lead forward: below the block's last column there is nothing.
        for label, row in list(zip(labels, rows, strict=True))[:end]:
            cells = [
                ("." if row[u] == "0.00" else row[u]).rjust(_column_width(labels[u]))
                for u in range(start, end)
            ]
            yield "  " + " ".join([label.ljust(label_width), *cells])
        start = end


def _column_width(label: str) -> int:
    """Room for the label and for a number such as 0.25."""
    return max(4, len(label))


def _probability(log_probability: float) -> float:
    """exp, at most 1 where rounding went past it."""
    return min(math.exp(log_probability), 1.0)


def _bits(log_probability: float) -> float:
    """-log2 of a probability, at least 0 where rounding went past it."""
    return max(0.0, -log_probability / math.log(2))


def _amount(log_probability: float) -> str:
    """A probability, and its bits for those too small to read."""
    return f"{_probability(log_probability):.3g} = {_bits(log_probability):.2f} bits"
