"""From a table to predictions: ``finetune``, ``predict``, ``embed``, transformers' pipeline."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas
import pytest
import torch
from commands import fails
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from transformers import pipeline

import exlm_mini
from exlm_lab import embed, finetune, predict
from exlm_lab.downstream import tables
from exlm_lab.downstream.figure import draw
from exlm_lab.downstream.task import Examples, Task
from exlm_mini.export import export
from exlm_mini.reading.trained import load

SMILES = ["C" * n + tail for n in range(1, 11) for tail in ("O", "N", "C1CC1", "C1CCCCC1")]
TEXTS = [f"The list has {n} items." if n % 2 else f"There is no {n}." for n in range(40)]
ONE = ["--train.epochs", "1", "--seeds", "1", "--device", "cpu", "--data.split", "random"]
KINDS = ("numbers", "labels", "mixed", "classes", "pair")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A table of molecules, texts and all kinds of targets; row 7 is broken, row 9 incomplete."""
    frame = pandas.DataFrame({"Name": [f"m {n}, b" for n in range(40)], "SMILES": SMILES})
    frame["pIC50"] = [round(len(s) + 100.5, 2) for s in SMILES]
    frame["Active"] = [n // 4 % 2 for n in range(40)]
    frame["Toxic"] = [n % 2 for n in range(40)]
    frame["Series"] = [("red", "green", "blue")[n % 3] for n in range(40)]
    frame["a"], frame["b"] = TEXTS, TEXTS[::-1]
    frame.loc[7, "SMILES"], frame.loc[9, ["pIC50", "Active"]] = "C1CC(", np.nan
    path = tmp_path_factory.mktemp("table") / "mine.csv"
    frame.to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def tuned(runs, table, tmp_path_factory):
    """A folder with a model for each of ``KINDS``, made by ``exlm finetune``."""
    folder = tmp_path_factory.mktemp("tuned")
    for kind, run, column, target in (
        ("numbers", "smiles", ["SMILES"], ["pIC50"]),
        ("labels", "smiles", ["SMILES"], ["Active", "Toxic"]),
        ("mixed", "smiles", ["SMILES"], ["Toxic", "pIC50"]),
        ("classes", "smiles", ["smiles"], ["Series"]),
        ("pair", "text", ["a", "b"], ["pIC50"]),
    ):
        argv = [table, "--column", *column, "--target", *target, "--from", runs / run, *ONE]
        seeds = ["1", "2"] if kind == "numbers" else ["1"]
        assert run_in(finetune, *argv, "--seeds", *seeds, "--output", folder / kind) == 0
    return folder


def run_in(command, *argv):
    """Run a command and return its exit code."""
    return command.main([str(word) for word in argv])


def rows_of(path):
    return pandas.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def test_a_table_is_tuned_and_reported_beside_what_a_person_would_try(tuned):
    record = json.loads((tuned / "numbers" / "results.json").read_text())["tasks"]["mine"]
    assert record["notes"]["rejected"][0]["row"] == 7 and len(record["notes"]["rejected"]) == 2
    assert record["baselines"].keys() == {"mean", "random forest"}
    assert len(record["baselines"]["random forest"]) == 2, "a forest for each seed"
    lines = (tuned / "numbers" / "table.md").read_text().splitlines()[4:7]
    reached = {line.split()[1]: float(line.split("|")[2].split()[0]) for line in lines}
    assert reached.keys() == {"fine-tuned", "random", "mean"}
    assert list(reached.values()) == sorted(reached.values()), "the best first"
    assert "<svg" in (tuned / "numbers" / "figure.svg").read_text()
    modes = {
        (tuned / "numbers" / n).stat().st_mode for n in ("config.json", "model.safetensors")
    }
    assert len(modes) == 1
    record = json.loads((tuned / "pair" / "results.json").read_text())["tasks"]["mine"]
    assert record["baselines"].keys() == {"mean", "TF-IDF"}
    text = (tuned / "mixed" / "table.md").read_text()
    assert "ROC AUC Toxic" in text and "RMSE pIC50" in text


@pytest.mark.parametrize("kind", KINDS)
def test_predict_writes_the_table_with_a_column_for_each_target(
    kind, tuned, table, tmp_path, capsys
):
    new, output = tmp_path / "new.csv", tmp_path / "out.csv"
    pandas.read_csv(table)[["Name", "SMILES", "a", "b"]].to_csv(new, index=False)
    assert run_in(predict, tuned / kind, new, "--output", output) == 0
    err, before, after = capsys.readouterr().err, rows_of(new), rows_of(output)
    added = {
        "numbers": {"pIC50"}, "labels": {"Active", "Toxic"}, "mixed": {"Toxic", "pIC50"},
        "classes": {"Series", "Series probability"}, "pair": {"pIC50"},
    }[kind]  # fmt: skip
    assert len(after) == 40
    for row, (own, said) in enumerate(zip(before, after, strict=True)):
        assert said.keys() == own.keys() | added and said.items() >= own.items()
        is_read = row != 7 or kind == "pair"
        assert all(bool(said[name]) == is_read for name in added)
    assert ("row 7: RDKit cannot read 'C1CC(' as a molecule" in err) == (kind != "pair")
    if "pIC50" in added:  # in the unit of the table, whose values are 101 to 120
        assert all(90 < float(said["pIC50"]) < 130 for said in after if said["pIC50"])
    if "Toxic" in added:
        assert all(0 < float(said["Toxic"]) < 1 for said in after if said["Toxic"])
    if kind == "numbers":
        with_answers = tmp_path / "measured.csv"
        pandas.read_csv(table).rename(columns={"pIC50": " PIC50 "}).to_csv(with_answers)
        assert run_in(predict, tuned / kind, with_answers, "--output", output) == 0
        for own, measured, said in zip(
            after, rows_of(with_answers), rows_of(output), strict=True
        ):
            assert measured.items() <= said.items()
            assert said["pIC50 predicted"] == own["pIC50"]
        again = tmp_path / "again.csv"  # no existing column is overwritten
        assert run_in(predict, tuned / kind, output, "--output", again) == 0
        for own, said in zip(rows_of(output), rows_of(again), strict=True):
            assert own.items() <= said.items()
            assert said["pIC50 predicted predicted"] == own["pIC50 predicted"]


@pytest.mark.parametrize("kind", KINDS)
def test_python_and_pipeline_say_the_same(kind, tuned):
    model = exlm_mini.load(tuned / kind)
    pairs = list(zip(TEXTS[:9], TEXTS[9:18], strict=True))
    texts = pairs if kind == "pair" else [*SMILES[10:17], "OC[C@H](N)C", "OC/C=C/C"]
    columns = list(model.predict(texts, batch_size=4).values())
    classify = pipeline("text-classification", str(tuned / kind), top_k=None)
    asked = [dict(zip(("text", "text_pair"), t, strict=True)) for t in pairs]
    said = [classify([one])[0] for one in (asked if kind == "pair" else texts)]
    if kind == "classes":
        best = [max(one, key=lambda label: label["score"]) for one in said]
        assert [one["label"] for one in best] == columns[0].tolist()
        np.testing.assert_allclose([one["score"] for one in best], columns[1], atol=1e-5)
        return
    names = list(model.model.config.id2label.values())
    scores = [[next(s["score"] for s in one if s["label"] == n) for n in names] for one in said]
    said = torch.tensor(scores)
    if kind == "mixed":  # transformers has no problem type for this kind
        said[:, 0] = said[:, 0].sigmoid()
    np.testing.assert_allclose(said.T, columns, atol=1e-5, rtol=1e-6)


def test_the_model_of_the_best_seed_is_kept(tuned):
    results = json.loads((tuned / "numbers" / "results.json").read_text())["tasks"]["mine"]
    found = dict(zip(results["seeds"], results["scores"]["validation"]["r2"], strict=True))
    assert len(set(found.values())) > 1
    task = exlm_mini.load(tuned / "numbers").task
    best = max(found, key=found.__getitem__)
    assert (task["validation"], task["run"][-7:]) == (found[best], f"/seed-{best}")


@pytest.mark.parametrize(
    ("target", "run", "other"),
    [("Active", None, "problem"), ("pIC50", "molecules", "pretrained")],
)
def test_a_directory_holds_models_of_one_task_and_start(
    target, run, other, tuned, runs, table, capsys
):
    output = tuned / "numbers"
    before = {path: path.read_bytes() for path in output.iterdir() if path.is_file()}
    argv = [table, "--column", "SMILES", "--target", target, "--from", run or runs / "smiles"]
    argv += [*ONE, "--train.learning_rate", "1e-4", "--output", output]
    fails(capsys, finetune.main, *argv, parts=[f"{output} was made with another {other}"])
    assert all(path.read_bytes() == own for path, own in before.items())


def test_a_model_is_neither_lost_in_silence_nor_written_over(
    tuned, runs, table, tmp_path, capsys
):
    argv = [table, "--column", "SMILES", "--target", "pIC50", "--from", runs / "smiles", *ONE]
    lost = shutil.copytree(tuned / "numbers", tmp_path / "lost")
    (lost / "config.json").unlink()
    fails(capsys, finetune.main, *argv, "--output", lost, parts=["no longer has its model"])
    exported = tmp_path / "exported"
    export(load(runs / "smiles"), exported)
    before = {path: path.read_bytes() for path in exported.iterdir()}
    parts = ["holds a pre-trained model"]
    fails(capsys, finetune.main, *argv, "--output", exported, parts=parts)
    assert before == {path: path.read_bytes() for path in exported.iterdir()}


def test_what_cannot_be_read_is_told_and_gets_nothing(tuned, capsys):
    numbers = exlm_mini.load(tuned / "numbers")
    texts = ["CCO", "C1CC(", None, "", "[Xe][Xe]", 3, "CCN"]
    said = numbers.predict(texts)["pIC50"]
    assert np.isnan(said).tolist() == [False, True, True, True, True, True, False]
    err = capsys.readouterr().err
    assert (
        "row 1: RDKit" in err and "row 2: it is not text" in err and "row 3: it is empty" in err
    )
    assert "row 4: 2 of its 2 tokens are not in the vocabulary" in err
    assert numbers.predict([])["pIC50"].shape == (0,)
    assert numbers.predict("CCO")["pIC50"] == pytest.approx(said[:1], rel=1e-5)
    assert exlm_mini.load(tuned / "classes").predict(["C1CC("])["Series"][0] is None
    told(lambda: exlm_mini.load(tuned / "pair").predict([("one",)]), "1 texts", "trained on 2")


@pytest.mark.parametrize(
    ("name", "size"),
    [("model.safetensors", n) for n in (None, 2, 2000)] + [("tokenizer.json", None)],
)
def test_a_damaged_model_is_said(name, size, tuned, table, tmp_path, capsys):
    model = shutil.copytree(tuned / "numbers", tmp_path / "model")
    (model / name).unlink() if size is None else os.truncate(model / name, size)
    parts = [f"cannot read {model}", "fine-tune in another"]
    fails(capsys, predict.main, model, table, "--output", tmp_path / "x.csv", parts=parts)


def test_what_is_no_fine_tuned_model_is_said(runs, table, tmp_path, capsys):
    argv = [runs / "smiles", table, "--output", tmp_path / "x.csv"]
    fails(capsys, predict.main, *argv, parts=["holds no fine-tuned model"])


def test_an_output_is_of_a_kind_that_exists_and_of_what_was_read(tuned, runs, tmp_path, capsys):
    table = tmp_path / "mine.parquet"
    pandas.DataFrame({"SMILES": ["CCO"], "Name": ["x0"]}).to_parquet(table)
    for command, model in ((predict.main, tuned / "numbers"), (embed.main, runs / "smiles")):
        for column, name, words in (
            ("SMILES", table.name, "replace the table"),
            ("SMILES", "out.gz", "ends in"),
            ("Name", "out.parquet", "no row of"),
        ):
            argv = [model, table, "--column", column, "--output", tmp_path / name]
            fails(capsys, command, *argv, parts=[words])
    argv = [tuned / "numbers", table, "--output", "o.csv", "--column", "SMILES", "Name"]
    fails(capsys, predict.main, *argv, parts=["1 columns (SMILES)", "give as many"])
    assert os.listdir(tmp_path) == [table.name]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--column", "SMILES"], ["--target is missing", "Name, SMILES, pIC50"]),
        (["--column", "SMILES", "--target", "pIC5"], ["no column 'pIC5'", "it has"]),
        (["--column", "SMILES", "--target", "pIC50", "--task", "bbbp"], ["--task is for"]),
        (["--column", "SMILES", "--target", "pIC50", "--recipe", "tiny"], ["--recipe is for"]),
        (["--column", "SMILES", "--target", "pIC50", "--grid"], ["--grid is for"]),
        (["--column", "SMILES", "--target", "pIC50", "--test", "{table}"], ["given twice"]),
        (["--column", "SMILES", "smiles", "--target", "pIC50"], ["'SMILES' is named twice"]),
        (
            ["--column", "SMILES", "--target", "pIC50", "--train.micro_batch_size", "12"],
            ["train.micro_batch_size 12 must divide train.batch_size 32"],
        ),
        (
            ["--column", "SMILES", "--target", "pIC50", *ONE, "--train.learning_rate", "1e30"],
            ["mine: every run diverged", "--train.learning_rate"],
        ),
    ],
)
def test_mistakes_are_one_line(argv, parts, runs, table, tmp_path, capsys):
    argv = [str(word).format(table=table) for word in (table, *argv, "--from", runs / "smiles")]
    argv += ["--output", tmp_path / "out"]
    fails(capsys, finetune.main, *argv, parts=parts)


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_a_figure_leaves_out_what_the_model_cannot_read(kind, tmp_path):
    numbers = ("x",) if kind == "numbers" else ()
    task = Task("mine", kind, ("x",), "score", "smiles", ("m",), ("x",), numbers)
    labels_RC = np.array([[0.0], [1.0], [1.0], [np.nan]])
    examples = Examples([("CCO",), ("C",), ("[Xe]",), ("CC",)], labels_RC)
    draw(task, examples, np.array([[0.1], [0.8], [np.nan], [0.3]]), tmp_path / "f.svg")
    assert (tmp_path / "f.svg").stat().st_size > 1000


# ---- embed ----


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_every_row_gets_its_vector(suffix, runs, table, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tables.chunks, "__defaults__", (16,))  # 40 rows in three chunks
    output = tmp_path / f"out{suffix}"
    argv = [runs / "smiles", table, "--column", "smiles", "--output", output]
    assert run_in(embed, *argv) == 0
    assert "row 7: RDKit cannot read" in capsys.readouterr().err
    expected = load(runs / "smiles").embed(SMILES).numpy()
    if suffix == ".npy":
        vectors = np.load(output)
        assert vectors.dtype == np.float32 and np.isnan(vectors[7]).all()
        vectors = list(vectors)
    else:
        frame = pandas.read_parquet(output)
        assert list(frame.columns[:2]) == ["Name", "SMILES"]
        vectors = list(frame["embedding"])
        assert vectors[7] is None
    del vectors[7]
    np.testing.assert_allclose(np.stack(vectors), np.delete(expected, 7, 0), atol=1e-5)


def test_vectors_may_begin_late_and_leave_a_column_of_their_name(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(tables.chunks, "__defaults__", (2,))
    table, output = tmp_path / "t.csv", tmp_path / "o.parquet"
    table.write_text("SMILES,Embedding\nC1CC(,a\nC1CC(,b\nCCO,c\n")
    assert run_in(embed, runs / "smiles", table, "--column", "SMILES", "--output", output) == 0
    frame = pandas.read_parquet(output)
    assert list(frame["Embedding"]) == ["a", "b", "c"]
    *unread, vector = frame["embedding computed"]
    assert unread == [None, None] and vector.dtype == np.float32


@pytest.mark.slow
def test_a_fine_tuned_model_opens_by_its_own_code(tuned, tmp_path):
    folder = str(tuned / "numbers")
    program = f"""
import transformers
kind = transformers.AutoModelForSequenceClassification
model = kind.from_pretrained({folder!r}, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained({folder!r}, trust_remote_code=True)
assert model(**tokenizer("CCO", return_tensors="pt")).logits.shape == (1, 1)
"""
    env = {**os.environ, "HF_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


def test_long_and_unknown_rows_are_told_once(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tables.chunks, "__defaults__", (16,))
    table = tmp_path / "t.csv"
    table.write_text("\n".join(["SMILES", *["CCO"] * 20, *["C" * 90, "CC[La]CCCC"] * 20]))
    argv = [runs / "smiles", table, "--column", "SMILES", "--output", tmp_path / "o.npy"]
    assert run_in(embed, *argv) == 0
    long, unknown = (one for one in capsys.readouterr().err.splitlines() if "texts" in one)
    assert long.startswith("20 of 60 texts") and "such as row 20 with 92" in long
    assert unknown.startswith("20 of 60 texts") and "[La]" in unknown


def test_a_molecule_that_is_too_long_is_cut(tuned):
    model = exlm_mini.load(tuned / "numbers")
    most = model.tokenizer.model_max_length
    long, cut = (model.predict(["C" * n])["pIC50"] for n in (2 * most, most - 2))
    assert long == cut


def test_unknown_tokens_are_counted_among_those_of_both_texts(tuned):
    model, lines = exlm_mini.load(tuned / "numbers"), []
    pairs = replace(model, task=model.task | {"columns": ["a", "b"]})
    said = pairs.predict([("C[La]", "[La]")], report=lines.append)
    assert np.isnan(said["pIC50"]).all() and "2 of its 3 tokens" in lines[0]
