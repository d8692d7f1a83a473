"""Settings refuse what cannot work, and survive a trip through plain dicts."""

import dataclasses
import json

import pytest
import yaml
from docstring_parser import parse_from_object

from exlm_lab.downstream.catalogue import ReadingConfig
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import (
    DataConfig,
    EncoderShape,
    MaskingConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
)
from exlm_mini.config.checks import Rule, UserError, schema
from exlm_mini.config.recipes import parse_stored, plain, run_config_from_dict, settings_of

CLASSES = (
    RunConfig, ModelConfig, MaskingConfig, DataConfig, TrainConfig, TuneConfig, ReadingConfig,
)  # fmt: skip
NAN = float("nan")
OUTSIDE = {
    ModelConfig: {
        "states_per_mask max_positions emission_chunk num_layers width ffn_width num_heads": (0,),
        "vocab_size": (0,), "num_layers": (1001,), "init_std": (0.0, NAN), "expand_at": (-1,),
        "dropout attention_dropout activation_dropout": (-0.1, 1.0, NAN),
        "clone_embedding_std": (-1.0,),
    },
    MaskingConfig: {"mask_ratio": (0.0, 1.0, -0.15, 15, NAN), "num_copies": (0,)},
    DataConfig: {
        "block_length": (2,), "max_documents": (1,), "vocab_size": (0, 2**22 + 1),
        "num_sentences": (0,), "validation_share": (0.0, 1.0, NAN),
        "max_unknown max_rejected": (-0.1, 1.1, NAN),
    },
    TrainConfig: {
        "steps batch_size micro_batch_size batch_tokens micro_batch_tokens save_every": (0,),
        "log_every validate_every validation_rows max_skipped": (0,), "num_threads": (0, 1025),
        "warmup_steps keep_last": (-1,), "weight_decay clip_norm min_loss_scale": (-1.0, NAN),
        "learning_rate adam_eps": (0.0, -1e-3, NAN), "chain_warmup": (-0.1, 0.6, NAN),
        "adam_betas": ((2.0, 0.98), (0.9, 1.0)),
    },
    RunConfig: {"seed": (-1,)},
}  # fmt: skip
"""Values that a rule of the field refuses, beyond its borders on either side."""
CLASHES = [
    (ModelConfig, {"preset": "bas"}, "model.preset is 'bas'; did you mean base"),
    (
        ModelConfig,
        {"expand_at": 2},
        "model.expand_at is 2; it must be below model.num_layers 2",
    ),
    (ModelConfig, {"width": 72, "num_heads": 4}, "model.width 72"),
    (ModelConfig, {"sparse": True, "transition": "ctc"}, "model.transition ctc"),
    (ModelConfig, {"sparse": True, "transition": "uniform"}, "model.transition uniform"),
    (DataConfig, {"kind": "toy", "source": ("a.txt",)}, "data.source is set"),
    (TrainConfig, {"micro_batch_size": 5}, "5 must divide train.batch_size 32"),
    (TrainConfig, {"batch_tokens": 64, "micro_batch_tokens": 128}, "128 must divide"),
    (TrainConfig, {"micro_batch_tokens": 8}, "set train.batch_tokens too"),
    (TrainConfig, {"batch_tokens": 64, "batch_size": 16}, "train.batch_size 16 counts rows"),
    (TrainConfig, {"batch_tokens": 64, "micro_batch_size": 16}, "train.micro_batch_size 16"),
    (TrainConfig, {"learning_rate": 1e20, "weight_decay": 1e20}, "lower both"),
    (RunConfig, {"masking": MaskingConfig(strategy="slots")}, "data.kind toy, not text"),
]


def refusal(make, **settings) -> str:
    """The line a refused value gets."""
    with pytest.raises(UserError) as refused:
        make(**settings)
    line = str(refused.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_number_outside_its_rule_is_refused(kind):
    for names, values in OUTSIDE[kind].items():
        for name in names.split():
            for value in values:
                assert f"{name} is {value}; it must " in refusal(kind, **{name: value})


@pytest.mark.parametrize(("make", "settings", "words"), CLASHES)
def test_settings_that_exclude_each_other_are_refused(make, settings, words):
    assert words in refusal(make, **settings)


@pytest.mark.parametrize("kind", CLASSES)
def test_every_setting_says_what_it_means_and_numbers_have_a_rule(kind):
    about = {p.arg_name: p.description for p in parse_from_object(kind).params}
    for name, (hint, marks) in schema(kind).items():
        if dataclasses.is_dataclass(hint):
            continue
        assert about.get(name), name
        if hint in (int, float, int | None, float | None) and not name.endswith("seed"):
            assert any(isinstance(mark, Rule) for mark in marks), name


def test_single_numbers_replace_those_of_a_preset():
    assert ModelConfig(preset="base").shape == EncoderShape(12, 768, 3072, 12)
    shape = ModelConfig(preset="base", num_layers=3, ffn_width=100).shape
    assert shape == EncoderShape(3, 768, 100, 12)
    assert ModelConfig(preset="tiny", width=16, num_heads=1).shape == EncoderShape(
        2, 16, 256, 1
    )


UNUSUAL = RunConfig(
    recipe="mine",
    objective="mlm+exlm",
    model=ModelConfig(preset="mini", width=64, transition="paper", sparse=True, dropout=0.25),
    masking=MaskingConfig(mask_ratio=0.3, strategy="bernoulli"),
    data=DataConfig(kind="smiles", source=("a.smi",), column="x", max_documents=10),
    train=TrainConfig(adam_betas=(0.5, 0.75), micro_batch_size=4, num_threads=2),
    seed=7,
)


@pytest.mark.parametrize("config", [RunConfig(), UNUSUAL])
def test_a_trip_through_plain_dicts_changes_nothing(config):
    plain = dataclasses.asdict(config)
    assert run_config_from_dict(plain) == config
    # JSON and YAML know no tuples.
    assert run_config_from_dict(json.loads(json.dumps(plain))) == config


def test_settings_from_when_models_could_be_divided_are_those_of_a_whole_one(tmp_path):
    stored = plain(RunConfig(seed=3))
    stored["train"]["sharding"] = "none"
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(stored))
    assert run_config_from_dict(stored) == RunConfig(seed=3)
    assert parse_stored(file.read_text()) == plain(RunConfig(seed=3))
    assert "sharding" not in settings_of(file)["train"]
    file.write_text(file.read_text().replace("sharding: none", "sharding: fsdp2"))
    line = refusal(lambda: parse_stored(file.read_text()))
    assert "train.sharding is fsdp2" in line and "take the setting out" in line
