"""The defaults of fine-tuning are the best settings of the recorded search."""

import json
import statistics
from pathlib import Path

import pytest

from exlm_lab.downstream.grid import combinations
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.finetune import parse

BOOK = Path(__file__).resolve().parents[2] / "book"


def test_the_defaults_of_fine_tuning_are_the_best_of_the_search():
    stored = json.loads((BOOK / "results" / "downstream-search.json").read_text())
    names = ("learning_rate", "epochs", "dropout", "warmup_share")
    tried = {
        tuple(run[name] for name in names): run["validation"] for run in stored["searched"]
    }
    settings = {c for space in stored["spaces"] for c in combinations(space, TuneConfig())}
    assert tried.keys() == {tuple(getattr(c, name) for name in names) for c in settings}
    best = max(tried, key=tried.__getitem__)
    assert best == tuple(getattr(TuneConfig(), name) for name in names)
    assert TuneConfig(**stored["after"]["setting"]) == TuneConfig()
    assert tried[best] == stored["after"]["validation"]["seeds"][0]
    for side in ("before", "after"):
        assert stored[side]["seeds"] == [1, 2, 3]
        for part in ("validation", "test"):
            found = stored[side][part]
            assert found["mean"] == pytest.approx(statistics.fmean(found["seeds"]), abs=0.01)
            assert found["sd"] == pytest.approx(statistics.stdev(found["seeds"]), abs=0.01)
    assert min(stored["after"]["test"]["seeds"]) > max(stored["before"]["test"]["seeds"])


@pytest.mark.parametrize("side", ["before", "after"])
def test_the_commands_of_the_search_are_those_of_its_settings(side):
    found = json.loads((BOOK / "results" / "downstream-search.json").read_text())[side]
    request = parse(found["command"].split()[3:])
    assert request.settings("embedded-molecules") == [TuneConfig(**found["setting"])]
    assert list(request.recipe.seeds) == found["seeds"]
