"""``python -m exlm_lab.finetune`` end to end, on runs of a few steps and files of a few rows."""

import json
import re
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from commands import fails
from glue_files import write_task
from refusals import told
from tiny_runs import write_molecules

from exlm_lab.downstream.prepared import make_span_problem
from exlm_lab.downstream.squad import load_squad
from exlm_lab.finetune import main, parse
from exlm_mini.config import SPECIAL_TOKENS
from exlm_mini.data.files import write_json
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.reading.trained import load
from exlm_mini.training.console import ProgressLine

ONE = ["--train.epochs", "1", "--seeds", "1", "--device", "cpu"]


@pytest.fixture(scope="module")
def rte(tmp_path_factory):
    """A GLUE folder whose RTE has two rows."""
    return write_task(tmp_path_factory.mktemp("glue"), "rte").parent


@pytest.fixture(scope="module")
def molecules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moleculenet")
    write_molecules(folder)
    return folder


def words(*argv):
    """The arguments as strings, as a command line passes them."""
    return [str(word) for word in argv]


def test_a_library_of_the_figure_is_missed_before_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "exlm_lab.downstream.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    table, output = tmp_path / "mine.csv", tmp_path / "out"
    table.write_text("SMILES,y\n" + "".join(f"{'C' * n},{n}\n" for n in range(1, 30)))
    asked = words(table, "--column", "SMILES", "--target", "y", "--from", "molecules", *ONE)
    fails(
        capsys, main, *asked, "--output", str(output), parts=["matplotlib", "exlm-mini[plot]"]
    )
    assert not output.exists()


def done(argv, output):
    """Run the command and return the ``results.json`` that it writes."""
    assert main(words(*argv, "--output", output)) == 0
    return json.loads((output / "results.json").read_text())


# ---- whole commands ----


def test_molecules_are_tuned_and_told_about(runs, molecules, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out"
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules]
    argv += ["--train.epochs", "2", "--seeds", "1", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("exlm_lab.downstream.finetuning.seconds_per_step", lambda *_: 10.0)
        assert main(words(*argv, "--output", output, "--dry-run")) == 0
    (line,) = capsys.readouterr().out.splitlines()
    planned = line.split("; ")
    why = "RDKit cannot read 'C1CC' as a molecule"
    assert f"rows left out: 1, first row 40 ({why})" in planned
    assert "rows train 32, validation 4, test 4" in planned
    # Two runs of two steps, 10 s each; per 32 rows, 4 are scored, each in a third of the time.
    assert planned[0].endswith("2 run(s) of 2 steps, about 42 s on cpu")
    assert not output.exists()
    results = done(argv, output)
    shown = capsys.readouterr().out
    assert re.search(r"\| bbbp +\| ROC AUC +\| test +\| \d+\.\d ± \d+\.\d \| mean of 2", shown)
    assert "molecules that lost stereo marks: 26" in shown
    record = results["tasks"]["bbbp"]
    for part, digest in record["notes"]["split_sha1"].items():
        assert f"{part} {digest[:8]}" in shown and f"{part} {digest[:8]}" in line
    assert record["setting"]["epochs"] == 2 and record["scores"]["test"].keys() >= {"roc_auc"}
    assert record["made_with"]["torch"] and record["made_with"]["commit"]
    assert results["checkpoint"]["sha256"] == load(runs / "smiles", print).sha256
    assert not list(output.rglob("step-*")), "checkpoints of finished runs are deleted"
    # As if the command had been killed after recording its run but before removing its files.
    (path,) = (output / "cells").rglob("seed-1.json")
    left = output / "running" / path.relative_to(output / "cells")
    (left.with_suffix("") / "checkpoints").mkdir(parents=True)
    assert done(argv, output) == results
    again = capsys.readouterr()
    assert again.out == shown and "step" not in again.err, "nothing is trained again"
    assert not (output / "running").exists()
    other = words(*argv, "--output", output, "--train.epochs", "3")
    fails(capsys, main, *other, parts=[output / "bbbp", "another run, bbbp/lr0.002-b32-e2"])
    # Results of another command are kept, those of another model are not.
    for sha256, tasks in ((results["checkpoint"]["sha256"], {"bace", "bbbp"}), ("0", {"bbbp"})):
        kept = {"checkpoint": {"sha256": sha256}, "tasks": {"bace": record}}
        write_json(output / "results.json", kept)
        assert done(argv, output)["tasks"].keys() == tasks


def test_text_is_tuned_beside_the_papers_numbers(runs, rte, tmp_path, capsys):
    run = runs / "text" / "checkpoints" / "step-000002"
    argv = ["--task", "rte", "--checkpoint", run, "--data", rte, *ONE]
    results = done([*argv, "--recipe", "finetune/table-6"], tmp_path / "out")
    assert results["checkpoint"]["step"] == 2
    shown = capsys.readouterr().out
    assert "chosen on the same rows that are reported" in shown
    assert "54.7 (Table 2)" in shown and "57.6 (Table 2)" in shown
    assert (
        "settings that differ from the recipe: epochs"
        in (tmp_path / "out" / "table.md").read_text()
    )


def test_a_grid_searches_with_one_seed_and_reports_all(runs, rte, tmp_path, capsys):
    recipe, out = tmp_path / "mine.yaml", tmp_path / "out"
    recipe.write_text(
        "report: median\nseeds: [3, 4, 5]\nrte:\n  epochs: [1]\n  learning_rate: [1e-3, 1e-4]\n"
    )
    argv = ["--task", "rte", "--checkpoint", runs / "text", "--data", rte, "--grid"]
    assert main(words(*argv, "--recipe", "table-11", "--dry-run")) == 0
    # 64 settings with the first seed, then the best one with four more; RTE has two rows.
    assert "64 setting(s), 5 seed(s), 68 run(s) of 2 to 10 steps" in capsys.readouterr().out
    record = done([*argv, "--recipe", recipe], out)["tasks"]["rte"]
    assert record["seeds"] == [3, 4, 5] and record["report"] == "median"
    # Two settings, and two more seeds for the better one.
    cells = [json.loads(path.read_text()) for path in out.glob("cells/rte/*/seed-?.json")]
    assert sorted(cell["seed"] for cell in cells) == [3, 3, 4, 5]
    best = max(
        (cell for cell in cells if cell["seed"] == 3),
        key=lambda cell: (
            cell["metrics"]["validation"]["accuracy"],
            cell["config"]["learning_rate"],
        ),
    )
    assert record["setting"]["learning_rate"] == best["config"]["learning_rate"]


def test_both_halves_of_mnli_are_scored(runs, tmp_path):
    write_task(tmp_path, "mnli")
    argv = ["--task", "mnli", "--checkpoint", runs / "text", "--data", tmp_path, *ONE]
    record = done(argv, tmp_path / "out")["tasks"]["mnli"]
    assert record["scores"].keys() == {"validation", "validation-mismatched"}


def test_a_signal_stops_and_the_same_command_goes_on(runs, molecules, tmp_path, monkeypatch):
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules, *ONE]
    argv = words(*argv, "--output", tmp_path / "out", "--train.epochs", "9")

    def tell(line, step, text):
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(ProgressLine, "tell", tell)
        assert main(argv) == 130
    steps = (tmp_path / "out").glob("running/bbbp/*/seed-1/checkpoint-*")
    assert max(step.name for step in steps) == "checkpoint-2", "in which the signal was seen"
    assert not list((tmp_path / "out").glob("cells/**/*.json"))
    assert main(argv) == 0
    assert not (tmp_path / "out" / "running").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "run"),
    [("embedded-molecules", "smiles"), ("toy-inference", "toy")],
)
def test_embedded_tasks_run_on_a_bare_machine(runs, tmp_path, task, run):
    argv = ["--task", task, "--checkpoint", runs / run, "--threads", "1", *ONE]
    assert list(done([*argv, "--recipe", "finetune/tiny"], tmp_path / "out")["tasks"]) == [task]


def test_without_a_task_those_of_the_recipe_that_the_run_can_read_are_taken(runs, capsys):
    for more in ([], ["--recipe", "finetune/tiny"]):
        assert main(words("--checkpoint", runs / "toy", "--dry-run", *more)) == 0
        shown = capsys.readouterr().out
        assert {line.partition(":")[0] for line in shown.splitlines()} == {"toy-inference"}
    fails(
        capsys,
        main,
        "--checkpoint",
        runs / "text",
        parts=["no embedded task reads text", "--task"],
    )
    argv = ["--checkpoint", runs / "smiles", "--recipe", "finetune/table-6"]
    fails(capsys, main, *argv, parts=["mnli consists of text"])


# ---- mistakes ----


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--task", "bbb"], ["unknown task 'bbb'", "did you mean bbbp"]),
        (["--task", "rte"], ["rte consists of text", "on smiles"]),
        (["--data.split", "scafold"], ["data.split is 'scafold'", "did you mean scaffold"]),
        (["--column", "SMILES"], ["--column is for a TABLE", "before all options"]),
        (["--seeds", "1", "1"], ["--seeds is [1, 1]"]),
        (["--max-unknown", "2"], ["--max-unknown: it is '2'"]),
        (["--grid"], ["--grid needs a --recipe"]),
        (["--output", "{run}"], ["pre-trained model"]),
        (["--recipe", "table-6"], ["table-6 has no task bbbp"]),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(runs, molecules, capsys, more, parts):
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules]
    more = [word.format(run=runs / "smiles") for word in more]
    fails(capsys, main, *argv, *more, parts=parts)


def test_files_of_others_are_not_replaced(runs, molecules, tmp_path, capsys, monkeypatch):
    ours = tmp_path / "figure.svg"
    ours.write_text("mine")
    monkeypatch.chdir(tmp_path)
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", molecules]
    for output in (tmp_path, ""):
        fails(capsys, main, *argv, "--output", output, parts=[f"{tmp_path} holds figure.svg"])
    assert [*tmp_path.iterdir()] == [ours]


def test_a_recipe_with_several_settings_needs_a_grid(runs, rte, capsys):
    argv = ["--task", "rte", "--checkpoint", runs / "text", "--data", rte]
    argv += ["--recipe", "table-11"]
    fails(capsys, main, *argv, parts=["64 settings for rte", "--grid"])
    pinned = ["--train.learning_rate", "2e-5", "--train.batch_size", "16"]
    pinned += ["--train.epochs", "3", "--train.warmup_share", "0.1"]
    (config,) = parse(words(*argv, *pinned)).settings("rte")
    assert (config.batch_size, config.weight_decay) == (16, 0.1)


def test_data_that_will_not_do_are_refused_before_training(runs, tmp_path, capsys):
    csv = tmp_path / "bbbp.csv"
    rows = [f"{i},m,1,{'C' * (i + 1)}O" for i in range(30)]
    csv.write_text("num,name,p_np,smiles\n" + "\n".join(rows) + "\n")
    argv = ["--task", "bbbp", "--checkpoint", runs / "smiles", "--data", csv, *ONE]
    argv += ["--data.split", "random", "--output", tmp_path / "out"]
    fails(capsys, main, *argv, parts=["'p_np' is 1 in all train rows", "--data.split"])
    assert not (tmp_path / "out").exists(), "a mistake leaves nothing behind"


@pytest.mark.parametrize(("name", "task"), [("mine.csv.gz", "mine"), (".hidden.csv", "hidden")])
def test_a_task_has_the_name_of_its_table(name, task):
    argv = [name, "--column", "a", "--target", "b", "--from", "molecules"]
    assert parse(argv).options.task == [task]


# ---- SQuAD ----


def paragraph(number):
    """A paragraph of several windows, with one question that it answers and one it does not."""
    context = f"{'This list is long. ' * 12}The answer is number {number}. {'It ends. ' * 10}"
    answer = f"number {number}"
    start = context.index(answer)
    has = {"id": f"a{number}", "question": "What is the answer?",
           "answers": [{"text": answer, "answer_start": start}]}  # fmt: skip
    none = {"id": f"n{number}", "question": "Who wrote it?", "answers": []}
    return {"context": context, "qas": [has, none]}


def write_squad(folder, train, dev):
    for name, numbers in (("train", train), ("dev", dev)):
        data = [{"title": "t", "paragraphs": [paragraph(n) for n in numbers]}]
        (folder / f"{name}-v2.0.json").write_text(json.dumps({"data": data}))
    return folder


def test_perfect_scores_give_perfect_answers(runs, tmp_path):
    """Scores that point at the targets of every window come back as the gold answers."""
    data = load_squad(write_squad(tmp_path, [1, 2], [3, 4, 5]))
    problem = make_span_problem(data, load(runs / "text", print))
    part = problem.parts["validation"]
    assert problem.notes["rows"]["validation"]["windows"] > 6
    scores = []
    for row, (first, last) in zip(part.rows, part.labels, strict=True):
        score_2N = np.zeros((2, len(row)), dtype=np.float32)
        score_2N[0, first] = score_2N[1, last] = 9.0
        scores.append(score_2N)
    judged = part.judge(scores)
    assert judged["best_f1"] == judged["best_exact"] == judged["f1"] == 1.0


def without_letters(pretrained, letters):
    """The same model with a vocabulary of characters that lacks ``letters``."""
    alphabet = [c for c in map(chr, range(32, 127)) if c not in letters]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    model = tokenizers.models.BPE(vocabulary, [], unk_token="[UNK]")
    definition = tokenizers.Tokenizer(model).to_str().encode()
    return replace(pretrained, tokenizer=Tokenizer(definition))


def test_tokens_of_squad_that_are_unknown_are_counted_and_refused(runs, tmp_path):
    text = load(runs / "text", print)
    data = load_squad(write_squad(tmp_path, [1, 2], [3]))
    problem = make_span_problem(data, without_letters(text, "?"))
    num_tokens = sum(map(len, problem.train.rows))
    share = len(problem.train.rows) / num_tokens  # one question mark in each window
    assert problem.notes["rows"]["train"]["unknown_share"] == round(share, 6)
    blind = without_letters(text, "aeiou")
    told(lambda: make_span_problem(data, blind), "squad_v2", "vocabulary", "such as")
    assert make_span_problem(data, blind, 1.0).train.rows


def test_squad_is_tuned(runs, tmp_path):
    write_squad(tmp_path, [1, 2], [3])
    argv = ["--task", "squad_v2", "--checkpoint", runs / "text", "--data", tmp_path, *ONE]
    record = done(argv, tmp_path / "out")["tasks"]["squad_v2"]
    assert (record["metric"], record["part"]) == ("best_f1", "validation")
