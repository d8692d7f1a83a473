"""Runs for the lab's tests to start from, pre-trained once per session."""

import pytest
from tiny_runs import tiny_run

from exlm_mini.reading.trained import load


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with a pre-trained run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("smiles", "text", "toy"):
        tiny_run(folder / kind, kind, max_positions=128)
    return folder


@pytest.fixture(scope="session")
def pretrained(runs):
    """The model that is pre-trained on molecules."""
    return load(runs / "smiles", print)
