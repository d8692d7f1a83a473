"""Files of settings: what they seem to say is what is read, or there is one line about it."""

from dataclasses import asdict, replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from refusals import told

from exlm_mini.config import DataConfig, RunConfig
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import (
    MAX_CHARACTERS,
    RUN,
    parse_stored,
    plain,
    read_yaml,
    run_config_from_dict,
    typed,
)


def read_settings(text):
    return typed(read_yaml(text), RUN)


SAID = {
    "data:\n  column: no": ("data", "column", "no"),
    "data:\n  column: 2024-01-01": ("data", "column", "2024-01-01"),
    "data:\n  column: 010": ("data", "column", "010"),
    "data:\n  column: 'null'": ("data", "column", "null"),
    "data:\n  column: ~": ("data", "column", None),
    "data:\n  column:": ("data", "column", None),
    "data:\n  source: [a.txt, 1e3]": ("data", "source", ("a.txt", "1e3")),
    "data:\n  source: []": ("data", "source", ()),
    "train:\n  learning_rate: 1e-3": ("train", "learning_rate", 0.001),
    "train:\n  learning_rate: 2": ("train", "learning_rate", 2.0),
    "train:\n  adam_betas: [0.9, 0.98]": ("train", "adam_betas", (0.9, 0.98)),
    "train:\n  steps: 50 # a comment": ("train", "steps", 50),
    "model:\n  sparse: true": ("model", "sparse", True),
    "\ufeff{model: {rope: '1d'}}": ("model", "rope", "1d"),
}


@pytest.mark.parametrize("text", SAID)
def test_a_value_is_what_its_setting_makes_of_the_word(text):
    group, name, value = SAID[text]
    found = read_settings(text)
    assert found == {group: {name: value}}
    assert type(found[group][name]) is type(value)


GUESSED = ("010", "1_000", "1:30", "5.0", "true", "", "[5]", "9" * 5000)
REFUSED = {
    **{f"train:\n  steps: {word}": ["train.steps is ", "int"] for word in GUESSED},
    "train:\n  learning_rate: .inf": ["train.learning_rate is '.inf'", "float"],
    "model:\n  sparse: yes": ["'yes'", "bool"],
    "model:\n  rope: 3d": ["model.rope is '3d'", "2d"],
    "data:\n  source: a.txt": ["data.source is 'a.txt'", "[a,b]"],
    "train:\n  adam_betas: [0.9]": ["train.adam_betas is a list", "[a,b]"],
    "train:\n  step: 5": ["unknown setting train.step", "did you mean train.steps"],
    "train:\n  steps: 5\n  steps: 6": ["line 3", "steps", "second time"],
    "? [a]\n: 5": ["unhashable"],
    "train: *t": ["line 1", "alias"],
    "train:\n  <<: {steps: 5}": ["unknown setting train.<<"],
    "train: !!python/object/apply:os.system [ls]": ["could not determine a constructor"],
    "seed: 1\n---\nseed: 2": ["expected a single document"],
    '"\\e[2J\\n": 5': ["unknown setting \\x1b[2J\\n"],
    "": ["must hold settings"],
    " " * (MAX_CHARACTERS + 1): ["100,001 characters"],
}


@pytest.mark.parametrize("text", REFUSED, ids=[text[:40] for text in REFUSED])
def test_what_has_no_plain_meaning_is_refused(text):
    line = told(lambda: read_settings(text), *REFUSED[text])
    assert line.isprintable()


@pytest.mark.parametrize("name", ["smiles-base", "toy-pairs"])
def test_the_settings_of_every_recipe_come_back_from_a_run(name):
    config = parse(["--recipe", name]).config
    stored = parse_stored(yaml.safe_dump(plain(config), sort_keys=False))
    assert run_config_from_dict(stored) == config


@given(
    st.builds(
        DataConfig,
        source=st.lists(st.text(), max_size=3).map(tuple),
        column=st.none() | st.text(),
        pack=st.none() | st.sampled_from(["null", "010", "1e5", "no", "~", "", "é\udc80", "-"]),
        max_unknown=st.floats(0, 1),
    )
)
def test_any_settings_come_back_from_a_run(data):
    config = replace(RunConfig(), data=data)
    stored = parse_stored(yaml.safe_dump(plain(config), sort_keys=False))
    assert asdict(run_config_from_dict(stored)) == asdict(config)


@pytest.mark.parametrize("text", ["train: {steps: true}", "seed: [", "train: {steps: 0}"])
def test_damaged_settings_of_a_run_are_told(text):
    told(lambda: parse_stored(text), "config.yaml is damaged", "restore it")
