"""Runs that begin as an MLM and grow follow one schedule, and end the same if interrupted."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from commands import TOY, dry_run, fails
from refusals import told

import exlm_mini
from exlm_mini import prepare
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import dotted, load_recipe, recipe_names, stored_config
from exlm_mini.pretrain import main
from exlm_mini.reading.trained import SHIPPED
from exlm_mini.training.checkpoint import load_checkpoint
from exlm_mini.training.cost import estimate, row_flops
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.step import low_rate

STEPS, GROWN = 6, 3
SETTINGS = f"""--recipe smiles-tiny --model.width 16 --model.ffn_width 16 --model.num_heads 2
    --train.steps {STEPS} --train.batch_size 4 --train.warmup_steps 2 --train.save_every 1
    --train.keep_last 0 --train.validation_rows 8 --train.device cpu --train.chain_warmup 0.1
    --data.max_documents 200 --masking.strategy spans --model.transition spans""".split()


GROWN_FROM = ["--train.steps", "3", "--train.warmup_steps", "0"]


def train(output: Path, *settings: str) -> Path:
    assert main([*SETTINGS, "--output", str(output), *settings]) == 0
    return output


def weights(run: Path, step: int, group: str = "model") -> dict[str, torch.Tensor]:
    return load_checkpoint(run / f"checkpoints/step-{step:06d}").tensors[group]


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> Path:
    settings = "--train.grow_at", "0.5", "--train.log_every", "1"
    return train(tmp_path_factory.mktemp("grown") / "run", *settings)


def test_until_it_grows_a_run_is_an_mlm(grown, mlm):
    for step in range(1, GROWN + 1):
        ours, theirs = weights(grown, step), weights(mlm, step)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    begun = exlm_mini.load(grown / f"checkpoints/step-{GROWN:06d}")
    assert begun.model_in_words == "MLM" and begun.fill("CC[MASK]").text
    assert exlm_mini.load(grown).model_in_words.startswith("ExLM")


def test_weights_go_on_when_it_grows_and_moments_begin_anew(grown):
    moments = weights(grown, GROWN + 1, "optimizer")
    assert {int(tensor) for name, tensor in moments.items() if name.endswith("/step")} == {1}
    assert any(name.startswith("transition.") for name in moments)
    moved = [
        (weights(grown, GROWN + 1)[name] - tensor).abs().max()
        for name, tensor in weights(grown, GROWN).items()
    ]
    assert 0 < max(moved) < 0.02  # about the learning rate: no weight was drawn anew


def test_a_run_that_has_grown_stays_so_when_it_is_given_more_steps(grown, tmp_path):
    longer = tmp_path / "run"
    shutil.copytree(grown, longer)
    for later in (STEPS - 1, STEPS):
        shutil.rmtree(longer / f"checkpoints/step-{later:06d}")
    settings = "--train.grow_at", "0.5", "--train.steps", str(2 * STEPS)
    train(longer, *settings, "--train.log_every", "1")
    assert exlm_mini.load(longer).model_in_words.startswith("ExLM")
    rates = {
        line["step"]: line["learning_rate"] for line in read_metrics(longer / "metrics.jsonl")
    }
    config = stored_config(longer / "config.yaml").train
    for step in range(STEPS - 1, 2 * STEPS):  # it warmed up when it grew, and never again
        assert rates[step] == config.rate(step - 1, GROWN)
    later = exlm_mini.load(longer / f"checkpoints/step-{STEPS + 1:06d}").config
    assert later.chain_share(GROWN + 2) == pytest.approx(2 - 2 / (0.1 * 2 * STEPS))
    assert later.chain_share(STEPS + 1) == 0


def test_operations_per_second_are_those_of_both_stages(grown):
    tokens, operations = [0], [0.0]
    for line in read_metrics(grown / "metrics.jsonl"):
        tokens.append(line["tokens"])
        per_token = line["model_flops_per_second"] / line["tokens_per_second"]
        operations.append(per_token * line["tokens"])
    of_step = [
        (operations[n + 1] - operations[n]) / (tokens[n + 1] - tokens[n]) for n in range(STEPS)
    ]
    assert of_step[1:GROWN] == pytest.approx([of_step[0]] * (GROWN - 1))
    assert of_step[GROWN:] == pytest.approx([of_step[-1]] * (STEPS - GROWN))
    assert of_step[-1] > 1.2 * of_step[0]


def test_the_rate_rises_once_more_when_it_grows():
    train = replace(load_recipe("smiles-tiny").train, steps=100, warmup_steps=10)
    line, rates = ([train.rate(step, at) for step in range(100)] for at in (0, 50))
    assert (rates[:50], rates[60:]) == (line[:50], line[60:])
    shares = [rate / on_line for rate, on_line in zip(rates[50:60], line[50:60], strict=True)]
    assert shares == pytest.approx([number / 10 for number in range(1, 11)])
    within = [train.rate(step, 5) / line[step] for step in range(20)]  # grows in the warm-up
    assert within == pytest.approx([1] * 5 + [number / 10 for number in range(1, 11)] + [1] * 5)


def test_the_rate_of_a_run_rises_once_more_when_it_grows(grown):
    schedule = stored_config(grown / "config.yaml").train
    rates = [line["learning_rate"] for line in read_metrics(grown / "metrics.jsonl")]
    assert rates == [schedule.rate(step, GROWN) for step in range(STEPS)]


def test_a_rate_that_stays_low_is_told():
    every = {name: load_recipe(name) for name in recipe_names()}
    assert not [name for name, config in every.items() if low_rate(config)]
    spans = every["smiles-spans"]
    for steps, word in ((300, "of 0.002: 200 steps"), (1500, "after the growth at step 1,000")):
        short = replace(spans, train=replace(spans.train, steps=steps))
        assert word in low_rate(short), low_rate(short)


def test_a_run_is_an_mlm_and_an_exlm_for_a_step_or_more():
    config = load_recipe("smiles-tiny")
    for share, step in ((1e-9, 1), (0.5, 5), (0.99, 9), (0.0, 0)):
        train = replace(config.train, grow_at=share, chain_warmup=0.0, steps=10)
        assert replace(config, train=train).grow_step == step
    told(
        lambda: replace(config.train, grow_at=0.7, chain_warmup=0.2),
        "grow_at 0.7", "chain_warmup 0.2", "lower one",
    )  # fmt: skip


def test_costs_are_those_of_both_stages():
    config = load_recipe("smiles-tiny")
    config = replace(config, train=replace(config.train, grow_at=0.25, steps=400))
    (mlm, first), (exlm, last) = config.stages
    assert (mlm.objective, first, exlm, last) == ("mlm", 100, config, 400)
    expected = 0.25 * row_flops(mlm, 90, 40) + 0.75 * row_flops(exlm, 90, 40)
    assert estimate(config, 90, 40).flops_per_token == pytest.approx(expected / 40)


def test_chains_stand_from_the_growth_on():
    config = load_recipe("smiles-tiny")
    train = replace(config.train, grow_at=0.5, chain_warmup=0.1, steps=100)
    shares = [replace(config, train=train).chain_share(step) for step in (50, 60, 65, 70)]
    assert shares == pytest.approx([1, 1, 0.5, 0])


# ---- from a run that has ended ----


@pytest.fixture(scope="module")
def mlm(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("mlm") / "run", "--objective", "mlm")


def test_a_run_from_a_grown_one_warms_up_at_its_own_start_alone(grown, tmp_path):
    settings = "--from", str(grown), "--train.log_every", "1"
    run = train(tmp_path / "run", *settings, "--train.steps", str(2 * GROWN + 2))
    schedule = stored_config(run / "config.yaml").train
    for line in read_metrics(run / "metrics.jsonl"):
        assert line["learning_rate"] == schedule.rate(line["step"] - 1, 0)


def test_a_dry_run_counts_the_steps_that_the_other_run_has_made(mlm, capsys):
    found, tokens = [], []
    for step in (STEPS // 2, STEPS):
        start = mlm / f"checkpoints/step-{step:06d}"
        told_of = dry_run(capsys, *SETTINGS, "--from", start)[0]["goes on from"]
        kind, num_flops = re.fullmatch(
            r"(.+), about (.+) FLOP not counted above", told_of
        ).groups()
        assert kind == f"mlm of {step} steps"
        found.append(float(num_flops))
        tokens.append(load_checkpoint(start).state["num_tokens"])
    assert found[0] / found[1] == pytest.approx(tokens[0] / tokens[1], rel=0.01)
    whole = dry_run(capsys, *SETTINGS, "--objective", "mlm")[0]["operations"]
    assert found[1] == pytest.approx(float(re.search("([^ ]+) in all", whole)[1]), rel=0.2)


@pytest.mark.parametrize("objective", ["mlm", "exlm"])
def test_a_run_goes_on_from_the_weights_of_another_and_its_moments_if_it_does_not_grow(
    objective, mlm, tmp_path
):
    run = train(tmp_path / "run", "--from", str(mlm), *GROWN_FROM, "--objective", objective)
    before, after = weights(mlm, STEPS), weights(run, 1)
    moved = [(after[name] - tensor).abs().max() for name, tensor in before.items()]
    assert 0 < max(moved) < 0.02
    before, after = weights(mlm, STEPS, "optimizer"), weights(run, 1, "optimizer")
    for name in [name for name in after if name.endswith("/step")]:
        assert after[name] == 1 + (before[name] if objective == "mlm" else 0)


def test_the_shipped_model_can_be_gone_on_from_without_moments(tmp_path):
    shipped = exlm_mini.load("molecules")
    model = dotted(asdict(shipped.config.model))
    settings = [
        word for name, value in model.items() if value is not None
        for word in (f"--model.{name}", str(value).lower())
    ]  # fmt: skip
    tokenizer = SHIPPED["molecules"] / "checkpoints/step-006000/tokenizer.json"
    source = tmp_path / "some.smi"
    source.write_text("".join("C" * n + "O\n" for n in range(1, 60)))
    grown = train(
        tmp_path / "run", "--from", "molecules", *GROWN_FROM, *settings,
        "--data.tokenizer", str(tokenizer), "--data.max_unknown", "1",
        "--data.source", str(source),
    )  # fmt: skip
    assert weights(grown, 1, "optimizer")["encoder.embedding.weight/step"] == 1


def test_a_run_from_another_that_is_cut_off_ends_with_the_same_bits(mlm, tmp_path):
    settings = ("--from", str(mlm), *GROWN_FROM)
    whole = train(tmp_path / "whole", *settings)
    last = "checkpoints/step-000003/model.safetensors"
    for step in (1, 2):
        again = shutil.copytree(whole, tmp_path / str(step))
        for later in range(step + 1, 4):
            shutil.rmtree(again / f"checkpoints/step-{later:06d}")
        train(again, *settings)
        assert (again / last).read_bytes() == (whole / last).read_bytes()


def test_rows_that_the_other_run_may_have_learned_from_are_told(mlm, tmp_path, capsys):
    source = [
        "--source",
        tmp_path / "some.smi",
        "--data.tokenizer",
        mlm / "data/tokenizer.json",
    ]
    (tmp_path / "some.smi").write_text("".join("C" * n + "O\n" for n in range(1, 30)))
    assert prepare.main([str(word) for word in [*source, "--output", tmp_path / "pack"]]) == 0
    packs = (tmp_path / "pack", True), (mlm / "data", False)
    for number, (pack, is_other) in enumerate(packs):
        capsys.readouterr()
        settings = "--data.pack", str(pack), "--from", str(mlm), "--train.steps", "1"
        train(tmp_path / str(number), *settings, "--train.chain_warmup", "0")
        assert ("held out other rows" in capsys.readouterr().err) == is_other


def test_shorter_rows_of_the_same_split_are_held_out_as_before(mlm, tmp_path, capsys):
    settings = "--from", str(mlm), "--data.block_length", "20", *GROWN_FROM
    shorter = load_checkpoint(
        train(tmp_path / "run", *settings) / "checkpoints/step-000003"
    ).state
    other = load_checkpoint(mlm / f"checkpoints/step-{STEPS:06d}").state
    assert shorter["validation_sha256"] != other["validation_sha256"]
    assert "held out other rows" not in capsys.readouterr().err


def test_a_run_of_a_toy_language_goes_on_from_one_with_another_seed(tmp_path):
    """Sentences are drawn from a grammar, so no document is held out by only one of the runs."""
    toy = [*TOY, "--train.steps", "2", "--train.warmup_steps", "0", "--output"]
    assert main([*toy, str(tmp_path / "mlm"), "--objective", "mlm"]) == 0
    settings = "--from", str(tmp_path / "mlm"), "--seed", "2"
    assert main([*toy, str(tmp_path / "run"), *settings]) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("--model.width 32", "model.width 16, but this run has 32"),
        ("--model.num_layers 3", "model.num_layers 2, but this run has 3"),
        ("--model.transition gated --from {grown}", "spans, but this run has gated"),
        ("--model.rope 1d", "model.rope 2d, but this run has 1d"),
        ("--model.num_heads 4", "model.num_heads 2, but this run has 4"),
        ("--data.max_documents 100", "because its data.max_documents is"),
        ("--seed 9", "learned from rows that this run holds out"),
        ("--data.validation_share 0.1", "because its data.validation_share is"),
        ("--data.vocab_size 20 --data.max_unknown 1", "was trained with another tokenizer"),
        (
            "--from {grown} --model.boundary paper",
            "model.boundary official, but this run has paper",
        ),
        (
            "--objective repeated-mlm --from {grown}",
            "was trained with objective exlm, but this run has repeated-",
        ),
        ("--train.grow_at 0.5", "drop one of the two"),
        ("--from {nowhere}", "there is no checkpoint in"),
    ],
)
def test_what_cannot_be_gone_on_from_is_one_line(grown, mlm, settings, words, tmp_path, capsys):
    names = {"grown": grown, "nowhere": tmp_path / "nowhere"}
    words_given = [word.format(**names) for word in settings.split()]
    command = [*SETTINGS, "--from", mlm, "--output", tmp_path / "run", *words_given]
    for more in ((), ("--dry-run",)):
        fails(capsys, main, *command, *more, parts=[words])
    assert not list((tmp_path / "run").glob("c*"))  # so that a corrected command can follow


def test_from_takes_the_place_of_a_recipes_first_stage(mlm):
    config = parse(["--recipe", "smiles-spans", "--from", str(mlm)]).config
    assert (config.train.grow_at, config.train.start_from) == (0.0, str(mlm))
