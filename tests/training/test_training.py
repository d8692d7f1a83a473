"""The training loop: what a step does depends on settings and step, and on nothing else."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import workers
from packs import whole
from workers import SMALL, STEPS, VOCAB_SIZE, losses, make_trainer

from exlm_mini.config import (
    DataConfig,
    MaskingConfig,
    RunConfig,
    SpecialIds,
    TrainConfig,
)
from exlm_mini.config.checks import UserError
from exlm_mini.data.batches import validation_batches
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.objectives import log_likelihood
from exlm_mini.training import evaluation, parts
from exlm_mini.training.checkpoint import latest_checkpoint, load_checkpoint
from exlm_mini.training.cost import longest_row
from exlm_mini.training.evaluation import evaluate, row_bits_and_correct
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.parts import (
    load_model,
    make_masker,
    make_model,
    score,
)
from exlm_mini.training.processes import Engine

SPECIAL = SpecialIds()
CPU = torch.device("cpu")
OBJECTIVES = ("mlm", "repeated-mlm", "exlm")
MODEL = replace(SMALL, num_layers=1)
TRAIN = replace(workers.TRAIN, micro_batch_size=None)


def make_config(objective="exlm", model=None, train=None, masking=None, seed=1):
    return RunConfig(
        objective=objective,
        model=replace(MODEL, **(model or {})),
        masking=MaskingConfig(mask_ratio=0.3, **(masking or {})),
        train=replace(TRAIN, **(train or {})),
        seed=seed,
    )


def losses_and_gradients(config, packs, output):
    """Loss and gradients of the first step."""
    trainer = make_trainer(config, packs, output)
    seen = []

    def look(progress):
        parameters = trainer.model.named_parameters()
        gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
        seen.append((progress.loss, gradients))

    trainer.run(look, should_stop=lambda: True)
    return seen[0]


def dropless(**train):
    """Settings under which micro-batches must not matter."""
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return {"model": off, "train": {"chain_warmup": 0.0, "clip_norm": 0.0, **train}}


# ---- schedules ----


@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        ({"warmup_steps": 4}, [0.5, 1, 1.5, 2, *(2 * n / 7 for n in range(6, -1, -1))]),
        ({"warmup_steps": 2, "decay_from": 0.6}, [1, *[2] * 5, 1.6, 1.2, 0.8, 0.4, 0]),
        # Before the end of the warm-up there is nothing to hold.
        ({"warmup_steps": 2, "decay_from": 0.1}, [1, *(2 * n / 9 for n in range(9, -1, -1))]),
    ],
)
def test_the_rate_rises_stays_and_falls_to_zero_after_the_last_step(settings, by_hand):
    train = TrainConfig(steps=10, learning_rate=2.0, **settings)
    assert [train.rate(step) for step in range(11)] == pytest.approx(by_hand)


def test_chains_are_held_then_faded_out():
    config = make_config(train={"steps": 8, "chain_warmup": 0.25})
    shares = [config.chain_share(step) for step in range(9)]
    assert shares == pytest.approx([1, 1, 1, 0.5, 0, 0, 0, 0, 0])
    longest = make_config(train={"steps": 8, "chain_warmup": 0.5})
    assert longest.chain_share(7) == pytest.approx(0.25)
    assert make_config(train={"chain_warmup": 0.0}).chain_share(0) == 0
    assert make_config("mlm").chain_share(0) == 0


# ---- what is left ----


def test_every_step_asked_for_is_saved_logged_and_validated(packs, tmp_path):
    train = {"steps": 7, "save_every": 3, "log_every": 2, "validate_every": 4}
    seen = []
    trainer = make_trainer(make_config(train=train), packs, tmp_path)
    is_complete = trainer.run(seen.append)
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000003", "step-000006", "step-000007"]
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records] == [2, 4, 6, 7]
    assert [r["step"] for r in records if "validation_bits_per_mask" in r] == [4, 7]
    assert [p.step for p in seen] == list(range(1, 8))
    assert [p.step for p in seen if p.evaluation] == [4, 7]
    assert is_complete
    assert trainer.evaluation == seen[-1].evaluation
    assert trainer.evaluation.bits_per_mask == records[-1]["validation_bits_per_mask"]
    assert trainer.evaluation.num_rows == 19
    rates = [replace(TRAIN, steps=7).rate(r["step"] - 1) for r in records]
    assert [r["learning_rate"] for r in records] == rates


def test_what_is_watched_stands_in_the_line_of_its_validation_and_can_end_the_run(
    packs, tmp_path
):
    train = {"steps": 7, "log_every": 1, "validate_every": 2}
    seen = []

    def watch():
        seen.append(len(seen) / 2)
        return {"seen": seen[-1]}

    trainer = make_trainer(make_config(train=train), packs, tmp_path)
    is_complete = trainer.run(should_stop=lambda: len(seen) == 2, watch=watch)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert {r["step"]: r["seen"] for r in records if "seen" in r} == {2: 0.0, 4: 0.5}
    assert trainer.step == 4 and not is_complete
    assert (tmp_path / "checkpoints" / "step-000004").is_dir()


# ---- determinism ----


def test_the_seed_decides_the_losses(packs, tmp_path):
    runs = []
    for number, seed in enumerate((1, 1, 2)):
        torch.manual_seed(number)
        runs.append(losses(make_trainer(make_config(seed=seed), packs, tmp_path / str(number))))
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


def losses_of_micro_batches(config, packs, output, num_parts, rank=0, world_size=1, seed=1):
    """Of one process: the same rows under the same masks each time, and nothing is learned."""
    config = replace(config, train=replace(config.train, learning_rate=1e-12, chain_warmup=0.0))
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
    assert len(found) == num_parts * STEPS
    return found


def test_dropout_is_drawn_anew_in_every_micro_batch_of_every_step_of_every_seed(
    packs, tmp_path
):
    found = losses_of_micro_batches(make_config(), packs, tmp_path / "dropped", 3)
    assert len(set(found)) == len(found)
    other = losses_of_micro_batches(make_config(), packs, tmp_path / "other", 3, seed=2)
    assert found != other
    plain = make_config(model=dropless()["model"])
    assert len(set(losses_of_micro_batches(plain, packs, tmp_path / "plain", 3))) == 1


def test_dropout_of_a_micro_batch_does_not_depend_on_the_number_of_processes(packs, tmp_path):
    alone = losses_of_micro_batches(make_config(), packs, tmp_path / "alone", 4)
    for rank in (0, 1):
        output = tmp_path / str(rank)
        assert (
            losses_of_micro_batches(make_config(), packs, output, 2, rank, 2) == alone[rank::2]
        )


# ---- micro-batches ----


@pytest.mark.parametrize(
    ("objective", "model", "masking"),
    [
        ("mlm", {}, {"strategy": "bernoulli"}),
        ("exlm", {}, {}),
        ("exlm", {"boundary": "paper", "transition": "paper"}, {"strategy": "bernoulli"}),
        ("exlm", {"transition": "uniform", "emission": "chunked", "emission_chunk": 3}, {}),
    ],
)
def test_micro_batches_change_neither_loss_nor_gradients(
    packs, tmp_path, objective, model, masking
):
    settings = dropless()
    settings["model"] |= model
    results = []
    for size in (None, 4, 1):
        settings["train"]["micro_batch_size"] = size
        config = make_config(objective, masking=masking, **settings)
        results.append(losses_and_gradients(config, packs, tmp_path / str(size)))
    (loss, gradients), *others = results
    largest = max(g.abs().max() for g in gradients.values())
    assert largest > 1e-3
    for other_loss, other_gradients in others:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert other_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (other_gradients[name] - gradient).abs().max() < 1e-5 * largest, name


TOKEN_BATCHES = {"batch_size": 32, "batch_tokens": 60, "micro_batch_tokens": 20}


def stopped_at(trainer, step):
    return trainer.stepper.optimizer.state_dict()["state"][0]["step"] == step


def test_parts_of_a_batch_of_tokens_weigh_by_their_rows_or_masks(packs, tmp_path):
    # The loss of the batch is that of its rows taken together, whatever the parts.
    for objective in ("mlm", "exlm"):
        settings = dropless(**TOKEN_BATCHES)
        trainer = make_trainer(make_config(objective, **settings), packs, tmp_path / objective)
        parts = trainer.stepper.batches.parts(0)
        scores = [score(trainer.model, part) for part in parts]
        weights = [int(part.is_masked_BN.sum()) for part in parts]
        if objective == "exlm":
            weights = [len(part.token_ids_BN) for part in parts]
        assert len(set(weights)) > 1
        losses_of_parts = [scored.loss.item() for scored in scores]
        seen = []
        trainer.run(lambda p, seen=seen: seen.append(p.loss), should_stop=lambda: True)
        assert seen[0] == pytest.approx(np.average(losses_of_parts, weights=weights), rel=1e-6)


# ---- what is logged ----


def test_tokens_and_seconds_are_counted_across_starts(packs, tmp_path):
    config = make_config("repeated-mlm", train={"log_every": 1})
    make_trainer(config, packs, tmp_path).run(should_stop=lambda: True)
    make_trainer(config, packs, tmp_path).run()
    records = read_metrics(tmp_path / "metrics.jsonl")
    batches = make_trainer(config, packs, tmp_path / "other").stepper.batches
    num_tokens = 0
    for step, record in enumerate(records):
        rows, _ = batches.rows(step)
        num_tokens += int(packs[0].lengths_R[rows].sum())  # each once, however often repeated
        assert record["tokens"] == num_tokens
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds) and seconds[0] > 0
    # What the second start did comes on top of the first, and has a speed of its own.
    assert seconds[1] > seconds[0]
    first, last = records[0], records[-1]
    speed = (last["tokens"] - first["tokens"]) / (last["seconds"] - first["seconds"])
    assert last["tokens_per_second"] == pytest.approx(speed, rel=1e-6)


def test_mask_accuracy_is_the_share_of_likeliest_guesses(packs, tmp_path):
    config = make_config("mlm", **dropless(log_every=1, micro_batch_size=2))
    trainer = make_trainer(config, packs, tmp_path)
    batch = whole(trainer.stepper.batches, 0)
    with torch.no_grad():
        guesses_S = trainer.model(batch.masked_ids_BN, batch.is_masked_BN).argmax(dim=1)
    # Make the guesses right for a known share of the masks: change what they should be.
    target_ids_S = batch.token_ids_BN[batch.is_masked_BN]
    target_ids_S[::3] = guesses_S[::3]
    batch.token_ids_BN[batch.is_masked_BN] = target_ids_S
    trainer.stepper.batches.parts = lambda *_: [
        type(batch)(*(t[start : start + 2] for t in batch)) for start in range(0, 8, 2)
    ]
    trainer.run(should_stop=lambda: True)
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    expected = (guesses_S == target_ids_S).double().mean().item()
    assert expected >= 1 / 3
    assert record["mask_accuracy"] == pytest.approx(expected)


# ---- precision ----


def test_bf16_trains_on_a_cpu(packs, tmp_path):
    runs = {}
    for precision in ("fp32", "bf16"):
        config = make_config(train={"precision": precision})
        runs[precision] = losses(make_trainer(config, packs, tmp_path / precision))
    assert all(map(math.isfinite, runs["bf16"]))
    assert runs["bf16"] == pytest.approx(runs["fp32"], rel=0.05)
    assert runs["bf16"] != runs["fp32"]
    for record in read_metrics(tmp_path / "bf16" / "metrics.jsonl"):
        assert all(value is not None for value in record.values())
    tensors = load_checkpoint(tmp_path / f"bf16/checkpoints/step-{STEPS:06d}").tensors
    assert {t.dtype for group in tensors.values() for t in group.values()} == {torch.float32}


def test_validation_has_the_precision_and_the_chains_of_its_step(packs, tmp_path):
    # Of four steps chains are fixed for 1.2 and fade as long: after two a third is left.
    train = {"precision": "bf16", "steps": 4, "chain_warmup": 0.3, "validate_every": 2}
    trainer = make_trainer(make_config(train=train), packs, tmp_path)
    trainer.run(should_stop=lambda: stopped_at(trainer, 2))
    found = trainer.evaluation.bits
    arguments = trainer.model, packs[1], trainer.masker, 19, Engine(CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert evaluate(*arguments, 1 / 3).bits == found
        assert evaluate(*arguments).bits != found
    assert evaluate(*arguments, 1 / 3).bits != found


# ---- mistakes ----


def test_a_loss_that_is_not_finite_stops_the_run(packs, tmp_path):
    train = {"learning_rate": 1e29, "warmup_steps": 0, "clip_norm": 0.0, "max_skipped": 2}
    with pytest.raises(UserError, match="at step 3: not finite in 2 steps in a row"):
        make_trainer(make_config(train=train), packs, tmp_path).run()
    # The first step that failed was not taken, and the second not saved.
    first, second = (load_checkpoint(tmp_path / f"checkpoints/step-00000{n}") for n in (1, 2))
    for group, named in first.tensors.items():
        for name, tensor in named.items():
            assert torch.equal(tensor, second.tensors[group][name]), (group, name)
    assert second.state["update"]["skipped_steps"] == 1
    assert not (tmp_path / "checkpoints/step-000003").exists()


def test_only_steps_in_a_row_that_are_not_finite_stop_the_run(packs, tmp_path):
    trainer = make_trainer(make_config(train={"max_skipped": 2}), packs, tmp_path)
    score_well, number = trainer.engine.score, itertools.count()

    def spoil_every_other(*arguments):
        scored = score_well(*arguments)
        return scored._replace(loss=scored.loss * (math.nan if next(number) % 2 else 1))

    trainer.engine.score = spoil_every_other
    assert (trainer.run(), trainer.stepper.skipped_steps) == (True, STEPS / 2)


def test_a_gradient_that_is_not_finite_costs_its_step_alone(packs, tmp_path):
    trainer = make_trainer(make_config(), packs, tmp_path)
    number, weights = itertools.count(1), []

    def spoil_the_third(gradient):
        return gradient * (math.inf if next(number) == 3 else 1)

    def note(progress):
        weights.append(trainer.model.encoder.embedding.weight.clone())

    trainer.model.encoder.final_norm.bias.register_hook(spoil_the_third)
    assert trainer.run(note) and trainer.stepper.skipped_steps == 1
    stood_still = [torch.equal(a, b) for a, b in itertools.pairwise(weights)]
    assert stood_still == [step == 3 for step in range(2, STEPS + 1)]


def test_a_row_without_a_path_is_left_out_of_the_loss_and_counted(packs, monkeypatch):
    config = make_config()
    model = make_model(config, VOCAB_SIZE, SPECIAL).eval()
    batch = batch_of(packs, config)
    whole_B = log_likelihood(model(*batch)).detach()
    lost_B = whole_B.index_fill(0, torch.tensor([3, 4]), -torch.inf)
    monkeypatch.setattr(parts, "log_likelihood", lambda scores: lost_B)
    scored = score(model, batch)
    num_targets_B = batch.is_masked_BN.sum(dim=1) + 2  # [BOS] and [EOS]
    kept = torch.isfinite(lost_B)
    expected = -(whole_B / num_targets_B)[kept].mean().item()
    assert scored.num_without_path == 2
    assert scored.loss.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("config", [make_config(o, m, masking=s) for o, m, s in [
    ("repeated-mlm", {}, {}), ("exlm", {}, {}),
    ("exlm", {"boundary": "paper", "states_per_mask": 3}, {}),
    ("exlm", {}, {"strategy": "bernoulli"}),
]])  # fmt: skip
def test_no_batch_is_longer_than_the_longest_row(packs, config):
    masker = make_masker(config, SPECIAL)
    model = make_model(config, VOCAB_SIZE, SPECIAL)
    token_ids_BN, _ = packs[0].gather(range(37))
    longest = 0
    for step in range(5):
        batch = masker(token_ids_BN, np.full(37, step), np.arange(37), step)
        with torch.no_grad():
            if isinstance(model, ExLM):
                longest = max(longest, model.encode(*batch)[0].shape[1])
            else:
                longest = max(longest, model.encode(batch.masked_ids_BN).shape[1])
    bound = longest_row(config, 11)
    assert longest <= bound
    if config.masking.strategy == "fixed_count":
        assert longest == bound


# ---- bits ----


def batch_of(packs, config):
    (batch,) = validation_batches(packs[1], make_masker(config, SPECIAL), 19, 64)
    return batch


@pytest.mark.parametrize("objective", ["mlm", "repeated-mlm"])
def test_bits_of_mlm_are_a_sum_over_masks(packs, objective):
    config = make_config(objective)
    model = make_model(config, VOCAB_SIZE, SPECIAL).eval()
    batch = batch_of(packs, config)
    bits_B = row_bits_and_correct(model, batch)[0]
    for row, bits in enumerate(bits_B.tolist()):
        length = int((batch.token_ids_BN[row] != SPECIAL.pad).sum())
        masked_ids, is_masked, token_ids = (t[row : row + 1, :length] for t in batch)
        with torch.no_grad():
            p = model(masked_ids, is_masked).double().softmax(dim=1)
        targets = token_ids[is_masked].tolist()
        by_hand = -sum(math.log2(p[s, y]) for s, y in enumerate(targets))
        assert bits == pytest.approx(by_hand, rel=1e-5)
    assert torch.equal(bits_B > 0, batch.is_masked_BN.any(dim=1))


@pytest.mark.parametrize(
    ("boundary", "transition", "share"),
    [("official", "gated", 0.0), ("paper", "gated", 0.5), ("paper", "uniform", 1.0)],
)
def test_bits_of_exlm_are_the_joint_over_all_paths(packs, boundary, transition, share):
    config = make_config(model={"boundary": boundary, "transition": transition})
    model = make_model(config, VOCAB_SIZE, SPECIAL).eval()
    batch = batch_of(packs, config)
    bits_B = row_bits_and_correct(model, batch, share)[0]
    with torch.no_grad():
        scores = model(*batch, share)
    for row in range(0, 19, 4):
        M, L = int(scores.graph.num_targets_B[row]), int(scores.graph.num_states_B[row])
        emission = scores.log_emission_BML[row, :M, :L].double().exp()
        transitions = scores.log_transition_BLL[row].double().exp()
        num_masks = int(batch.is_masked_BN[row].sum())
        assert num_masks + 2 == M
        total = 0.0
        for inner in itertools.combinations(range(1, L - 1), M - 2):
            path = (0, *inner, L - 1)
            p = math.prod(transitions[v, u].item() for v, u in itertools.pairwise(path))
            # Masked tokens alone: the targets but for the first and the last.
            total += p * math.prod(emission[i + 1, u].item() for i, u in enumerate(inner))
        assert bits_B[row].item() == pytest.approx(-math.log2(total), rel=1e-5)


@pytest.mark.parametrize(("objective", "is_training"), [("mlm", True), ("exlm", False)])
def test_evaluation_is_repeatable_and_leaves_the_model_as_it_was(packs, objective, is_training):
    config = make_config(objective)
    model = make_model(config, VOCAB_SIZE, SPECIAL).train(is_training)
    masker = make_masker(config, SPECIAL)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    results = set()
    for seed in range(2):
        torch.manual_seed(seed)
        results.add(evaluate(model, packs[1], masker, 19, Engine(CPU)))
    assert len(results) == 1
    assert model.training is is_training
    assert all(part.training is is_training for part in model.modules())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_evaluation_does_not_depend_on_the_batch_size(packs, monkeypatch):
    config = make_config()
    model = make_model(config, VOCAB_SIZE, SPECIAL)
    found = []
    for size in (64, 7):
        monkeypatch.setattr(evaluation, "VALIDATION_BATCH_ROWS", size)
        found.append(
            evaluate(model, packs[1], make_masker(config, SPECIAL), 13, Engine(CPU), 0.5)
        )
    assert found[1][1:] == found[0][1:]
    assert found[1].bits == pytest.approx(found[0].bits, rel=1e-5)
    assert found[0].num_rows == 13
    assert found[0].bits_per_row * 13 == pytest.approx(found[0].bits)
    assert found[0].bits_per_mask * found[0].num_masks == pytest.approx(found[0].bits)


def test_rows_without_a_path_are_counted_apart(packs, monkeypatch):
    config = make_config()
    model = make_model(config, VOCAB_SIZE, SPECIAL).eval()
    monkeypatch.setattr(
        evaluation,
        "row_bits_and_correct",
        lambda model, batch, share: (
            torch.where(batch.is_masked_BN.sum(dim=1) > 2, torch.inf, 3.0),
            batch.is_masked_BN.sum(dim=1),
        ),
    )
    batch = batch_of(packs, config)
    num_masks_B = batch.is_masked_BN.sum(dim=1)
    fits_B = num_masks_B <= 2
    assert 0 < int(fits_B.sum()) < 19
    result = evaluate(model, packs[1], make_masker(config, SPECIAL), 19, Engine(CPU))
    assert result.num_rows == int(fits_B.sum())
    assert result.num_without_path == 19 - result.num_rows
    assert result.num_masks == result.num_correct == int(num_masks_B[fits_B].sum())
    assert result.bits_per_row == 3.0


# ---- the trained model ----


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_trained_model_comes_back(packs, tmp_path, objective):
    config = make_config(objective)
    trainer = make_trainer(config, packs, tmp_path)
    trainer.run()
    checkpoint = latest_checkpoint(tmp_path / "checkpoints", print)
    model, stored = load_model(checkpoint)
    learned = {"block_length": int(packs[0].lengths_R.max()), "vocab_size": packs[0].vocab_size}
    assert stored == replace(config, data=replace(config.data, **learned))
    assert type(model) is (ExLM if objective == "exlm" else MaskedLM)
    assert not model.training
    batch = batch_of(packs, config)
    assert torch.equal(
        row_bits_and_correct(model, batch)[0],
        row_bits_and_correct(trainer.model.eval(), batch)[0],
    )


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
    # A fixed count would have variance 0. Four standard errors of a binomial's variance.
    assert abs(count_B.var() - n * p * (1 - p)) < 4 * n * p * (1 - p) * (2 / 499) ** 0.5
    assert abs(count_B.mean() - n * p) < 4 * (n * p * (1 - p) / 500) ** 0.5


# ---- numbers that are none, and checkpoints that hold something else ----


@pytest.mark.parametrize(
    ("model", "train", "told"),
    [
        ({"init_std": 1e9}, {}, "validation at step 3 gives nan"),
        ({}, {"adam_eps": 1e-300}, "place.weight are not finite after step 1"),
    ],
)
def test_a_run_whose_numbers_are_none_ends_and_keeps_none_of_them(
    model, train, told, packs, tmp_path
):
    trainer = make_trainer(make_config("exlm", model, train), packs, tmp_path)
    with pytest.raises(UserError, match=told) as error:
        trainer.run()
    assert "checkpoints are kept" in str(error.value)
    for path in (tmp_path / "checkpoints").glob("*"):
        found = load_checkpoint(path)
        assert all(bool(t.isfinite().all()) for t in found.tensors["model"].values())
