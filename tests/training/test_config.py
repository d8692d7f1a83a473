"""Settings are taken as written, or refused with one line of error."""

import json
import typing
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
import yaml
from commands import dry_run, fails, main_of
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_lab.downstream.settings import ReadingConfig, TuneConfig
from exlm_mini.config import DataConfig, EncoderShape, ModelConfig, RunConfig
from exlm_mini.config.checks import fields_of
from exlm_mini.config.recipes import load_recipe, plain, recipe_names, stored_config
from exlm_mini.training import cost
from exlm_mini.training.cost import check_memory, device_memory
from exlm_mini.training.dry_run import row_length_of
from exlm_mini.training.processes import with_precision

CPU = torch.device("cpu")
GIB = 2**30
CLASSES = (RunConfig, TuneConfig, ReadingConfig)
CLASHES = [
    (
        {"model": {"preset": "bas"}},
        "model.preset is 'bas'; it should be 'tiny', 'mini', 'base'",
    ),
    ({"model": {"expand_at": 2}}, "model.expand_at is 2; it must be below model.num_layers 2"),
    ({"model": {"width": 72, "num_heads": 4}}, "model.width 72"),
    ({"model": {"sparse": True, "transition": "ctc"}}, "model.transition ctc"),
    ({"model": {"sparse": True, "transition": "uniform"}}, "model.transition uniform"),
    ({"model": {"sparse": True, "transition": "spans"}}, "model.transition spans"),
    ({"data": {"kind": "toy", "source": ("a.txt",)}}, "data.tokenizer is set"),
    ({"train": {"micro_batch_size": 5}}, "5 must divide train.batch_size 32"),
    ({"train": {"batch_tokens": 64, "micro_batch_tokens": 128}}, "128 must divide"),
    ({"train": {"batch_tokens": 64, "micro_batch_tokens": 48}}, "48 must divide"),
    ({"train": {"micro_batch_tokens": 8}}, "set train.batch_tokens too"),
    ({"train": {"batch_tokens": 64, "batch_size": 16}}, "train.batch_size 16 and"),
    ({"train": {"batch_tokens": 64, "micro_batch_size": 16}}, "train.micro_batch_size 16"),
    ({"masking": {"strategy": "slots"}}, "slots cannot be used with data.kind text"),
    (
        {"masking": {"strategy": "units"}, "data": {"kind": "toy"}},
        "units cannot be used with data.kind toy",
    ),
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_setting_says_what_it_means_and_no_number_is_without_bounds(kind):
    for name, setting in fields_of(kind):
        assert setting.description or name == "recipe", name
        if {int, float} & {setting.annotation, *typing.get_args(setting.annotation)}:
            assert any(hasattr(mark, "ge") or hasattr(mark, "gt") for mark in setting.metadata)
            beyond = 2**63 if setting.annotation is int else float("nan")
            group, _, field = name.rpartition(".")
            refused = {group: {field: beyond}} if group else {field: beyond}
            told(partial(kind, **refused), name)


@pytest.mark.parametrize(("settings", "words"), CLASHES)
def test_settings_that_exclude_each_other_are_refused(settings, words):
    told(lambda: RunConfig(**settings), words)


def test_single_numbers_replace_those_of_a_preset():
    assert ModelConfig(preset="base").shape == EncoderShape(12, 768, 3072, 12)
    shape = ModelConfig(preset="base", num_layers=3, ffn_width=100).shape
    assert shape == EncoderShape(3, 768, 100, 12)


# ---- files ----

SAID = {
    "data: {column: no}": ("data", "column", "no"),
    "data: {column: 2024-01-01}": ("data", "column", "2024-01-01"),
    "data: {column: 010}": ("data", "column", "010"),
    "data: {column: 'null'}": ("data", "column", "null"),
    "data: {column: ~}": ("data", "column", None),
    "data:\n  column:": ("data", "column", None),
    "data: {source: [a.txt, 1e3]}": ("data", "source", ("a.txt", "1e3")),
    "data: {source: []}": ("data", "source", ()),
    "data: {source: a.txt}": ("data", "source", ("a.txt",)),
    "train: {learning_rate: 1e-3}": ("train", "learning_rate", 0.001),
    "train: {learning_rate: 2}": ("train", "learning_rate", 2.0),
    "train: {adam_betas: [0.9, 0.98]}": ("train", "adam_betas", (0.9, 0.98)),
    "train:\n  steps: 010 # ten": ("train", "steps", 10),
    "model: {sparse: true}": ("model", "sparse", True),
    "\ufeff{model: {rope: '1d'}}": ("model", "rope", "1d"),
}
REFUSED = {
    **{
        f"train: {{steps: {word}}}": ["train.steps is "]
        for word in ("1:30", "true", "0", "5e2")
    },
    f"train: {{steps: {'9' * 5000}}}": ["train.steps is '999"],
    "train:\n  steps:": ["train.steps is empty", "integer"],
    "train: {steps: [5]}": ["train.steps is a list", "integer"],
    "train: {learning_rate: .inf}": ["train.learning_rate is '.inf'", "number"],
    "train: {adam_betas: [0.9]}": ["train.adam_betas.1", "required"],
    "train: 5": ["train is '5'; it should be a group of settings"],
    "trian: {steps: 5}": ["unknown setting trian", "did you mean train?"],
    "tests: {steps: 5}": ["known: recipe", "train"],
    "train: {step: 5}": ["unknown setting train.step", "did you mean train.steps"],
    "train:\n  steps: 5\n  steps: 6": ["line 3", "steps", "second time"],
    "? [a]\n: 5": ["unknown setting [Scalar"],
    "train.steps: 5": ["gives train.steps as steps below train:"],
    "train:\n  ~: 5": ["unknown setting train.~"],
    "train: *t": ["undefined alias"],
    "train: {<<: {steps: 5}}": ["unknown setting train.<<"],
    "seed: 1\n---\nseed: 2": ["expected a single document"],
    '"\\e[2J\\n": 5': ["unknown setting \\x1b[2J\\n"],
    "": ["must hold settings"],
    "5": ["must hold settings"],
}


def read(text, folder):
    file = folder / "config.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return stored_config(file)


@pytest.mark.parametrize("text", SAID)
def test_a_value_is_what_its_setting_makes_of_the_word(text, tmp_path):
    group, name, value = SAID[text]
    found = getattr(getattr(read(text, tmp_path), group), name)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", REFUSED, ids=[text[:40] for text in REFUSED])
def test_what_has_no_plain_meaning_is_refused(text, tmp_path):
    line = told(lambda: read(text, tmp_path), "config.yaml is damaged", *REFUSED[text])
    assert line.isprintable()


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_any_file_is_settings_or_one_line(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("any")
    try:
        assert isinstance(read(content, folder), RunConfig)
    except ValueError:
        told(lambda: read(content, folder), "config.yaml is damaged")


@given(
    st.builds(
        DataConfig,
        source=st.lists(st.text(), max_size=3).map(tuple),
        column=st.none() | st.text(),
        pack=st.none() | st.sampled_from(["null", "010", "1e5", "no", "~", "", "é", "-"]),
        max_unknown=st.floats(0, 1),
    )
)
def test_any_settings_come_back_from_a_file(tmp_path_factory, data):
    config = replace(RunConfig(), data=data)
    text = yaml.safe_dump(plain(config), sort_keys=False)
    assert read(text, tmp_path_factory.mktemp("run")) == config
    assert RunConfig(**asdict(config)) == RunConfig(**json.loads(json.dumps(plain(config))))


@pytest.mark.parametrize("name", recipe_names())
def test_the_settings_of_every_recipe_come_back_from_a_run(name, tmp_path):
    config = load_recipe(name)
    assert read(yaml.safe_dump(plain(config), sort_keys=False), tmp_path) == config


# ---- numbers too large for a machine are refused before anything of that size is made ----

PRETRAIN = "pretrain --recipe toy-pairs --objective exlm --train.device cpu --output out"
MODEL = ["about", "GiB, but this machine has 24.0 GiB", "model.width"]
TOO_LARGE = [
    (f"{PRETRAIN} --model.width 200000", MODEL),
    (f"{PRETRAIN} --model.num_layers 1000 --model.width 6400", MODEL),
    (f"{PRETRAIN} --train.batch_size 2147483647", ["GiB", "lower train.micro_batch_size"]),
    (
        f"{PRETRAIN} --train.batch_size 2147483647 --train.micro_batch_size 1",
        ["GiB", " train.batch_size"],
    ),
    (
        f"{PRETRAIN} --train.batch_size 32 --train.batch_tokens 2147483647",
        ["GiB", "lower train.micro_batch_tokens"],
    ),
    (f"{PRETRAIN} --data.vocab_size 2147483647", ["data.vocab_size", "less than or equal"]),
    ("pretrain --recipe toy-pairs --dry-run --devices 2147483647", ["use --devices 128"]),
    ("prepare --source x.txt --workers 100000 --output out", ["--workers", "1024"]),
    ("finetune --checkpoint x --threads 100000", ["--threads", "1024"]),
    (f"sweep ablations --seeds {'9' * 5000} --list", ["--seeds", "999"]),
]  # fmt: skip


@pytest.fixture
def memory_of_24_gib(monkeypatch):
    """Make any machine look like one with 24 GiB of memory and no GPU."""
    monkeypatch.setattr(cost, "device_memory", lambda device: 24 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(("command", "words"), TOO_LARGE, ids=[c[:80] for c, _ in TOO_LARGE])
def test_what_does_not_fit_is_told_with_its_figure(
    command, words, memory_of_24_gib, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    name, *argv = command.split()
    fails(capsys, main_of(name), *argv, parts=words)


@pytest.mark.parametrize("name", recipe_names())
def test_no_recipe_is_refused_where_it_fits(name, memory_of_24_gib):
    config = with_precision(load_recipe(name), CPU)
    vocab_size = config.model.vocab_size or config.data.vocab_size
    check_memory(config, vocab_size, row_length_of(config), CPU, 1)


def test_a_dry_run_tells_what_no_machine_holds(capsys, memory_of_24_gib):
    argv = ["--recipe", "text-large", "--model.vocab_size", "50265"]
    argv += ["--model.num_layers", "1000", "--train.batch_size", "2147483647"]
    argv += ["--train.micro_batch_size", "1", "--train.device", "cpu"]
    assert dry_run(capsys, *argv)[0]["parameters"].startswith("12,6")


@pytest.mark.parametrize(("limit", "is_less"), [("1000000000", True), ("max", False)])
def test_a_container_has_no_more_than_it_may_take(limit, is_less, tmp_path, monkeypatch):
    whole = device_memory(CPU)
    (tmp_path / "memory.max").write_text(limit)
    monkeypatch.setattr(cost, "CGROUP", tmp_path)
    assert device_memory(CPU) == (10**9 if is_less else whole)
