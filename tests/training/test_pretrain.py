"""``python -m exlm_mini.pretrain`` end to end, on runs of a few steps."""

import contextlib
import json
import os
import re
import shlex
import signal
from pathlib import Path

import commands
import pytest
import torch
from commands import SMALL, contents, ended, fails, succeeds

from exlm_mini import fill, pretrain
from exlm_mini.config import RunConfig
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import dotted, plain, recipe_names, stored_config
from exlm_mini.pretrain import INTERRUPTED, main
from exlm_mini.training.checkpoint import load_checkpoint
from exlm_mini.training.console import ProgressLine, stop_by_signal
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.processes import with_precision

UNTIMED = commands.TOY
FOUR = ["--train.steps", "4"]
TOY = [*UNTIMED, *FOUR]
TEXT = ["--recipe", "text-tiny", *SMALL, *FOUR]
SMILES = ["--recipe", "smiles-tiny", *SMALL, *FOUR]
TWO_FILES = ["--data.source", "some.txt", "--data.source", "more.txt"]


def trains(capsys, *arguments):
    """Run ``pretrain``, which must succeed; return the summary it prints."""
    return succeeds(capsys, main, *arguments)


def same_training(first, second):
    """Assert that weights and optimizer of two checkpoints agree bit for bit."""
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


@pytest.fixture
def own(tmp_path):
    """A folder with files that a user may have."""
    folder = tmp_path / "own"
    folder.mkdir()
    sentences = [f"The cat number {n} sat on the mat. Déjà vu." for n in range(80)]
    (folder / "some.txt").write_text("\n\n".join(sentences), "utf-8")
    (folder / "more.txt").write_text("\n\n".join(s.upper() for s in sentences), "utf-8")
    molecules = [f"{'C' * n}{end}" for n in range(1, 30) for end in ("C(=O)O", "CN")]
    (folder / "some.csv").write_text("\n".join(["molecule", *molecules]))
    (folder / "typo.yaml").write_text("model:\n  states_per_masc: 3\n")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Output of a complete run."""
    output = tmp_path_factory.mktemp("finished") / "run"
    assert main([*TOY, "--output", str(output)]) == 0
    return output


# ---- what a run leaves ----


@pytest.mark.parametrize(
    ("arguments", "source"),
    [
        (TOY, None),
        ([*TEXT, *TWO_FILES, "--data.block_length", "16"], "some.txt, more.txt"),
        ([*SMILES, "--data.source", "some.csv", "--data.column", "molecule"], "some.csv"),
    ],
)
def test_a_run_leaves_settings_metrics_versions_and_checkpoints(
    arguments, source, own, monkeypatch, capsys
):
    monkeypatch.chdir(own)
    output = Path("new") / "run"
    arguments = [*arguments, "--train.save_every", "3", "--output", str(output)]
    code, _, err = ended(capsys, main, *arguments)
    assert code == 0 and (source is None or f"documents from {source}\n" in err)
    asked = parse(arguments).config
    assert (asked.train.precision, asked.recipe) == ("auto", arguments[1])
    config = stored_config(output / "config.yaml")
    assert config == with_precision(asked, torch.device("cpu"))
    versions = json.loads((output / "versions.json").read_text())
    assert {"exlm_mini", "python", "torch", "numpy", "device", "commit"} <= versions.keys()
    names = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000004"]
    assert load_checkpoint(output / "checkpoints" / names[1]).step == 4
    (record,) = read_metrics(output / "metrics.jsonl")
    assert record["step"] == 4 and record["validation_bits_per_mask"] > 0
    assert {p.name for p in (output / "data").iterdir()} >= {"tokenizer.json", "corpus.json"}


def test_without_output_a_run_is_named_after_recipe_and_time(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = ended(capsys, main, *TOY)
    (directory,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"toy-pairs-\d{8}-\d{6}", directory.name)
    assert code == 0 and f"run directory: runs/{directory.name}" in out.splitlines()
    told = re.search(r"^to try the model: \S+ -m exlm_mini.fill (.*)$", err, re.M)
    assert told[1].count("[MASK]") == 2
    assert fill.main(shlex.split(told[1])) == 0  # the command that it suggests works


@pytest.mark.parametrize("objective", ["mlm", "exlm"])
def test_the_toy_summary_has_one_line_for_each_number(objective, tmp_path, capsys):
    out = trains(capsys, *TOY, "--objective", objective, "--output", tmp_path)
    numbers = dict(re.findall(r"^([\w ]+) ([\d.]+) bits$", out, re.M))
    assert (numbers["joint entropy"], numbers["MLM floor"]) == ("1.000", "2.000")
    record = read_metrics(tmp_path / "metrics.jsonl")[-1]
    per_row, per_mask = (record[f"validation_bits_per_{of}"] for of in ("row", "mask"))
    assert numbers[f"{objective} reached"] == f"{per_row:.3f}"
    assert per_row == pytest.approx(2 * per_mask)  # two masks in each of the 16 rows
    assert f"{per_mask:.3f} bits per masked token (32 masks in 16 rows)" in out


# ---- resuming ----


def test_the_same_command_again_does_nothing(tmp_path, monkeypatch, capsys):
    out = trains(capsys, *TOY, "--output", tmp_path)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("exlm_mini.training.provenance.commit", lambda: "another")
        assert trains(capsys, *TOY, "--output", tmp_path) == out
    assert contents(tmp_path) == before


def test_minutes_become_steps_that_a_run_keeps(tmp_path, monkeypatch, capsys):
    """A run takes about that long, and when stopped and resumed equals a whole one bit for bit."""
    timed = [*UNTIMED, "--train.minutes", "0.02", "--output", str(tmp_path)]
    stop_after(monkeypatch, 1)
    timing, threads = pretrain._steps_in, []

    def timed_with(*arguments):
        threads.append(torch.get_num_threads())
        return timing(*arguments)

    monkeypatch.setattr(pretrain, "_steps_in", timed_with)
    torch.set_num_threads(3)
    code, _, err = ended(capsys, main, *timed)
    assert threads == [1]  # as many as in the run
    steps = stored_config(tmp_path / "config.yaml").train.steps
    assert (code, f"about {steps:,} steps on this machine" in err) == (INTERRUPTED, True)
    _, _, err = ended(capsys, main, *timed)
    assert f"keeps the {steps} steps" in err and "--train.steps in place" in err
    seconds = read_metrics(tmp_path / "metrics.jsonl")[-1]["seconds"]
    assert 0.4 < seconds < 6  # 1.2 were asked for, but the machine may be busy
    whole = tmp_path / "whole"
    planned, kept = parse(UNTIMED)[0].train, stored_config(tmp_path / "config.yaml").train
    assert kept.warmup_steps == round(planned.warmup_steps * steps / planned.steps)
    same = f"--train.steps {steps} --train.warmup_steps {kept.warmup_steps}".split()
    trains(capsys, *TOY, *same, "--output", whole)
    last = f"checkpoints/step-{steps:06d}"
    same_training(whole / last, tmp_path / last)


def stop_after(monkeypatch, step, number=signal.SIGINT):
    """Send this process a signal once, while ``step`` is being reported."""
    show, sent = ProgressLine.show, []

    def show_and_stop(self, progress):
        show(self, progress)
        if progress.step == step and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    monkeypatch.setattr(ProgressLine, "show", show_and_stop)


@pytest.mark.reliability
@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_stopped_run_goes_on_to_the_same_end(
    number, step, finished, tmp_path, monkeypatch, capsys
):
    handler = signal.getsignal(number)
    stop_after(monkeypatch, step, number)
    code, out, err = ended(capsys, main, *TOY, "--output", tmp_path)
    assert (code, out) == (INTERRUPTED, "")
    assert signal.getsignal(number) is handler
    # A signal that comes while a step is reported takes effect in the next step.
    assert f"stopped at step {step + 1} of 4; run the same command again with --output" in err
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step-{step + 1:06d}"]
    assert "exlm reached" in trains(capsys, *TOY, "--output", tmp_path)
    last = "checkpoints/step-000004"
    same_training(finished / last, tmp_path / last)


@pytest.mark.parametrize(("seconds", "stops_at_once"), [(0, False), (3, True)])
def test_a_second_signal_stops_at_once_unless_it_is_the_first_again(
    seconds, stops_at_once, monkeypatch
):
    lines, now = [], 100.0
    monkeypatch.setattr("exlm_mini.training.console.time.monotonic", lambda: now)
    stops = pytest.raises(KeyboardInterrupt) if stops_at_once else contextlib.nullcontext()
    # A shell makes its background jobs ignore SIGINT, so set the usual handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with stop_by_signal(lines.append) as should_stop:
            assert not should_stop()
            signal.raise_signal(signal.SIGINT)
            assert should_stop()
            now += seconds
            with stops:
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(lines) == 1


def test_several_processes_need_an_output(monkeypatch, capsys):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    fails(capsys, main, *TOY, parts=["needs --output DIR"])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("exlm_mini.training.console.SECONDS_TO_SPEAK", 0)
    assert ended(capsys, main, *TOY) == (2, "", "")  # the first process reports it


@pytest.mark.reliability
def test_other_settings_on_the_same_output_are_refused(tmp_path, capsys):
    trains(capsys, *TOY, "--output", tmp_path)
    before = contents(tmp_path)
    for change, words in (
        (["--objective", "mlm"], "objective: exlm -> mlm"),
        (["--train.save_every", "1", "--seed", "2"], "seed: 1 -> 2;"),
        (["--train.steps", "3"], "train.steps: 4 -> 3"),
    ):
        parts = words, "another --output"
        line = fails(capsys, main, *TOY, *change, "--output", tmp_path, parts=parts)
        assert "save_every" not in line and contents(tmp_path) == before
    # Settings of saving and logging may change, and are listed; more steps are allowed too.
    changes = ["--train.save_every", "1", "--train.validation_rows", "8", "--train.steps", "6"]
    code, out, err = ended(capsys, main, *TOY, *changes, "--output", tmp_path)
    assert code == 0 and "(16 masks in 8 rows)" in out and "6 steps" in out
    assert "changed since the last start: train.save_every: 200 -> 1\n" in err
    assert "changed since the last start: train.validation_rows: 16 -> 8\n" in err
    steps = "train.steps: 4 -> 6; from here on, these follow the longer schedule"
    assert f"{steps}: the learning rate, fixed chains\n" in err
    assert stored_config(tmp_path / "config.yaml").train.steps == 6
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000005", "step-000006"]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 6


# ---- recipes and options ----


def test_options_replace_what_a_recipe_says_in_any_order(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train:\n  steps: 7\n  batch_size: 3\nseed: 4\n")
    expected = parse(["--recipe", str(file), "--train.steps", "9"]).config
    assert (expected.train.steps, expected.train.batch_size, expected.seed) == (9, 3, 4)
    assert parse(["--train.steps", "9", f"--recipe={file}"]).config == expected
    assert parse(["--train.steps=9", "--recipe", str(file)]).config == expected


def test_help_shows_what_most_runs_need_and_all_of_it_where_asked(capsys):
    shown = {}
    for words in (["--help"], ["--help=all"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 0
        shown[words[0]] = capsys.readouterr().out
    lines = shown["--help"].splitlines()
    assert len(lines) < 95 and max(map(len, lines)) <= 80
    assert "--train.adam_eps" not in shown["--help"]
    options = set(re.findall(r"^  (--\S+)", shown["--help=all"], re.M))
    assert {f"--{name}" for name in dotted(plain(RunConfig()))} <= options
    assert all(name in shown["--help"] for name in recipe_names())


# ---- bad input ----

MISTAKES = {
    "recipe with a typo": (
        ["--recipe", "typo.yaml"], ["typo.yaml", "model.states_per_masc", "model.states_per_mask"]
    ),
    "unknown option": (["--train.step", "5"], ["did you mean --train.steps"]),
    "another type": (["--train.adam_betas", "0.9", "x"], ["train.adam_betas.1 is 'x'"]),
    "too few positions": (
        [*TOY, "--model.max_positions", "16"], ["13 tokens", "17", "raise it to 17"]
    ),
    "block without a mask": (
        [*TEXT, "--data.block_length", "8"], ["rows of 8 tokens", "at least one mask"]
    ),
    "no number of minutes": ([*UNTIMED, "--train.minutes", "inf"], ["--train.minutes", "finite"]),
    "minutes and steps": (
        [*TOY, "--train.minutes", "2"], ["--train.minutes sets train.steps", "drop one"]
    ),
    "minutes of a dry run": (
        [*UNTIMED, "--train.minutes", "2", "--dry-run"], ["--train.minutes 2", "drop one"]
    ),
    "after dashes": ([*TOY, "--", "--train.steps", "5"], ["after -- are not read", "drop"]),
    "negative rate": ([*TOY, "--train.learning_rate", "-1e-3"], ["'-1e-3'", "greater than 0"]),
    "missing GPU": ([*TOY, "--train.device", "cuda:97"], ["cuda:97", "use cpu"]),
    "missing file": ([*TEXT, "--data.source", "none.txt"], ["none.txt", "existing path"]),
    "pack missing": ([*TEXT, "--data.pack", "nowhere"], ["nowhere"]),
    "output that is a file": ([*TOY, "--output", "some.csv"], ["some.csv"]),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_gets_one_line_and_leaves_nothing(arguments, words, own, monkeypatch, capsys):
    monkeypatch.chdir(own)
    before = contents(own)
    fails(capsys, main, "--output", "run", *arguments, parts=words)
    # What may be left is a directory with the lock and a finished corpus, which the corrected
    # command takes over.
    after = {n: c for n, c in contents(own).items() if not n.startswith("run/data")}
    assert after in (before, before | {"run": None})
    if Path("run").exists() and not Path("run/data").exists():
        trains(capsys, *TOY, "--output", "run")


def test_a_command_that_names_nothing_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fails(capsys, main, parts=["--recipe"])
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_failed_after_the_data_were_packed_keeps_them(tmp_path, capsys):
    parts = "model.vocab_size is 99", "27"
    fails(capsys, main, *TOY, "--model.vocab_size", 99, "--output", tmp_path, parts=parts)
    packed = contents(tmp_path)
    assert "data/corpus.json" in packed
    trains(capsys, *TOY, "--output", tmp_path)
    assert contents(tmp_path).items() >= packed.items()


# ---- what the toy language shows ----


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "bits"), [("exlm", 1.0), ("mlm", 2.0)])
def test_exlm_reaches_the_joint_entropy_and_mlm_its_floor(objective, bits, tmp_path, capsys):
    argv = ["--recipe", "toy-pairs", "--objective", objective, "--train.device", "cpu"]
    out = trains(capsys, *argv, "--output", tmp_path)
    reached = float(re.search(rf"{objective} reached ([\d.]+) bits", out)[1])
    assert bits - 0.03 <= reached <= bits + 0.05
