"""Every setting arrives in the optimiser, the schedule and the dropout that are really used.

Training is compared with AdamW written out in float64, and with a table that says where a run first
differs when one setting is changed. Of fine-tuning, only the recipes are tested here.
"""

import copy
import itertools
from dataclasses import asdict

import pytest
import torch
from packs import whole
from torch import Tensor, nn
from workers import make_trainer

from exlm_lab.downstream.grid import TUNING as RECIPES
from exlm_lab.downstream.grid import combinations
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import MaskingConfig, ModelConfig, RunConfig, TrainConfig
from exlm_mini.config.recipes import dotted, load_recipe, replaced
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.run_directory import FREE_SETTINGS

# Typed from the paper: learning rates, batch sizes, epochs, warm-up shares, pooler dropouts.
FIXED = ((5e-5,), (32,), (3,), (0.06,), (0.0,))
LARGE_GLUE = ((1e-5, 2e-5, 3e-5, 4e-5), (32,), (2, 3, 5), (0.06,), (0.0,))
SMALL_GLUE = ((2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (2, 3, 5, 10), (0.06, 0.1), (0.0,))
SQUAD = ((2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (2, 3), (0.06, 0.1), (0.0,))
FINE_TUNING = {
    "table-6": dict.fromkeys(("mnli", "qnli", "qqp", "rte"), FIXED),
    "table-8": {
        "bace": ((1e-4,), (64,), (60,), (0.06,), (0.2,)),
        "bbbp": ((4e-4,), (128,), (40,), (0.06,), (0.1,)),
        "tox21": ((1e-4,), (128,), (80,), (0.06,), (0.1,)),
        "sider": ((5e-4,), (32,), (100,), (0.4,), (0.0,)),
        "muv": ((2e-5,), (128,), (40,), (0.2,), (0.1,)),
        "clintox": ((5e-5,), (256,), (100,), (0.1,), (0.5,)),
        "toxcast": ((1e-4,), (64,), (80,), (0.06,), (0.1,)),
    },
    "table-11": {
        **dict.fromkeys(("mnli", "qnli", "qqp", "sst2"), LARGE_GLUE),
        **dict.fromkeys(("rte", "mrpc", "cola", "stsb"), SMALL_GLUE),
        "squad_v2": SQUAD,
    },
}

PRETRAINING = RunConfig(
    objective="exlm",
    model=ModelConfig(
        num_layers=1, width=16, ffn_width=24, num_heads=2, max_positions=48, states_per_mask=3,
        dropout=0.15, attention_dropout=0.2, activation_dropout=0.25, init_std=0.2,
        clone_embedding_std=0.3,
    ),
    masking=MaskingConfig(mask_ratio=0.4),
    train=TrainConfig(
        steps=6, batch_size=8, micro_batch_size=4, learning_rate=0.04, warmup_steps=2,
        decay_from=0.5, adam_betas=(0.6, 0.75), adam_eps=1e-3, weight_decay=0.3, clip_norm=0.2,
        chain_warmup=0.25, save_every=100, log_every=1, validate_every=3, validation_rows=8,
        device="cpu", precision="fp32",
    ),
    seed=5,
)  # fmt: skip
RATES = [0.02, 0.04, 0.04, 0.03, 0.02, 0.01]
"""Learning rate of each step: two of warm-up, one at the peak, then down by quarters of it."""
CHAIN_SHARES = [1, 1, 2 / 3, 0, 0, 0]
"""Chain share of each step: it is 1 for one and a half steps, and falls to 0 in as many."""

WITHOUT_DROPOUT = {
    "model.dropout": 0.0, "model.attention_dropout": 0.0, "model.activation_dropout": 0.0,
}  # fmt: skip


# ---- AdamW ----


def doubles(tensors) -> list[Tensor]:
    return [t.detach().double().clone() for t in tensors]


def largest(tensors: list[Tensor]) -> float:
    return max((t.abs().max().item() for t in tensors if t.numel()), default=0.0)


def distance(first: list[Tensor], second: list[Tensor]) -> float:
    return largest([a - b for a, b in zip(first, second, strict=True)])


def assert_same_path(run: list[list[Tensor]], by_hand: list[list[Tensor]]) -> None:
    """Assert that the error of each step is below a hundredth of the distance moved in the step.

    Float32 costs 5e-5 of that distance, and a setting left at its default four times the distance.
    """
    for step, (ours, expected) in enumerate(zip(run[1:], by_hand[1:], strict=True), 1):
        error = distance(ours, expected) / distance(expected, by_hand[step - 1])
        assert error < 1e-2, (step, error)


@pytest.mark.parametrize("objective", ["mlm", "exlm"])
def test_pretraining_is_adamw_in_float64(packs, tmp_path, objective):
    config = replaced(PRETRAINING, {"objective": objective} | WITHOUT_DROPOUT)
    trainer = make_trainer(config, packs, tmp_path)
    # PyTorch's AdamW and clipping in float64, with the numbers written out here.
    model, settings = copy.deepcopy(trainer.model).double(), config.train
    adam = torch.optim.AdamW(
        model.parameters(), betas=settings.adam_betas, eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
    )  # fmt: skip
    run, path = [doubles(trainer.model.parameters())], [doubles(model.parameters())]
    trainer.run(lambda _: run.append(doubles(trainer.model.parameters())))
    records = read_metrics(tmp_path / "metrics.jsonl")
    for step, rate in enumerate(RATES):
        share = CHAIN_SHARES[step] if objective == "exlm" else 0.0
        loss = model.answer(whole(trainer.stepper.batches, step), share).scored().loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm).item()
        adam.param_groups[0]["lr"] = rate
        adam.step()
        adam.zero_grad()
        path.append(doubles(model.parameters()))
        assert norm > 1.5 * settings.clip_norm, "clipping is to be active"
        assert records[step]["learning_rate"] == pytest.approx(rate)
        assert records[step]["loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert records[step]["gradient_norm"] == pytest.approx(norm, rel=1e-3)
    assert_same_path(run, path)


# ---- the tables of the paper ----


@pytest.mark.parametrize("recipe", FINE_TUNING)
def test_recipes_of_fine_tuning_try_the_numbers_of_the_tables(recipe):
    # The tables are silent about weight decay and clipping.
    decay_and_clip = (0.0, 1.0) if recipe == "table-8" else (0.1, 0.0)
    spaces = load_recipe(recipe, RECIPES).spaces
    for task, columns in FINE_TUNING[recipe].items():
        found = set()
        for own in combinations(spaces[task], TuneConfig()):
            schedule = own.learning_rate, own.batch_size, own.epochs, own.warmup_share
            found.add((*schedule, own.pooler_dropout))
            assert (own.adam_betas, own.adam_eps) == ((0.9, 0.98), 1e-6)
            assert (own.dropout, own.attention_dropout) == (0.1, 0.1)
            assert (own.weight_decay, own.clip_norm) == decay_and_clip
        assert found == set(itertools.product(*columns))


# ---- one setting at a time ----

Stages = dict[str, list[Tensor]]
"""Stages of a run, in order: the weights it begins with, its first batch, the encoder's output for
it, the first loss and clipped gradient, the weights after each of three steps, the validation."""

# For each setting, a new value and the stage at which the run then first differs.
PRETRAINING_TABLE = {
    "objective": ("mlm", "weights"),
    "seed": (6, "weights"),
    "model.num_layers": (2, "weights"),
    "model.width": (24, "weights"),
    "model.ffn_width": (16, "weights"),
    "model.num_heads": (4, "weights"),  # the transition has a gate for each head
    "model.max_positions": (64, "weights"),
    "model.dropout": (0.3, "hidden"),
    "model.attention_dropout": (0.1, "hidden"),
    "model.activation_dropout": (0.1, "hidden"),
    "model.states_per_mask": (2, "weights"),
    "model.boundary": ("paper", "hidden"),
    "model.transition": ("paper", "weights"),
    "model.use_position": (False, "weights"),
    "model.sparse": (True, "gradient"),  # fixed chains are sparse; their gradient is not
    "model.clone_embedding_std": (0.1, "weights"),
    "model.rope": ("1d", "hidden"),
    "model.init_std": (0.1, "weights"),
    "masking.mask_ratio": (0.3, "batch"),
    "masking.strategy": ("bernoulli", "batch"),
    "train.steps": (8, "step 3"),
    "train.batch_size": (12, "batch"),
    "train.micro_batch_size": (2, "batch"),
    "train.learning_rate": (0.02, "step 1"),
    "train.warmup_steps": (4, "step 1"),
    "train.decay_from": (0.1, "step 3"),
    "train.adam_betas": ((0.6, 0.9), "step 2"),
    "train.adam_eps": (1e-2, "step 1"),
    "train.weight_decay": (0.1, "step 1"),
    "train.clip_norm": (0.1, "gradient"),
    "train.chain_warmup": (0.0, "loss"),
    "train.precision": ("bf16", "hidden"),
    "train.validation_rows": (4, "validation"),
    "train.validate_every": (50, "validation"),
}
WITHOUT_EFFECT = {
    "model.preset": "mini",  # all numbers of it are replaced
    "model.emission": "chunked",
    "model.emission_chunk": 2,
    "model.chain_bonus": 1.0,  # used by another transition
    "masking.span_length": 5,  # used by another strategy
    "masking.span_law": "geometric",
    "masking.num_copies": 5,  # used by another objective
    "train.max_skipped": 1,
    "train.save_every": 1,
    "train.keep_last": 1,
    "train.log_every": 2,
    "train.num_threads": 1,
}
ELSEWHERE = {
    "model.vocab_size", "model.expand_at", "train.batch_tokens", "train.micro_batch_tokens",
    "train.compile", "train.tensorboard", "train.device", "train.grow_at", "train.start_from",
}  # fmt: skip
"""Cannot be changed alone or on every machine; tested in test_batches, test_growing and others."""


def first_difference(one: Stages, other: Stages) -> str | None:
    for stage in one:
        a, b = one[stage], other.get(stage, [])
        if [t.shape for t in a] != [t.shape for t in b]:
            return stage
        gap = distance(a, b) / max(largest(a), 1e-9)
        if gap > 1e-5:  # rounding gives 1e-7 at most, a setting 1e-3 at least
            return stage
    return None


def stages_of(config: RunConfig, packs, output) -> Stages:
    trainer = make_trainer(config, packs, output)
    model, parts = trainer.model, trainer.stepper.batches.parts(0)
    stages = {
        "weights": doubles(model.parameters()),
        "batch": doubles(tensor for part in parts for tensor in part),
    }

    def look(encoder, inputs, hidden_BTD: Tensor) -> None:
        stages.setdefault("hidden", doubles([hidden_BTD]))

    def note(progress) -> None:
        if progress.step == 1:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            stages["loss"] = [torch.tensor(progress.loss)]
            stages["gradient"] = doubles(gradients)
        stages[f"step {progress.step}"] = doubles(model.parameters())

    model.encoder.register_forward_hook(look)
    trainer.run(note, should_stop=lambda: trainer.step == 3)
    if trainer.evaluation:
        stages["validation"] = [torch.tensor(trainer.evaluation.bits_per_mask)]
    return stages


@pytest.fixture(scope="module")
def plain_stages(packs, tmp_path_factory) -> Stages:
    return stages_of(PRETRAINING, packs, tmp_path_factory.mktemp("run"))


def test_every_setting_is_in_a_table():
    names = {name for name in dotted(asdict(RunConfig())) if not name.startswith("data.")}
    assert names == {*PRETRAINING_TABLE, *WITHOUT_EFFECT, *ELSEWHERE, "recipe"}


def test_what_weights_depend_on_may_not_change_when_a_run_goes_on():
    measured = {name for name, (_, stage) in PRETRAINING_TABLE.items() if stage == "validation"}
    free = {name for name in (*measured, *WITHOUT_EFFECT) if name.startswith("train.")}
    assert free | {"train.device", "train.tensorboard"} == FREE_SETTINGS


@pytest.mark.parametrize("name", PRETRAINING_TABLE)
def test_a_setting_changes_pretraining_where_it_should(name, plain_stages, packs, tmp_path):
    value, stage = PRETRAINING_TABLE[name]
    config = replaced(PRETRAINING, {name: value})
    assert config != PRETRAINING
    assert first_difference(plain_stages, stages_of(config, packs, tmp_path)) == stage


def test_other_settings_do_not_change_what_is_trained(plain_stages, packs, tmp_path):
    config = replaced(PRETRAINING, WITHOUT_EFFECT)
    assert first_difference(plain_stages, stages_of(config, packs, tmp_path)) is None
