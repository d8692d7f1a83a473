"""A trained model and a text with masks: what it reads there, as JSON or as a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from exlm_mini.config import RunConfig, UserError
from exlm_mini.data import files
from exlm_mini.data.tokenizer import MASK, Tokenizer, on_one_line, visible
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.reading.decoding import Reading, read_masked_lm, read_states, top_tokens
from exlm_mini.reading.pretrained import TRAINED_IN_TURN, tokenizer_of
from exlm_mini.training.checkpoint import latest_checkpoint
from exlm_mini.training.console import say
from exlm_mini.training.parts import chain_share, load_model, num_copies


class Loaded(NamedTuple):
    """A trained model and what it needs to read text."""

    run: Path
    step: int
    config: RunConfig
    model: ExLM | MaskedLM
    tokenizer: Tokenizer


def single_run(directory: Path) -> Path | None:
    """The directory that has ``checkpoints/``: the one given, or one of two trained in turn."""
    candidates = [directory, *(directory / name for name in TRAINED_IN_TURN)]
    return next((path for path in candidates if any(path.glob("checkpoints/step-*"))), None)


def newest_run(runs: Path) -> Path:
    """The run below a directory that saved a checkpoint last.

    Raises:
        UserError: if no run there has a checkpoint.
    """
    found = [run for path in runs.glob("*") if (run := single_run(path))]
    if not found:
        raise UserError(
            f"no run below {runs}/ has a checkpoint; train one with python -m "
            "exlm_mini.pretrain, or name its directory with --run"
        )
    return max(found, key=lambda run: (run / "checkpoints").stat().st_mtime_ns)


def load_run(directory: Path) -> Loaded:
    """Model and tokenizer of a run's newest intact checkpoint.

    Args:
        directory: OUTPUT of a run, or one of the two directories in it that mlm+exlm trains.

    Raises:
        UserError: no such directory, no intact checkpoint, or not the tokenizer it was trained
            with.
    """
    if not directory.is_dir():
        raise UserError(f"there is no directory {directory}; give the --output of a run")
    run = single_run(directory)
    checkpoint = latest_checkpoint(run / "checkpoints", say) if run else None
    if checkpoint is None:
        raise UserError(
            f"{directory} has no checkpoint; give the --output of a run that has saved one"
        )
    if "tokenizer_sha256" not in checkpoint.state:
        raise UserError(
            f"{run} holds no pre-trained model; give the --output of a pre-training run"
        )
    with files.reading(run):
        tokenizer = tokenizer_of(run, checkpoint)
        model, config = load_model(checkpoint)
        return Loaded(run, checkpoint.step, config, model, tokenizer)


MAX_CHARACTERS = 20_000
"""More than any row holds. Symbols of molecules are found in a time that is quadratic where
brackets stay open: a second for so many."""


def encode_row(loaded: Loaded, text: str) -> Tensor:
    """masked_ids_BN of one text between [BOS] and [EOS].

    Raises:
        UserError: not UTF-8, no mask, something the vocabulary lacks, or too long for the model.
    """
    tokenizer = loaded.tokenizer
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes of another encoding reach us as lone surrogates
        raise UserError("the text is not valid UTF-8; check the terminal's encoding") from None
    if MASK not in text:
        raise UserError(f"the text has no {MASK}; write {MASK} in place of each hidden token")
    if len(text) > MAX_CHARACTERS:
        raise UserError(
            f"the text has {len(text):,} characters; {MAX_CHARACTERS:,} is the most that is read"
        )
    token_ids = tokenizer.encode_with_masks(text)
    if tokenizer.special_ids.unk in token_ids:
        pieces = re.split(rf" ?{re.escape(MASK)}", text)
        unknown = [piece for part in pieces for piece in tokenizer.unknown_pieces(part)]
        raise UserError(
            f"not in the vocabulary of {loaded.run}: "
            f"{', '.join(repr(piece) for piece in dict.fromkeys(unknown))}; use words or "
            "symbols of its training data, or name another run with --run"
        )
    row = [tokenizer.special_ids.bos, *token_ids, tokenizer.special_ids.eos]
    _check_length(loaded, row)
    return torch.tensor([row])


def _check_length(loaded: Loaded, row: list[int]) -> None:
    """Refuse a row that the positions cannot hold once it is expanded or repeated."""
    config = loaded.config
    needed, how = len(row) * num_copies(config), "after repetition"
    if config.objective == "exlm":
        num_boundaries = 2 if config.model.boundary == "official" else 0
        num_expanded = row.count(loaded.tokenizer.special_ids.mask) + num_boundaries
        needed = len(row) + (config.model.states_per_mask - 1) * num_expanded
        how = "after expansion"
    if needed > config.model.max_positions:
        raise UserError(
            f"the text has {len(row)} tokens with [BOS] and [EOS], {needed} {how}, more than "
            f"model.max_positions {config.model.max_positions} of {loaded.run}; shorten it"
        )


def read(loaded: Loaded, masked_ids_BN: Tensor) -> Reading:
    """What the model of a run says about one row.

    Raises:
        UserError: if its weights give no probabilities.
    """
    if isinstance(loaded.model, ExLM):
        # As at the validation of this step: transitions may still be blended with fixed chains.
        share = chain_share(loaded.config, loaded.step)
        found = read_states(loaded.model, masked_ids_BN, share)
    else:
        found = read_masked_lm(loaded.model, masked_ids_BN, num_copies(loaded.config))
    if found.log_token_SV.isnan().any():
        raise UserError(
            f"the weights of {loaded.run} give no probabilities, for they are too large or no "
            "numbers; give another run"
        )
    return found


def fill_in(tokenizer: Tokenizer, masked_ids_BN: Tensor, token_ids_S: Tensor) -> str:
    """The text with the chosen tokens in place of the masks."""
    filled_N = masked_ids_BN[0].clone()
    filled_N[filled_N == tokenizer.special_ids.mask] = token_ids_S
    return tokenizer.decode(filled_N[1:-1].tolist())


# ---- as JSON and as a table ----

LINE_WIDTH = 100


def as_json(
    loaded: Loaded, text: str, masked_ids_BN: Tensor, reading: Reading, top: int
) -> dict[str, Any]:
    """The reading as one JSON object; the schema is in the docstring of ``exlm_mini.fill``."""
    tokenizer = loaded.tokenizer
    top_of_masks = _top(tokenizer, reading.log_token_SV, top)
    masks = [
        {"mask": i + 1, **_token(tokenizer, token_id), "top": top_of_masks[i]}
        for i, token_id in enumerate(reading.token_ids_S.tolist())
    ]
    out = {
        "run": str(loaded.run),
        "step": loaded.step,
        "objective": loaded.config.objective,
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
    if graph is not None:
        out["path"] = [states.labels[u] for u in graph.path_M.tolist()]
        out["path_probability"] = _probability(graph.log_path)
        out["fit_probability"] = _probability(graph.log_fit)
        out["transition"] = graph.log_transition_LL.exp().tolist()
    return out


def as_table(
    loaded: Loaded, text: str, masked_ids_BN: Tensor, reading: Reading, top: int
) -> Iterator[str]:
    """The reading as lines of plain text."""
    tokenizer, states, graph = loaded.tokenizer, reading.states, reading.graph
    chosen = [visible(tokenizer, token_id) for token_id in reading.token_ids_S.tolist()]
    yield f"run     {loaded.run}, step {loaded.step}"
    yield f"model   {model_in_words(loaded)}"
    yield f"text    {on_one_line(text)}"
    filled = fill_in(tokenizer, masked_ids_BN, reading.token_ids_S)
    yield f"filled  {on_one_line(filled)}"
    sums = "the masks are independent"
    if graph is not None:
        labels = [states.labels[u] for u in graph.path_M.tolist()]
        steps = [f"{label} {token}" for label, token in zip(labels[1:-1], chosen, strict=True)]
        yield f"path    {' -> '.join([labels[0], *steps, labels[-1]])}"
        yield f"        {_amount(graph.log_path)}, the best path: its transitions and tokens"
        sums = "these tokens by all paths"
    yield f"joint   {_amount(reading.log_joint)}, {sums}"
    if graph is not None:
        yield f"fit     {_amount(graph.log_fit)}, one step per mask, whatever the tokens"
    yield ""
    copies = num_copies(loaded.config)
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
    if graph is not None:
        yield ""
        yield "Transitions: the row hands over to the column"
        yield from _matrix_lines(states.labels, graph.log_transition_LL.exp())


def model_in_words(loaded: Loaded) -> str:
    """The kind of model in a few words."""
    config = loaded.config
    if config.objective == "mlm":
        return "MLM"
    if config.objective == "repeated-mlm":
        return f"Repeated MLM, {num_copies(config)} copies"
    model = config.model
    share = chain_share(config, loaded.step)
    chains = f", still {share:.0%} fixed parallel chains" if share else ""
    return (
        f"ExLM, {model.states_per_mask} states per mask, {model.transition} transitions{chains}"
    )


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
    start = 0
    while start < len(labels):
        line, end = " " * (2 + label_width), start
        while end < len(labels) and (
            end == start or len(line) + 1 + _column_width(labels[end]) <= LINE_WIDTH
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
