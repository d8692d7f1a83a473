"""Looks up numbers of the runs recorded in ``book/results/`` for the pages of the book.

See ``recorded`` and ``small`` for what their roles accept. A lookup that finds nothing raises
``ValueError``.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path
from typing import Any

import yaml

RESULTS = Path(__file__).resolve().parents[1] / "results"
COMMAND = "python -m exlm_mini.pretrain "
NEAR = 0.1
"""A run on a toy language has arrived when it is within this many bits of the joint entropy."""


def record_files() -> list[Path]:
    """Files of recorded runs; the folder also holds benchmarks, evidence and downstream tasks."""
    files = sorted(RESULTS.glob("*.json"))
    others = ("bench-", "evidence-", "downstream-", "learned-places", "links-pilot")
    return [file for file in files if not file.name.startswith(others)]


@cache
def records() -> dict[str, dict[str, Any]]:
    """All recorded runs, keyed by their options: the part of the command line after ``COMMAND``."""
    by_options: dict[str, dict[str, Any]] = {}
    for path in record_files():
        for record in json.loads(path.read_text()):
            options = record["command"].removeprefix(COMMAND)
            if options in by_options:
                raise ValueError(f"{path.name} records '{options}' a second time")
            by_options[options] = record | {"file": path.name}
    return by_options


@cache
def names() -> dict[str, list[str]]:
    """The patterns of options that each short name means, from ``results/names.yaml``."""
    listed = yaml.safe_load((RESULTS / "names.yaml").read_text())
    return {name: [p] if isinstance(p, str) else p for name, p in listed.items()}


def runs_of(name: str) -> list[dict[str, Any]]:
    """The recorded runs that a short name means."""
    if name not in names():
        raise ValueError(f"no run is named '{name}' in results/names.yaml")
    matches: dict[str, dict[str, Any]] = {}
    for pattern in names()[name]:
        options = fnmatch.filter(records(), pattern)
        if not options:
            raise ValueError(f"no recorded run matches '{pattern}' ({name})")
        matches |= {o: records()[o] for o in options}
    return list(matches.values())


def entropies(record: dict[str, Any]) -> tuple[float, float]:
    """Joint entropy of the toy language of a run, and the floor of MLM on it, both in bits."""
    from exlm_mini.data.toy_grammars import grammar

    if record["config"]["data"]["kind"] != "toy":
        raise ValueError(f"{record['command']} was not trained on a toy language")
    language = grammar(record["config"]["data"]["grammar"])
    masked_N = language.mask()
    return language.joint_entropy_bits(masked_N), language.marginal_entropy_bits(masked_N)


def recorded(text: str) -> str:
    """The number that a role asks for with the text ``NAME OBJECTIVE WHAT``.

    WHAT is ``row`` or ``mask`` (bits of the last validation), ``joint`` or ``floor`` (exact bits
    of the toy language), ``won`` (how much of the gap between the two was closed, in percent) or
    ``steps``; for a group of runs also ``arrived`` (how many reached the joint entropy) and
    ``row-arrived`` or ``row-stayed`` (bits per row of those that did or did not). For a group the
    result is a range from the smallest number to the largest.
    """
    try:
        name, objective, what = text.split()
    except ValueError:
        raise ValueError(f"expected NAME OBJECTIVE WHAT, got '{text}'") from None
    runs = [r for r in runs_of(name) if objective in r["validation"]]
    if not runs:
        raise ValueError(f"no run named '{name}' trained {objective}")
    last = [record["validation"][objective][-1] for record in runs]
    rows = [point["validation_bits_per_row"] for point in last]
    if what == "row":
        return span(rows)
    if what == "mask":
        return span([point["validation_bits_per_mask"] for point in last])
    if what == "steps":
        return span([point["step"] for point in last], digits=0)
    joint, floor = entropies(runs[0])
    arrived = [bits for bits in rows if bits < joint + NEAR]
    stayed = [bits for bits in rows if bits >= joint + NEAR]
    match what:
        case "joint":
            return span([joint])
        case "floor":
            return span([floor])
        case "won":
            return span([100 * (floor - bits) / (floor - joint) for bits in rows], digits=0)
        case "arrived":
            return f"{len(arrived)} of {len(rows)}"
        case "row-arrived":
            return span(arrived)
        case "row-stayed":
            return span(stayed)
    raise ValueError(f"'{what}' is not something a record holds")


def span(numbers: list[float], digits: int = 3) -> str:
    """Numbers as text: the only one, or the smallest and the largest, such as "1.2 to 3.4"."""
    if not numbers:
        raise ValueError("there are no numbers to show")
    low, high = (str(rounded(number, digits)) for number in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def rounded(number: float, digits: int) -> Decimal:
    """A number rounded half up, as by hand: records hold four digits, and many end in 5."""
    # Adding 0 turns -0 into 0.
    return Decimal(str(number)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP) + 0


def short(commit: str) -> str:
    """The first seven digits of a commit; a suffix " with changes" is kept."""
    return commit[:7] + commit[40:]


def stamps(name: str) -> list[tuple[str, str]]:
    """Device and commit of each run that a short name means."""
    return [(r["versions"]["device"], r["versions"]["commit"]) for r in runs_of(name)]


def provenance(stamps: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Devices and shortened commits, each pair once; the device ``cpu`` is written "CPU"."""
    named = [("CPU" if device == "cpu" else device, short(commit)) for device, commit in stamps]
    return list(dict.fromkeys(named))


def by_seed(runs: list[dict[str, Any]]) -> dict[str, str]:
    """Runs grouped by their options without the seed, each with text such as ", seed 1 to 6"."""
    seeds: dict[str, list[int]] = {}
    for record in runs:
        options = re.sub(r" --seed \d+", "", record["command"].removeprefix(COMMAND))
        seeds.setdefault(options, []).append(record["config"]["seed"])
    return {
        options: f", seed {span(some, digits=0)}" for options, some in sorted(seeds.items())
    }


def listed_runs() -> dict[str, list[dict[str, Any]]]:
    """Every recorded run, listed under its short name or else under the name of its file."""
    listed = {name: runs_of(name) for name in names()}
    named = {record["command"] for runs in listed.values() for record in runs}
    for record in records().values():
        if record["command"] not in named:
            listed.setdefault(record["file"], []).append(record)
    return listed


# ---- small downstream runs ----


@cache
def small_runs() -> dict[str, Any]:
    return json.loads((RESULTS / "downstream-small.json").read_text())


def small(text: str) -> str:
    """The number that a role asks for with the text ``TASK WHAT`` or ``RUN WHAT``.

    For a task, WHAT is a model such as ``exlm`` (mean over seeds ± standard deviation, in percent),
    a pair such as ``exlm-mlm`` (difference ± half its 95% interval), ``paper-exlm`` or
    ``paper-mlm`` (the paper's score), or ``seen`` (how many molecules pre-training has read). For a
    run such as ``smiles-exlm`` it is ``bits`` (per masked token), ``minutes`` or a size.
    """
    name, _, what = text.partition(" ")
    shown: dict[str, str] = {}
    if task := small_runs()["tasks"].get(name):
        shown = {m: "{mean:.1f} ± {sd:.1f}".format(**x) for m, x in task["models"].items()}
        for pair, score in task["differences"].items():
            shown[pair.replace(" ", "")] = "{mean:+.1f} ± {half_width_95:.1f}".format(**score)
        _, exlm, mlm = task["paper"].values()
        shown |= {"paper-exlm": f"{exlm:.1f}", "paper-mlm": f"{mlm:.1f}"}
        if seen := task["seen_in_pretraining"]:
            shown["seen"] = "{seen:,} of {molecules:,}".format(**seen)
    elif run := small_runs()["pretraining"].get(name):
        (curve,) = run["validation"].values()
        sizes = run | {"rows": run["corpus"]["rows"], "steps": run["config"]["train"]["steps"]}
        shown = {size: f"{sizes[size]:,}" for size in ("parameters", "tokens", "rows", "steps")}
        shown["bits"] = f"{curve[-1]['validation_bits_per_mask']:.2f}"
        shown["minutes"] = f"{run['seconds'] / 60:.0f}"
    if what not in shown:
        raise ValueError(f"downstream-small.json holds no '{text}'")
    return shown[what]


def small_stamps(corpus: str) -> list[tuple[str, str]]:
    """Device and commit of the small pre-training runs on a corpus, sorted."""
    runs = small_runs()["pretraining"].items()
    stamps = [run["versions"] for name, run in runs if name.startswith(f"{corpus}-")]
    if not stamps:
        raise ValueError(f"downstream-small.json holds no run on '{corpus}'")
    return sorted((stamp["device"], stamp["commit"]) for stamp in stamps)
