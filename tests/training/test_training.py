"""The training loop: what a step does depends only on the settings and on its number."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from packs import whole
from workers import PLAIN, STEPS, WITHOUT_DROPOUT, changed, make_trainer

from exlm_mini.config import (
    DataConfig,
    MaskingConfig,
    RunConfig,
    SpecialIds,
    TrainConfig,
)
from exlm_mini.config.checks import UserError
from exlm_mini.training import evaluation
from exlm_mini.training.checkpoint import load_checkpoint
from exlm_mini.training.evaluation import evaluate, row_bits_and_correct
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.parts import make_masker
from exlm_mini.training.processes import Engine
from exlm_mini.training.trainer import Trainer

CONFIG = changed(PLAIN, model={"num_layers": 1}, micro_batch_size=None)


def one_step(trainer):
    """Train one step; return the line that it logs."""
    trainer.run(should_stop=lambda: True)
    return read_metrics(trainer.output / "metrics.jsonl")[-1]


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        ({"warmup_steps": 4}, [0.5, 1, 1.5, 2, *(2 * n / 7 for n in range(6, -1, -1))]),
        ({"warmup_steps": 2, "decay_from": 0.6}, [1, *[2] * 5, 1.6, 1.2, 0.8, 0.4, 0]),
        # The decay would begin within the warm-up, so the rate is never held.
        ({"warmup_steps": 2, "decay_from": 0.1}, [1, *(2 * n / 9 for n in range(9, -1, -1))]),
    ],
)
def test_the_rate_rises_stays_and_falls_to_zero_after_the_last_step(settings, by_hand):
    train = TrainConfig(steps=10, learning_rate=2.0, **settings)
    assert [train.rate(step) for step in range(11)] == pytest.approx(by_hand)


# ---- what is left ----


def test_every_step_asked_for_is_saved_logged_and_validated(packs, tmp_path):
    config = changed(CONFIG, steps=7, save_every=3, log_every=2, validate_every=4, keep_last=0)
    seen = []
    trainer = make_trainer(config, packs, tmp_path)
    assert trainer.run(seen.append)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000006", "step-000007"]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [2, 4, 6, 7]
    assert [r["step"] for r in records if "validation_bits_per_mask" in r] == [4, 7]
    assert [p.step for p in seen] == list(range(1, 8))
    assert [p.step for p in seen if p.evaluation] == [4, 7]
    evaluation, last = trainer.evaluation, records[-1]
    assert evaluation == seen[-1].evaluation and evaluation.num_rows == 19
    for name in ("bits_per_mask", "bits_per_row", "mask_accuracy", "perplexity"):
        assert last[f"validation_{name}"] == getattr(evaluation, name)
    assert [r["learning_rate"] for r in records] == [
        config.train.rate(r["step"] - 1) for r in records
    ]
    for record in records:
        flops = trainer.flops_per_token * record["tokens_per_second"]
        assert record["model_flops_per_second"] == pytest.approx(flops)
        assert record["peak_memory_mib"] > 10
    # A run that is started again keeps its last validation.
    again = make_trainer(config, packs, tmp_path)
    assert again.run() and again.evaluation == evaluation


def test_what_is_watched_stands_in_the_line_of_its_validation_and_can_end_the_run(
    packs, tmp_path
):
    config = changed(CONFIG, steps=7, log_every=1, validate_every=2)
    seen = []

    def watch():
        seen.append(len(seen) / 2)
        return {"seen": seen[-1]}

    trainer = make_trainer(config, packs, tmp_path)
    is_complete = trainer.run(should_stop=lambda: len(seen) == 2, watch=watch)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert {r["step"]: r["seen"] for r in records if "seen" in r} == {2: 0.0, 4: 0.5}
    assert trainer.step == 4 and not is_complete
    assert (tmp_path / "checkpoints" / "step-000004").is_dir()


def test_tokens_and_seconds_are_counted_across_starts(packs, tmp_path):
    config = changed(CONFIG, "repeated-mlm", log_every=1)
    one_step(make_trainer(config, packs, tmp_path))
    trainer = make_trainer(config, packs, tmp_path)
    trainer.run()
    first, *_, last = records = read_metrics(tmp_path / "metrics.jsonl")
    rows = [trainer.stepper.batches.rows(step)[0] for step in range(STEPS)]
    tokens = [packs[0].lengths_R[row].sum() for row in rows]  # each counts once, not per copy
    assert [record["tokens"] for record in records] == np.cumsum(tokens).tolist()
    # The second start adds to the counts of the first, but its speed is its own.
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds) and 0 < seconds[0] < seconds[1]
    speed = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
    assert last["tokens_per_second"] == pytest.approx(speed, rel=1e-6)


def test_mask_accuracy_is_the_share_of_likeliest_guesses(packs, tmp_path):
    config = changed(CONFIG, "mlm", model=WITHOUT_DROPOUT, log_every=1)
    trainer = make_trainer(config, packs, tmp_path)
    batch = whole(trainer.stepper.batches, 0)
    with torch.no_grad():
        guesses_S = trainer.model(batch.masked_ids_BN, batch.is_masked_BN).argmax(dim=1)
    # Make the guesses right for a known share of the masks by changing the targets.
    target_ids_S = batch.token_ids_BN[batch.is_masked_BN]
    target_ids_S[::3] = guesses_S[::3]
    batch.token_ids_BN[batch.is_masked_BN] = target_ids_S
    trainer.stepper.batches.parts = lambda *_: [
        type(batch)(*(t[start : start + 2] for t in batch)) for start in range(0, 8, 2)
    ]
    expected = (guesses_S == target_ids_S).double().mean().item()
    assert expected >= 1 / 3
    assert one_step(trainer)["mask_accuracy"] == pytest.approx(expected)


# ---- what a step depends on ----


def losses_of_micro_batches(config, packs, output, num_parts, rank=0, world_size=1, seed=1):
    """Losses in one process, with the same rows and masks every time and nothing learned."""
    config = changed(config, steps=3, learning_rate=1e-12, chain_warmup=0.0)
    trainer = make_trainer(config, packs, output)
    trainer.engine.rank, trainer.engine.world_size = rank, world_size
    trainer.stepper.config = replace(config, seed=seed)
    batch, found = whole(trainer.stepper.batches, 0), []
    trainer.stepper.batches.parts = lambda *_: [batch] * num_parts
    plain = trainer.engine.score

    def noted(part, chain_share):
        scored = plain(part, chain_share)
        found.append(round(scored.loss.item(), 5))
        return scored

    trainer.engine.score = noted
    trainer.run()
    assert len(found) == num_parts * 3
    return found


def test_dropout_depends_on_micro_batch_step_and_seed_and_not_on_the_processes(packs, tmp_path):
    alone = losses_of_micro_batches(CONFIG, packs, tmp_path / "alone", 4)
    assert len(set(alone)) == len(alone)
    assert losses_of_micro_batches(CONFIG, packs, tmp_path / "other", 4, seed=2) != alone
    for rank in (0, 1):
        of_rank = losses_of_micro_batches(CONFIG, packs, tmp_path / str(rank), 2, rank, 2)
        assert of_rank == alone[rank::2]
    plain = changed(CONFIG, model=WITHOUT_DROPOUT)
    assert len(set(losses_of_micro_batches(plain, packs, tmp_path / "plain", 4))) == 1


@pytest.mark.parametrize("objective", ["mlm", "exlm"])
def test_parts_of_a_batch_of_tokens_weigh_by_their_rows_or_masks(objective, packs, tmp_path):
    # The loss of the batch is that of its rows taken together, whatever the parts.
    config = changed(
        CONFIG, objective, {"strategy": "bernoulli", "mask_ratio": 0.1}, WITHOUT_DROPOUT,
        chain_warmup=0.0, batch_size=32, batch_tokens=120, micro_batch_tokens=40,
    )  # fmt: skip
    trainer = make_trainer(config, packs, tmp_path)
    parts = trainer.stepper.batches.parts(0)
    assert len(parts) == 3
    losses_of_parts = [trainer.model.answer(part).scored().loss.item() for part in parts]
    weights = [int(part.is_masked_BN.sum()) for part in parts]
    if objective == "exlm":
        weights = [int(part.is_masked_BN.any(dim=1).sum()) for part in parts]
        assert sum(weights) < sum(len(part.token_ids_BN) for part in parts)
    assert len(set(weights)) > 1
    expected = np.average(losses_of_parts, weights=weights)
    assert one_step(trainer)["loss"] == pytest.approx(expected, rel=1e-6)


# ---- precision ----


def test_validation_has_the_precision_and_the_chains_of_its_step(packs, tmp_path):
    # Of four steps, chains are fixed for 1.2 and fade for 1.2: after two, a third is left.
    config = changed(CONFIG, precision="bf16", steps=4, chain_warmup=0.3, validate_every=2)
    trainer = make_trainer(config, packs, tmp_path)
    trainer.run(should_stop=lambda: trainer.evaluation is not None)
    found = trainer.evaluation.bits
    arguments = trainer.model, packs[1], trainer.masker, 19, Engine(torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluate(*arguments, 1 / 3).bits == found
        assert evaluate(*arguments).bits != found
    assert evaluate(*arguments, 1 / 3).bits != found


# ---- numbers that are not finite ----


def test_a_loss_that_is_not_finite_stops_the_run(packs, tmp_path):
    """Each step is a start of its own here, because skipped steps are counted across starts."""
    train = {"warmup_steps": 0, "clip_norm": 0.0, "max_skipped": 3, "validate_every": 100}
    config = changed(CONFIG, learning_rate=1e29, **train)
    with pytest.raises(UserError, match="at step 4: not finite in 3 steps in a row"):
        for _ in range(4):
            make_trainer(config, packs, tmp_path).run(should_stop=lambda: True)
    # The failed steps changed no weight, and the last was not saved.
    first, third = (load_checkpoint(tmp_path / f"checkpoints/step-00000{n}") for n in (1, 3))
    for group, named in first.tensors.items():
        for name, tensor in named.items():
            assert torch.equal(tensor, third.tensors[group][name]), (group, name)
    assert third.state["update"]["skipped_steps"] == 2
    assert not (tmp_path / "checkpoints/step-000004").exists()


def test_a_run_of_fewer_steps_than_may_be_skipped_stops_if_all_are(packs, tmp_path):
    trainer = make_trainer(changed(CONFIG, steps=2, max_skipped=10), packs, tmp_path)
    trainer.model.encoder.final_norm.bias.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(UserError, match="at step 2: not finite in 2 steps in a row"):
        trainer.run()


def test_a_gradient_that_is_not_finite_costs_its_step_alone(packs, tmp_path):
    """This holds however often it happens: only failures in a row stop a run."""
    trainer = make_trainer(changed(CONFIG, max_skipped=2), packs, tmp_path)
    number, weights = itertools.count(1), []

    def spoil_every_other(gradient):
        return gradient * (1 if next(number) % 2 else math.inf)

    def note(progress):
        weights.append(trainer.model.encoder.embedding.weight.clone())

    trainer.model.encoder.final_norm.bias.register_hook(spoil_every_other)
    assert trainer.run(note) and trainer.stepper.skipped_steps == STEPS / 2
    stood_still = [torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    assert stood_still == [step % 2 == 0 for step in range(2, STEPS + 1)]


def test_a_run_from_another_has_skipped_nothing_yet(packs, tmp_path):
    source = make_trainer(CONFIG, packs, tmp_path / "source")
    source.stepper.skipped_steps = 2
    assert one_step(source)["skipped_steps"] == 2
    checkpoint = load_checkpoint(tmp_path / "source" / "checkpoints" / "step-000001")
    trainer = make_trainer(CONFIG, packs, tmp_path / "run")
    trainer.begin_from(checkpoint)
    assert one_step(trainer)["skipped_steps"] == 0


@pytest.mark.parametrize("memory", [{"micro_batch_size": 2}, {}])
def test_validation_takes_no_more_rows_at_once_than_a_micro_batch(
    memory, packs, tmp_path, monkeypatch
):
    rows = []

    def noted(model, batch, chain_share):
        rows.append(len(batch.token_ids_BN))
        return row_bits_and_correct(model, batch, chain_share)

    monkeypatch.setattr(evaluation, "row_bits_and_correct", noted)
    trainer = make_trainer(changed(CONFIG, **memory), packs, tmp_path)
    trainer.validate(0)
    assert max(rows) == min(memory.get("micro_batch_size", 64), sum(rows))


def test_processes_that_read_different_data_are_told(packs, tmp_path):
    engine = Engine(torch.device("cpu"))
    engine.same = lambda value: ("another", *value[1:]) if isinstance(value, tuple) else value
    with pytest.raises(UserError, match="processes read different data"):
        Trainer(CONFIG, *packs, tmp_path, engine=engine)


@pytest.mark.parametrize(
    ("model", "train", "words"),
    [
        ({"init_std": 1e9}, {}, "validation at step 3 gives nan"),
        ({}, {"adam_eps": 1e-300}, "place.weight are not finite after step 1"),
    ],
)
def test_a_run_whose_numbers_are_none_ends_and_keeps_none_of_them(
    model, train, words, packs, tmp_path
):
    trainer = make_trainer(changed(CONFIG, model=model, **train), packs, tmp_path)
    with pytest.raises(UserError, match=f"{words}.*checkpoints are kept"):
        trainer.run()
    for path in (tmp_path / "checkpoints").glob("*"):
        tensors = load_checkpoint(path).tensors["model"]
        assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


# ---- masks ----


@pytest.mark.parametrize(("strategy", "num_copies"), [("fixed_count", 3), ("slots", 1)])
def test_repeated_mlm_always_masks_by_independent_draws(strategy, num_copies):
    config = RunConfig(
        objective="repeated-mlm",
        masking=MaskingConfig(0.4, strategy, num_copies),
        data=DataConfig(kind="toy"),
    )
    token_ids_BN = torch.full((500, 22), SpecialIds().mask + 1)
    counters = np.zeros(500, dtype=np.int64), np.arange(500)
    masker = make_masker(config, SpecialIds())
    count_B = masker(token_ids_BN, *counters, step=0).is_masked_BN.sum(dim=1).double()
    n, p = 22 * num_copies, 0.4
    # Four standard errors of a binomial's variance; a fixed count would have variance 0.
    assert abs(count_B.var() - n * p * (1 - p)) < 4 * n * p * (1 - p) * (2 / 499) ** 0.5
    assert abs(count_B.mean() - n * p) < 4 * (n * p * (1 - p) / 500) ** 0.5
