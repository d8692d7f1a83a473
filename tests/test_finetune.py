"""``python -m exlm_lab.finetune`` end to end, on runs of a few steps and files of a few rows."""

import json
import re
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from glue_files import write_task
from refusals import told
from tiny_runs import tiny_run, write_molecules

from exlm_lab.downstream import glue, squad
from exlm_lab.downstream.catalogue import ReadingConfig, input_of, task_names
from exlm_lab.downstream.moleculenet import BENCHMARKS, load
from exlm_lab.downstream.prepared import make_span_problem
from exlm_lab.downstream.squad import Squad
from exlm_lab.finetune import main, parse
from exlm_mini.config import SPECIAL_TOKENS
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.training.checkpoint import load_checkpoint, save_checkpoint
from exlm_mini.training.console import ProgressLine

ROOT = Path(__file__).resolve().parents[1]
ONE = ["--train.epochs", "1", "--seeds", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A pre-trained run of each kind."""
    folder = tmp_path_factory.mktemp("runs")
    for kind in ("smiles", "text", "toy"):
        tiny_run(folder / kind, kind, max_positions=128)
    tiny_run(folder / "repeated", "text", "repeated-mlm")
    return folder


@pytest.fixture(scope="module")
def rte(tmp_path_factory):
    """GLUE's RTE in a few rows, its test set included."""
    folder = tmp_path_factory.mktemp("glue") / "RTE"
    folder.mkdir()
    for name, count in (("train", 12), ("dev", 6), ("test", 5)):
        lines = ["index\tsentence1\tsentence2" + "\tlabel" * (name != "test")]
        for i in range(count):
            label = ("entailment", "not_entailment")[i % 2]
            row = f"{i}\tThe list has {i} items.\tThere is {'a' if i % 2 else 'no'} list."
            lines.append(row if name == "test" else f"{row}\t{label}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return folder.parent


@pytest.fixture(scope="module")
def molecules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moleculenet")
    write_molecules(folder)
    return folder


def refused(capsys, argv, *parts):
    """Exit code 2 and one line that names all parts."""
    assert main([str(word) for word in argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert str(part) in line, line


# ---- whole commands ----


def test_molecules_are_tuned_and_told_about(runs, molecules, tmp_path, capsys):
    output = tmp_path / "out"
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules]
    argv += ["--output", output, "--train.epochs", "2", "--seeds", "1", "2"]
    assert main([str(word) for word in argv]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| bbbp +\| roc_auc +\| test +\| \d+\.\d ± \d+\.\d \| mean of 2", shown)
    assert "split unimol" in shown and "1 row RDKit rejects left out" in shown
    assert "stereo marks removed from 26 molecules" in shown
    results = json.loads((output / "results.json").read_text())
    record = results["tasks"]["bbbp"]
    sha1 = record["notes"]["split_sha1"]["test"]
    assert sha1[:8] in shown
    assert record["setting"]["epochs"] == 2 and record["device"] == "cpu"
    assert record["made_with"]["torch"] and record["made_with"]["commit"]
    assert results["checkpoint"]["sha256"] == load_pretrained(runs / "smiles", print).sha256
    answers = (next(output.glob("cells/bbbp/*/seed-1.test.jsonl"))).read_text().splitlines()
    assert len(answers) == record["notes"]["rows"]["test"]["examples"]
    assert all(0 <= json.loads(line)["answer"][0] <= 1 for line in answers)
    assert not list(output.rglob("step-*")), "checkpoints of finished runs are deleted"


def test_the_same_command_again_trains_nothing(runs, molecules, tmp_path, capsys):
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules, *ONE]
    argv = [str(word) for word in (*argv, "--output", tmp_path / "out")]
    assert main(argv) == 0
    first = capsys.readouterr()
    assert "step" in first.err
    # As if it had been killed between the record of its run and what it removes then.
    (record,) = (tmp_path / "out" / "cells").rglob("seed-1.json")
    left = tmp_path / "out" / "running" / record.relative_to(tmp_path / "out" / "cells")
    (left.with_suffix("") / "checkpoints").mkdir(parents=True)
    assert main(argv) == 0
    again = capsys.readouterr()
    assert again.out == first.out and "step" not in again.err
    assert not (tmp_path / "out" / "running").exists()


@pytest.mark.parametrize("run", ["text", "repeated"])
def test_text_is_tuned(runs, rte, tmp_path, capsys, run):
    argv = ["--task", "rte", "--checkpoint", runs / run, "--data", rte, *ONE]
    assert main([str(word) for word in (*argv, "--output", tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"\| rte +\| accuracy +\| validation", shown)
    assert "chosen on the rows that are reported" in shown


def test_a_grid_searches_with_one_seed_and_reports_all(runs, rte, tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "report: median\nseeds: [3, 4, 5]\nrte:\n  epochs: [1]\n  learning_rate: [1e-3, 1e-4]\n"
    )
    argv = ["--task", "rte", "--checkpoint", runs / "text", "--data", rte, "--grid"]
    argv += ["--recipe", recipe, "--output", tmp_path / "out"]
    assert main([str(word) for word in argv]) == 0
    record = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["rte"]
    assert [entry["seed"] for entry in record["searched"]] == [3, 3]
    assert record["seeds"] == [3, 4, 5] and record["reported"]["rule"] == "median"
    best = max(record["searched"], key=lambda entry: entry["validation"])
    rate = f"lr{record['setting']['learning_rate']:g}-"
    assert best["setting"].startswith(rate)
    # Two settings, and two more seeds for the better one.
    assert len(list((tmp_path / "out").glob("cells/rte/*/seed-?.json"))) == 4
    assert "median of 3" in capsys.readouterr().out


def test_the_paper_stands_in_the_table(runs, rte, tmp_path, capsys):
    argv = ["--task", "rte", "--checkpoint", runs / "text", "--data", rte, *ONE]
    argv += ["--output", tmp_path / "out", "--recipe", "finetune/table-6"]
    assert main([str(word) for word in argv]) == 0
    assert "not the recipe's: epochs" in (tmp_path / "out" / "table.md").read_text()
    assert "54.7 (Table 2)" in (shown := capsys.readouterr().out) and "57.6 (Table 2)" in shown


def test_a_dry_run_writes_nothing(runs, rte, tmp_path, capsys):
    argv = ["--task", "rte", "--checkpoint", runs / "text", "--data", rte, "--dry-run"]
    argv += ["--output", tmp_path / "out", "--recipe", "table-11", "--grid"]
    assert main([str(word) for word in argv]) == 0
    shown = capsys.readouterr().out
    # 64 settings with the first seed, then four more seeds of the best; 12 rows.
    assert "64 setting(s), 5 seed(s), 68 run(s) of 2 to 10 steps" in shown
    assert not (tmp_path / "out").exists()


def test_a_dry_run_tells_how_molecules_were_divided(runs, molecules, tmp_path, capsys):
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules]
    argv = [str(word) for word in (*argv, "--output", tmp_path / "out")]
    assert main([*argv, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "bbbp: split unimol, sizes 32/4/4 (paper 1631/204/204)" in lines
    assert "bbbp: row 40 rejected by RDKit: C1CC" in lines
    assert main([*argv, *ONE]) == 0
    record = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]["bbbp"]
    assert record["notes"]["sizes"] == [32, 4, 4]
    for part, digest in record["notes"]["split_sha1"].items():
        assert f"bbbp: {part} rows sha1 {digest}" in lines


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_dry_run_reproduces_the_splits_of_the_real_sets(runs, data_dir, capsys, name):
    folder = data_dir / "moleculenet"
    known = json.loads((folder / "scaffold_split_expected.json").read_text())["splits"][name]
    known = known["chirality"]
    argv = ["--task", name, "--checkpoint", runs / "smiles", "--data", folder, "--dry-run"]
    assert main([str(word) for word in (*argv, "--max-unknown", "1")]) == 0
    lines = capsys.readouterr().out.splitlines()
    found, paper = ("/".join(map(str, n)) for n in (known["sizes"], BENCHMARKS[name].sizes))
    assert f"{name}: split unimol, sizes {found} (paper {paper})" in lines
    for part, digest in known.get("sha1", {}).items():
        part = "validation" if part == "valid" else part
        assert f"{name}: {part} rows sha1 {digest}" in lines
    rejected = [line for line in lines if "rejected by RDKit" in line]
    assert len(rejected) == len(known["unparsed_rows"])
    for row, line in zip(known["unparsed_rows"], rejected, strict=True):
        assert line.startswith(f"{name}: row {row} rejected by RDKit: ")


@pytest.mark.parametrize("name", glue.TASKS)
def test_every_task_of_glue_is_read_by_the_command(runs, tmp_path, capsys, name):
    write_task(tmp_path, name)
    argv = ["--task", name, "--checkpoint", runs / "text", "--data", tmp_path, "--dry-run"]
    assert main([str(word) for word in argv]) == 0
    shown = capsys.readouterr().out
    halves = ("", "-mismatched") if name == "mnli" else ("",)
    parts = {"train": 2} | {f"validation{h}": 2 for h in halves}
    for part, count in parts.items():
        assert f'{name}: {part} {{"examples": {count}, ' in shown


@pytest.mark.parametrize("name", ["mnli", "qqp"])
def test_tasks_whose_files_are_large_are_tuned(runs, tmp_path, capsys, name):
    write_task(tmp_path, name)
    argv = ["--task", name, "--checkpoint", runs / "text", "--data", tmp_path, *ONE]
    assert main([str(word) for word in (*argv, "--output", tmp_path / "out")]) == 0
    record = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"][name]
    assert ("validation-mismatched" in record["parts"]) == (name == "mnli")
    assert ("f1" in record["parts"]["validation"]) == (name == "qqp")


def test_long_texts_are_cut_and_counted(runs, rte, tmp_path, capsys):
    long = tmp_path / "glue"
    shutil.copytree(rte, long)
    path = long / "RTE" / "dev.tsv"
    path.write_text(path.read_text() + f"9\t{'many words ' * 100}\tShort.\tentailment\n")
    argv = ["--task", "rte", "--checkpoint", runs / "text", "--data", long, *ONE]
    assert main([str(word) for word in (*argv, "--output", tmp_path / "out")]) == 0
    assert "1 row cut to fit the model" in capsys.readouterr().out


def test_scoring_without_its_library_says_what_to_install(
    runs, molecules, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules, *ONE]
    assert main([str(word) for word in (*argv, "--output", tmp_path / "out")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "needs the package scipy" in told and "pip install 'exlm-mini[tasks]'" in told


def test_a_step_of_a_run_can_be_named(runs, rte, tmp_path, capsys):
    step = runs / "text" / "checkpoints" / "step-000002"
    argv = ["--task", "rte", "--checkpoint", step, "--data", rte, *ONE]
    assert main([str(word) for word in (*argv, "--output", tmp_path / "out")]) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["checkpoint"]["step"] == 2


def test_a_signal_stops_and_the_same_command_goes_on(
    runs, molecules, tmp_path, capsys, monkeypatch
):
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules, *ONE]
    argv = [str(word) for word in (*argv, "--output", tmp_path / "out", "--train.epochs", "9")]

    def tell(line, step, text):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(ProgressLine, "tell", tell)
        assert main(argv) == 130
    assert "goes on" in capsys.readouterr().err
    (checkpoint,) = (tmp_path / "out").glob("running/bbbp/*/seed-1/checkpoints/step-*")
    assert load_checkpoint(checkpoint).step == 3, "the step in which the signal was seen"
    assert not list((tmp_path / "out").glob("cells/**/*.json"))
    assert main(argv) == 0
    assert not (tmp_path / "out" / "running").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "run"),
    [("embedded-molecules", "smiles"), ("sections", "text"), ("toy-inference", "toy")],
)
def test_embedded_tasks_run_on_a_bare_machine(runs, tmp_path, capsys, task, run):
    argv = ["--task", task, "--checkpoint", runs / run, "--threads", "1", *ONE]
    argv += ["--recipe", "finetune/tiny", "--output", tmp_path / "out"]
    assert main([str(word) for word in argv]) == 0
    assert task in capsys.readouterr().out


@pytest.mark.parametrize(
    ("run", "task"),
    [("smiles", "embedded-molecules"), ("text", "sections"), ("toy", "toy-inference")],
)
def test_without_a_task_the_embedded_one_of_the_runs_kind_is_taken(runs, capsys, run, task):
    assert main(["--checkpoint", str(runs / run), "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"no --task: {task}, the embedded task of {run}\n"
    assert shown.out.startswith(f"{task}: ")


def test_without_a_task_a_recipe_names_those_the_run_can_read(runs, capsys):
    argv = ["--checkpoint", str(runs / "smiles"), "--recipe"]
    assert main([*argv, "finetune/tiny", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "no --task: embedded-molecules of the recipe tiny\n"
    assert "sections" not in shown.out
    refused(capsys, [*argv, "table-6"], "table-6 consist of text", "on smiles")


# ---- mistakes ----


def test_every_task_says_what_it_consists_of():
    inputs = {name: input_of(name) for name in task_names()}
    assert inputs["muv"] == inputs["embedded-molecules"] == "smiles"
    assert inputs["squad_v2"] == inputs["cola"] == inputs["sections"] == "text"
    assert inputs["toy-inference"] == "toy"
    assert len(inputs) == 8 + 1 + 7 + 3


def test_mistakes_on_the_command_line_are_one_line(runs, molecules, tmp_path, capsys):
    base = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules]
    refused(capsys, ["--task", "bbb", *base[2:]], "unknown task 'bbb'", "did you mean bbbp")
    refused(capsys, [*base, "--train.epoch", "3"], "--train.epoch", "train.epochs")
    refused(capsys, [*base, "--train.epochs", "three"], "train.epochs is 'three'", "int")
    refused(capsys, [*base, "--train.epochs", "0"], "epochs is 0")
    refused(capsys, [*base, "--data.canonical", "so"], "data.canonical is 'so'", "bool")
    refused(capsys, [*base, "--data.split", "scafold"], "data.split is 'scafold'")
    refused(capsys, [*base, "--seeds", "1", "1"], "--seeds is [1, 1]")
    refused(capsys, [*base, "--seeds", 2**63], "--seeds", "below 2**63")
    refused(capsys, [*base, "--max-unknown", "nan"], "max_unknown", "nan")
    refused(capsys, [*base, "--max-unknown", "2"], "--max-unknown is 2", "[0, 1]")
    refused(capsys, [*base, "--train.adam_betas", "0.9"], "adam_betas", "expected 2")
    refused(capsys, [*base, "--grid"], "--grid needs a --recipe")
    refused(capsys, [*base, "--search-seeds", "2"], "--search-seeds 2 is for --grid")
    refused(capsys, [*base, "--output", runs / "smiles"], runs / "smiles", "pre-training run")
    refused(capsys, [*base, "--recipe", "table-6"], "table-6 has no task bbbp")
    refused(capsys, [*base, "--threads", "0"], "--threads is 0")
    refused(capsys, [*base, "--device", "gpu"], "train.device is 'gpu'")
    refused(capsys, base[2:], f"--data is {molecules}", "--task")


def test_a_recipe_with_several_settings_needs_a_grid(runs, rte, tmp_path, capsys):
    argv = ["--task", "rte", "--checkpoint", runs / "text", "--data", rte]
    argv += ["--recipe", "table-11", "--output", tmp_path / "out"]
    refused(capsys, argv, "64 settings for rte", "--grid")
    pinned = ["--train.learning_rate", "2e-5", "--train.batch_size", "16"]
    pinned += ["--train.epochs", "3", "--train.warmup_share", "0.1"]
    (config,) = parse([*map(str, argv), *pinned]).settings("rte")
    assert (config.batch_size, config.weight_decay) == (16, 0.1)


def test_a_checkpoint_that_will_not_do_is_refused(runs, rte, molecules, tmp_path, capsys):
    def with_run(run, task="bbbp", data=molecules):
        return ["--task", task, "--checkpoint", run, "--data", data, "--output", tmp_path / "o"]

    refused(capsys, with_run(tmp_path / "nothing"), "there is no", "nothing")
    (tmp_path / "empty").mkdir()
    refused(capsys, with_run(tmp_path / "empty"), "holds no checkpoints")
    refused(capsys, with_run(runs / "text"), "bbbp consists of smiles", "trained on text")
    refused(capsys, with_run(runs / "smiles", "rte", rte), "rte consists of text")
    copy = tmp_path / "copy"
    shutil.copytree(runs / "smiles", copy)
    shutil.copy(runs / "text" / "data" / "tokenizer.json", copy / "data")
    refused(capsys, with_run(copy), "tokenizer.json is not the tokenizer", "sha256")
    (copy / "data" / "tokenizer.json").write_text("{")
    refused(capsys, with_run(copy), "tokenizer.json is not the tokenizer", "restore it")
    (copy / "data" / "tokenizer.json").unlink()
    refused(capsys, with_run(copy), "tokenizer.json is missing")
    stored = load_checkpoint(runs / "smiles" / "checkpoints" / "step-000003")
    kept = {n: t for n, t in stored.tensors["model"].items() if not n.startswith("encoder.")}
    headless = save_checkpoint(tmp_path / "headless", 3, {"model": kept}, stored.state)
    refused(capsys, with_run(headless), "no weights of an encoder")
    part = {n: t for n, t in stored.tensors["model"].items() if "layers.1.ffn_in" not in n}
    shutil.copytree(runs / "smiles", tmp_path / "part")
    save_checkpoint(tmp_path / "part" / "checkpoints", 3, {"model": part}, stored.state)
    refused(capsys, with_run(tmp_path / "part"), "encoder.layers.1.ffn_in.weight (16, 16)")
    tuned = save_checkpoint(tmp_path / "tuned", 3, {"model": stored.tensors["model"]}, {})
    refused(capsys, with_run(tuned), "no pre-trained model")
    shutil.copytree(runs / "smiles", tmp_path / "spoilt")
    for step in sorted((tmp_path / "spoilt" / "checkpoints").glob("step-*")):
        (step / "model.safetensors").unlink()
    refused(capsys, with_run(tmp_path / "spoilt"), step / "model.safetensors", "No such file")
    assert not (tmp_path / "o").exists()


def test_two_models_trained_in_turn_are_told_apart(runs, tmp_path):
    for name in ("mlm", "exlm"):
        shutil.copytree(runs / "toy", tmp_path / "both" / name)
    told(lambda: load_pretrained(tmp_path / "both", print), tmp_path / "both" / "exlm", "mlm")


def test_files_that_will_not_do_are_refused(runs, rte, molecules, tmp_path, capsys):
    def with_data(task, run, folder):
        argv = ["--task", task, "--checkpoint", runs / run, "--data", folder]
        return [*argv, "--output", tmp_path / "out"]

    bad = tmp_path / "glue"
    shutil.copytree(rte, bad)
    path = bad / "RTE" / "train.tsv"
    good = path.read_text()
    path.write_text(good.replace("\tnot_entailment", "\tmaybe", 1))
    refused(capsys, with_data("rte", "text", bad), path, "maybe")
    path.write_text(good.replace("sentence2", "hypothesis"))
    refused(capsys, with_data("rte", "text", bad), "sentence2", "hypothesis")
    path.write_text(good.splitlines()[0] + "\n")
    refused(capsys, with_data("rte", "text", bad), "holds no examples")
    path.unlink()
    refused(capsys, with_data("rte", "text", bad), "train.tsv")
    csv = tmp_path / "bbbp.csv"
    csv.write_text("num,name,p_np,smiles\n" + "".join(f"{i},m,,CC\n" for i in range(20)))
    refused(capsys, with_data("bbbp", "smiles", csv), "p_np", "no value")
    csv.write_text("num,name,p_np,smiles\n0,m,2,CC\n")
    refused(capsys, with_data("bbbp", "smiles", csv), "p_np", "'2'")
    csv.write_text("num,name,p_np,molecule\n0,m,1,CC\n")
    refused(capsys, with_data("bbbp", "smiles", csv), "no column smiles", "found: num, name")
    csv.write_text("num,name,p_np,smiles\n0,m,1,CC\n1,m,0,CO\n")
    refused(capsys, with_data("bbbp", "smiles", csv), "part of the split unimol is empty")
    refused(capsys, with_data("sections", "text", rte), "sections is embedded", "--data")
    assert not (tmp_path / "out").exists(), "a mistake leaves nothing behind"


def test_a_vocabulary_of_other_molecules_is_refused(runs, tmp_path, capsys):
    csv = tmp_path / "bbbp.csv"
    rows = [f"{i},m,{i % 2},[Xe].[Rn].[Kr]{'.[He]' * i}" for i in range(30)]
    csv.write_text("num,name,p_np,smiles\n" + "\n".join(rows) + "\n")
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", csv, *ONE]
    argv += ["--data.split", "random", "--output", tmp_path / "out"]
    refused(capsys, argv, "not in the vocabulary", "bbbp", "such as [He], ", "--max-unknown")


def test_aromatic_molecules_before_a_vocabulary_of_kekule_spelling_are_refused(
    runs, tmp_path, capsys
):
    assert load_pretrained(runs / "smiles", print).tokenizer.unknown_pieces("c") == ["c"]
    csv = tmp_path / "bbbp.csv"
    rows = [f"{i},m,{i % 2},{'C' * i}c1ccccc1" for i in range(30)]
    csv.write_text("num,name,p_np,smiles\n" + "\n".join(rows) + "\n")
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", csv, *ONE]
    argv += ["--data.split", "random", "--output", tmp_path / "out"]
    refused(capsys, argv, "such as c; ", "Kekulé spelling", "are aromatic", "--max-unknown")


def test_a_part_that_cannot_be_scored_is_refused_before_training(runs, tmp_path, capsys):
    def labelled(zeros):
        csv = tmp_path / "bbbp.csv"
        rows = [f"{i},m,{int(i not in zeros)},{'C' * (i + 1)}O" for i in range(30)]
        csv.write_text("num,name,p_np,smiles\n" + "\n".join(rows) + "\n")
        return ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", csv, *ONE,
                "--data.split", "random", "--output", tmp_path / "out"]  # fmt: skip

    refused(capsys, labelled([]), "bbbp", "a yes and a no", "part validation", "--data.split")
    _, parts = load("bbbp", tmp_path / "bbbp.csv", "random")
    zeros = [int(i) for part in (parts.train, parts.validation) for i in part.ids[:1]]
    refused(capsys, labelled(zeros), "bbbp", "part test", "--data.split")
    assert not (tmp_path / "out").exists(), "a mistake leaves nothing behind"


def test_stereo_marks_go_where_the_vocabulary_has_none(runs):
    tokenizer = load_pretrained(runs / "smiles", print).tokenizer
    assert ReadingConfig().cleaning(tokenizer).strip_stereo
    assert not ReadingConfig(stereo="keep").cleaning(tokenizer).strip_stereo


# ---- SQuAD ----


def paragraph(number):
    """A paragraph of several windows, a question with an answer in it and one without."""
    context = f"{'The list is long. ' * 12}The answer is number {number}. {'It ends. ' * 10}"
    answer = f"number {number}"
    start = context.index(answer)
    has = {"id": f"a{number}", "question": "What is the answer?",
           "answers": [{"text": answer, "answer_start": start}]}  # fmt: skip
    none = {"id": f"n{number}", "question": "Who wrote it?", "answers": []}
    return {"context": context, "qas": [has, none]}


def squad_of(numbers):
    return {"data": [{"title": "t", "paragraphs": [paragraph(n) for n in numbers]}]}


def test_perfect_scores_give_perfect_answers(runs):
    """Scores that point at the targets of every window come back as the gold answers."""
    pretrained = load_pretrained(runs / "text", print)
    data = Squad(squad_of([1, 2]), squad_of([3, 4, 5]))
    problem = make_span_problem(data, "made here", pretrained)
    part = problem.parts["validation"]
    assert problem.notes["rows"]["validation"]["windows"] > 6
    scores = []
    for row, (first, last) in zip(part.rows, part.labels, strict=True):
        score_2N = np.zeros((2, len(row)), dtype=np.float32)
        score_2N[0, first] = score_2N[1, last] = 9.0
        scores.append(score_2N)
    judged = part.judge(scores)
    assert judged["best_f1"] == judged["best_exact"] == judged["f1"] == 1.0
    answers = dict(part.answers(scores))
    assert answers["a4"] == "number 4" and answers["n4"] == ""


def without_letters(pretrained, letters):
    """The same model with a vocabulary of text that lacks some letters."""
    alphabet = [c for c in map(chr, range(32, 127)) if c not in letters]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="[UNK]")
    definition = tokenizers.Tokenizer(model).to_str().encode()
    return pretrained._replace(tokenizer=Tokenizer(definition))


def test_tokens_of_squad_that_are_unknown_are_counted_and_refused(runs):
    pretrained = without_letters(load_pretrained(runs / "text", print), "?")
    data = Squad(squad_of([1, 2]), squad_of([3]))
    problem = make_span_problem(data, "made here", pretrained)
    for name, dataset in zip(("train", "validation"), data, strict=True):
        rows = [(q.question, q.context) for q in squad.read_questions(dataset)[0]]
        share = 1 / np.mean([len(question + context) for question, context in rows])
        assert problem.notes["rows"][name]["unknown_share"] == round(share, 6) > 0
    blind = without_letters(pretrained, "aeiou")
    told(
        lambda: make_span_problem(data, "made here", blind), "squad_v2", "vocabulary", "such as"
    )
    assert make_span_problem(data, "made here", blind, 1.0).notes["rows"]["train"]


def test_squad_is_tuned(runs, tmp_path, capsys):
    folder = tmp_path / "squad"
    folder.mkdir()
    (folder / "train-v2.0.json").write_text(json.dumps(squad_of([1, 2])))
    (folder / "dev-v2.0.json").write_text(json.dumps(squad_of([3])))
    argv = ["--task", squad.TASK.name, "--checkpoint", runs / "text", "--data", folder, *ONE]
    assert main([str(word) for word in (*argv, "--output", tmp_path / "out")]) == 0
    assert re.search(r"\| squad_v2 +\| best_f1 +\| validation", capsys.readouterr().out)
    (answers,) = (tmp_path / "out").glob("cells/squad_v2/*/seed-1.validation.jsonl")
    assert {json.loads(line)["id"] for line in answers.read_text().splitlines()} == {"a3", "n3"}


def test_the_dev_set_of_squad_alone_is_split_by_articles(runs, tmp_path, capsys):
    articles = [squad_of([n])["data"][0] for n in (1, 2, 3)]
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps({"data": articles}))
    argv = ["--task", "squad_v2", "--checkpoint", runs / "text", *ONE, "--data"]
    assert main([str(word) for word in (*argv, path, "--dry-run")]) == 0
    planned = capsys.readouterr()
    assert planned.err.startswith("squad_v2: the dev set alone cannot train; ")
    assert main([str(word) for word in (*argv, tmp_path, "--output", tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert planned.err in shown.err
    assert "articles of the dev set, not the published split" in shown.out
