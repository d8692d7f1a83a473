"""Hours from a file of measured speeds: which record is taken, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exlm_mini import bench
from exlm_mini.config import RunConfig, UserError
from exlm_mini.pretrain import main
from exlm_mini.settings import load_recipe, plain
from exlm_mini.throughput import SAME_SPEED, Throughput, speed_settings, throughput

MACHINE = {"device": "NVIDIA H200", "cpu": "Some CPU", "torch": "2.13.0"}


def config_of(name: str = "text-base", **train) -> RunConfig:
    config = load_recipe(name)
    return replace(config, train=replace(config.train, **train))


def record(config: RunConfig, speed: float = 1000.0, **changes) -> dict:
    """What ``bench train --json`` has in its list, as far as it is read."""
    return {
        "benchmark": "train",
        "recipe": config.recipe,
        "objective": config.objective,
        "settings": speed_settings(config),
        "tokens_per_second": speed,
        "accumulated": 8,
        "accumulated_by_recipe": 8,
        "machine": MACHINE,
        **changes,
    }


@pytest.fixture
def written(tmp_path):
    """Write a JSON file; its path."""

    def write(content) -> str:
        path = tmp_path / "speeds.json"
        path.write_text(json.dumps(content))
        return str(path)

    return write


def test_the_record_of_the_same_settings_is_taken(written):
    base, large = config_of("text-base"), config_of("text-large")
    file = written([record(large, 10.0), {"benchmark": "dag"}, record(base, 20.0)])
    assert throughput(file, base) == (20.0, f"measured on NVIDIA H200, {file}")
    assert throughput(file, large).tokens_per_second == 10.0


def test_a_file_of_evidence_tells_the_machine_once(written):
    base = config_of()
    found = record(base, 30.0)
    del found["machine"]
    results = {
        "text-base exlm": {"records": [found]},
        "text-large exlm": {"skipped": "no room"},
    }
    sections = {"dag": {"8,20,80": {"records": [{"benchmark": "dag"}]}}, "train": results}
    file = written({"machine": MACHINE | {"device": "cpu"}, "sections": sections})
    assert throughput(file, base) == (30.0, f"measured on Some CPU, {file}")


def test_a_shorter_step_is_told(written):
    base = config_of()
    file = written([record(base, accumulated_by_recipe=64)])
    assert "8 of 64 micro-batches a step" in throughput(file, base).source


def test_steps_and_bookkeeping_do_not_change_a_speed(written):
    file = written([record(config_of())])
    for changes in ({"steps": 7}, {"learning_rate": 1.0}, {"save_every": 3}, {"device": "cpu"}):
        assert throughput(file, config_of(**changes)).tokens_per_second == 1000


def test_the_precision_that_was_used_serves_a_run_that_leaves_it_open(written):
    file = written([record(config_of(precision="bf16"))])
    assert throughput(file, config_of(precision="auto")).tokens_per_second == 1000
    with pytest.raises(UserError, match=r"train\.precision bf16, not fp32"):
        throughput(file, config_of(precision="fp32"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"micro_batch_size": 16}, "train.micro_batch_size 32, not 16"),
        ({"batch_size": 4096}, "train.batch_size 2048, not 4096"),
        ({"compile": True}, "train.compile False, not True"),
    ],
)
def test_a_speed_of_other_settings_is_refused_with_the_first_difference(change, words, written):
    # The nearest is the one of the same recipe, wherever it stands.
    file = written([record(config_of("text-large")), record(config_of())])
    with pytest.raises(UserError) as told:
        throughput(file, config_of(**change))
    assert f"the nearest was measured with {words}; measure it with" in str(told.value)


def test_a_setting_that_a_record_does_not_know_is_a_difference(written):
    old = record(config_of())
    del old["settings"]["train.compile"]
    with pytest.raises(UserError, match=r"train\.compile None, not False"):
        throughput(written([old]), config_of())


def test_a_setting_that_only_a_record_knows_is_a_difference(written):
    newer = record(config_of())
    newer["settings"]["model"]["depth"] = 2
    with pytest.raises(UserError, match=r"model\.depth 2, not None"):
        throughput(written([newer]), config_of())


@pytest.mark.parametrize("name", SAME_SPEED)
def test_every_setting_of_a_speed_is_compared(name, written):
    other = record(config_of())
    for value in ({}, "other"):
        other["settings"][name] = value
        with pytest.raises(UserError, match=f"measured with {name}"):
            throughput(written([other]), config_of(precision="bf16"))


def without(key: str) -> dict:
    return {k: v for k, v in record(config_of()).items() if k != key}


@pytest.mark.parametrize(
    "content",
    [
        [], {}, 3, "text", None, [3], [[]], {"sections": 3}, {"sections": {}},
        {"machine": MACHINE, "sections": {"train": {}}}, [{"benchmark": "dag"}],
        *([without(key)] for key in record(config_of())),
        *([record(config_of(), speed)] for speed in (0.0, -1.0, "1000", None, True, 1e999)),
        [record(config_of(), 10**400)],
        [record(config_of(), machine=3)], [record(config_of(), machine={})],
        [record(config_of(), settings=[])],
    ],
)  # fmt: skip
def test_a_file_without_a_speed_is_refused_in_one_line(content, written):
    with pytest.raises(UserError, match=r"^--throughput .* exlm_mini.bench train ") as told:
        throughput(written(content), config_of())
    assert "\n" not in str(told.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@given(st.data())
def test_a_changed_record_gives_a_speed_or_one_line(tmp_path_factory, data):
    found = record(config_of())
    keys = data.draw(st.lists(st.sampled_from(sorted(found)), max_size=3))
    found |= {key: data.draw(JSON) for key in keys}
    if data.draw(st.booleans()):
        found["settings"] = data.draw(st.dictionaries(st.sampled_from(SAME_SPEED), JSON))
    path = tmp_path_factory.mktemp("fuzz") / "speeds.json"
    path.write_text(json.dumps(data.draw(st.sampled_from([[found], {"sections": found}]))))
    try:
        speed = throughput(str(path), config_of())
    except UserError as error:
        assert str(error).count("\n") == 0
    else:
        assert isinstance(speed, Throughput) and 0 < speed.tokens_per_second < float("inf")
        assert found["settings"] == speed_settings(config_of())


def test_what_bench_prints_gives_the_hours_of_a_dry_run(tmp_path, capsys):
    arguments = ["train", "--recipe", "toy-pairs", "--steps", "3", "--json"]
    assert bench.main(arguments) == 0
    out = capsys.readouterr().out
    (tmp_path / "speeds.json").write_text(out)
    dry_run = [
        "--recipe",
        "toy-pairs",
        "--dry-run",
        "--throughput",
        str(tmp_path / "speeds.json"),
    ]
    assert main(dry_run) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "device hours" in line]
    for line, found in zip(lines, json.loads(out), strict=True):
        assert f"at {found['tokens_per_second']:,.0f} tokens/s (measured on " in line
        hours = 400 * 128 * 13 / found["tokens_per_second"] / 3600
        assert line.split()[2] == f"{hours:.2g}"
    assert main([*dry_run, "--train.batch_size", "64"]) == 2
    err = capsys.readouterr().err
    assert "train.batch_size 128, not 64" in err.splitlines()[-1]


def test_a_run_of_several_processes_gives_the_speed_of_one_device(tmp_path):
    config = config_of("smiles-tiny")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    lines = [
        {"step": n, "tokens": 1000 * n, "seconds": 2.0 * n, "num_processes": 1 if n < 4 else 5}
        for n in range(1, 12)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert throughput(str(tmp_path), config).tokens_per_second == 1000 / 2.0 / 5
