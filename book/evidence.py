"""Check and measure all there is on the machine at hand, and keep it as one JSON file. ::

    python book/evidence.py                       to book/results/evidence-DEVICE.json
    python book/evidence.py --only checks,dag     some sections of it
    python book/evidence.py --quick               tiny sizes, to build/

It needs torch, numpy and safetensors, what the compiled backend needs to be built, and PyYAML for
the recipes, which are left out without it. Each result is written as soon as it is there: the same
command goes on where the last one was stopped. Results of other sources, another machine or another
number of threads are not mixed: --again measures everything anew. The exit status is 1 if a check
fails or something could not be measured.

The file holds ``machine`` (with the commit, and ``sources``, a hash of all code involved),
``backends`` (why one does not work here, or null), ``passed`` (of what is there), ``missing``
(asked for and not there, after a stop), and ``sections``: section, then name of the result, then
the result. To add a section, add a function to ``SECTIONS``.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that nothing needs to be installed

import torch  # noqa: E402
from evidence_file import File, Result, opened  # noqa: E402
from measurements import (  # noqa: E402
    Item,
    Setting,
    checks,
    dag_times,
    data_times,
    emission_times,
    step_times,
    train_times,
)
from sanitizing import sanitizer  # noqa: E402

from exlm_lab.benchmarks.dag import load_extra_backend  # noqa: E402
from exlm_mini.alignment import BACKENDS  # noqa: E402
from exlm_mini.config import UserError, nearest  # noqa: E402
from exlm_mini.options import command_parser  # noqa: E402
from exlm_mini.training.console import exit_code  # noqa: E402
from exlm_mini.training.parts import choose_device  # noqa: E402
from exlm_mini.training.provenance import machine  # noqa: E402

SECTIONS: dict[str, Callable[[Setting], Iterator[Item]]] = {
    "checks": checks,
    "dag": dag_times,
    "emission": emission_times,
    "step": step_times,
    "data": data_times,
    "train": train_times,
    "sanitizer": sanitizer,
}
"""In this order; each yields its items, and an item is run only if its result is missing."""


def sources() -> str:
    """A hash of all the code that results depend on, for where there is no git to name a commit."""
    scripts = ("evidence", "evidence_file", "measurements", "correctness", "sanitizing")
    files = [ROOT / "book" / f"{name}.py" for name in scripts]
    for package in ("exlm_mini", "exlm_lab"):
        files += (ROOT / package).rglob("*.py")
        files += (ROOT / package / "recipes").rglob("*.yaml")
    files += [
        file for suffix in ("h", "cpp", "cu") for file in (ROOT / "cuda").glob(f"*.{suffix}")
    ]
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


# ---- running ----


def run(arguments: argparse.Namespace) -> int:
    """Make what is missing; 0 if all is well, 1 if not."""
    device = _device(arguments.device)
    names = arguments.backend or list(BACKENDS)
    for name in names:
        if name not in BACKENDS:
            raise UserError(f"unknown backend '{name}'; {nearest(name, BACKENDS)}")
    only = list(SECTIONS)
    if arguments.only is not None:
        only = list(dict.fromkeys(arguments.only.split(",")))
    for name in only:
        if name not in SECTIONS:
            raise UserError(f"--only '{name}': {nearest(name, SECTIONS)}")
    extra = {path.stem: load_extra_backend(path) for path in arguments.extra_backend}
    for name in extra:
        if name in BACKENDS:
            raise UserError(f"--extra-backend: the name '{name}' is taken; rename the file")

    about = {**machine(device), "threads": torch.get_num_threads(), "sources": sources()}
    if arguments.commit:
        about["commit"] = arguments.commit
    reasons = {name: BACKENDS[name].why_not(device.type) for name in names}
    content = {
        "command": "python book/evidence.py" + " --quick" * arguments.quick,
        "begun": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": about,
        "backends": reasons,
        "quick": arguments.quick,
        "passed": True,
        "missing": [],
        "sections": {},
    }
    path = arguments.output or _usual_path(about, arguments.quick)
    file = opened(path, content, arguments.again)
    works = [name for name, reason in reasons.items() if reason is None]
    setting = Setting(device, arguments.quick, works, extra, file.result)
    for name, reason in reasons.items():
        if reason is not None:
            _tell(f"{name} does not work here: {reason}")
    _make(setting, file, only)
    for problem in file.problems():
        _tell(f"FAILED {problem}")
    verdict = "NOT ALL IS WELL" if file.problems() else "all is well"
    _tell(f"{verdict}: {file.path}")
    return 1 if file.problems() else 0


def _make(setting: Setting, file: File, only: list[str]) -> None:
    """Run the items whose results are missing, and tell of each."""
    items = [(section, item) for section in only for item in SECTIONS[section](setting)]
    file.ask_for((section, item.key) for section, item in items)
    todo = [(s, item) for s, item in items if file.result(s, item.key) is None]
    if len(todo) < len(items):
        _tell(f"{len(items) - len(todo)} of {len(items)} results are there already")
    start = time.monotonic()
    for number, (section, item) in enumerate(todo, 1):
        begun = time.monotonic()
        try:
            result = item.run()
        except Exception as error:  # whatever it is, the others go on
            reason = " ".join(str(error).split())[:500]
            result = {"error": f"{type(error).__name__}: {reason}"}
        result["seconds"] = round(time.monotonic() - begun, 3)
        file.put(section, item.key, result)
        spent = time.monotonic() - start
        left = spent / number * (len(todo) - number)
        progress = f"{number}/{len(todo)}, {spent:.0f} s, ETA {left:.0f} s"
        _tell(f"{section} {item.key}: {summary(result)}  [{progress}]")
        for note in result.get("notes", []):
            _tell(f"    {note}")


def summary(result: Result) -> str:
    """A result in one line."""
    if "error" in result:
        return f"ERROR {result['error'][:200]}"
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    if "worst" in result:
        parts = [
            f"{name} {'inf' if found['error'] is None else format(found['error'], '.0e')}"
            f" (limit {found['limit']:.0e})"
            for name, found in result["worst"].items()
        ]
        if result["rows_redone"]:
            parts.append(f"{result['rows_redone']} rows redone in log space")
        return ", ".join(["right" if result["passed"] else "WRONG", *parts])
    if "records" in result:
        return _records_summary(result["records"])
    if "verdict" in result:
        return " ".join(["clean" if result["passed"] else "NOT CLEAN", *result["verdict"]])
    return ", ".join(f"{name} {value:.3g}" for name, value in result.items())


def _records_summary(records: list[dict[str, Any]]) -> str:
    speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
    if not speeds:
        return ", ".join(f"{r['backend']} {r['median_ms']:.3g} ms" for r in records)
    up_to = f" to {max(speeds):.3g}" if len(speeds) > 1 else ""
    return f"{min(speeds):.3g}{up_to} tokens/s"


def _tell(line: str) -> None:
    print(line, flush=True)


def _device(name: str) -> torch.device:
    try:
        return choose_device(name)
    except UserError as error:
        raise UserError(str(error).replace("train.device", "--device")) from None


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
    add("--only", metavar="A,B", help=f"sections, of {','.join(SECTIONS)}; default all")
    add("--again", action="store_true", help="forget what the file holds")
    add(
        "--backend",
        action="append",
        metavar="NAME",
        help="check and time this one; default all",
    )
    add("--extra-backend", action="append", default=[], type=Path, metavar="FILE.py",
        help="time the function log_likelihood of this file in section dag")  # fmt: skip
    add("--commit", metavar="NAME", help="what the sources are, where there is no git to ask")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 all is well, 1 it is not, 2 a mistake of the user, 130 interrupted."""
    return exit_code(
        lambda: run(_parser().parse_args(argv)),
        interrupted="interrupted; the same command goes on from here",
    )


if __name__ == "__main__":
    sys.exit(main())
