"""Numbers of the small downstream runs for the pages of the book.

* ``{small}`TASK MODEL` ``: mean over seeds ± standard deviation, in percent; MODEL is ``exlm``,
  ``mlm`` or ``scratch``;
* ``{small}`TASK MODEL-MODEL` ``: the difference, taken seed by seed, ± half its 95% interval;
* ``{small}`TASK paper-MODEL` ``: what the paper prints;
* ``{small}`TASK seen` ``: molecules that pre-training has read, of all in the benchmark;
* ``{small}`RUN WHAT` ``: of a pre-training run such as ``smiles-exlm``; WHAT is ``bits`` (per
  masked token, validation), ``parameters``, ``rows``, ``tokens``, ``steps`` or ``minutes``.

All come from ``book/results/downstream-small.json``, which ``book/downstream_small.py`` writes.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "results" / "downstream-small.json"


@cache
def record() -> dict[str, Any]:
    """The whole file."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def small(text: str) -> str:
    """The number a role asks for; see the head of this file.

    Raises:
        ValueError: if the text is of another form, or the file does not hold it.
    """
    name, _, what = text.partition(" ")
    if task := record()["tasks"].get(name):
        return _of_task(name, task, what)
    if run := record()["pretraining"].get(name):
        return _of_run(name, run, what)
    raise ValueError(f"'{name}' is no task and no run of {FILE.name}")


def _of_task(name: str, task: dict[str, Any], what: str) -> str:
    first, _, second = what.partition("-")
    if what in task["models"]:
        return "{mean:.1f} ± {sd:.1f}".format(**task["models"][what])
    if found := task["differences"].get(f"{first} - {second}"):
        return "{mean:+.1f} ± {half_width_95:.1f}".format(**found)
    if first == "paper" and second in ("exlm", "mlm"):
        (mlm,) = set(task["paper"]) - {"table", "ExLM"}
        return f"{task['paper']['ExLM' if second == 'exlm' else mlm]:.1f}"
    if what == "seen" and (seen := task["seen_in_pretraining"]):
        return f"{seen['seen']:,} of {seen['molecules']:,}"
    raise ValueError(f"{FILE.name} holds no '{what}' of {name}")


def _of_run(name: str, run: dict[str, Any], what: str) -> str:
    (curve,) = run["validation"].values()
    found = {
        "bits": f"{curve[-1]['validation_bits_per_mask']:.2f}",
        "parameters": f"{run['parameters']:,}",
        "tokens": f"{run['tokens']:,}",
        "rows": f"{run['corpus']['rows']:,}",
        "steps": f"{run['config']['train']['steps']:,}",
        "minutes": f"{run['seconds'] / 60:.0f}",
    }
    if what not in found:
        raise ValueError(f"{FILE.name} holds no '{what}' of {name}")
    return found[what]


def made(corpus: str) -> list[tuple[str, str]]:
    """Device and commit of the pre-training runs of a corpus, sorted.

    Raises:
        ValueError: if there is no such corpus.
    """
    runs = [run for name, run in record()["pretraining"].items() if name.startswith(corpus)]
    if not runs:
        raise ValueError(f"'{corpus}' is no corpus of {FILE.name}")
    return sorted((run["versions"]["device"], run["versions"]["commit"]) for run in runs)
