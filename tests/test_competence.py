"""Runs of equal competence: when they end, and what is read from them."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from tiny_runs import CELL

from exlm_lab.experiments import verdicts
from exlm_lab.experiments.cells import Cell, Claim, Experiment
from exlm_lab.experiments.grids import REPEATED
from exlm_lab.experiments.ledger import SweepLedger
from exlm_lab.experiments.running import Runner
from exlm_lab.experiments.study import ENOUGH, EXPERIMENTS, PAIRS, SCALE, slopes
from exlm_lab.ledger import StoppedError
from exlm_mini.training.run_directory import read_metrics

WATCHED = {**CELL, "train.steps": 12, "train.validate_every": 3, "train.learning_rate": 0.01}


def test_the_cells_are_those_of_the_sweep_that_lose_more_than_a_tenth():
    grid = [(p, k) for p, copies in REPEATED.items() for k in copies]
    assert list(PAIRS) == [(p, k) for p, k in grid if p**k > 0.1]


def test_slopes_find_a_plane_and_are_those_of_least_squares():
    p, lost = (np.array([f(p, k) for p, k in PAIRS]) for f in (lambda p, k: p, pow))
    of_lost, of_ratio = (np.array(list(weights.values())) for weights in slopes())
    plane = 0.7 - 0.3 * lost + 0.1 * p
    assert of_lost @ plane == pytest.approx(-0.3) and of_ratio @ plane == pytest.approx(0.1)
    noisy = plane + np.random.default_rng(0).normal(size=len(p))
    (_, *want), *_ = np.linalg.lstsq(np.stack([np.ones_like(p), lost, p], axis=1), noisy)
    assert [of_lost @ noisy, of_ratio @ noisy] == pytest.approx(want)


def cell(level):
    return Cell("c", "toy", "sweep/toy", WATCHED, seeds=(1,), watched={"excess_bits": level})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The excess at every validation of a run that has no reason to end early."""
    folder = tmp_path_factory.mktemp("whole")
    found = Runner(folder, "cpu", report=lambda line: None).train(
        cell(None).config(1), watched=cell(None).watched
    )
    assert found["steps"] == 12
    return {point["step"]: point["excess_bits"] for point in found["curve"]}


def test_a_run_ends_at_the_first_look_that_is_low_enough_wherever_it_was_stopped(
    whole, tmp_path
):
    level = cell((whole[3] + whole[6]) / 2)
    assert whole[3] > level.watched["excess_bits"] > whole[6]
    for stop in (None, 2, 6):  # never, before the look, and at it
        count = itertools.count(1)
        stops = lambda stop=stop, count=count: next(count) == stop  # noqa: E731
        runner = Runner(tmp_path / str(stop), "cpu", None, lambda line: None, stops)
        for _ in range(3):
            try:
                found = runner.train(level.config(1), watched=level.watched)
            except StoppedError:
                continue
            assert found["steps"] == 6
            assert {p["step"]: p["excess_bits"] for p in found["curve"]} == {
                step: whole[step] for step in (3, 6)
            }
        lines = read_metrics(runner.folder(level.config(1), level.watched) / "metrics.jsonl")
        assert lines[-1]["step"] == 6


def test_a_run_that_never_gets_there_counts_in_no_claim(whole, tmp_path, monkeypatch):
    low, high = round(min(whole.values()) / 2, 3), round(max(whole.values()) + 0.01, 3)
    cells = (
        Cell("there", "toy", "sweep/toy", WATCHED, seeds=(1,), watched={"excess_bits": high}),
        Cell("short", "toy", "sweep/toy", WATCHED, seeds=(1,), watched={"excess_bits": low}),
    )
    claims = [Claim("", "steps", c.name, None, 1, 1.0) for c in cells]
    tiny = Experiment("tiny", "two runs", cells, tuple(claims))
    monkeypatch.setattr(verdicts, "EXPERIMENTS", {"tiny": tiny})
    runner = Runner(tmp_path / "work", "cpu", report=lambda line: None)
    ledger = SweepLedger(tmp_path, "tiny", SCALE, runner)
    for one in cells:
        ledger.run(one, 1)
        assert ledger.is_done(one, 1)
        # The level is a part of what a record says it is.
        record = json.loads(ledger.path(one, 1).read_text())
        assert record["watched"] == dict(one.watched)
    there, short = verdicts.verdicts(tmp_path)["tiny"]
    assert there.differences == (3.0,) and short.differences == ()
    assert "short seed 1" in verdicts.report(tmp_path)


def test_the_cells_end_at_one_excess_of_one_schedule():
    cells = EXPERIMENTS["competence"].cells
    assert {tuple(c.watched.items()) for c in cells} == {(("missed_share", ENOUGH),)}
    assert len({str(c.config(1).train) for c in cells}) == 1
