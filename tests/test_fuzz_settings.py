"""Damaged recipes, settings, logs and checkpoints: one clear line or what was written, no more.

``EXLM_MUTATIONS=10000 pytest tests/test_fuzz_settings.py -s`` tries ten thousand of each kind and
prints what became of them.
"""

import json
import os
import random
import shutil
import signal
from collections import Counter
from dataclasses import asdict

import pytest
import torch
import yaml
from damage import damage_bytes, damage_json, damage_log, damage_text
from test_fuzz_packs import SECONDS_FOR_ONE

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import RECIPES, parse_stored, plain, run_config_from_dict
from exlm_mini.training.checkpoint import (
    MANIFEST,
    encode_manifest,
    latest_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from exlm_mini.training.run_directory import (
    FREE_SETTINGS,
    MetricsLog,
    read_metrics,
    settle_config,
)

pytestmark = pytest.mark.reliability

NUM_MUTATIONS = int(os.environ.get("EXLM_MUTATIONS", "300"))


@pytest.fixture
def in_time():
    """Call it before each mutation: the reader then has ten seconds, of processor time."""

    def too_long(*_):
        raise AssertionError("the reader hangs")

    previous = signal.signal(signal.SIGPROF, too_long)
    yield lambda: signal.setitimer(signal.ITIMER_PROF, SECONDS_FOR_ONE)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, previous)


def assert_one_line(error):
    text = str(error)
    assert text and text.isprintable(), repr(text)
    assert len(text) < 2000, len(text)


def leaves_of(text):
    """Dotted names of a file with the words that stand there, read by no type at all.

    Tuples are lists of words; a word is its text and whether it is without quotes.
    """

    def word(node):
        if isinstance(node, yaml.SequenceNode):
            return [word(item) for item in node.value]
        assert isinstance(node, yaml.ScalarNode), node
        return node.value, node.style is None

    found = {}

    def walk(node, prefix):
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            if isinstance(value, yaml.MappingNode):
                walk(value, f"{name}.")
            else:
                assert name not in found, name
                found[name] = word(value)

    walk(yaml.compose(text, Loader=yaml.BaseLoader), "")
    return found


def means(leaf, value):
    """The words of a file say this value, to a reader who knows nothing of YAML."""
    if isinstance(value, tuple | list):
        return len(leaf) == len(value) and all(map(means, leaf, value))
    text, is_plain = leaf
    if value is None:
        return is_plain and text in ("", "~", "null", "Null", "NULL")
    if isinstance(value, str):
        return text == value
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    return type(value)(text) == value and "_" not in text


def dotted(config):
    """Settings under dotted names, as Python has them."""
    flat = {}
    for name, value in asdict(config).items():
        inner = value if isinstance(value, dict) else {}
        flat |= {f"{name}.{key}": item for key, item in inner.items()} or {name: value}
    return flat


DEFAULT = dotted(RunConfig())


def test_damaged_recipes_are_told_or_mean_what_they_say(tmp_path, in_time):
    texts = [path.read_text() for path in sorted(RECIPES.glob("*.yaml"))]
    texts.append(yaml.safe_dump(plain(RunConfig()), sort_keys=False))
    path, rng, outcomes = tmp_path / "mine.yaml", random.Random(1), Counter()
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(damage_text(rng.choice(texts), rng))
        in_time()
        try:
            config = dotted(parse(["--recipe", str(path)]).config)
        except UserError as error:
            assert_one_line(error)
            outcomes["told"] += 1
            continue
        leaves = leaves_of(path.read_text(encoding="utf-8"))
        for name, value in config.items():
            if name == "recipe":
                assert value == "mine"
            elif name in leaves:
                assert means(leaves[name], value), (name, value, leaves[name])
            else:
                assert value == DEFAULT[name], (name, value)
        outcomes["read"] += 1
    print(dict(outcomes))
    assert min(outcomes["told"], outcomes["read"]) > 0.1 * NUM_MUTATIONS


def test_damaged_settings_of_a_run_are_told_or_are_the_same(tmp_path, in_time):
    config = run_config_from_dict(
        {"seed": 7, "data": {"files": ["a.txt", "010"], "column": "no"},
         "train": {"steps": 50, "save_every": 5, "adam_eps": 1e-8}}
    )  # fmt: skip
    asked, flat = plain(config), dotted(config)
    text = yaml.safe_dump(asked, sort_keys=False)
    file, rng, outcomes = tmp_path / "config.yaml", random.Random(2), Counter()
    for _ in range(NUM_MUTATIONS):
        damaged = damage_text(text, rng)
        file.write_bytes(damaged)
        in_time()
        try:
            changes = settle_config(tmp_path, text, asked, parse_stored)
        except UserError as error:
            assert_one_line(error)
            assert file.read_bytes() == damaged
            outcomes["told"] += 1
            continue
        leaves = leaves_of(damaged.decode())
        differ = {
            name
            for name, value in flat.items()
            if not (means(leaves[name], value) if name in leaves else value == DEFAULT[name])
        }
        assert differ <= FREE_SETTINGS, differ
        assert {change.partition(":")[0] for change in changes} == differ
        assert parse_stored(file.read_text()) == asked
        outcomes["listed" if differ else "read"] += 1
    print(dict(outcomes))
    assert outcomes["told"] > 0.5 * NUM_MUTATIONS and outcomes["read"]


def no_key_twice(pairs):
    assert len(dict(pairs)) == len(pairs), pairs
    return dict(pairs)


def test_damaged_logs_are_told_or_read_as_they_stand(tmp_path, in_time):
    file, rng, outcomes = tmp_path / "metrics.jsonl", random.Random(3), Counter()
    with MetricsLog(file, 0) as log:
        for step in range(10, 210, 10):
            record = {"step": step, "loss": rng.random(), "tokens": step * 64, "rate": None}
            log.write(record | ({"validation_bits": 1 / step} if step % 50 == 0 else {}))
    whole = file.read_bytes()
    wanted = read_metrics(file)
    for _ in range(NUM_MUTATIONS):
        damaged = damage_log(whole, rng)
        file.write_bytes(damaged)
        in_time()
        try:
            records = read_metrics(file)
        except UserError as error:
            assert_one_line(error)
            with pytest.raises(UserError):
                MetricsLog(file, 100)
            assert file.read_bytes() == damaged
            outcomes["told"] += 1
            continue
        # A line more or less, or another digit, cannot be seen; a number that is none can.
        lines = damaged.split(b"\n")[: len(records)]
        strict = {"object_pairs_hook": no_key_twice, "parse_constant": pytest.fail}
        assert records == [json.loads(line, **strict) for line in lines]
        assert len(records) >= damaged.count(b"\n") - 1
        steps = [record["step"] for record in records]
        assert steps == sorted(set(steps)) and all(type(step) is int for step in steps)
        with MetricsLog(file, 100) as log:
            log.write({"step": 110})
        kept = [record for record in records if record["step"] <= 100]
        assert read_metrics(file) == [*kept, {"step": 110}]
        outcomes["read" if all(record in wanted for record in records) else "other"] += 1
    print(dict(outcomes))
    assert outcomes["told"] > 0.3 * NUM_MUTATIONS and outcomes["read"]


def damage_checkpoint(path, rng):
    """Spoil one directory; whether it can be seen that another state was put in its manifest."""
    file = path / rng.choice(sorted(os.listdir(path)))
    way = rng.randrange(8)
    if way == 0:
        file.unlink()
    elif way == 1:
        file.write_bytes(b"")
    elif way == 2:
        for each in path.iterdir():
            each.unlink()
    elif way == 3:
        os.replace(path / "model.safetensors", path / "optimizer.safetensors")
    elif way == 4:
        file.unlink()
        file.mkdir()
    elif way == 5:
        fields = damage_json(json.loads((path / MANIFEST).read_bytes()), rng)
        if rng.random() < 0.5:
            (path / MANIFEST).write_bytes(json.dumps(fields).encode())
        else:
            fields.pop("manifest_sha256", None)
            (path / MANIFEST).write_bytes(encode_manifest(fields))
            return True
    else:
        file.write_bytes(damage_bytes(file.read_bytes(), rng))
    return False


def test_damaged_checkpoints_are_passed_over_or_are_the_same(tmp_path, in_time):
    rng, outcomes = random.Random(4), Counter()
    tensors = {
        "model": {"a": torch.arange(6.0), "b": torch.ones(2, 3).bfloat16()},
        "optimizer": {"a/step": torch.tensor(7)},
    }
    whole, folder = tmp_path / "whole", tmp_path / "damaged"
    for step in (5, 6, 7):
        save_checkpoint(whole, step, tensors, {"of": step, "nested": {"x": [1, None]}})
    wanted = {step: latest_bytes(whole / f"step-{step:06d}") for step in (5, 6, 7)}
    for _ in range(NUM_MUTATIONS):
        shutil.copytree(whole, folder)
        spoilt = rng.sample([5, 6, 7], rng.choice([1, 1, 1, 2, 2, 3]))
        forged = {s for s in spoilt if damage_checkpoint(folder / f"step-{s:06d}", rng)}
        same = {s for s in wanted if latest_bytes(folder / f"step-{s:06d}") == wanted[s]}
        lines = []
        in_time()
        try:
            found = latest_checkpoint(folder, lines.append)
        except UserError as error:
            assert_one_line(error)
            assert not same and not lines
            outcomes["none is left"] += 1
        else:
            # A manifest written anew with a sha256 that fits may say something else.
            assert found.step == max(same, default=0) or found.step in forged
            assert len(lines) == 7 - found.step
            if found.step not in forged:
                assert found.state == {"of": found.step, "nested": {"x": [1, None]}}
                for group, named in tensors.items():
                    for name, tensor in named.items():
                        assert torch.equal(found.tensors[group][name], tensor)
            prune_checkpoints(folder, 1, found.step, None)
            assert latest_checkpoint(folder, lambda line: None).step == found.step
            outcomes["the newest" if found.step == 7 else "an earlier one"] += 1
        for line in lines:
            assert_one_line(line)
        shutil.rmtree(folder)
    print(dict(outcomes))
    assert min(outcomes[key] for key in ("the newest", "an earlier one", "none is left")) > 9


def latest_bytes(path):
    """All files of a checkpoint."""
    return {file.name: file.is_file() and file.read_bytes() for file in path.iterdir()}
