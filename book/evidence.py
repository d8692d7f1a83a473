"""Check and measure all there is on the machine at hand, and keep it as one JSON file. ::

    python book/evidence.py                       to book/results/evidence-DEVICE.json
    python book/evidence.py --only checks,dag     some sections of it
    python book/evidence.py --quick               tiny sizes, to build/

Each result is written as soon as it is there: the same command goes on where the last one was
stopped, so that `timeout 9m` in front of it makes all of it in pieces. Results of another commit,
machine or number of threads are not mixed: --again measures everything anew. The exit status is 1
if a result is wrong or something could not be measured.

The file holds ``machine`` (with the commit), ``backends`` (why one does not work here, or null),
``passed`` (of what is there), and ``sections``: section, then name of the result, then the result.
To add a section, add a function to ``measurements.SECTIONS``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from measurements import SECTIONS, Result, Setting

from exlm_mini.alignment import BACKENDS
from exlm_mini.config.checks import UserError, nearest
from exlm_mini.config.options import command_parser
from exlm_mini.data.files import read_bytes, reading, write_atomically
from exlm_mini.training.console import exit_code
from exlm_mini.training.parts import choose_device
from exlm_mini.training.provenance import machine

ROOT = Path(__file__).resolve().parents[1]
SAME = ("torch", "device", "cpu", "threads", "commit")
"""What results in one file have in common."""


def run(arguments: argparse.Namespace) -> int:
    """Make what is missing; 0 if all is well, 1 if not."""
    only = arguments.only.split(",")
    for name in only:
        if name not in SECTIONS:
            raise UserError(f"--only '{name}': {nearest(name, SECTIONS)}")
    try:
        device = choose_device(arguments.device)
    except UserError as error:
        raise UserError(str(error).replace("train.device", "--device")) from None
    about = {**machine(device), "threads": torch.get_num_threads()}
    about["commit"] = arguments.commit or about["commit"]
    path = arguments.output or _usual_path(about, arguments.quick)
    content = {
        "command": "python book/evidence.py" + " --quick" * arguments.quick,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about,
        "backends": {name: BACKENDS[name].why_not(device.type) for name in BACKENDS},
        "quick": arguments.quick,
        "passed": True,
        "sections": {},
    }
    if path.exists() and not arguments.again:
        content |= kept(path, content)
    for name, reason in content["backends"].items():
        if reason is not None:
            _tell(f"{name} does not work here: {reason}")
    path.parent.mkdir(parents=True, exist_ok=True)
    _make(path, content, Setting(device, arguments.quick), only)
    for problem in problems(content):
        _tell(f"FAILED {problem}")
    _tell(f"{'all is well' if content['passed'] else 'NOT ALL IS WELL'}: {path}")
    return 0 if content["passed"] else 1


def kept(path: Path, new: dict[str, Any]) -> dict[str, Any]:
    """Of a file that is there already: when it was begun, its sections, and if they passed.

    Raises:
        UserError: it holds something else, or results that do not go with the new ones.
    """
    with reading(path, "choose another --output"):
        stored = json.loads(read_bytes(path))
        before, now = ({**whole["machine"], "quick": whole["quick"]} for whole in (stored, new))
        differing = [name for name in (*SAME, "quick") if before[name] != now[name]]
        problems(stored)  # reads every result
        found = {name: stored[name] for name in ("begun", "passed", "sections")}
    if differing:
        raise UserError(
            f"{path} holds results of another {', '.join(differing)}; --again measures anew, "
            "another --output keeps both"
        )
    return found


def _make(path: Path, content: dict[str, Any], setting: Setting, only: list[str]) -> None:
    """Run the items whose results are missing; write and print each result."""
    items = [(section, item) for section in only for item in SECTIONS[section](setting)]
    todo = []
    for section, item in items:
        found = content["sections"].get(section, {}).get(item.key)
        if found is None or "error" in found:  # what raised an exception is tried again
            todo.append((section, item))
    if len(todo) < len(items):
        _tell(f"{len(items) - len(todo)} of {len(items)} results are there already")
    for number, (section, item) in enumerate(todo, 1):
        begun = time.monotonic()
        try:
            result = item.run()
        except Exception as error:  # whatever it is, the others go on
            reason = " ".join(str(error).split())[:500]
            result = {"error": f"{type(error).__name__}: {reason}"}
        result["seconds"] = round(time.monotonic() - begun, 3)
        content["sections"].setdefault(section, {})[item.key] = result
        content["passed"] = not problems(content)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        write_atomically(path, text.encode())
        _tell(f"{section} {item.key}: {summary(result)}  [{number}/{len(todo)}]")
        for note in result.get("notes", []):
            _tell(f"    {note}")


def problems(content: dict[str, Any]) -> list[str]:
    """Results that are wrong or missing, one line each."""
    return [
        f"{section}: {key}: {result.get('error') or result['failure']}"
        for section, results in content["sections"].items()
        for key, result in results.items()
        if "error" in result or result.get("passed") is False
    ]


def summary(result: Result) -> str:
    """A result in one line."""
    for name in ("error", "skipped", "failure"):
        if result.get(name):
            return f"{name}: {result[name]}"
    return ", ".join(
        f"{r['tokens_per_second']:.3g} tokens/s"
        if "tokens_per_second" in r
        else f"{r['backend']} {r['median_ms']:.3g} ms"
        for r in result.get("records", [])
    ) or ", ".join(f"{name} {error:.3g}" for name, error in result.get("errors", {}).items())


def _tell(line: str) -> None:
    print(line, flush=True)


def _usual_path(about: dict[str, Any], is_quick: bool) -> Path:
    name = about["cpu"] if about["device"] == "cpu" else about["device"]
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder = ROOT / "build" if is_quick else ROOT / "book" / "results"
    return folder / f"evidence-{slug}.json"


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("python book/evidence.py", __doc__)
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="where to; default: named by the device")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs")
    names = ",".join(SECTIONS)
    add("--only", metavar="A,B", default=names, help=f"sections, of {names}; default all")
    add("--again", action="store_true", help="forget what the file holds")
    add("--commit", metavar="NAME", help="of this copy, where there is no git to ask")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 all is well, 1 it is not, 2 a mistake of the user, 130 interrupted."""
    return exit_code(
        lambda: run(_parser().parse_args(argv)),
        interrupted="interrupted; the same command goes on from here",
    )


if __name__ == "__main__":
    sys.exit(main())
