r"""``python -m exlm_mini.fill``: fill the masks of a text or molecule and show how. ::

    python -m exlm_mini.fill "The [MASK] of the cell." --run runs/text-tiny
    python -m exlm_mini.fill "CC[MASK]C(=O)O" --top 3 --json
    python -m exlm_mini.fill "She felt [MASK] and [MASK]." --html explorer.html

``--json`` prints one object; probabilities are between 0 and 1, labels are as in the table::

    run, step, objective     directory, checkpoint and kind of the model
    text, filled             with [MASK] and with the tokens chosen
    joint_probability        of the chosen tokens together; ExLM: by all paths
    joint_bits               -log2 of it, also where it is too small for a float
    masks                    for each {"mask": from 1, "id", "token", "text",
                             "top"}: the chosen token, and the likeliest for
                             this mask by itself, a list of {"id", "token" as
                             in the vocabulary, "text", "probability"}
    states                   ExLM: for each {"label", "mask" (null: boundary),
                             "clone" (0 where not expanded), "top"}; or null
    path                     labels of the best path's states, start to end
    path_probability         its transitions times its tokens
    fit_probability          of reaching the end in one step per mask
    transition               rows hand over to columns, in the order of states

The last four are null where states have no edges (MLM, and ``--model.transition ctc``).

``--html`` writes the graph as one page for a browser, in which a reader fixes words or states and
sees what follows for the other masks. It needs states with edges, and no network. Below it the
likeliest fillings of a molecule are drawn, new atoms marked, where RDKit is installed.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exlm_mini.config.checks import UserError, on_one_line
from exlm_mini.config.options import command_parser
from exlm_mini.data.tokenizer import MASK, Tokenizer, visible
from exlm_mini.reading.runs import SHIPPED, newest_run, shipped_for
from exlm_mini.training.console import exit_code, say

if TYPE_CHECKING:  # help and mistakes on the command line need no torch
    from torch import Tensor

    from exlm_mini.reading.trained import Filled, Trained

RUNS = Path("runs")
LINE_WIDTH = 100
"""Width of the output without a terminal."""


def as_json(trained: Trained, text: str, filled: Filled, top: int) -> dict[str, Any]:
    """The reading as one JSON object; its schema is in the docstring of this file."""
    tokenizer, reading = trained.tokenizer, filled.reading
    states, graph = reading.states, reading.graph
    tops = _top(tokenizer, reading.log_token_SV, top)
    out: dict[str, Any] = {
        "run": str(trained.run),
        "step": trained.step,
        "objective": trained.config.objective,
        "text": text,
        "filled": filled.text,
        "joint_probability": filled.probability,
        "joint_bits": _bits(reading.log_joint),
        "masks": [
            {"mask": i, **_token(tokenizer, token_id), "top": likeliest}
            for i, (token_id, likeliest) in enumerate(
                zip(reading.token_ids_S.tolist(), tops, strict=True), start=1
            )
        ],
    }
    others = ("states", "path", "path_probability", "fit_probability", "transition")
    out |= dict.fromkeys(others)
    if states is None:
        return out
    names = ("label", "mask", "clone", "top")
    owners = [i if 0 < i <= len(tops) else None for i in states.owner_L.tolist()]
    tops = _top(tokenizer, states.log_token_LV, top)
    rows = zip(states.labels, owners, states.clone_L.tolist(), tops, strict=True)
    out["states"] = [dict(zip(names, row, strict=True)) for row in rows]
    if graph is not None:
        out["path"] = [states.labels[u] for u in graph.path_M.tolist()]
        out["path_probability"] = _probability(graph.log_path)
        out["fit_probability"] = _probability(graph.log_fit)
        out["transition"] = graph.log_transition_LL.exp().tolist()
    return out


def as_table(trained: Trained, found: dict[str, Any], filled: Filled) -> Iterator[str]:
    """What ``as_json`` found, as lines of plain text; ``filled`` has the rest of the reading."""
    tokenizer, graph, path = trained.tokenizer, filled.reading.graph, found["path"] or []
    yield f"run     {trained.run}, step {trained.step}"
    yield f"model   {trained.model_in_words}"
    yield f"text    {on_one_line(found['text'])}"
    yield f"filled  {on_one_line(found['filled'])}"
    joint = _amount(filled.reading.log_joint)
    if graph is None:
        yield f"joint   {joint}, the masks are independent"
    else:
        chosen = ["", *(f" {visible(tokenizer, mask['id'])}" for mask in found["masks"]), ""]
        yield f"path    {' -> '.join(map(str.__add__, path, chosen))}"
        yield f"        {_amount(graph.log_path)}, the best path: its transitions and tokens"
        yield f"joint   {joint}, these tokens by all paths"
        yield f"fit     {_amount(graph.log_fit)}, one step per mask, whatever the tokens"
    yield "\nEach mask by itself: likeliest tokens"
    yield from _token_lines(tokenizer, {str(m["mask"]): m["top"] for m in found["masks"]})
    if found["states"] is None:
        return
    yield "\nEach state (mask.clone): likeliest tokens" + "; * on the best path" * bool(path)
    # The states of the boundaries are of interest only where they speak for a mask.
    yield from _token_lines(tokenizer, {
        state["label"] + "*" * (state["label"] in path[1:-1]): state["top"]
        for state in found["states"] if state["mask"] or state["label"] in path[1:-1]
    })  # fmt: skip
    if graph is not None:
        yield "\nTransitions: the row hands over to the column"
        labels = [state["label"] for state in found["states"]]
        yield from _matrix_lines(labels, found["transition"])


def _token(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    token, text = tokenizer.token(token_id), tokenizer.decode([token_id])
    return {"id": token_id, "token": token, "text": text}


def _top(tokenizer: Tokenizer, log_token_XV: Tensor, count: int) -> list[list[dict[str, Any]]]:
    """The likeliest tokens of each row."""
    from exlm_mini.reading.decoding import top_tokens

    tops = top_tokens(log_token_XV, count, tokenizer.special_ids)
    return [
        [{**_token(tokenizer, i), "probability": p} for i, p in zip(*row, strict=True)]
        for row in zip(*(top_XC.tolist() for top_XC in tops), strict=True)
    ]


def _token_lines(tokenizer: Tokenizer, tops: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """One line per label of tokens with probabilities, in columns."""
    cells = [
        [label, *(f"{visible(tokenizer, t['id'])} {t['probability']:.2f}" for t in top)]
        for label, top in tops.items()
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield f"  {'  '.join(map(str.ljust, row, widths))}".rstrip()


def _matrix_lines(labels: list[str], rows: list[list[float]]) -> Iterator[str]:
    """The matrix with two decimals and a dot for 0.00, in blocks of columns that fit a line."""
    width = max(4, *map(len, labels))
    line_width = shutil.get_terminal_size((LINE_WIDTH, 24)).columns
    num_columns = max(1, (line_width - 2 - width) // (width + 1))
    for start in range(0, len(labels), num_columns):
        end = min(start + num_columns, len(labels))
        table = [("", labels[start:end])]
        # Edges lead forward: below the block's last column there is nothing.
        for label, row in zip(labels[:end], rows, strict=False):
            cells = [f"{p:.2f}" for p in row[start:end]]
            table.append((label, ["." if cell == "0.00" else cell for cell in cells]))
        if start:
            yield ""
        for label, cells in table:
            yield "  " + " ".join([label.ljust(width), *(cell.rjust(width) for cell in cells)])


def _probability(log_probability: float) -> float:
    """exp, at most 1 where rounding went past it."""
    return min(math.exp(log_probability), 1.0)


def _bits(log_probability: float) -> float:
    """-log2 of a probability, at least 0 where rounding went past it."""
    return max(0.0, -log_probability / math.log(2))


def _amount(log_probability: float) -> str:
    """A probability, and its bits for those too small to read."""
    return f"{_probability(log_probability):.3g} = {_bits(log_probability):.2f} bits"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_mini.fill", __doc__)
    parser.add_argument("text", help=f"text, SMILES or toy sentence with {MASK}")
    parser.add_argument(
        "--run", type=Path, metavar="DIR",
        help=f"--output of a training run, or {' or '.join(SHIPPED)}, which are shipped; default: "
        f"the newest below {RUNS}/, else one that is shipped",
    )  # fmt: skip
    parser.add_argument(
        "--top", type=int, default=5, metavar="N", help="tokens per mask and state; default 5"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write the graph to explore in a browser"
    )
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Read the text with the model asked for, and print what it says."""
    if arguments.top < 1:
        raise UserError(f"--top is {arguments.top}; it must be at least 1")
    if arguments.html is not None and arguments.html.suffix != ".html":
        raise UserError(f"--html is {arguments.html}; give the page a name that ends in .html")
    directory = arguments.run
    if directory is None:
        directory = newest_run(RUNS)
        if directory is not None:
            say(f"reading the newest run, {directory}")
        else:
            directory = SHIPPED[name := shipped_for(arguments.text)]
            say(f"no run below {RUNS}/: reading the small model '{name}' that is shipped")
    from exlm_mini.reading.trained import load

    trained = load(directory)
    filled = trained.fill(arguments.text)
    if arguments.html is not None:
        page = trained.explore(arguments.text)
        below = ""
        if trained.input == "smiles" and find_spec("rdkit"):
            from exlm_mini.reading.structures import structures

            below = structures(page.scene)
        page.save(arguments.html, title=on_one_line(arguments.text), below=below)
        say(f"wrote {arguments.html}; open it in a browser")
    found = as_json(trained, arguments.text, filled, arguments.top)
    if arguments.json:
        print(json.dumps(found, allow_nan=False))
    else:
        print("\n".join(as_table(trained, found, filled)))


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a token may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    return exit_code(lambda: run(_parser().parse_args(argv)), unread=0)


if __name__ == "__main__":
    sys.exit(main())
