"""All experiments by name: the sweeps, and the study."""

from __future__ import annotations

from exlm_lab.experiments.cells import Experiment
from exlm_lab.experiments.grids import SWEEPS
from exlm_lab.experiments.study import STUDY

EXPERIMENTS: dict[str, Experiment] = {one.name: one for one in (*SWEEPS, *STUDY)}
"""Every experiment by name, in the order in which they are worth running."""


def planned() -> list[Experiment]:
    """The experiments that have a plan: those of the study."""
    return [one for one in EXPERIMENTS.values() if one.plan]
