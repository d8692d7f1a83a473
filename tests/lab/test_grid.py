"""Recipes of settings, the ledger of finished runs, and the reports about these runs."""

import dataclasses
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import told

import exlm_mini.hf as hf
from exlm_lab.downstream.grid import (
    TUNING,
    Tuning,
    best_setting,
    combinations,
    key,
    paper_numbers,
    setting_of,
)
from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.results import (
    PAPER_TABLES,
    in_percent,
    table,
    task_record,
)
from exlm_lab.downstream.runs import Result, TuningLedger, compare
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config.recipes import load_recipe

BASE = TuneConfig()
TASK = Task("which", "classes", ("no", "yes"), "accuracy", "smiles")


# ---- recipes ----


@pytest.mark.parametrize(
    ("name", "report", "num_seeds"),
    [("table-6", "mean", 3), ("table-8", "mean", 3), ("table-11", "median", 5)],
)
def test_recipes_have_the_seeds_and_the_rule_of_the_paper(name, report, num_seeds):
    """``test_settings_arrive`` compares their settings for each task with the paper's tables."""
    recipe = load_recipe(f"finetune/{name}", TUNING)
    assert (recipe.report, recipe.seeds) == (report, tuple(range(1, num_seeds + 1)))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seeds: [1]\nrtee:\n  epochs: [2]\n", "rtee"),
        ("seeds: [1]\nrte:\n  epochs: [0]\n", "epochs is '0'"),
        ("seeds: [1]\nrte:\n  epochs: 2\n", "rte.epochs is '2'; it should be a valid list"),
        ("seeds: [1]\nrte:\n  epochs: []\n", "rte.epochs is a list"),
        ("seeds: [1]\nrte:\n  epochs:\n", "rte.epochs is empty"),
        ("seeds: [1]\nrte: [epochs]\n", "rte is a list"),
        ("seeds: [1, 1]\n", "seeds is [1, 1]"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(tmp_path, text, part):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    told(lambda: load_recipe(str(path), TUNING), path, part)


def test_a_space_is_every_combination_once():
    space = {
        "learning_rate": [1e-5, 2e-5, 3e-5], "batch_size": [16, 32], "pooler_dropout": [0.0, 0.1]
    }  # fmt: skip
    settings = combinations(space, BASE)
    assert len(set(settings)) == len({key(config) for config in settings}) == 3 * 2 * 2
    assert combinations({}, BASE) == [BASE]
    assert len(combinations({"learning_rate": [0.001, 1e-3, 0.002]}, BASE)) == 2


# ---- choosing and reporting ----


def cell(rate, seed, accuracy, test=0.5):
    metrics = {"validation": {"accuracy": accuracy}, "test": {"accuracy": test}}
    record = {"metrics": metrics, "best_epoch": 1, "seconds": 2.0, "device": "cpu"}
    config = {**dataclasses.asdict(BASE), "learning_rate": rate}
    record |= {"config": config, "seed": seed}
    return {**record, "parameters": 7, "problem_sha256": "0"}


def diverged(rate, seed=1):
    config = {**dataclasses.asdict(BASE), "learning_rate": rate}
    return {"config": config, "seed": seed, "diverged": "why"}


def test_the_setting_is_chosen_on_validation():
    cells = [cell(1e-5, 1, 0.7, test=0.9), cell(2e-5, 1, 0.8, test=0.1), diverged(3e-5)]
    cells += [cell(4e-5, 1, 0.8), cell(5e-5, 1, 0.1)]
    assert best_setting(cells, TASK).learning_rate == 2e-5
    told(lambda: best_setting([diverged(1e-3), diverged(1e-2)], TASK), "every run diverged")


def test_seeds_are_put_together_as_the_recipe_says():
    assert in_percent([0.3], "mean") == "30.0"
    values = [0.1, 0.4, 0.9, 0.2]
    sd = 100 * np.std(values, ddof=1)
    for rule, center in (("mean", 40), ("median", 30)):
        assert in_percent(values, rule) == f"{center:.1f} ± {sd:.1f}"


def test_the_paper_stands_beside_our_numbers():
    assert paper_numbers(PAPER_TABLES["table-8"], "bace") == {
        "Table 1": {"SMILES-BERT*": 77.8, "ExLM": 79.6}
    }
    rte = paper_numbers(PAPER_TABLES["table-6"], "rte")
    assert rte["Table 2"]["ExLM"] == rte["Table 4"]["15%, ExLM k=4"] == 57.6
    # The paper prints the same run in two places.
    for task in ("qnli", "qqp", "rte"):
        printed = paper_numbers(PAPER_TABLES["table-6"], task)
        assert printed["Figure 8"]["p=15%, k=1"] == printed["Table 2"]["Vanilla MLM"]
    assert paper_numbers(PAPER_TABLES["table-11"], "squad_v2")["Table 3"]["ExLM"] == 84.6


def result(cells, searched=()):
    notes = {"rows": {"train": {"examples": 9, "truncated": 0, "unknown_share": 0.0}}}
    return Result(TASK, setting_of(cells[0]), cells, list(searched), notes)


def test_a_record_reports_the_test_and_keeps_everything_else():
    recipe = Tuning("none", {}, (1, 2))
    cells = [cell(1e-5, 1, 0.7, 0.6), cell(1e-5, 2, 0.9, 0.8)]
    searched = [cells[0], cell(2e-5, 1, 0.1)]
    record = task_record(result([*cells, diverged(1e-5, 3)], searched), recipe, {})
    assert (record["part"], record["seeds"], record["diverged_seeds"]) == ("test", [1, 2], [3])
    assert record["scores"]["test"] == {"accuracy": [0.6, 0.8]}
    assert record["scores"]["validation"] == {"accuracy": [0.7, 0.9]}
    assert record["seconds"] == 6.0, "a run that was searched with and reported counts once"
    json.dumps(record, allow_nan=False)


BOTH = {"validation": {"accuracy": 0.5}, "validation-mismatched": {"accuracy": 0.4}}
SPANS = {"validation": {"best_f1": 0.6, "best_exact": 0.55}}


@pytest.mark.parametrize(
    ("task", "recipe", "scores", "rows"),
    [
        ("mnli", "table-11", BOTH, [("50.0", "85.9 (Table 3)", "86.9 (Table 3)"),
                                    ("40.0", "85.8 (Table 3)", "86.7 (Table 3)")]),
        ("squad_v2", "table-11", SPANS, [("60.0", "84.6 (Table 3)"), ("55.0", "82.0 (Table 3)")]),
        ("toy-inference", "none", {"validation": {"accuracy": 0.5}}, [("50.0",)]),
    ],
)  # fmt: skip
def test_a_row_stands_beside_those_of_the_paper(task, recipe, scores, rows):
    """A column of the paper without any number is left out."""
    metric, *_ = scores["validation"]
    reached = result([cell(1e-5, 1, 0.5) | {"metrics": scores}])
    reached = reached._replace(task=TASK._replace(name=task, metric=metric))
    record = task_record(reached, Tuning(recipe, {}, (1,), "mean"), {"device": "slow"})
    head, _, *lines = table({"checkpoint": {"objective": "exlm"}, "tasks": {task: record}})
    for line, parts in zip(lines, rows, strict=True):
        assert all(part in line for part in parts), line
    assert head.count("paper") == (0 if recipe == "none" else 2), head


def test_beside_baselines_an_f1_names_its_class():
    scores = {"accuracy": 0.5, "f1": 0.4}
    own = result([cell(1e-5, 1, 0.5) | {"metrics": {"validation": scores, "test": scores}}])
    own = own._replace(
        baselines={"prior": [scores]}, notes=own.notes | {"classes": TASK.classes}
    )
    record = task_record(own, Tuning("none", {}, (1,)), {"device": "slow"})
    head, *_ = table({"checkpoint": {"objective": "exlm"}, "tasks": {"mine": record}})
    assert "F1 of yes" in head


# ---- the ledger ----


@pytest.fixture(scope="module")
def problem(pretrained):
    return make(pretrained, 0)


def make(pretrained, shift):
    def part(lengths):
        labels = np.array([(n + shift) % 2 for n in lengths])
        return Examples([("C" * n,) for n in lengths], labels)

    return make_problem(TASK, Splits(part([1, 2, 3]), part([4, 5]), part([7]), {}), pretrained)


QUICK = TuneConfig(epochs=1, batch_size=2)


def test_runs_of_other_data_or_weights_are_not_mixed(pretrained, problem, tmp_path):
    ledger = TuningLedger(tmp_path, pretrained, problem, "cpu")
    made = ledger.run(QUICK, 1)
    other = TuningLedger(tmp_path, pretrained, make(pretrained, 1))
    told(lambda: other.run(QUICK, 1), "another problem", "--output")
    other = TuningLedger(tmp_path, replace(pretrained, sha256="0"), problem)
    told(lambda: other.run(QUICK, 1), "another pretrained")
    path = next(tmp_path.glob("cells/**/seed-1.json"))
    for metrics in (None, {"validation": {"accuracy": math.nan}}):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": metrics}))
        told(lambda: ledger.run(QUICK, 1), path, "run will be repeated")
    path.unlink()
    assert ledger.run(QUICK, 1)["metrics"] == made["metrics"]


def test_a_run_that_diverged_is_recorded_and_the_search_goes_on(pretrained, problem, tmp_path):
    lines = []
    wild = dataclasses.replace(QUICK, learning_rate=1e29, epochs=3, warmup_share=0.0)
    ledger = TuningLedger(tmp_path, pretrained, problem, "cpu", report=lines.append)
    cells = [ledger.run(config, 1) for config in (wild, QUICK)]
    assert "diverged" in cells[0] and "lower learning_rate (1e+29)" in lines[0]
    assert best_setting(cells, TASK) == QUICK


def test_baselines_are_of_the_rows_that_are_reported(problem, monkeypatch, tmp_path):
    seen = []
    for name, place in (("figure.draw", 1), ("baselines.baselines", 2)):
        monkeypatch.setattr(
            f"exlm_lab.downstream.{name}", lambda *args, place=place: seen.append(args[place])
        )
    model = SimpleNamespace(scores=lambda texts: (None, {}))
    monkeypatch.setattr(hf, "load_predictor", lambda path: model)
    compare(Result(TASK, BASE, [], [], {}), problem, (1,), tmp_path)
    assert all(examples is problem.parts["test"].examples for examples in seen) and seen
