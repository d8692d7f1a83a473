"""Files of settings: what they seem to say is what is read, or there is one line about it."""

from dataclasses import asdict, replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_mini.config import DataConfig, RunConfig, run_config_from_dict
from exlm_mini.options import parse
from exlm_mini.recipes import parse_stored, plain, recipe_names
from exlm_mini.recipes.typed_yaml import MAX_CHARACTERS, read_settings

SAID = {
    "data:\n  column: no": ("data", "column", "no"),
    "data:\n  column: 2024-01-01": ("data", "column", "2024-01-01"),
    "data:\n  column: 010": ("data", "column", "010"),
    "data:\n  hub_config: 20231101.en": ("data", "hub_config", "20231101.en"),
    "data:\n  column: 'null'": ("data", "column", "null"),
    "data:\n  column: ~": ("data", "column", None),
    "data:\n  column:": ("data", "column", None),
    "data:\n  files: [a.txt, 1e3]": ("data", "files", ("a.txt", "1e3")),
    "data:\n  files: []": ("data", "files", ()),
    "train:\n  learning_rate: 1e-3": ("train", "learning_rate", 0.001),
    "train:\n  learning_rate: 2": ("train", "learning_rate", 2.0),
    "train:\n  adam_betas: [.9, 0.98]": ("train", "adam_betas", (0.9, 0.98)),
    "train:\n  steps: +50 # a comment": ("train", "steps", 50),
    "model:\n  sparse: True": ("model", "sparse", True),
    "\ufeff{model: {rope: '1d'}}": ("model", "rope", "1d"),
}


@pytest.mark.parametrize("text", SAID)
def test_a_value_is_what_its_setting_makes_of_the_word(text):
    group, name, value = SAID[text]
    found = read_settings(text)
    assert found == {group: {name: value}}
    assert type(found[group][name]) is type(value)


REFUSED = {
    "train:\n  steps: 010": ["train.steps is '010'", "int"],
    "train:\n  steps: 0x10": ["'0x10'", "int"],
    "train:\n  steps: 1_000": ["'1_000'", "int"],
    "train:\n  steps: 1:30": ["'1:30'", "int"],
    "train:\n  steps: 5.0": ["'5.0'", "int"],
    "train:\n  steps: true": ["'true'", "int"],
    "train:\n  steps: '5'": ["'5'", "int"],
    "train:\n  steps:": ["train.steps is empty", "int"],
    "train:\n  steps: [5]": ["train.steps is a list", "int"],
    "train:\n  steps: {a: 5}": ["train.steps is a group", "int"],
    f"train:\n  steps: {2**63}": ["int"],
    f"train:\n  steps: {'9' * 5000}": ["999...'", "int"],
    "train:\n  learning_rate: .inf": ["'.inf'", "float"],
    "train:\n  learning_rate: 1e400": ["'1e400'", "float"],
    "train:\n  learning_rate: .nan": ["'.nan'", "float"],
    "train:\n  learning_rate: fast": ["'fast'", "float"],
    "model:\n  sparse: yes": ["'yes'", "bool"],
    "model:\n  sparse: 1": ["'1'", "bool"],
    "model:\n  rope: 3d": ["model.rope is '3d'", "2d"],
    "objective:": ["objective is empty", "mlm"],
    "data:\n  hub_split: null": ["data.hub_split is 'null'", "str"],
    "data:\n  files: a.txt": ["data.files is 'a.txt'", "[a, b]"],
    "train:\n  adam_betas: [0.9]": ["train.adam_betas has 1 values", "2"],
    "train:\n  step: 5": ["unknown setting train.step", "did you mean train.steps"],
    "train:\n  steps: 5\n  steps: 6": ["line 3", "steps", "second time"],
    "model:\n  sparse: true\nmodel:\n  rope: 1d": ["line 3", "model", "second time"],
    "model: 5": ["model must hold settings", "'5'"],
    "model:": ["model must hold settings"],
    "? [a]\n: 5": ["line 1", "name of a setting"],
    "train: &t\n  steps: 5": ["line 1", "anchor"],
    "train: *t": ["line 1", "anchor or alias"],
    "train:\n  <<: {steps: 5}": ["unknown setting train.<<"],
    "train:\n  steps: !!int 5": ["line 2", "tag"],
    "train: !!python/object/apply:os.system [ls]": ["line 1", "tag"],
    "seed: 1\n---\nseed: 2": ["several documents"],
    "data:\n  files: [[[[a]]]]": ["line 2", "nested too deep"],
    "[" * 50_000: ["nested too deep"],
    "train:\n\tsteps: 5": ["'\\t'", "line 2"],
    "seed: 1\0": ["#x0000"],
    "\x1b[2J: 5": ["#x001b"],
    '"\\e[2J\\n": 5': ["unknown setting \\x1b[2J\\n"],
    "": ["holds no settings"],
    "# nothing": ["holds no settings"],
    "just words": ["holds no settings"],
    " " * (MAX_CHARACTERS + 1): ["100,001 characters"],
}


@pytest.mark.parametrize("text", REFUSED, ids=[text[:40] for text in REFUSED])
def test_what_has_no_plain_meaning_is_refused(text):
    line = told(lambda: read_settings(text), *REFUSED[text])
    assert line.isprintable()


@pytest.mark.parametrize("word", ["null", "~", "NULL", "---", "--- # x", "a\nb", "\x1b[2J"])
def test_a_recipe_cannot_hold_what_an_option_cannot(word, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"data": {"column": word}}))
    told(lambda: parse(["--recipe", str(path)]), "data.column cannot be", ascii(word))


def test_files_of_settings_follow_the_recipe_and_options_win(tmp_path):
    for name, steps in (("one", 5), ("two", 6)):
        (tmp_path / f"{name}.yaml").write_text(f"train:\n  steps: {steps}\n  batch_size: 4\n")
    files = ["--settings", f"{tmp_path}/one.yaml", f"--settings={tmp_path}/two.yaml"]
    config = parse([*files, "--train.batch_size", "8", "--recipe", "toy-pairs"]).config
    assert (config.train.steps, config.train.batch_size) == (6, 8)
    assert (config.recipe, config.masking.strategy) == ("toy-pairs", "slots")
    told(lambda: parse(["--settings", str(tmp_path)]), tmp_path, "Is a directory")
    told(lambda: parse(["--settings"]), "Is a directory")


def test_a_group_without_settings_changes_nothing(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {}\ntrain: {}\n")
    config = parse(["--recipe", str(tmp_path / "mine.yaml")]).config
    assert config == RunConfig(recipe="mine")


@pytest.mark.parametrize("name", recipe_names())
def test_the_settings_of_every_recipe_come_back_from_a_run(name):
    config = parse(["--recipe", name]).config
    stored = parse_stored(yaml.safe_dump(plain(config), sort_keys=False))
    assert run_config_from_dict(stored) == config


@given(
    st.builds(
        DataConfig,
        files=st.lists(st.text(), max_size=3),
        column=st.none() | st.text(),
        pack=st.none() | st.sampled_from(["null", "010", "1e5", "no", "~", "", "é\udc80", "-"]),
        max_unknown=st.floats(0, 1),
    )
)
def test_any_settings_come_back_from_a_run(data):
    config = replace(RunConfig(), data=data)
    stored = parse_stored(yaml.safe_dump(plain(config), sort_keys=False))
    assert asdict(run_config_from_dict(stored)) == asdict(config)


@pytest.mark.parametrize(
    "text", ["train: {steps: true}", "seed: [", "train: {steps: 0}", "x: 1"]
)
def test_damaged_settings_of_a_run_are_told(text):
    told(lambda: parse_stored(text), "config.yaml is damaged", "restore it")
