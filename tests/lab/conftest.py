"""Runs to go on from, pre-trained once for all tests of the lab."""

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
    """The model of molecules."""
    return load(runs / "smiles", print)
