"""The study's queue leaves each run once, and its verdicts follow the rules of the plan."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_runs import CELL, DATA

from exlm_lab import sweep as command
from exlm_lab.experiments import frozen, grids, verdicts
from exlm_lab.experiments.cells import Cell, Claim, Experiment
from exlm_lab.experiments.records import Group, Record
from exlm_lab.experiments.running import Runner
from exlm_lab.experiments.study import EXPERIMENTS
from exlm_lab.experiments.verdicts import Verdict, differences, holm, p_value
from exlm_mini.alignment import dag_log_likelihood
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.training.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
NUMBERS = {3: "Three", 5: "Five", 10: "Ten"}
CLAIM = Claim("ours is better", "bits_per_row", "ours", "base", -1, 0.5, is_primary=True)


def test_claims_name_cells_with_equal_seeds_and_settings_that_can_be():
    for experiment in EXPERIMENTS.values():
        names = {cell.name for cell in experiment.cells}
        for claim in experiment.claims:
            assert (set(claim.weights) if claim.weights else {claim.cell}) <= names
            assert claim.base in names | {"floor_bits_per_row", "frequency_bits", None}
            assert claim.smallest > 0 and claim.sign in (1, -1)
        assert len({cell.seeds for cell in experiment.cells if not cell.is_timed}) == 1
        assert len(names) == len(experiment.cells)
        for cell in experiment.cells:
            assert cell.config(cell.seeds[0]).seed == cell.seeds[0]


# ---- statistics ----


def test_holm_multiplies_the_smallest_by_their_number_and_never_falls():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_keeps_the_family_at_its_level():
    # Eight true nulls: any rejection is wrong. Simulated, with four standard errors of room.
    rng = np.random.default_rng(0)
    wrong = np.mean([min(holm(list(rng.random(8)))) < 0.05 for _ in range(4000)])
    assert wrong < 0.05 + 4 * math.sqrt(0.05 * 0.95 / 4000)


def test_the_p_value_is_that_of_a_t_test_by_hand():
    values = [0.3, -0.1, 0.4, 0.2]
    mean, error = np.mean(values), np.std(values, ddof=1) / 2
    assert p_value(values) == pytest.approx(2 * stats.t.sf(mean / error, 3))
    assert p_value([0.3]) is None and p_value([0.0, 0.0]) is None
    assert p_value([0.2, 0.2]) == 0.0


@pytest.mark.parametrize(
    ("differences", "adjusted", "word"),
    [
        ((-1.0, -1.1, -0.9), 0.01, "for"),
        ((1.0, 1.1, 0.9), 0.01, "against"),  # beyond chance on the other side
        ((-1.0, -1.1, -0.9), 0.2, "undecided"),  # one of many
        ((0.01, -0.02, 0.0), 0.9, "against"),  # nothing that would matter
        ((-0.9, 0.6, 0.1), 0.9, "undecided"),  # too far apart to say
        ((-1.0,), None, "undecided"),
        ((), None, "undecided"),
    ],
)
def test_a_verdict_follows_the_rules_of_the_plan(differences, adjusted, word):
    assert Verdict(CLAIM, differences, 3, None, adjusted).word == word


def test_the_interval_is_that_of_a_t_test():
    values = (0.3, -0.1, 0.4, 0.2)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    found = Verdict(CLAIM, values, 4, None, None)
    assert (found.mean - found.half_width, found.mean + found.half_width) == pytest.approx(
        (low, high)
    )


def group(cell, **values):
    """Three seeds of a cell with these metrics."""
    records = (
        Record(cell, "toy", seed, "mlm", {name: v[seed - 1] for name, v in values.items()}, {})
        for seed in (1, 2, 3)
    )
    return Group(cell, "toy", tuple(records))


def test_a_contrast_is_with_a_cell_a_metric_of_the_same_run_zero_or_a_weighted_sum():
    groups = {"a": group("a", x=(1, 2, 4), y=(1, 1, 1)), "b": group("b", x=(0, 3, 0))}
    for cell, base, weights, want in (
        ("a", "b", None, (1, -1, 4)),
        ("a", "y", None, (0, 1, 3)),
        ("a", None, None, (1, 2, 4)),
        ("a name", None, {"a": 0.5, "b": 2.0}, (0.5, 7, 2)),
        ("a name", None, {"a": 0.5, "c": 2.0}, ()),
    ):
        assert differences(Claim("", "x", cell, base, 1, 1.0, weights=weights), groups) == want


# ---- what is possible ----


def best_bits(boundary: str, is_sparse: bool, restarts: int = 24, steps: int = 700) -> float:
    """Bits of the best graph of two states per mask on the language ``shifts``, as Adam finds."""
    torch.manual_seed(0)
    k, masks = 2, ("bos", "x", "y", "eos")
    single = {"bos", "eos"} if boundary == "paper" else set()
    owner_L = torch.tensor(
        [n for n, m in enumerate(masks) for _ in range(1 if m in single else k)]
    )
    L, words = len(owner_L), {"[BOS]": 4, "[EOS]": 5}
    is_edge_LL = torch.ones(L, L, dtype=torch.bool).triu(1)
    if is_sparse:
        is_edge_LL &= owner_L[:, None] < owner_L[None, :]
    edge_RLL = torch.randn(restarts, L, L, dtype=torch.float64).mul_(2).requires_grad_()
    word_RLV = torch.randn(restarts, L, 6, dtype=torch.float64).mul_(2).requires_grad_()
    optimizer = torch.optim.Adam([edge_RLL, word_RLV], lr=0.05)
    phrases_PM = [[words["[BOS]"], n, n + 1, words["[EOS]"]] for n in range(3)]
    counts = torch.full((restarts,), 4), torch.full((restarts,), L)
    for _ in range(steps):
        log_E_RLL = edge_RLL.masked_fill(~is_edge_LL, -1e30).log_softmax(dim=2)
        log_E_RLL = log_E_RLL.masked_fill(~is_edge_LL, -math.inf)
        log_P_RLV = word_RLV[..., : 4 if single else 6].log_softmax(dim=2)
        if single:  # their own words are not scored
            log_P_RLV = torch.cat((log_P_RLV, torch.zeros(restarts, L, 2)), dim=2)
        log_p_R = sum(
            dag_log_likelihood(
                log_P_RLV[:, :, ids_M].transpose(1, 2), log_E_RLL, *counts, backend="vectorized"
            )
            for ids_M in phrases_PM
        ) / len(phrases_PM)  # fmt: skip
        optimizer.zero_grad()
        (-log_p_R.sum()).backward()
        optimizer.step()
    return (-log_p_R / math.log(2)).min().item()


@pytest.mark.slow
def test_what_the_plan_says_of_the_best_graphs_for_shifted_phrases():
    assert best_bits("official", is_sparse=False) == pytest.approx(math.log2(3), abs=0.02)
    assert best_bits("official", is_sparse=True) == pytest.approx(2.25, abs=0.02)
    assert best_bits("paper", is_sparse=False) == pytest.approx(2.25, abs=0.02)


# ---- records ----


@pytest.fixture
def tiny(monkeypatch):
    """A study of two tiny cells with two seeds each."""
    cells = (
        Cell("ours", "slots", "sweep/toy", CELL, seeds=(1, 2)),
        Cell("base", "slots", "sweep/toy", {**CELL, "model.width": 8}, seeds=(1, 2)),
    )
    found = {"tiny": Experiment("tiny", "two models", cells, (CLAIM,))}
    for module in (verdicts, grids, command):
        monkeypatch.setattr(module, "EXPERIMENTS", found)
    monkeypatch.setattr(command, "commit", lambda: "0" * 40)
    return found


def run(folder, *more):
    argv = ["study", "--output", folder / "out", "--work", folder / "work", "--device", "cpu"]
    return command.main([str(word) for word in (*argv, *more)])


def written(folder):
    return {path.name: path.read_bytes() for path in (folder / "out" / "tiny").glob("*.json")}


@pytest.mark.slow
def test_the_queue_leaves_a_record_of_each_run_once(tiny, tmp_path, capsys):
    assert run(tmp_path) == 0
    before = written(tmp_path)
    assert sorted(before) == [
        f"study-{cell}-seed{seed}.json" for cell in ("base", "ours") for seed in (1, 2)
    ]
    record = json.loads(before["study-ours-seed1.json"])
    assert record["versions"].keys() >= {"commit", "cpu", "device", "torch"}
    assert record["seconds"]["pretrain"] > 0 and record["settings"] == CELL
    assert run(tmp_path) == 0 and written(tmp_path) == before
    capsys.readouterr()
    assert run(tmp_path, "--list") == 0
    assert "4 of 4 runs recorded" in capsys.readouterr().out
    assert run(tmp_path, "--report") == 0
    out = capsys.readouterr().out
    ours, base = (
        [
            json.loads(before[f"study-{c}-seed{s}.json"])["metrics"]["bits_per_row"]
            for s in (1, 2)
        ]
        for c in ("ours", "base")
    )
    mean = np.mean(np.subtract(ours, base))
    assert "2 of 2" in out and f"{mean:+.3f} ±" in out


@pytest.mark.slow
def test_a_run_that_another_worker_has_taken_is_left_to_it(tiny, tmp_path, capsys):
    with RunDirectory(tmp_path / "work" / "queue" / "tiny" / "study-ours-seed1"):
        assert run(tmp_path) == 0
    assert len(written(tmp_path)) == 3
    assert "study-ours-seed1.json" not in written(tmp_path)


@pytest.mark.slow
def test_a_stopped_queue_goes_on_and_ends_with_the_same_numbers(tiny, tmp_path, monkeypatch):
    assert run(tmp_path / "whole") == 0
    asked = itertools.count()
    monkeypatch.setattr(
        "exlm_mini.training.console.Requests.should_stop", lambda self: next(asked) % 5 == 4
    )
    codes = [run(tmp_path / "stopped") for _ in range(40)]
    assert codes[0] == 130 and codes[-1] == 0
    numbers = [
        {name: json.loads(data)["metrics"] for name, data in written(tmp_path / folder).items()}
        for folder in ("whole", "stopped")
    ]
    assert numbers[0] == numbers[1]


def test_first_seeds_come_first_and_what_has_no_data_is_left_out(
    tiny, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)  # without corpora/molecules
    cells = (Cell("mlm", "molecules", "sweep/smiles", seeds=(1, 2)),)
    monkeypatch.setitem(tiny, "molecules", Experiment("molecules", "", cells, ()))
    runs = command.planned(command.chosen(["study"], "mini", None), "mini", [])
    left = command.ready(runs, Runner(tmp_path / "work"))
    assert [(run.cell.name, run.seed) for run in left] == [
        ("ours", 1), ("base", 1), ("ours", 2), ("base", 2),
    ]  # fmt: skip
    assert "corpora/molecules" in capsys.readouterr().err


def test_a_checkout_with_changes_makes_no_record_for_the_book(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "commit", lambda: f"{'0' * 40} with changes")
    monkeypatch.setattr(command, "OUTPUT", tmp_path / "out")
    assert run(tmp_path) == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_record_of_molecules_holds_what_pairs_and_frozen_states_say(
    tiny, tmp_path, monkeypatch
):
    prepare_corpus(replace(DATA["smiles"], validation_share=0.3), tmp_path / "corpus", 1)
    monkeypatch.setattr(frozen, "QUANTITIES", ("qed", "BertzCT"))  # no two molecules agree
    settings = {**CELL, "data.pack": str(tmp_path / "corpus"), "objective": "exlm"}
    cell = Cell("exlm", "molecules", "sweep/smiles", settings, seeds=(1,))
    monkeypatch.setitem(tiny, "tiny", Experiment("tiny", "", (cell,), ()))
    assert run(tmp_path) == 0
    first = json.loads(written(tmp_path)["study-exlm-seed1.json"])["metrics"]
    assert first.keys() >= {"bits_per_mask", "rings_together_bits", "read_qed"}
    shutil.rmtree(tmp_path / "out")
    assert run(tmp_path) == 0
    assert json.loads(written(tmp_path)["study-exlm-seed1.json"])["metrics"] == first


def test_the_plan_says_what_the_code_says():
    text = (ROOT / "book" / "plan.md").read_text()
    for name, experiment in EXPERIMENTS.items():
        assert f"## {name.capitalize()}: " in text
        section = text.partition(f"## {name.capitalize()}: ")[2].partition("\n## ")[0]
        (count,) = {len(c.seeds) for c in experiment.cells if not c.is_timed}
        assert f"{NUMBERS[count]} seeds." in section
    (told,) = re.findall(r"bring the primary claims to (\w+)", " ".join(text.split()))
    primary = [c for e in EXPERIMENTS.values() for c in e.claims if c.is_primary]
    assert {"twelve": 12}[told] == len(primary)
