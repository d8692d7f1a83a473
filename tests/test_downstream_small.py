"""``book/downstream_small.py``: the table of the small downstream runs comes from their files."""

import json
import re
import shutil
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from tiny_runs import DATA

from exlm_lab.downstream.grid import Space, summary
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.finetune import parse
from exlm_mini import pretrain
from exlm_mini.config.recipes import build
from exlm_mini.data.corpus import prepare_corpus

pytest.importorskip("rdkit", reason="rdkit is not installed")

BOOK = Path(__file__).resolve().parents[1] / "book"
sys.path += [str(BOOK), str(BOOK / "_ext")]
import downstream_small as small  # noqa: E402
import small_numbers  # noqa: E402

STORED = BOOK / "results" / "downstream-small.json"
METRICS = {
    "bbbp": "roc_auc", "bace": "roc_auc", "clintox": "roc_auc",
    "cola": "matthews", "sst2": "accuracy",
}  # fmt: skip
SCORES = {"exlm": [0.70, 0.72, 0.74], "mlm": [0.69, 0.73, 0.68], "scratch": [0.6, 0.6, 0.63]}
TINY = [
    *("--train.steps", "2", "--train.batch_size", "4", "--train.validation_rows", "8"),
    *("--train.device", "cpu", "--train.num_threads", "1", "--train.chain_warmup", "0"),
    *("--model.width", "16", "--model.num_heads", "2", "--model.ffn_width", "16"),
]


def tuned(corpus: str, model: str) -> dict:
    """A ``results.json`` as ``finetune`` writes it, without the parts nobody reads."""
    tasks = {}
    for task in small.TASKS[corpus]:
        parts = ("validation", "test") if corpus == "smiles" else ("validation",)
        metrics = {part: {METRICS[task]: summary(SCORES[model], "mean-sd")} for part in parts}
        notes = {"rows": {part: {"examples": 9} for part in ("train", *parts)}}
        if corpus == "smiles":
            notes |= {"split": "unimol", "split_sha1": {"test": "ab"}}
        tasks[task] = {
            "metric": METRICS[task],
            "part": parts[-1],
            "parts": metrics,
            "seeds": [1, 2, 3],
            "best_epochs": [1, 2, 2],
            "seconds": 3.0,
            "setting": asdict(TuneConfig(epochs=2)),
            "notes": notes,
            "made_with": {"commit": "none", "torch": "none", "device": "cpu"},
        }
    return {"tasks": json.loads(json.dumps(tasks))}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All run directories, two steps each, and benchmarks of a few molecules."""
    folder = tmp_path_factory.mktemp("small")
    runs, benchmarks = folder / "runs", folder / "moleculenet"
    for corpus in small.TASKS:
        prepare_corpus(DATA[corpus], runs / f"pack-{corpus}", 1)
        for model in ("exlm", "mlm"):
            argv = ["--recipe", f"{corpus}-tiny", "--objective", model, *TINY]
            argv += ["--data.pack", str(runs / f"pack-{corpus}")]
            assert pretrain.main([*argv, "--output", str(runs / f"{corpus}-{model}")]) == 0
        shutil.copytree(runs / f"{corpus}-mlm", runs / f"{corpus}-scratch")
        for model in small.MODELS:
            path = runs / f"tuned-{corpus}-{model}" / "results.json"
            path.parent.mkdir()
            path.write_text(json.dumps(tuned(corpus, model)))
    benchmarks.mkdir()
    rows = small.Pack.open(runs / "pack-smiles" / "train.json")
    tokenizer = small.Tokenizer.load(runs / "pack-smiles" / "tokenizer.json")
    ids_BN, lengths_B = rows.gather(range(4))
    known = [tokenizer.decode(r[1 : n - 1]) for r, n in zip(ids_BN, lengths_B, strict=True)]
    # No molecule of the corpus has xenon.
    unseen = [f"[Xe]{'C' * n}C1CC1" for n in range(1, 17)]
    for name, head, labels in (
        ("bbbp", "smiles,p_np", 1), ("bace", "smiles,Class", 1), ("clintox", "smiles,a,b", 2),
    ):  # fmt: skip
        lines = [f"{text}{f',{i % 2}' * labels}" for i, text in enumerate([*known, *unseen])]
        (benchmarks / f"{name}.csv").write_text("\n".join([head, *lines]) + "\n")
    return runs, benchmarks


@pytest.fixture
def spoiled(whole, tmp_path):
    """A copy of the runs to spoil."""
    runs = shutil.copytree(whole[0], tmp_path / "runs")
    for config in runs.glob("*/config.yaml"):
        config.write_text(config.read_text().replace(str(whole[0]), str(runs)))
    return runs, whole[1]


@pytest.fixture(scope="module")
def record(whole, tmp_path_factory):
    target = tmp_path_factory.mktemp("results") / "downstream-small.json"
    runs, benchmarks = whole
    assert small.main([str(runs), "--data", str(benchmarks), "--to", str(target)]) == 0
    return json.loads(target.read_text())


def refused(capsys, whole, tmp_path) -> str:
    """The one line a mistake gets; nothing is written."""
    target = tmp_path / "out.json"
    capsys.readouterr()
    argv = [str(whole[0]), "--data", str(whole[1]), "--to", str(target)]
    assert small.main(argv) == 2
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if not line.startswith("skipped")]
    assert out == "" and line.startswith("error: ") and not target.exists()
    return line


def agrees(record: dict) -> None:
    """A record is complete, and every mean is that of its seeds."""
    assert set(record["pretraining"]) == {f"{c}-{m}" for c in small.TASKS for m in small.MODELS}
    for corpus in small.TASKS:
        exlm, mlm = (record["pretraining"][f"{corpus}-{m}"] for m in ("exlm", "mlm"))
        assert exlm["tokens"] == mlm["tokens"] and exlm["corpus"] == mlm["corpus"]
        assert exlm["config"]["train"] == mlm["config"]["train"]
        assert exlm["config"]["objective"] == "exlm" and mlm["config"]["objective"] == "mlm"
    assert list(record["tasks"]) == [task for tasks in small.TASKS.values() for task in tasks]
    for name, task in record["tasks"].items():
        assert task["metric"] == METRICS[name]
        assert set(task["models"]) == set(small.MODELS) and len(task["seeds"]) == 3
        for found in [*task["models"].values(), *task["differences"].values()]:
            assert len(found["seeds"]) == 3
            assert found["mean"] == pytest.approx(statistics.fmean(found["seeds"]), abs=1e-3)
            assert found["sd"] == pytest.approx(statistics.stdev(found["seeds"]), abs=1e-3)
        for pair, found in task["differences"].items():
            # Student's t with two degrees of freedom
            assert found["half_width_95"] == pytest.approx(4.3027 * found["sd"] / 3**0.5, 1e-3)
            ours, theirs = (task["models"][model]["mean"] for model in pair.split(" - "))
            assert found["mean"] == pytest.approx(ours - theirs, abs=1e-3)
        seen = task["seen_in_pretraining"]
        assert (seen is not None) == (name in small.TASKS["smiles"])
        if seen:
            assert seen["seen_in_test"] <= min(seen["seen"], seen["test"]) < seen["molecules"]


def test_every_number_comes_from_the_files(record, whole):
    agrees(record)
    bbbp = record["tasks"]["bbbp"]
    assert bbbp["models"]["exlm"]["seeds"] == [70.0, 72.0, 74.0]
    assert bbbp["models"]["exlm"]["mean"] == 72.0 and bbbp["models"]["exlm"]["sd"] == 2.0
    assert bbbp["differences"]["exlm - mlm"]["seeds"] == [1.0, -1.0, 6.0]
    assert bbbp["paper"] == {"table": "Table 1", "ExLM": 72.8, "SMILES-BERT*": 68.6}
    assert bbbp["command"].endswith("--data DATA/moleculenet --train.epochs 2")
    assert record["tasks"]["sst2"]["part"] == "validation"
    run = record["pretraining"]["smiles-exlm"]
    pack = small.Pack.open(whole[0] / "pack-smiles" / "train.json")
    sizes = {"rows": len(pack), "tokens": pack.num_tokens, "sha256": pack.sha256}
    assert run["corpus"] == sizes
    assert run["validation"]["exlm"][-1]["step"] == 2 and run["parameters"] > 0
    assert "in 2 steps of 4 rows" in record["scale"]["smiles-exlm"]
    assert str(whole[0]) not in json.dumps(record)  # no path of a machine
    assert "--data.pack RUNS/pack-smiles" in run["command"]


def test_molecules_of_pretraining_are_counted(record):
    for name in small.TASKS["smiles"]:
        found = record["tasks"][name]["seen_in_pretraining"]
        assert (found["molecules"], found["seen"]) == (20, 4)
    for one, other in (("OCC", "CCO"), ("NCC.Cl", "CCN"), ("C[C@@H](N)O", "C[C@H](N)O")):
        assert small.keys(one) == small.keys(other) != small.keys("CCC")
    assert small.keys("C[Xx]") == []


def test_pages_show_the_numbers_of_the_record(record, monkeypatch):
    monkeypatch.setattr(small_numbers, "record", lambda: record)
    run = record["pretraining"]["smiles-exlm"]
    for text, wanted in (
        ("bbbp exlm", "72.0 ± 2.0"), ("bbbp exlm-mlm", "+2.0 ± 9.0"), ("bace paper-mlm", "77.8"),
        ("sst2 paper-exlm", "93.9"), ("clintox seen", "4 of 20"), ("text-exlm steps", "2"),
        ("smiles-exlm tokens", f"{run['tokens']:,}"),
        ("smiles-exlm rows", f"{run['corpus']['rows']:,}"),
        ("smiles-exlm parameters", f"{run['parameters']:,}"),
        ("smiles-exlm minutes", f"{run['seconds'] / 60:.0f}"),
    ):  # fmt: skip
        assert small_numbers.small(text) == wanted
    bits = float(small_numbers.small("smiles-exlm bits"))
    curve = run["validation"]["exlm"]
    assert bits == pytest.approx(curve[-1]["validation_bits_per_mask"], abs=0.0051)
    assert set(small_numbers.made("smiles")) == {("cpu", run["versions"]["commit"])}
    for text in ("rte exlm", "bbbp", "bbbp mlm-bert", "sst2 seen", "smiles-exlm loss"):
        with pytest.raises(ValueError, match=text.split()[0]):
            small_numbers.small(text)
    with pytest.raises(ValueError, match="proteins"):
        small_numbers.made("proteins")


def test_the_page_says_which_stored_differences_are_clear():
    stored = json.loads(STORED.read_text())
    agrees(stored)
    assert not re.search(r'[" =]/\w+/', STORED.read_text())  # a path of the machine it is from
    clear = {
        f"{name} {pair.replace(' - ', '-')}"
        for name, task in stored["tasks"].items()
        for pair, found in task["differences"].items()
        if abs(found["mean"]) > found["half_width_95"]
    }
    page = " ".join((BOOK / "reproduction.md").read_text().split())
    verdict = page[page.index("What the data say:") : page.index("supports no conclusion")]
    assert clear == set(re.findall(r"\{small\}`([^`]+)`", verdict))
    assert "two do, the only ones of all fifteen" in verdict
    bits = {name: float(small_numbers.small(f"{name} bits")) for name in stored["pretraining"]}
    assert bits["smiles-exlm"] < bits["smiles-mlm"] and bits["text-exlm"] < bits["text-mlm"]
    best = {
        name: max(task["models"], key=lambda model: task["models"][model]["mean"])
        for name, task in stored["tasks"].items()
    }
    assert {name for name, model in best.items() if model == "scratch"} == {"bace", "cola"}


def test_models_trained_or_tuned_unlike_are_refused(spoiled, tmp_path, capsys):
    path = spoiled[0] / "tuned-smiles-mlm" / "results.json"
    good = path.read_text()
    path.write_text(good.replace('"test": "ab"', '"test": "cd"'))
    assert "bbbp: mlm and exlm differ in split_sha1" in refused(capsys, spoiled, tmp_path)
    path.write_text(good.replace('"seeds": [1, 2, 3]', '"seeds": [1, 2]'))
    line = refused(capsys, spoiled, tmp_path)
    assert "seeds [1, 2] where 3 are wanted" in line and "fine-tune on bbbp first" in line
    path.unlink()
    assert "cannot read" in refused(capsys, spoiled, tmp_path)
    config = spoiled[0] / "smiles-mlm" / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.003", "learning_rate: 0.1"))
    assert "smiles-exlm and smiles-mlm differ in train" in refused(capsys, spoiled, tmp_path)
    shutil.rmtree(spoiled[0] / "smiles-exlm")
    shutil.copytree(spoiled[0] / "smiles-mlm", spoiled[0] / "smiles-exlm")
    line = refused(capsys, spoiled, tmp_path)
    assert "smiles-exlm was trained with --objective mlm, not exlm" in line


# ---- the search of the defaults ----


def test_the_defaults_of_fine_tuning_are_the_best_of_the_search():
    stored = json.loads((BOOK / "results" / "downstream-search.json").read_text())
    names = ("learning_rate", "epochs", "dropout", "warmup_share")
    tried = {
        tuple(run[name] for name in names): run["validation"] for run in stored["searched"]
    }
    spaces = [Space(**{n: tuple(v) for n, v in space.items()}) for space in stored["spaces"]]
    settings = {config for space in spaces for config in space.settings(TuneConfig())}
    assert tried.keys() == {tuple(getattr(c, name) for name in names) for c in settings}
    best = max(tried, key=tried.__getitem__)
    assert best == tuple(getattr(TuneConfig(), name) for name in names)
    assert build(TuneConfig, stored["after"]["setting"]) == TuneConfig()
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
    assert request.settings("embedded-molecules") == [build(TuneConfig, found["setting"])]
    assert list(request.recipe.seeds) == found["seeds"]
