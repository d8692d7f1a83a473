"""Recipes of settings, the ledger of finished runs, and what is reported of them."""

import dataclasses
import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import told
from tiny_runs import tiny_run

from exlm_lab.downstream.grid import (
    TUNING,
    Space,
    Tuning,
    best_setting,
    is_diverged,
    key,
    paper_numbers,
    setting_of,
    summary,
)
from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.results import (
    PAPER_TABLES,
    check_results,
    notes,
    scale,
    table,
    task_record,
    write_results,
)
from exlm_lab.downstream.runs import Result, TuningLedger
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_lab.ledger import StoppedError
from exlm_mini.config.recipes import load_recipe
from exlm_mini.reading.pretrained import load_pretrained

BASE = TuneConfig()
TASK = Task("which", "classes", ("no", "yes"), "accuracy", "smiles")

# Typed from the paper: rate, batch, epochs, warm-up share.
FIXED = ({5e-5}, {32}, {3}, {0.06})
LARGE_GLUE = ({1e-5, 2e-5, 3e-5, 4e-5}, {32}, {2, 3, 5}, {0.06})
SMALL_GLUE = ({2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {2, 3, 5, 10}, {0.06, 0.1})
SQUAD = ({2e-5, 3e-5, 4e-5, 5e-5}, {16, 32}, {2, 3}, {0.06, 0.1})
TABLE_6 = dict.fromkeys(["mnli", "qnli", "qqp", "rte"], FIXED)
TABLE_11 = dict.fromkeys(["mnli", "qnli", "qqp", "sst2"], LARGE_GLUE)
TABLE_11 |= dict.fromkeys(["rte", "mrpc", "cola", "stsb"], SMALL_GLUE) | {"squad_v2": SQUAD}
# Epochs, batch, rate, warm-up, dropout, pooler dropout.
TABLE_8 = {
    "bace": (60, 64, 1e-4, 0.06, 0.1, 0.2),
    "bbbp": (40, 128, 4e-4, 0.06, 0.1, 0.1),
    "tox21": (80, 128, 1e-4, 0.06, 0.1, 0.1),
    "sider": (100, 32, 5e-4, 0.4, 0.1, 0.0),
    "muv": (40, 128, 2e-5, 0.2, 0.1, 0.1),
    "clintox": (100, 256, 5e-5, 0.1, 0.1, 0.5),
    "toxcast": (80, 64, 1e-4, 0.06, 0.1, 0.1),
}


# ---- recipes ----


@pytest.mark.parametrize(
    ("name", "report", "num_seeds", "tasks"),
    [
        ("table-6", "mean", 3, TABLE_6),
        ("table-8", "mean-sd", 3, TABLE_8),
        ("table-11", "median", 5, TABLE_11),
    ],
)
def test_recipes_name_tasks_seeds_and_the_rule_of_the_paper(name, report, num_seeds, tasks):
    """What they say of each task, ``test_settings_arrive`` compares with the tables."""
    recipe = load_recipe(f"finetune/{name}", TUNING)
    assert recipe[1:3] == (report, tuple(range(1, num_seeds + 1)))
    assert recipe.spaces.keys() == tasks.keys()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seeds: [1]\nrtee:\n  epochs: [2]\n", "rtee"),
        ("seeds: [1]\nrte:\n  epoch: [2]\n", "rte.epoch"),
        ("seeds: [1]\nrte:\n  epochs: [0]\n", "epochs is 0"),
        ("seeds: [1, 1]\n", "seeds is [1, 1]"),
        ("rte:\n  epochs: [2]\n", "seeds is []"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(tmp_path, text, part):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    told(lambda: load_recipe(str(path), TUNING), path, part)


@given(
    st.lists(st.sampled_from([1e-5, 2e-5, 3e-5]), unique=True),
    st.lists(st.sampled_from([16, 32]), unique=True),
    st.lists(st.sampled_from([0.0, 0.1]), unique=True),
)
def test_a_space_is_every_combination_once(rates, batches, dropouts):
    space = Space(tuple(rates), tuple(batches), pooler_dropout=tuple(dropouts))
    settings = space.settings(BASE)
    count = max(len(rates), 1) * max(len(batches), 1) * max(len(dropouts), 1)
    assert len(set(settings)) == len(settings) == count
    assert len({key(config) for config in settings}) == count


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


def test_the_setting_is_chosen_by_the_median_on_validation():
    cells = [cell(1e-5, 1, 0.7, test=0.9), cell(2e-5, 1, 0.8, test=0.1), diverged(3e-5)]
    assert best_setting(cells, TASK).learning_rate == 2e-5
    cells = [cell(1e-5, s, a) for s, a in enumerate([0.1, 0.8, 0.8])]
    cells += [cell(2e-5, s, a) for s, a in enumerate([0.6, 0.6, 0.9])]
    assert best_setting(cells, TASK).learning_rate == 1e-5
    told(lambda: best_setting([diverged(1e-3), diverged(1e-2)], TASK), "every run diverged")


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_seeds_are_put_together_as_the_recipe_says(values):
    percent = [100 * value for value in values]
    assert summary(values, "median")["value"] == pytest.approx(statistics.median(percent))
    for rule in ("mean", "mean-sd"):
        assert summary(values, rule)["value"] == pytest.approx(np.mean(percent), abs=1e-9)
    sd = summary(values, "mean-sd")["sd"]
    if len(values) == 1:
        assert sd is None
    else:
        assert sd == pytest.approx(np.std(percent, ddof=1), abs=1e-9)


def test_the_paper_stands_beside_our_numbers():
    assert paper_numbers(PAPER_TABLES["table-8"], "bace") == {
        "Table 1": {"SMILES-BERT*": 77.8, "ExLM": 79.6}
    }
    rte = paper_numbers(PAPER_TABLES["table-6"], "rte")
    assert rte["Table 2"]["ExLM"] == rte["Table 4"]["15%, ExLM k=4"] == 57.6
    # The same run in two of the paper's places.
    for task in ("qnli", "qqp", "rte"):
        printed = paper_numbers(PAPER_TABLES["table-6"], task)
        assert printed["Figure 8"]["p=15%, k=1"] == printed["Table 2"]["Vanilla MLM"]
    assert paper_numbers(PAPER_TABLES["table-11"], "squad_v2")["Table 3"]["ExLM"] == 84.6


def result(cells, searched=()):
    notes = {"rows": {"train": {"examples": 9, "truncated": 0, "unknown_share": 0.0}}}
    return Result(TASK, setting_of(cells[0]), cells, list(searched), notes)


def results_of(objective, tasks, **masking):
    """What ``results.json`` holds of some tasks."""
    checkpoint = {"objective": objective, "config": {"masking": masking}}
    return {"checkpoint": checkpoint, "tasks": tasks}


def test_a_record_reports_the_test_and_keeps_everything_else():
    recipe = Tuning("none", "mean-sd", (1, 2), {})
    cells = [cell(1e-5, 1, 0.7, 0.6), cell(1e-5, 2, 0.9, 0.8)]
    record = task_record(result(cells, [*cells, diverged(1e-2)]), recipe)
    assert (record["part"], record["seeds"]) == ("test", [1, 2])
    assert record["reported"]["value"] == pytest.approx(70)
    assert record["reported"]["sd"] == pytest.approx(200**0.5)
    assert record["parts"]["validation"]["accuracy"]["seeds"] == pytest.approx([70, 90])
    assert record["searched"][-1]["validation"] is None
    assert record["seconds"] == 4.0, "a run that was searched with and reported counts once"
    json.dumps(record, allow_nan=False)


@pytest.mark.parametrize(
    ("name", "scores", "rows"),
    [
        ("mnli", {"validation": {"accuracy": 0.5}, "validation-mismatched": {"accuracy": 0.4}},
         [("50.0", "85.9 (Table 3)", "86.9 (Table 3)"),
          ("40.0", "85.8 (Table 3)", "86.7 (Table 3)")]),
        ("squad_v2", {"validation": {"best_f1": 0.6, "best_exact": 0.55}},
         [("60.0", "84.6 (Table 3)"), ("55.0", "82.0 (Table 3)")]),
    ],
)  # fmt: skip
def test_the_table_has_both_halves_of_mnli_and_both_scores_of_squad(name, scores, rows):
    record = tuned_on(name, "table-11", scores)
    lines = table(results_of("exlm", record))[2:]
    for line, parts in zip(lines, rows, strict=True):
        assert all(part in line for part in parts), line


def tuned_on(task, recipe, scores=None):
    """The record of a run of a recipe, by the name of its task."""
    metric = {"table-8": "roc_auc"}.get(recipe, "accuracy")
    metric = "best_f1" if task == "squad_v2" else metric
    made = cell(1e-5, 1, 0.5)
    made["metrics"] = scores or {"validation": {metric: 0.5}}
    found = result([made])._replace(task=TASK._replace(name=task, metric=metric))
    return {task: {**task_record(found, Tuning(recipe, "mean", (1,), {})), "recipe": recipe}}


def test_the_papers_row_is_that_of_the_objective():
    def shown(objective, task="mnli", recipe="table-6", **masking):
        return table(results_of(objective, tuned_on(task, recipe), **masking))

    head, _, row = shown("mlm")
    assert head.count("paper") == 1 and "83.6 (Table 2)" in row and "85.1" not in row
    head, _, row = shown("exlm")
    assert "83.6 (Table 2)" in row and "85.1 (Table 2)" in row
    repeated = {"mask_ratio": 0.387, "num_copies": 4}
    head, _, row = shown("repeated-mlm", **repeated)
    assert "| paper: Repeated MLM, p=38.7%, k=4 |" in head
    assert "| 83.6 (Table 2) | 81.0 (Figure 3), 81.8 (Figure 8)" in row
    # A column without a number is left out.
    assert "Repeated" not in shown("repeated-mlm", "bace", "table-8", **repeated)[0]
    assert "paper" not in shown("exlm", "sections", "none")[0]


def test_notes_name_what_was_cut_left_out_and_never_trained():
    record = tuned_on("bbbp", "none")["bbbp"]
    record["notes"] |= {
        "rows": {"train": {"examples": 9, "truncated": 1, "unknown_share": 0.0}},
        "rejected": [{"row": 3, "smiles": "C1"}],
        "stereo_removed": 1,
        "labels_never_trained": [f"l{i}" for i in range(7)],
    }  # fmt: skip
    line = "; ".join(notes({**record, "labels_counted": 1}))
    assert "; 1 row cut to fit the model; 1 row RDKit rejects left out; " in line
    assert "stereo marks removed from 1 molecule; 1 label counted; " in line
    assert "no training row has 7 labels: l0, l1, l2, l3, l4 and 2 more; " in line


def test_a_seed_that_diverged_is_left_out_and_named():
    recipe = Tuning("none", "median", (1, 2), {})
    record = task_record(result([cell(1e-5, 1, 0.7), diverged(1e-5, 2)]), recipe)
    assert record["diverged_seeds"] == [2] and len(record["reported"]["seeds"]) == 1
    told(lambda: task_record(result([diverged(1e-5)]), recipe), "which", "learning_rate")


# ---- the ledger ----


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return load_pretrained(
        tiny_run(tmp_path_factory.mktemp("runs") / "smiles", "smiles"), print
    )


@pytest.fixture(scope="module")
def problem(pretrained):
    return make(pretrained, 0)


def make(pretrained, shift):
    def part(lengths):
        labels = np.array([(n + shift) % 2 for n in lengths])
        return Examples([("C" * n,) for n in lengths], labels, [f"m{n}" for n in lengths])

    return make_problem(TASK, Splits(part([1, 2, 3]), part([4, 5]), part([7]), {}), pretrained)


QUICK = TuneConfig(epochs=1, batch_size=2)


def test_a_finished_run_is_not_made_again(pretrained, problem, tmp_path):
    ledger = TuningLedger(tmp_path, pretrained, problem, "cpu")
    steps = []
    first = ledger.run(QUICK, 1, steps.append)
    assert len(steps) == 2 and not (tmp_path / "running").exists()
    again = ledger.run(QUICK, 1, steps.append)
    assert len(steps) == 2 and again == first
    (path,) = tmp_path.glob("cells/which/*/seed-1.validation.jsonl")
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == ["m4", "m5"]
    assert {answer["answer"] for answer in answers} <= {"no", "yes"}


def test_a_stopped_run_goes_on_and_leaves_no_record_before(pretrained, problem, tmp_path):
    stopping = TuningLedger(tmp_path, pretrained, problem, "cpu", should_stop=lambda: True)
    with pytest.raises(StoppedError):
        stopping.run(QUICK, 1)
    assert not list(tmp_path.glob("cells/**/*.json"))
    steps = []
    TuningLedger(tmp_path, pretrained, problem, "cpu").run(QUICK, 1, steps.append)
    assert [progress.step for progress in steps] == [2]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.clear(),
        lambda record: record.pop("metrics"),
        lambda record: record["metrics"]["validation"].update(accuracy="high"),
        lambda record: record["metrics"]["validation"].update(accuracy=math.nan),
    ],
)
def test_runs_of_other_data_or_weights_are_not_mixed(change, pretrained, problem, tmp_path):
    ledger = TuningLedger(tmp_path, pretrained, problem, "cpu")
    made = ledger.run(QUICK, 1)
    other = TuningLedger(tmp_path, pretrained, make(pretrained, 1))
    told(lambda: other.run(QUICK, 1), "another problem", "--output")
    other = TuningLedger(tmp_path, pretrained._replace(sha256="0"), problem)
    told(lambda: other.run(QUICK, 1), "another pretrained")
    path = next(tmp_path.glob("cells/**/seed-1.json"))
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    told(lambda: ledger.run(QUICK, 1), path, "run is made again")
    path.unlink()
    assert ledger.run(QUICK, 1)["metrics"] == made["metrics"]


def test_a_run_that_diverged_is_recorded_and_the_search_goes_on(pretrained, problem, tmp_path):
    lines = []
    wild = dataclasses.replace(QUICK, learning_rate=1e29, epochs=3, warmup_share=0.0)
    ledger = TuningLedger(tmp_path, pretrained, problem, "cpu", report=lines.append)
    cells = [ledger.run(config, 1) for config in (wild, QUICK)]
    assert is_diverged(cells[0]) and "for which lower learning_rate (1e+29)" in lines[0]
    assert best_setting(cells, TASK) == QUICK


def test_results_of_another_checkpoint_are_not_added_to(pretrained, problem, tmp_path):
    recipe = Tuning("none", "mean", (1,), {})
    made = TuningLedger(tmp_path, pretrained, problem, "cpu").run(QUICK, 1)
    record = task_record(Result(TASK, QUICK, [made], [], problem.notes), recipe)
    made_with = {"device": "a very slow one"}
    whole = write_results(tmp_path, pretrained, {"which": record}, recipe, made_with)
    assert check_results(tmp_path, pretrained) == json.loads(json.dumps(whole["tasks"]))
    (ours,) = scale(whole)
    assert "pre-trained for 3 steps" in ours and "on a very slow one" in ours
    assert "which" in (tmp_path / "table.md").read_text()
    told(lambda: check_results(tmp_path, pretrained._replace(sha256="0")), "other weights")
    whole["tasks"]["which"]["recipe"] = "table-8"
    assert "50.5 M parameters" in scale(whole)[1]
    whole["tasks"]["which"]["reported"] = []
    (tmp_path / "results.json").write_text(json.dumps(whole))
    told(lambda: check_results(tmp_path, pretrained), "results.json", "damaged")
