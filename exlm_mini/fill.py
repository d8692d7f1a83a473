"""``python -m exlm_mini.fill``: fill the masks of a text or molecule and show how. ::

    python -m exlm_mini.fill "The [MASK] of the cell." --run runs/text-tiny
    python -m exlm_mini.fill "CC[MASK]C(=O)O" --top 3
    python -m exlm_mini.fill "She felt [MASK] and [MASK]." --html explorer.html

``--html`` writes the state graph as a single page for a browser, in which a reader can fix words or
states and see what follows for the other masks. The page needs no network; the model must be an MLM
or an ExLM whose states have edges. If RDKit is installed, the likeliest fillings of a molecule are
drawn below the graph, with the new atoms marked.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_mini.config.checks import Count, UserError, on_one_line
from exlm_mini.config.options import command_parser, of
from exlm_mini.data.tokenizer import MASK, Tokenizer, visible
from exlm_mini.reading.runs import SHIPPED, model_directory, newest_run, shipped_for
from exlm_mini.training.console import exit_code, say

if TYPE_CHECKING:  # --help and command-line errors do not import torch
    from torch import Tensor

    from exlm_mini.reading.trained import Filled, Trained

RUNS = Path("runs")
LINE_WIDTH = 100
"""Width of the output, in characters, when it does not go to a terminal."""


def table(trained: Trained, text: str, filled: Filled, top: int) -> Iterator[str]:
    """Yield the reading as lines of plain text, with ``top`` tokens for each mask and state."""
    tokenizer, reading = trained.tokenizer, filled.reading
    states, graph = reading.states, reading.graph
    joint, path = _amount(reading.log_joint), list[str]()
    yield f"run     {trained.run}, step {trained.step}"
    yield f"model   {trained.model_in_words}"
    yield f"text    {on_one_line(text)}"
    yield f"filled  {on_one_line(filled.text)}"
    if states is None or graph is None:
        yield f"joint   {joint}, the masks are independent"
    else:
        path = [states.labels[state] for state in graph.path_M.tolist()]
        words = [f" {visible(tokenizer, i)}" for i in reading.token_ids_S.tolist()]
        yield f"path    {' -> '.join(map(str.__add__, path, ['', *words, '']))}"
        yield f"        {_amount(graph.log_path)}, the best path: its transitions and tokens"
        yield f"joint   {joint}, these tokens, summed over all paths"
        yield f"fit     {_amount(graph.log_fit)}, probability of one step per mask, for any tokens"
    num_masks = len(reading.token_ids_S)
    yield "\nEach mask by itself: likeliest tokens"
    masks = list(map(str, range(1, num_masks + 1)))
    yield from _token_lines(tokenizer, masks, reading.log_token_SV, top)
    if states is None:
        return
    yield "\nEach state (mask.clone): likeliest tokens" + "; * on the best path" * bool(path)
    on_path = path[1:-1]
    # States of [BOS] and [EOS] are shown only if the best path takes them for a mask.
    shown = {
        state: label + "*" * (label in on_path)
        for state, label in enumerate(states.labels)
        if 0 < states.owner_L[state] <= num_masks or label in on_path
    }
    log_token_XV = states.log_token_LV[list(shown)]
    yield from _token_lines(tokenizer, list(shown.values()), log_token_XV, top)
    if graph is not None:
        yield "\nTransitions: probability of going from the row's state to the column's"
        yield from _matrix_lines(states.labels, graph.log_transition_LL.exp().tolist())


def _token_lines(
    tokenizer: Tokenizer, labels: Sequence[str], log_token_XV: Tensor, top: int
) -> Iterator[str]:
    """For each label, a line with its likeliest tokens and their probabilities, in columns."""
    from exlm_mini.reading.decoding import top_tokens

    tops = (top_XC.tolist() for top_XC in top_tokens(log_token_XV, top, tokenizer.special_ids))
    cells = [
        [label, *(f"{visible(tokenizer, i)} {p:.2f}" for i, p in zip(ids, shares, strict=True))]
        for label, ids, shares in zip(labels, *tops, strict=True)
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
        # Edges only lead forward, so rows below the block's last column would be empty.
        for label, row in zip(labels[:end], rows, strict=False):
            cells = [f"{p:.2f}" for p in row[start:end]]
            table.append((label, ["." if cell == "0.00" else cell for cell in cells]))
        if start:
            yield ""
        for label, cells in table:
            yield "  " + " ".join([label.ljust(width), *(cell.rjust(width) for cell in cells)])


def _amount(log_probability: float) -> str:
    """A probability, also in bits in case it is tiny; rounding errors that exceed 1 are cut off."""
    bits = max(0.0, -log_probability / math.log(2))
    return f"{2.0**-bits:.3g} = {bits:.2f} bits"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python -m exlm_mini.fill", __doc__)
    add = parser.add_argument
    add("text", help=f"text, SMILES or toy sentence with {MASK}")
    add(
        "--run", type=Path, metavar="DIR",
        help=f"--output of a training run, or a shipped model ({', '.join(SHIPPED)}); default: the "
        f"newest run below {RUNS}/, else a shipped model",
    )  # fmt: skip
    top = "number of tokens to show per mask and state; default 5"
    add("--top", type=of(Count), default=5, metavar="N", help=top)
    html = "also write a page to explore the graph in a browser"
    add("--html", type=Path, metavar="FILE", help=html)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Fill the text with the chosen model and print the result; write the page of ``--html``."""
    if arguments.html is not None and arguments.html.suffix != ".html":
        raise UserError(f"--html is {arguments.html}; give a name that ends in .html")
    directory = arguments.run
    if directory is None:
        directory = newest_run(RUNS)
        if directory is not None:
            say(f"reading the newest run, {directory}")
        else:
            directory = SHIPPED[name := shipped_for(arguments.text)]
            say(f"no run below {RUNS}/: reading the small shipped model '{name}'")
    directory = model_directory(directory)
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
    print("\n".join(table(trained, arguments.text, filled, arguments.top)))


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 (done), 2 (user error) or 130 (interrupted)."""
    return exit_code(lambda: run(_parser().parse_args(argv)), unread=0)


if __name__ == "__main__":
    sys.exit(main())
