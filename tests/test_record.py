"""``book/record.py``: run directories become records the book can trust."""

import importlib.util
import json
import shlex
import shutil
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

SCRIPT = Path(__file__).resolve().parents[1] / "book" / "record.py"
_spec = importlib.util.spec_from_file_location("book_record", SCRIPT)
record = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(record)

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


@pytest.fixture
def run(trained, tmp_path):
    """A copy to spoil."""
    return shutil.copytree(trained, tmp_path / "run")


def kept(target):
    """The records of a file."""
    return json.loads(target.read_text())


def refused(capsys, *arguments):
    """The one line a mistake gets."""
    assert record.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_a_record_holds_what_the_run_measured(trained, tmp_path, capsys):
    target = tmp_path / "runs.json"
    assert record.main([str(trained), "--to", str(target)]) == 0
    (entry,) = kept(target)
    assert list(entry) == ["command", "summary", "validation", "config", "versions"]
    for name in ("mlm", "exlm"):
        logged = [
            x
            for x in read_metrics(trained / name / "metrics.jsonl")
            if "validation_bits_per_mask" in x
        ]
        assert [point["step"] for point in entry["validation"][name]] == [2, 3]
        for point, line in zip(entry["validation"][name], logged, strict=True):
            for key in ("validation_bits_per_mask", "validation_bits_per_row"):
                assert point[key] == pytest.approx(line[key], abs=5e-5)
        row = entry["validation"][name][-1]["validation_bits_per_row"]
        assert any(line.startswith(f"{name}: 3 steps") and f"{row:.3f}" in line
                   for line in entry["summary"])  # fmt: skip
    assert entry["versions"] == json.loads((trained / "versions.json").read_text())
    assert entry["config"]["train"]["steps"] == 3
    assert "holds 1 record" in capsys.readouterr().out


def test_the_recorded_command_trains_the_same_settings(trained):
    entry = record.record_of(trained)
    python, dash_m, module, *arguments = shlex.split(entry["command"])
    assert (python, dash_m, module) == ("python", "-m", "exlm_mini.pretrain")
    assert plain(parse(arguments).config) == entry["config"]
    # Nothing but what differs from the recipe: each option of the run, the precision that the
    # device settled, and no other.
    assert sorted(arguments) == sorted([*OPTIONS, "--train.precision", "fp32"])


@pytest.mark.parametrize(
    "options",
    [
        ["--recipe", "toy-pairs"],
        ["--recipe", "text-tiny", "--data.files", "a b.txt", "c.txt.xz", "--seed", "7"],
        [
            "--recipe",
            "smiles-tiny",
            "--model.sparse",
            "true",
            "--train.adam_betas",
            "0.8",
            "0.9",
        ],
        ["--recipe", "text-tiny", "--train.num_threads", "2", "--data.hub", "wiki text"],
        ["--objective", "mlm"],
    ],
)
def test_a_command_is_rebuilt_from_the_settings(options):
    config = parse(options).config
    command = shlex.split(record.command_of(config))[3:]
    assert parse(command).config == config
    assert len(command) == len(options)


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
    first = target.read_bytes()
    assert [e["command"][-2:].strip() for e in kept(target)] == ["1", "9", "10"]
    assert record.add_records(target, entries[::-1]) == 3
    assert target.read_bytes() == first
    record.add_records(target, [{"command": "train --seed 9", "round": 2}])
    assert [e["round"] for e in kept(target)] == [1, 2, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["runs.json"]


def test_recording_twice_changes_nothing(trained, tmp_path):
    target = tmp_path / "runs.json"
    record.main([str(trained), "--to", str(target)])
    first = target.read_bytes()
    record.main([str(trained), str(trained), "--to", str(target)])
    assert target.read_bytes() == first


def test_what_is_no_finished_run_is_refused(run, tmp_path, capsys):
    target = tmp_path / "runs.json"
    line = refused(capsys, tmp_path / "absent", "--to", target)
    assert "absent" in line and "give the --output of a run" in line
    assert "config.yaml" in refused(capsys, run / "exlm", "--to", target)

    log = run / "exlm" / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole[: whole.index("\n") + 1])
    line = refused(capsys, run, "--to", target)
    assert "step 1 of 3" in line and "exlm" in line
    log.write_text("")
    assert "step 0 of 3" in refused(capsys, run, "--to", target)
    log.write_text("[]\n" + whole)
    assert "damaged" in refused(capsys, run, "--to", target)
    log.unlink()
    assert "metrics.jsonl" in refused(capsys, run, "--to", target)

    *lines, last = [json.loads(line) for line in whole.splitlines()]
    # A last line with words is none that was written whole.
    for value, words in (
        ("x", "step 2 of 3"),
        ([], "metrics.jsonl is damaged"),
    ):
        spoiled = [*lines, last | {"validation_bits_per_mask": value}]
        log.write_text("".join(f"{json.dumps(line)}\n" for line in spoiled))
        line = refused(capsys, run, "--to", target)
        assert words in line
    log.write_text(whole.replace("validation_bits_per_row", "else"))
    assert f"{log} has no validation of its last step 3" in refused(capsys, run, "--to", target)

    log.write_text(whole)
    (run / "versions.json").write_text("{}")
    assert "versions.json" in refused(capsys, run, "--to", target)
    (run / "versions.json").write_text("[" * 100_000)
    assert "versions.json" in refused(capsys, run, "--to", target)
    (run / "versions.json").unlink()
    assert "versions.json" in refused(capsys, run, "--to", target)
    (run / "config.yaml").write_text("train: 3")
    line = refused(capsys, run, "--to", target)
    assert str(run) in line and "config.yaml" in line
    assert not target.exists()


def test_one_bad_run_among_good_ones_writes_nothing(trained, tmp_path, capsys):
    target = tmp_path / "runs.json"
    refused(capsys, trained, tmp_path / "absent", "--to", target)
    assert not target.exists()


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        '{"a": 1}',
        "[1]",
        '[{"step": 1}]',
        "\ufffd[",
        '[{"command": 3}]',
        "[" * 100_000,
    ],
    ids=lambda text: text[:20],
)
def test_a_target_that_holds_something_else_is_left_alone(trained, tmp_path, capsys, text):
    target = tmp_path / "runs.json"
    target.write_text(text)
    assert "runs.json" in refused(capsys, trained, "--to", target)
    assert target.read_text() == text


def test_a_target_must_lie_in_a_folder_that_exists(trained, tmp_path, capsys):
    assert "cannot" in refused(capsys, trained, "--to", tmp_path / "no" / "runs.json")
    assert "--to" in refused(capsys, trained)
    assert "RUN" in refused(capsys, "--to", tmp_path / "runs.json")


def test_an_interrupt_is_told_in_one_line(trained, tmp_path, capsys, monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "record_of", interrupted)
    target = tmp_path / "runs.json"
    assert record.main([str(trained), "--to", str(target)]) == 130
    assert capsys.readouterr() == ("", "interrupted\n") and not target.exists()


def test_settings_no_command_can_give_are_refused():
    config = parse(["--data.column", "name"]).config
    assert "--data.column name" in record.command_of(config)
    # The command line reads this name as "no column".
    nameless = replace(config, data=replace(config.data, column="null"))
    told(lambda: record.command_of(nameless), "--data.column null")
