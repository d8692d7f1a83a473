"""``book/record.py``: run directories become records the book can trust."""

import json
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from refusals import told

from exlm_mini import pretrain
from exlm_mini.config import RunConfig
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import plain
from exlm_mini.training.run_directory import read_metrics

sys.path.append(str(Path(__file__).resolve().parents[1] / "book"))
import record

OPTIONS = [
    *("--recipe", "toy-pairs", "--train.steps", "3", "--train.batch_size", "4"),
    *("--train.validate_every", "2", "--train.validation_rows", "8", "--train.log_every", "1"),
    *("--train.device", "cpu"),
    *("--model.width", "16", "--model.num_heads", "2", "--model.ffn_width", "16"),
    *("--data.num_sentences", "64"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of both models, three steps each."""
    run = tmp_path_factory.mktemp("runs") / "both"
    assert pretrain.main([*OPTIONS, "--output", str(run)]) == 0
    return run


def kept(target):
    """The records of a file."""
    return json.loads(target.read_text())


def refused(capsys, *arguments):
    """The one line a mistake gets."""
    assert record.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_a_record_holds_what_the_run_measured(trained, tmp_path):
    target = tmp_path / "runs.json"
    assert record.main([str(trained), "--to", str(target)]) == 0
    first = target.read_bytes()
    assert record.main([str(trained), str(trained), "--to", str(target)]) == 0
    assert target.read_bytes() == first, "recording twice changes nothing"
    (entry,) = kept(target)
    for name in ("mlm", "exlm"):
        lines = read_metrics(trained / name / "metrics.jsonl")
        logged = [line for line in lines if "validation_bits_per_mask" in line]
        assert [point["step"] for point in entry["validation"][name]] == [2, 3]
        for point, line in zip(entry["validation"][name], logged, strict=True):
            for key in ("validation_bits_per_mask", "validation_bits_per_row"):
                assert point[key] == pytest.approx(line[key], abs=5e-5)
        row = entry["validation"][name][-1]["validation_bits_per_row"]
        assert any(
            f"{name}: 3 steps" in line and f"{row:.3f}" in line for line in entry["summary"]
        )
    assert entry["versions"] == json.loads((trained / "versions.json").read_text())
    assert entry["config"]["train"]["steps"] == 3


def test_the_recorded_command_trains_the_same_settings(trained):
    entry = record.record_of(trained)
    python, dash_m, module, *arguments = shlex.split(entry["command"])
    assert (python, dash_m, module) == ("python", "-m", "exlm_mini.pretrain")
    assert plain(parse(arguments).config) == entry["config"]
    # Nothing but what differs from the recipe: each option of the run, the precision that the
    # device settled, and no other.
    assert sorted(arguments) == sorted([*OPTIONS, "--train.precision", "fp32"])


@pytest.mark.parametrize(
    "command",
    [
        "--recipe text-tiny --data.files 'a b.txt' c.txt.xz --seed 7",
        "--recipe smiles-tiny --model.sparse true --train.adam_betas 0.8 0.9",
        "--objective mlm",
    ],
)
def test_a_command_is_rebuilt_from_the_settings(command):
    config = parse(shlex.split(command)).config
    rebuilt = shlex.split(record.command_of(config))[3:]
    assert parse(rebuilt).config == config
    assert len(rebuilt) == len(shlex.split(command))


def test_a_recipe_of_the_users_own_becomes_options(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"objective": "mlm", "train": {"steps": 5}}))
    config = parse(["--recipe", str(file)]).config
    command = record.command_of(config)
    assert "--recipe" not in command
    assert replace(parse(shlex.split(command)[3:]).config, recipe="mine") == config
    assert record.command_of(replace(RunConfig(), recipe="mine")).endswith("pretrain")


def test_records_are_sorted_and_the_same_command_replaces(tmp_path):
    target = tmp_path / "runs.json"
    entries = [{"command": f"train --seed {seed}", "round": 1} for seed in (10, 9, 1)]
    assert record.add_records(target, entries) == 3
    assert [e["command"][-2:].strip() for e in kept(target)] == ["1", "9", "10"]
    record.add_records(target, [{"command": "train --seed 9", "round": 2}])
    assert [e["round"] for e in kept(target)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("file", "spoil", "words"),
    [
        ("exlm/metrics.jsonl", lambda log: log[: log.index("\n") + 1], "step 1 of 3"),
        ("exlm/metrics.jsonl", lambda log: log.replace("validation_bits_per_row", "else"),
         "has no validation of its last step 3"),
        ("versions.json", lambda text: "{}", "versions.json"),
        ("config.yaml", lambda text: "train: 3", "config.yaml"),
    ],
)  # fmt: skip
def test_what_is_no_finished_run_is_refused(trained, tmp_path, capsys, file, spoil, words):
    run, target = shutil.copytree(trained, tmp_path / "run"), tmp_path / "runs.json"
    (run / file).write_text(spoil((run / file).read_text()))
    line = refused(capsys, trained, run, "--to", target)
    assert words in line and str(run) in line
    assert not target.exists(), "nor is the good run recorded"


@pytest.mark.parametrize("text", ["not json", '{"a": 1}', "[1]", '[{"command": 3}]'])
def test_a_target_that_holds_something_else_is_left_alone(trained, tmp_path, capsys, text):
    target = tmp_path / "runs.json"
    target.write_text(text)
    assert "runs.json" in refused(capsys, trained, "--to", target)
    assert target.read_text() == text


def test_settings_no_command_can_give_are_refused():
    config = parse(["--data.column", "name"]).config
    # The command line reads this name as "no column".
    nameless = replace(config, data=replace(config.data, column="null"))
    told(lambda: record.command_of(nameless), "--data.column null")
