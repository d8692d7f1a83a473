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
    transition               rows hand over to columns, in the order of ``states``

The last four are null where states are not linked (MLM, and ``--model.transition ctc``).

``--html`` writes the graph as one page for a browser, in which a reader fixes words or states and
sees what follows for the other masks. It needs linked states, and nothing from the network.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

from torch import Tensor

from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser
from exlm_mini.data import files
from exlm_mini.data.tokenizer import MASK, on_one_line
from exlm_mini.reading.decoding import Reading
from exlm_mini.reading.fill import as_json, as_table
from exlm_mini.reading.pretrained import SHIPPED
from exlm_mini.reading.trained import (
    Trained,
    encode_row,
    explore,
    load,
    newest_run,
    read,
    shipped_for,
)
from exlm_mini.training.console import exit_code, say

RUNS = Path("runs")


def write_explorer(
    file: Path, trained: Trained, text: str, masked_ids_BN: Tensor, reading: Reading
) -> None:
    """Write the page in which the graph of a reading is explored, and say where it is.

    Raises:
        UserError: if the states are not linked, or the file cannot be written.
    """
    page = explore(trained, masked_ids_BN, reading)
    try:
        page.save(file, title=on_one_line(text))
    except OSError as error:
        raise UserError(
            f"cannot write {file} ({error.strerror}); check its folder and the disk"
        ) from None
    say(f"wrote {file}; open it in a browser")


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
    directory = arguments.run
    if directory is None:
        directory = newest_run(RUNS)
        if directory is not None:
            say(f"reading the newest run, {directory}")
        else:
            directory = SHIPPED[name := shipped_for(arguments.text)]
            say(f"no run below {RUNS}/: reading the small model '{name}' that is shipped")
    trained = load(directory)
    masked_ids_BN = encode_row(trained, arguments.text)
    reading = read(trained, masked_ids_BN)
    if arguments.html is not None:
        write_explorer(arguments.html, trained, arguments.text, masked_ids_BN, reading)
    shown = (trained, arguments.text, masked_ids_BN, reading, arguments.top)
    with files.reading(trained.run):  # whose vocabulary may have gaps
        if arguments.json:
            lines = [json.dumps(as_json(*shown), allow_nan=False)]
        else:
            lines = list(as_table(*shown))
    print("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a token may not fit the terminal's encoding
            stream.reconfigure(errors="backslashreplace")
    return exit_code(lambda: run(_parser().parse_args(argv)), unread=0)


if __name__ == "__main__":
    sys.exit(main())
