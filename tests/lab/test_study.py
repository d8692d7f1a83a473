"""The study's queue makes each run once, and its verdicts follow the rules of the plan."""

from __future__ import annotations

import itertools
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_records import made_record, write
from scipy import stats
from tiny_runs import CELL, DATA

from exlm_lab import sweep as command
from exlm_lab.experiments import frozen, records, verdicts
from exlm_lab.experiments.catalogue import EXPERIMENTS
from exlm_lab.experiments.cells import Cell, Claim, Experiment
from exlm_lab.experiments.running import Runner
from exlm_lab.experiments.study import (
    PAIRS,
    WATCHED,
    slopes,
)
from exlm_lab.experiments.verdicts import Verdict, differences, escapes, holm, p_value
from exlm_lab.ledger import StoppedError
from exlm_mini.config.checks import UserError
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.training import provenance
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.run_directory import locked_directory

ROOT = Path(__file__).resolve().parents[2]
CLAIM = Claim("ours is better", "bits_per_row", "ours", "base", -1, 0.5, is_primary=True)


# ---- statistics ----


def test_holm_multiplies_the_smallest_by_their_number_and_never_falls():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_p_value_is_that_of_a_t_test_by_hand():
    values = [0.3, -0.1, 0.4, 0.2]
    mean, error = np.mean(values), np.std(values, ddof=1) / 2
    assert p_value(values) == pytest.approx(2 * stats.t.sf(mean / error, 3))
    assert p_value([0.3]) is None
    assert p_value([0.2, 0.2]) == 0.0 and p_value([0.0, 0.0]) == 1.0
    verdict = Verdict(CLAIM, tuple(values), 4, None, None)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert verdict.interval == pytest.approx((low, high))


@pytest.mark.parametrize(
    ("differences", "adjusted", "word"),
    [
        ((-1.0, -1.1, -0.9), 0.01, "for"),
        ((1.0, 1.1, 0.9), 0.01, "against"),  # the other sign, beyond chance
        ((-1.0, -1.1, -0.9), 0.2, "undecided"),  # not significant once corrected
        ((0.1, 0.6, 0.2), 0.2, "against"),  # the interval leaves out every effect that matters
        ((0.01, -0.02, 0.0), 0.9, "against, too small to matter"),
        ((-0.01, -0.011, -0.009), 0.01, "for, too small to matter"),
        ((0.01, 0.011, 0.009), 0.01, "against, too small to matter"),
        ((-0.9, 0.6, 0.1), 0.9, "undecided"),  # too much scatter to say
        ((-1.0,), None, "undecided"),
        ((0.0, 0.0, 0.0), None, "undecided"),
        ((), None, "undecided"),
    ],
)
def test_a_verdict_follows_the_rules_of_the_plan(differences, adjusted, word):
    assert Verdict(CLAIM, differences, 3, None, adjusted).word == word


@pytest.mark.parametrize(
    ("differences", "limit", "shown"),
    [
        ((-2.0, -2.0, -1.4), None, "-1.8 ± 0.9"),
        ((-2.0, -2.0, -1.4), -2.0, "-1.8 (-2.0 to -0.9)"),
        ((-2.0, -2.0, -1.4), -9.0, "-1.8 ± 0.9"),
        ((-2.0, -2.0, -1.4), -1.7, "-1.8 (-1.8 to -0.9)"),  # measured just past the limit
        ((0.35, 0.16, 0.21), None, "+0.2 ± 0.2"),
        ((0.35, 0.17, 0.21), None, "+0.24 ± 0.23"),  # excludes zero; a further digit shows it
        ((-1.0,), None, "-1.0"),
        ((), None, "–"),
    ],
)
def test_an_interval_is_told_up_to_what_can_be_and_on_its_side_of_zero(
    differences, limit, shown
):
    assert Verdict(CLAIM, differences, 3, None, None, limit).shown(1) == shown


def test_a_contrast_is_with_a_cell_a_metric_of_the_same_run_zero_or_a_weighted_sum():
    seeds = pd.MultiIndex.from_product([["a", "b"], [1, 2, 3]], names=["cell", "seed"])
    of_b = [math.nan] * 3
    table = pd.DataFrame({"x": [1, 2, 4, 0, 3, 0], "y": [1, 1, 1, *of_b]}, seeds)
    for cell, base, weights, want in (
        ("a", "b", None, (1, -1, 4)),
        ("a", "y", None, (0, 1, 3)),
        ("a", None, None, (1, 2, 4)),
        ("a name", None, {"a": 0.5, "b": 2.0}, (0.5, 7, 2)),
        ("a name", None, {"a": 0.5, "c": 2.0}, ()),
    ):
        assert differences(Claim("", "x", cell, base, 1, 1.0, weights=weights), table) == want


def test_a_claim_of_fewer_bits_has_a_limit_and_the_plan_the_seeds_of_all_its_cells():
    index = pd.MultiIndex.from_product([["ours", "base"], [1, 2, 3]], names=["cell", "seed"])
    bits, joint = [5.0, 6.0, 7.0, 8.0, 8.0, 9.0], [4.0] * 6
    table = pd.DataFrame({"bits_per_row": bits, "joint_bits_per_row": joint}, index)
    table["objective"] = "mlm"
    cells = tuple(
        Cell(name, "slots", "sweep/toy", CELL, seeds=seeds)
        for name, seeds in (("ours", (1, 2)), ("base", (2, 3)))
    )
    experiment = Experiment("tiny", "", cells, (CLAIM,), "a plan")
    more_seeds = table.rename(index={1: 7, 2: 8, 3: 9}, level="seed")
    assert verdicts.judge(CLAIM, experiment, pd.concat([table, more_seeds])) == verdicts.judge(
        CLAIM, experiment, table
    )
    fewer, more = (
        verdicts.judge(CLAIM._replace(sign=sign), experiment, table) for sign in (-1, 1)
    )
    assert fewer.limit == pytest.approx(-13 / 3 - 4.302653 / 3)
    assert more.limit is None and fewer.planned == 3


@pytest.mark.parametrize(
    ("names", "seeds", "words"),
    [
        (["ours", "base", "ours"], (1, 2), "tiny has several cells named 'ours'"),
        (["ours"], (), "cell 'ours' of tiny has no seeds"),
    ],
)
def test_an_experiment_without_a_sense_is_refused(names, seeds, words):
    cells = tuple(Cell(name, "slots", "sweep/toy", CELL, seeds=seeds) for name in names)
    with pytest.raises(UserError, match=words):
        Experiment("tiny", "", cells)


def test_a_cell_that_is_not_there_is_told_by_the_name_of_the_nearest():
    experiment = Experiment("tiny", "", (Cell("ours", "slots", "sweep/toy", CELL),))
    with pytest.raises(UserError, match="tiny has no cell 'our'; did you mean ours"):
        experiment.cell("our")


# ---- records ----


@pytest.fixture
def tiny(monkeypatch):
    """Replace all experiments by a study of two tiny cells with two seeds each."""
    cells = (
        Cell("ours", "slots", "sweep/toy", CELL, seeds=(1, 2)),
        Cell("base", "slots", "sweep/toy", {**CELL, "model.width": 8}, seeds=(1, 2)),
    )
    for name in list(EXPERIMENTS):
        monkeypatch.delitem(EXPERIMENTS, name)
    tiny = Experiment("tiny", "two models", cells, (CLAIM,), "a plan")
    monkeypatch.setitem(EXPERIMENTS, "tiny", tiny)
    monkeypatch.setattr(provenance, "commit", lambda: "0" * 40)
    return EXPERIMENTS


def run(folder, *more):
    argv = ["study", "--output", folder / "out", "--work", folder / "work", "--device", "cpu"]
    return command.main([str(word) for word in (*argv, *more)])


def written(folder):
    return records.read("tiny", folder / "out")


@pytest.mark.slow
def test_a_run_that_another_worker_has_taken_is_left_to_it(tiny, tmp_path, capsys):
    with locked_directory(tmp_path / "work" / "queue" / "tiny" / "ours-seed1"):
        assert run(tmp_path) == 0
    assert len(written(tmp_path)) == 3
    assert ("ours", 1) not in written(tmp_path)


def test_a_run_that_diverges_is_left_out_and_the_next_is_made(tiny, tmp_path, capsys):
    ours, base = tiny["tiny"].cells
    hot = replace(ours, settings={**ours.settings, "train.learning_rate": 1e25})
    tiny["tiny"] = replace(tiny["tiny"], cells=(hot, base))
    assert run(tmp_path) == 2
    assert "not recorded, see above: ours seed 1, ours seed 2" in capsys.readouterr().err
    assert list(written(tmp_path)) == [("base", 1), ("base", 2)]


def test_first_seeds_come_first_and_what_has_no_data_is_left_out(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # without corpora/molecules
    cells = (Cell("mlm", "molecules", "sweep/smiles", seeds=(1, 2)),)
    monkeypatch.setitem(tiny, "molecules", Experiment("molecules", "", cells, (), "a plan"))
    runs = command.queue(command.select(["study"]), [])
    left = command.with_data(runs, Runner(tmp_path / "work"))
    assert [(run.cell.name, run.seed) for run in left] == [
        ("ours", 1), ("base", 1), ("ours", 2), ("base", 2),
    ]  # fmt: skip
    assert "corpora/molecules" in capsys.readouterr().err


def test_a_checkout_with_changes_makes_no_record_for_the_book(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: f"{'0' * 40} with changes")
    monkeypatch.setattr(command, "OUTPUT", tmp_path / "out")
    assert run(tmp_path) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_record_of_molecules_holds_what_pairs_and_frozen_states_say(
    tiny, tmp_path, monkeypatch
):
    prepare_corpus(replace(DATA["smiles"], validation_share=0.3), tmp_path / "corpus", 1)
    # Quantities in which no two molecules agree.
    monkeypatch.setattr(frozen, "QUANTITIES", ("qed", "BertzCT"))
    settings = {**CELL, "data.pack": str(tmp_path / "corpus"), "objective": "exlm"}
    cell = Cell("exlm", "molecules", "sweep/smiles", settings, seeds=(1,))
    monkeypatch.setitem(tiny, "tiny", Experiment("tiny", "", (cell,), (), "a plan"))
    assert run(tmp_path) == 0
    first = written(tmp_path)["exlm", 1]["metrics"]
    assert first.keys() >= {"bits_per_mask", "rings_together_bits", "read_qed"}
    shutil.rmtree(tmp_path / "out")
    assert run(tmp_path) == 0
    assert written(tmp_path)["exlm", 1]["metrics"] == first


# ---- runs of equal competence ----


def test_slopes_find_a_plane_and_are_those_of_least_squares():
    p, lost = (np.array([f(p, k) for p, k in PAIRS]) for f in (lambda p, k: p, pow))
    of_lost, of_ratio = (np.array(list(weights.values())) for weights in slopes())
    plane = 0.7 - 0.3 * lost + 0.1 * p
    assert of_lost @ plane == pytest.approx(-0.3) and of_ratio @ plane == pytest.approx(0.1)
    more = next(c for c in EXPERIMENTS["competence"].claims if "more than" in c.text).weights
    assert np.array(list(more.values())) @ plane == pytest.approx(-0.3 - 0.1)
    noisy = plane + np.random.default_rng(0).normal(size=len(p))
    (_, *want), *_ = np.linalg.lstsq(np.stack([np.ones_like(p), lost, p], axis=1), noisy)
    assert [of_lost @ noisy, of_ratio @ noisy] == pytest.approx(want)


LOOKS = {**CELL, "train.steps": 12, "train.validate_every": 3, "train.learning_rate": 0.01}


def cell(level):
    watched = {"entropy_bits": None, "excess_bits": level}  # one is enough
    return Cell("c", "toy", "sweep/toy", LOOKS, seeds=(1,), watched=watched)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The excess bits by step, at every validation of a run that no threshold ends early."""
    folder = tmp_path_factory.mktemp("whole")
    found = Runner(folder, "cpu", report=lambda line: None).train(
        cell(None).config(1), watched=cell(None).watched
    )
    assert found["steps"] == 12
    return {point["step"]: point["excess_bits"] for point in found["curve"]}


def test_a_run_ends_at_the_first_look_that_is_low_enough_wherever_it_was_stopped(
    whole, tmp_path
):
    level = cell(whole[6])
    assert whole[3] > whole[6]
    for stop in (None, 2, 6):  # never, before the last validation, and at it
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


def store(folder, cell, seed=1, **changed):
    """Write a record of the tiny study."""
    write(folder, made_record("tiny", cell, seed, **changed))


def test_a_run_that_never_gets_there_counts_in_no_claim(tiny, tmp_path, monkeypatch):
    claims = [Claim("", "steps", name, None, 1, 0.25) for name in ("ours", "base")]
    monkeypatch.setitem(tiny, "tiny", replace(tiny["tiny"], claims=tuple(claims)))
    for name, excess in (("ours", 0.5), ("base", 0.51)):
        curve = [{"step": n, "excess_bits": e, "bits": 2.0} for n, e in ((3, 0.1), (6, excess))]
        watched = {"excess_bits": 0.5, "bits": 1.0, "entropy_bits": None}  # one is enough
        store(tmp_path, name, metrics={"steps": 6}, curve=curve, watched=watched)
    there, short = verdicts.verdicts(tmp_path)["tiny"]
    assert there.differences == (6.0,) and short.differences == ()
    store(tmp_path, "mlm", metrics={"prize_bits": 1.234})
    text = verdicts.report(tmp_path, ["tiny"])
    assert "base seed 1" in text and "1 of 2" in text and " +6.000 " in text
    # The smallest effect that matters, and the prize.
    assert " +0.25 " in text and "1.23 bits per row" in text


def test_all_primary_claims_share_a_correction_even_those_without_numbers(
    tiny, tmp_path, monkeypatch
):
    claims = [
        Claim("", "x", cell, None, 1, 1.0, is_primary)
        for cell, is_primary in (("a", True), ("missing", True), ("b", True), ("a", False))
    ]
    cells = tuple(Cell(name, "slots", "sweep/toy", CELL) for name in "ab")
    monkeypatch.setitem(tiny, "tiny", replace(tiny["tiny"], cells=cells, claims=tuple(claims)))
    for seed, a, b in ((1, 1.0, 1.0), (2, 1.1, 2.0), (3, 0.9, 1.0)):
        store(tmp_path, "a", seed, metrics={"x": a})
        store(tmp_path, "b", seed, metrics={"x": b})
    found = verdicts.verdicts(tmp_path)["tiny"]
    of_a, of_b = found[0].p_value, found[2].p_value
    assert of_a < of_b / 3
    assert [v.adjusted for v in found] == pytest.approx([3 * of_a, None, 2 * of_b, of_a])


# ---- leaving the symmetric start on text ----


def test_the_report_tells_since_when_runs_are_below_the_frequencies_and_links_win():
    def record(seed, bits, linked):
        curve = [
            dict(zip(("step", *WATCHED), (10 * n, b, 7.0, d, 0.0), strict=True))
            for n, (b, d) in enumerate(zip(bits, linked, strict=True), start=1)
        ]
        return {"cell": "none", "seed": seed, "specialisation_bits": 0.25, "curve": curve}

    rows = [record(1, (7.1, 6.8, 6.5), (0, 0, 0.2)), record(2, (6.5, 6.95, 6.99), (0.3, 0, 0))]
    table = pd.DataFrame(rows).set_index(["cell", "seed"])
    assert escapes(table)[1] == ("none", "20, never", "30, never", "0.250 ± 0.000")
    for point in rows[0]["curve"]:
        del point["dependence_bits"]  # an MLM has none
    assert escapes(table)[1][2] == "never, never"
