"""``python -m exlm_lab.sweep``: its tables of cells, its records, and a small sweep end to end."""

import json
import math
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from commands import contents, fails
from made_records import made_record, write
from refusals import told
from tiny_runs import CELL, TASK

from exlm_lab import sweep
from exlm_lab.benchmarks import step
from exlm_lab.experiments import ledger as ledgers
from exlm_lab.experiments import measures, running
from exlm_lab.experiments.catalogue import EXPERIMENTS, planned
from exlm_lab.experiments.cells import Cell, load_base
from exlm_lab.experiments.ledger import SweepLedger
from exlm_lab.experiments.metric_names import is_share
from exlm_lab.experiments.paper import printed
from exlm_lab.experiments.records import add, read
from exlm_lab.experiments.running import Runner
from exlm_mini.config import RunConfig, TrainConfig
from exlm_mini.config.recipes import dotted, plain
from exlm_mini.reading.trained import load
from exlm_mini.training.checkpoint import latest_checkpoint
from exlm_mini.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


# ---- the tables ----


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_cell_differs_from_its_base_only_as_it_says(name):
    cells, is_sweep = EXPERIMENTS[name].cells, not EXPERIMENTS[name].plan
    assert len({cell.name for cell in cells}) == len(cells)
    rows = [(cell.paper, cell.input) for cell in cells if cell.paper]
    assert len(set(rows)) == len(rows), "two cells stand for one row"
    assert is_sweep or len({cell.seeds for cell in cells if not cell.is_timed}) == 1
    for cell in cells:
        assert not is_sweep or cell.name.startswith(f"{cell.input}-")
        assert cell.seeds == tuple(range(1, len(cell.seeds) + 1))
        assert cell.paper is None or cell.paper[1] in printed(cell.paper[0])
        base, own = (dotted(plain(run)) for run in (load_base(cell.base), cell.config(7)))
        changed = {key for key in own if own[key] != base[key]}
        assert changed <= {*cell.settings, "seed"}, cell.name
        assert own == own | cell.settings | {"seed": 7}, cell.name
        if cell.cost_of is not None:
            sweep, timed_name = cell.cost_of
            timed = EXPERIMENTS[sweep].cell(timed_name)
            # An MLM may be given the cost of any ExLM.
            assert timed.is_timed
            assert own["objective"] != "exlm" or timed.config(7).model == cell.config(7).model


def test_runs_that_differ_in_bookkeeping_alone_share_a_trained_model(tmp_path):
    runner, config, shared = Runner(tmp_path), load_base("sweep/toy"), set()
    folders = {runner.folder(c) for c in (config, replace(config, seed=2))}
    assert len(folders | {runner.folder(config, {"excess_bits": 1.0})}) == 3
    for field in fields(TrainConfig):
        train = replace(config.train)
        object.__setattr__(train, field.name, "another value")
        if runner.folder(replace(config, train=train)) in folders:
            shared.add(field.name)
    assert shared == {"save_every", "keep_last", "log_every", "tensorboard", "device"}


# ---- the command line ----


def test_mistakes_are_told_before_anything_is_trained_or_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(SweepLedger, "run", lambda *_: pytest.fail("a cell was trained"))
    only = ["--only", "molecules-p0.15-k1", "--output", "out"]
    for argv, parts in (
        (["ablation"], ["'ablation'", "did you mean ablations"]),
        (["ablations", "--only", "toy-elxm"], ["toy-elxm", "toy-exlm"]),
        (["cost", "--data", tmp_path / "none"], ["none", "check --data"]),
        (["ablations", "--report", "--seeds", "1"], ["--report", "leave out --only"]),
        (["repeated-mlm", *only], ["corpora/molecules", "exlm_mini.prepare"]),
    ):
        fails(capsys, sweep.main, *argv, parts=parts)
    assert list(tmp_path.iterdir()) == []


def test_only_takes_names_and_patterns_and_study_stands_for_all_experiments():
    assert list(sweep.select(["cost", "study"])) == ["cost", *(e.name for e in planned())]
    cells = sweep.select(["ablations", "cost"], ["toy-mlm", "slots-*"])
    assert {cell.name for cell in cells["ablations"] if cell.input == "toy"} == {"toy-mlm"}
    every = [c for c in EXPERIMENTS["ablations"].cells if c.input == "slots"]
    assert len(cells["ablations"]) == 1 + len(every) and "cost" not in cells


# ---- records ----


@pytest.fixture
def tiny(monkeypatch):
    """Replace the ablations by three tiny cells, and the cost sweep by one timed cell."""
    exlm = {"objective": "exlm", "model.states_per_mask": 2, "masking.mask_ratio": 0.3}
    cells = {
        "ablations": [
            Cell("toy-exlm", "toy", "sweep/toy", {**CELL, **exlm}, TASK, seeds=(1,)),
            Cell("toy-mlm", "toy", "sweep/toy", CELL, None, seeds=(1,)),
            Cell(
                "toy-mlm++", "toy", "sweep/toy", CELL, None, seeds=(1,), cost_of=("cost", "toy-k2")
            ),
        ],
        "cost": [Cell("toy-k2", "toy", "sweep/toy", {**CELL, **exlm}, is_timed=True, seeds=(1,))],
    }  # fmt: skip
    for name, some in cells.items():
        monkeypatch.setitem(EXPERIMENTS, name, replace(EXPERIMENTS[name], cells=tuple(some)))
    monkeypatch.setattr(step, "ENOUGH_SECONDS", 0.0)
    return cells


def run(folder, *more):
    output, work = (str(folder / name) for name in ("out", "work"))
    return sweep.main(
        ["ablations", "--output", output, "--work", work, "--device", "cpu", *more]
    )


def test_an_experiment_of_a_user_is_listed_and_reported(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "book/running.md").read_text(), re.S)
    monkeypatch.setitem(EXPERIMENTS, "mine", None)  # so that it is removed afterwards
    exec(compile(code, "mine.py", "exec"), {"__name__": "mine"})
    assert sweep.main(["mine", "--list", f"--output={tmp_path}"]) == 0
    config = plain(EXPERIMENTS["mine"].cell("mlm").config(1))
    made = made_record("mine", "mlm", config=config, version=1, metrics={"bits_per_row": 2.5})
    write(tmp_path, made)
    assert sweep.main(["mine", "--report", f"--output={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "two-states" in out and "| 2.50" in out
    # Records made with other settings are not pooled with these.
    write(tmp_path, made | {"seed": 2, "config": config | {"seed": 2, "objective": "exlm"}})
    report = "mine", "--report", f"--output={tmp_path}"
    fails(capsys, sweep.main, *report, parts=["the record of mlm seed 2", "another config"])


@pytest.mark.slow
def test_a_sweep_leaves_a_record_of_each_cell(tiny, tmp_path, capsys):
    start = time.monotonic()
    assert run(tmp_path) == 0
    passed = time.monotonic() - start
    records = read("ablations", tmp_path / "out")
    record = records["toy-exlm", 1]
    assert record["sweep"] == "ablations"
    assert [point["step"] for point in record["curve"]] == [3, 6]
    assert 0 <= record["downstream"]["test"] <= 1
    assert record["downstream"]["setting"]["num_train"] == 12
    assert record["metrics"]["total_correlation_bits"] >= 0
    assert record["config"] == plain(tiny["ablations"][0].config(1))
    assert record["versions"].keys() >= {"torch", "commit", "device", "python"}
    assert record["seconds"].keys() == {"pretrain", "measure", "finetune"}
    timed = read("cost", tmp_path / "out")["toy-k2", 1]
    assert sum(record["seconds"].values()) + timed["seconds"]["measure"] <= passed
    equal = records["toy-mlm++", 1]
    ratio = timed["metrics"]["cost_ratio"]
    assert equal["config"]["train"]["steps"] == round(6 * ratio)
    assert equal["metrics"]["cost_ratio"] == ratio
    said = capsys.readouterr().err
    steps = set(re.findall(r"^toy-mlm\+\+ \d+/(\d+)", said, re.M))
    # An MLM++ with as many steps as the MLM is the same run, which is trained already.
    assert steps == {str(round(6 * ratio))} - {"6"}, said
    # A second call does nothing.
    before = contents(tmp_path / "out")
    assert run(tmp_path) == 0
    assert contents(tmp_path / "out") == before
    out, err = capsys.readouterr()
    assert out == "" and re.search(r"(\d+) of \1 runs are recorded in .*--output", err)


def test_the_ratio_of_a_cost_is_measured_by_one_process_for_all(tiny, tmp_path, monkeypatch):
    calls = []

    def time_once(self, config):
        calls.append(config)
        time.sleep(0.2)  # the other thread asks meanwhile
        return {
            "metrics": {"cost_ratio": 1.0 + len(calls)},
            "seconds": {"measure": 0.0},
            "curve": [],
        }

    monkeypatch.setattr(Runner, "time", time_once)
    monkeypatch.setattr(running, "SECONDS_BETWEEN_LOOKS", 0.05)

    def changed(_):
        ledger = SweepLedger(tmp_path / "out", "ablations", Runner(tmp_path / "work", "cpu"))
        return ledger.equal_cost(tiny["ablations"][2])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(changed, range(2))
    assert len(calls) == 1 and first == second


def test_a_run_whose_log_lost_its_end_is_no_record(tiny, tmp_path):
    runner, config = Runner(tmp_path, "cpu"), tiny["ablations"][1].config(1)
    trained = runner.train(config)
    assert runner.train(config) == trained
    log = runner.folder(config) / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    for kept in (lines[:-1], []):
        log.write_text("".join(kept))
        told(lambda: runner.train(config), "is missing the last lines", "run again")


@pytest.fixture
def grown(monkeypatch):
    """A cell that starts from another cell's model, on few molecules, with a timed cell."""
    settings = {
        "model.num_layers": 1, "model.width": 16, "model.ffn_width": 16, "model.num_heads": 2,
        "masking.strategy": "spans", "masking.mask_ratio": 0.3, "data.pack": None,
        "data.max_documents": 300, "train.steps": 6, "train.batch_size": 4,
        "train.warmup_steps": 1, "train.validation_rows": 8,
    }  # fmt: skip
    exlm = {**settings, "objective": "exlm", "model.transition": "spans"}
    trunk = Cell("molecules-mlm", "molecules", "sweep/smiles", settings, seeds=(1,))
    timed = replace(trunk, name="molecules-cost", settings=exlm, is_timed=True)
    cell = replace(
        trunk, name="molecules-exlm", settings=exlm, start=trunk, with_prize=True,
        cost_of=("cost", timed.name),
    )  # fmt: skip
    monkeypatch.setitem(EXPERIMENTS, "cost", replace(EXPERIMENTS["cost"], cells=(timed,)))
    monkeypatch.setattr(step, "ENOUGH_SECONDS", 0.0)
    for name in ("PRIZE_ROWS", "FILLED_ROWS"):
        monkeypatch.setattr(measures, name, 8)
    return cell


def test_a_cell_goes_on_from_the_trained_model_of_another(grown, tmp_path, capsys):
    ledger = SweepLedger(tmp_path / "out", "links", Runner(tmp_path / "work", "cpu"))
    record = ledger.run(grown, 1)
    metrics = record["metrics"]
    steps = record["config"]["train"]["steps"]
    assert steps == round(6 / metrics["cost_ratio"])
    shown = capsys.readouterr().err
    assert "molecules-mlm, for molecules-exlm 6/6: " in shown
    assert f"molecules-exlm {steps}/{steps}: " in shown
    folder = tmp_path / "work" / record["config"]["train"]["start_from"]
    before = latest_checkpoint(folder / "checkpoints", print)
    assert before.step == 6 and before.state["config"]["objective"] == "mlm"
    # Its token count continues that of the first cell.
    own = ledger.runner.folder(RunConfig(**record["config"]))
    last = read_metrics(own / "metrics.jsonl")[-1]
    assert last["tokens"] > before.state["num_tokens"] > 0
    won = metrics["at_once_bits"] - metrics["together_bits"]
    assert metrics["links_win_bits"] == pytest.approx(won, abs=1e-3)
    assert metrics["prize_bits"] == pytest.approx(
        metrics["at_once_bits"] - metrics["in_turn_bits"], abs=1e-3
    )
    assert 0 <= metrics["exact_at_once"] <= metrics["readable_at_once"] <= 1
    filled = {name for name in metrics if name.startswith(("readable_", "exact_"))}
    assert len(filled) == 12 and all(map(is_share, filled))
    assert ledger.record(grown, 1)
    told(lambda: ledger.record(replace(grown, start=None), 1), "another config")


def test_a_cell_that_grows_is_trained_in_both_stages(grown, tmp_path):
    settings = {**grown.settings, "train.grow_at": 0.5}
    runner = Runner(tmp_path / "work", "cpu")
    config = replace(grown, start=None, settings=settings).config(1)
    trained = runner.train(config)
    lines = read_metrics(runner.folder(config) / "metrics.jsonl")
    assert [line["step"] for line in lines][-1] == trained["steps"] == 6
    assert {3, 6} <= {line["step"] for line in lines if "validation_bits_per_mask" in line}
    assert load(runner.folder(config), print).config.objective == "exlm"


MLM = Cell("toy-mlm", "toy", "sweep/toy", CELL)


def stored(folder, cell, **changed):
    """Write what the ledger reads of a finished cell's record, and return the ledger."""
    own = {"config": plain(cell.config(1)), "version": ledgers.VERSION}
    add(made_record(**{"sweep": "ablations", "cell": cell.name, **own, **changed}), folder)
    return SweepLedger(folder, "ablations", Runner(folder / "work"))


def test_a_setting_that_a_record_lacks_was_at_its_default(tmp_path):
    cell = replace(MLM, downstream=TASK)
    config, setting = plain(cell.config(1)), json.loads(json.dumps(asdict(TASK)))
    del config["model"]["clone_embedding_std"], setting["tune"]["pooler_dropout"]
    ledger = stored(tmp_path, cell, config=config, downstream={"setting": setting})
    assert ledger.record(cell, 1)
    other = replace(cell, settings={**CELL, "model.clone_embedding_std": 0.5})
    told(lambda: ledger.record(other, 1), "another config")
    other = replace(cell, downstream=replace(TASK, tune=replace(TASK.tune, pooler_dropout=0.5)))
    told(lambda: ledger.record(other, 1), "another downstream")


def test_a_record_of_other_settings_is_refused(tmp_path):
    ledger = stored(tmp_path, MLM)
    steps = replace(MLM, settings={**CELL, "train.steps": 7})
    watched = replace(MLM, watched={"excess_bits": 1.0})
    assert ledger.record(MLM, 1) and not ledger.record(MLM, 2)
    told(lambda: ledger.record(steps, 1), "toy-mlm seed 1", "another config", "--output")
    told(lambda: ledger.record(replace(MLM, downstream=TASK), 1), "another downstream")
    told(lambda: ledger.record(watched, 1), "another watched")
    tested = replace(MLM, tested_with={"many": {"masking.mask_ratio": 0.9}})
    told(lambda: ledger.record(tested, 1), "has no metric @many")
    ledger = stored(tmp_path / "old", MLM, version=ledgers.VERSION + 1)
    told(lambda: ledger.record(MLM, 1), tmp_path / "old", "another version")


def test_records_are_sorted_by_cell_and_seed_each_once(tmp_path):
    for seed in (10, 2, 1, 2):
        stored(tmp_path, MLM, seed=seed)
    stored(tmp_path, replace(MLM, name="toy-mlm++"))
    made = [("toy-mlm++", 1), *(("toy-mlm", seed) for seed in (1, 2, 10))]
    assert list(read("ablations", tmp_path)) == made
    assert len((tmp_path / "ablations.jsonl").read_text().splitlines()) == len(made)


def test_workers_that_end_together_leave_all_records(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "SECONDS_BETWEEN_LOOKS", 0.01)
    trained = {"curve": [], "steps": 1, "seconds": 2.0}
    monkeypatch.setattr(Runner, "train", lambda *_: trained)
    monkeypatch.setattr(Runner, "measure", lambda *_: {})
    cell = replace(MLM, settings={**CELL, "train.learning_rate": 0.01 / 3})  # in all its digits

    def make(seed):
        runner = Runner(tmp_path / f"work-{seed}", "cpu")  # workers share only the output
        ledger = SweepLedger(tmp_path / "out", "ablations", runner)
        ledger.run(cell, seed)
        return ledger.record(cell, seed)["seed"]

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(make, range(1, 9)))
    assert [seed for _, seed in read("ablations", tmp_path / "out")] == made


@pytest.mark.parametrize(("bits", "before"), [(math.nan, 2.0), (2.0, math.inf)])
def test_numbers_that_are_none_are_no_result(tmp_path, monkeypatch, bits, before):
    runner, curve = Runner(tmp_path / "work"), [{"step": 1, "bits_per_mask": before}]
    trained = {"curve": curve, "steps": 1, "seconds": 2.0}
    monkeypatch.setattr(runner, "train", lambda *_: trained)
    monkeypatch.setattr(runner, "measure", lambda *_: {"bits_per_mask": bits})
    ledger = SweepLedger(tmp_path, "ablations", runner)
    told(lambda: ledger.run(MLM, 1), f"bits_per_mask is {bits + before - 2}", "not recorded")
    assert not read("ablations", tmp_path)
