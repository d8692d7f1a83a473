"""What a run survives from outside: a killed command, changed data, changed code."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL, TOY, contents, fails
from tokenizers import Tokenizer

from exlm_mini import prepare
from exlm_mini.data.files import read_json, write_json
from exlm_mini.pretrain import main
from exlm_mini.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.reliability


def trains(*arguments):
    assert main([str(argument) for argument in arguments]) == 0


def test_every_promise_of_the_book_has_its_test():
    _, _, section = (
        (ROOT / "book" / "running.md").read_text().partition("## What a run survives")
    )
    promised = re.findall(r"`(test_\w+)` \|", section.partition("\n## ")[0])
    held = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*.py"))
    assert len(promised) > 5
    assert [name for name in promised if f"def {name}(" not in held] == []


# ---- killed ----


@pytest.mark.slow
def test_commands_killed_at_random_end_with_the_same_bytes():
    """Only a sample of kills; EXLM_KILLS sets how many."""
    command = [sys.executable, ROOT / "tests" / "stress" / "kills.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_killed_behind_its_last_save_leaves_what_any_other_does(tmp_path):
    """It was still deleting old checkpoints, and there is no later save to finish that."""
    arguments = [*TOY, "--objective", "mlm", "--train.steps", "3", "--train.save_every", "1"]
    arguments += ["--train.keep_last", "1", "--output", tmp_path]
    trains(*arguments)
    checkpoints = tmp_path / "checkpoints"
    whole = contents(checkpoints)
    (last,) = checkpoints.iterdir()
    for name in ("step-000001.tmp", "step-000002"):
        shutil.copytree(last, checkpoints / name)
    trains(*arguments)
    assert contents(checkpoints) == whole


# ---- other data ----


def corpus(directory, sentences):
    """Prepare a corpus with the command; return its directory."""
    source = directory.with_suffix(".txt")
    source.write_text("\n\n".join(sentences))
    arguments = ["--source", str(source), "--output", str(directory), "--workers", "1"]
    arguments += ["--data.vocab_size", "300", "--data.block_length", "16"]
    arguments += ["--data.validation_share", "0.2"]
    assert prepare.main(arguments) == 0
    return directory


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two corpora with different texts."""
    folder = tmp_path_factory.mktemp("corpora")
    first = [f"The cat number {n} sat on the mat." for n in range(60)]
    second = [f"A dog of {n} years lay by the door." for n in range(60)]
    return corpus(folder / "first", first), corpus(folder / "second", second)


@pytest.fixture
def begun(corpora, tmp_path):
    """A run on a copy of the first corpus: its command, the copy, and its output."""
    pack = tmp_path / "pack"
    shutil.copytree(corpora[0], pack)
    command = [
        *("--recipe", "text-tiny", *SMALL, "--objective", "mlm", "--train.steps", "2"),
        *("--data.pack", pack, "--output", tmp_path / "run"),
    ]
    trains(*command)
    return command, pack, tmp_path / "run"


def test_a_corpus_with_other_rows_is_refused(begun, corpora, capsys):
    command, pack, run = begun
    shutil.rmtree(pack)
    shutil.copytree(corpora[1], pack)
    before = contents(run)
    line = fails(capsys, main, *command)
    assert str(pack / "train.json") in line and "is not the data" in line
    assert "--output" in line
    assert contents(run) == before


def test_a_corpus_with_the_same_rows_and_another_tokenizer_is_refused(begun, capsys):
    """Two words swap ids in the vocabulary: every id stays in range, but two change meaning."""
    command, pack, run = begun
    tokenizer = json.loads((pack / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (pack / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert Tokenizer.from_file(str(pack / "tokenizer.json")).token_to_id("a") is not None
    before = contents(run)
    line = fails(capsys, main, *command)
    assert "tokenizer.json" in line and "do not belong to the same corpus" in line
    # The same change in a corpus whose files agree with each other.
    prepared_with(pack)
    line = fails(capsys, main, *command)
    assert "tokenizer" in line and "--output" in line
    assert contents(run) == before


def prepared_with(pack):
    """Rewrite the side files of a corpus to match the tokenizer it has now."""
    digest = hashlib.sha256((pack / "tokenizer.json").read_bytes()).hexdigest()
    for name in ("train.json", "validation.json"):
        write_json(pack / name, read_json(pack / name) | {"tokenizer_sha256": digest})


# ---- other code ----

# Nats per target, recorded with Python 3.11.7, PyTorch 2.13.0 and NumPy 2.4.6 on an x86-64 CPU.
# They change only if the computation does; whoever changes it must record them anew.
GOLDEN = {
    "mlm": [3.6815, 2.9134, 2.5102, 2.1952, 1.9717, 1.8006, 1.7002, 1.6337, 1.5881, 1.5590],
    "repeated-mlm": [
        3.5254, 3.2628, 3.1083, 3.0898, 2.9735, 2.9861, 3.0369, 3.0150, 2.8651, 3.1506
    ],
    "exlm": [3.4154, 2.9126, 2.4583, 2.2226, 2.1394, 1.9544, 1.7706, 1.6342, 1.5326, 1.4471],
}  # fmt: skip
CURVE = [
    *("--train.steps", "10", "--train.learning_rate", "0.02", "--train.warmup_steps", "2"),
    *("--train.batch_size", "32", "--train.clip_norm", "1.0"),
]


@pytest.mark.parametrize("objective", GOLDEN)
def test_the_loss_curve_of_a_tiny_run_is_the_recorded_one(objective, tmp_path):
    command = [*TOY, *CURVE, "--train.log_every", "1", "--objective", objective]
    trains(*command, "--output", tmp_path)
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses == pytest.approx(GOLDEN[objective], abs=1e-3)
