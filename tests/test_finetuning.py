"""Fine-tuning: the encoder downstream, heads, losses, the loop and what it survives."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch
from official import Golden, assert_close, golden_files, state_dict_from_official
from refusals import told
from tiny_runs import tiny_run

from exlm_lab.downstream import finetuning
from exlm_lab.downstream.finetuning import FineTuner
from exlm_lab.downstream.heads import (
    ClassificationHead,
    FineTuned,
    SpanHead,
    loss_sum,
)
from exlm_lab.downstream.inputs import framed, padded
from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_mini.config import ModelConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.reading.trained import load
from exlm_mini.training.checkpoint import load_checkpoint, save_checkpoint
from exlm_mini.training.step import DivergedError

HEAD, ENCODER = "classification_heads.h.", "encoder.sentence_encoder."
OURS = {
    "dense.weight": "dense.weight", "dense.bias": "dense.bias",
    "output.weight": "out_proj.weight", "output.bias": "out_proj.bias",
}  # fmt: skip
SPECIAL = SpecialIds()
SMALL = ModelConfig(
    width=16, num_heads=2, ffn_width=16, num_layers=1, max_positions=64, dropout=0.0,
    attention_dropout=0.0, init_std=0.2,
)  # fmt: skip


# ---- the released code's numbers ----


@pytest.mark.parametrize("path", golden_files("finetune*.npz"))
def test_scores_loss_and_gradients_equal_the_released_ones(path):
    golden = Golden(path)
    # Taken out, for the pre-trained model has no such parameters.
    head = {name: golden.arrays.pop(f"param/{HEAD}{theirs}") for name, theirs in OURS.items()}
    exlm = golden.load(ExLM, golden.config)
    classes, width = head["output.weight"].shape
    model = FineTuned(exlm, ClassificationHead(width, classes, 0.0)).eval()
    model.head.load_state_dict(head)
    token_ids_BN = golden["src_tokens"].long()
    scores_BC = model(token_ids_BN)
    assert_close(scores_BC, golden["logits"], "scores")
    loss = loss_sum("classes", scores_BC, golden["target"].long())
    assert_close(loss, golden["loss"], "loss")
    loss.backward()
    expected = golden.group("grad/")
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in expected.values())
    for ours, theirs in OURS.items():
        gradient = model.head.get_parameter(ours).grad
        assert_close(gradient, expected.pop(HEAD + theirs), theirs, floor=floor)
    encoder = state_dict_from_official(
        {n: expected.pop(n) for n in list(expected) if n.startswith(ENCODER)}
    )
    for name, gradient in encoder.items():
        assert_close(exlm.get_parameter(name).grad, gradient, name, floor=floor)
    # What is not used downstream has no gradient there either.
    assert expected and all(not gradient.any() for gradient in expected.values())


# ---- the encoder downstream ----


def rows_of(*rows):
    return padded([framed(row, SPECIAL) for row in rows], SPECIAL.pad)


@pytest.mark.parametrize("expand_at", [0, 1])
@pytest.mark.parametrize("boundary", ["official", "paper"])
def test_exlm_gives_one_state_per_token_that_of_its_first_clone(boundary, expand_at):
    torch.manual_seed(0)
    changes = {"boundary": boundary, "num_layers": 2, "expand_at": expand_at}
    model = ExLM(dataclasses.replace(SMALL, **changes), 30).eval()
    token_ids_BN = rows_of([[7, 8], [9]], [[10]])
    hidden_BND = FineTuned(model, torch.nn.Identity()).hidden(token_ids_BN)
    nothing_BN = torch.zeros_like(token_ids_BN, dtype=torch.bool)
    whole_BTD, _ = model.encode(token_ids_BN, nothing_BN, token_ids_BN)
    k = 4 if boundary == "official" else 1
    # [BOS] 7 8 [EOS] [EOS] 9 [EOS]
    places = [0, k, k + 1, k + 2, 2 * k + 2, 3 * k + 2, 3 * k + 3]
    assert whole_BTD.shape[1] == 4 * k + 3
    assert torch.equal(hidden_BND[0], whole_BTD[0, places])


def test_repeated_mlm_reads_the_first_copy_of_every_token():
    torch.manual_seed(0)
    model = MaskedLM(SMALL, 30).eval()
    token_ids_BN = rows_of([[7, 8, 9]], [[10]])
    hidden_BND = FineTuned(model, torch.nn.Identity(), 3).hidden(token_ids_BN)
    whole_BTD = model.encode(token_ids_BN.repeat_interleave(3, dim=1))
    assert torch.equal(hidden_BND, whole_BTD[:, ::3])


def test_only_encoder_and_head_are_trained():
    model = FineTuned(ExLM(SMALL, 30), ClassificationHead(16, 2, 0.0))
    assert {name.partition(".")[0] for name in model.state_dict()} == {"encoder", "head"}
    model(rows_of([[7, 8]])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_span_never_lies_on_padding():
    torch.manual_seed(0)
    model = FineTuned(ExLM(SMALL, 30), SpanHead(16, 0.0, SPECIAL.pad)).eval()
    token_ids_BN = rows_of([[7]], [[7, 8, 9]])
    scores_B2N = model(token_ids_BN)
    is_pad_BN = token_ids_BN == SPECIAL.pad
    assert torch.equal(torch.isinf(scores_B2N), is_pad_BN.unsqueeze(1).expand_as(scores_B2N))


def share_dropped(values: torch.Tensor, p: float) -> bool:
    """Zeros are a share p of the values, within four standard errors, and others are all alike."""
    is_dropped = values == 0
    assert values[~is_dropped].unique().numel() == 1
    return abs(is_dropped.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / values.numel())


@torch.no_grad()
def test_heads_drop_before_every_layer_of_theirs():
    p, width = 0.3, 64
    hidden_BND, token_ids_BN = torch.ones(200, 1, width), torch.ones(200, 1, dtype=torch.int64)
    eye, zero = torch.eye(width), torch.zeros(width)
    weights = {
        "dense.weight": eye, "dense.bias": zero, "output.weight": eye, "output.bias": zero,
    }  # fmt: skip
    head = ClassificationHead(width, width, p)
    head.load_state_dict(weights)
    # Twice: before the dense layer, and before the last.
    assert share_dropped(head(hidden_BND, token_ids_BN), 1 - (1 - p) ** 2)
    head.load_state_dict({**weights, "dense.weight": 0 * eye, "dense.bias": zero + 1})
    assert share_dropped(head(hidden_BND, token_ids_BN), p)
    span = SpanHead(2, p, SPECIAL.pad)
    span.load_state_dict({"output.weight": torch.eye(2), "output.bias": torch.zeros(2)})
    assert share_dropped(span(torch.ones(9, 700, 2), torch.ones(9, 700)), p)
    assert not (head.eval()(hidden_BND, token_ids_BN) == 0).any()


# ---- losses ----


LOG_SHARES = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.125, 0.75]]))


@pytest.mark.parametrize(
    ("kind", "scores", "labels", "expected"),
    [
        ("classes", LOG_SHARES, torch.tensor([1, 2]), -math.log(0.25) - math.log(0.75)),
        ("number", torch.tensor([[0.5], [2.0]]), torch.tensor([0.0, 1.0]), 1.25),
        ("labels", torch.zeros(1, 2), torch.tensor([[1.0, 0.0]]), 2 * math.log(2)),
        ("span", LOG_SHARES[None], torch.tensor([[0, 2]]), -math.log(0.5 * 0.75) / 2),
    ],
)
def test_a_loss_is_that_of_its_kind_and_never_rounded_to_half(kind, scores, labels, expected):
    assert loss_sum(kind, scores, labels).item() == pytest.approx(expected)
    halves = scores.bfloat16()
    rounded = loss_sum(kind, halves, labels)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(loss_sum(kind, halves.double(), labels).item())


# ---- the loop ----

TASK = Task("which", "classes", ("no", "yes"), "accuracy", "smiles")


def molecules(count, seed):
    """Chains of carbon; yes where there is an oxygen."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, count)
    texts = [("C" * int(rng.integers(2, 8)) + ("O" if yes else "C"),) for yes in labels]
    return Examples(texts, labels)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return load_pretrained(
        tiny_run(tmp_path_factory.mktemp("runs") / "smiles", "smiles"), print
    )


@pytest.fixture(scope="module")
def problem(pretrained):
    splits = Splits(molecules(40, 0), molecules(30, 1), molecules(30, 2), {})
    return make_problem(TASK, splits, pretrained)


CONFIG = TuneConfig(epochs=4, batch_size=8, learning_rate=1e-2, pooler_dropout=0.1)


def tuned(pretrained, problem, directory, config=CONFIG, seed=1, should_stop=lambda: False):
    tuner = FineTuner(pretrained, problem, config, seed, directory, "cpu")
    return tuner.run(should_stop=should_stop), tuner


def test_an_easy_task_is_learnt(pretrained, problem, tmp_path):
    config = dataclasses.replace(CONFIG, epochs=12)
    _, tuner = tuned(pretrained, problem, tmp_path, config)
    assert tuner.metrics["test"]["accuracy"] > 0.9
    reached = [record["validation"]["accuracy"] for record in tuner.history]
    assert tuner.best_epoch == 1 + reached.index(max(reached))
    assert tuner.metrics["validation"]["accuracy"] == max(reached)


def test_the_weights_of_the_first_best_epoch_are_kept_and_scored(pretrained, problem, tmp_path):
    marks = iter([0.2, 0.9, 0.9, 0.1])
    part = problem.parts["validation"]
    judged = part._replace(judge=lambda scores: {"accuracy": next(marks, 0.0)})
    problem = problem._replace(parts={"validation": judged})
    tuner = FineTuner(pretrained, problem, CONFIG, 1, tmp_path, "cpu")
    weights, losses = [], []

    def look(progress):
        losses.append(progress.loss)
        if progress.evaluation is not None:
            weights.append({n: t.clone() for n, t in tuner.model.state_dict().items()})

    tuner.run(look)
    assert tuner.best_epoch == 2
    for name, tensor in tuner.model.state_dict().items():
        assert torch.equal(tensor, weights[1][name]), name
    assert all(map(np.array_equal, tuner.scores["validation"], tuner.score(part)))
    assert [record["loss"] for record in tuner.history] == pytest.approx(
        np.array(losses).reshape(4, 5).mean(axis=1)
    )


@pytest.mark.parametrize("after", [3, 5])
def test_a_stopped_run_ends_like_one_that_was_not(pretrained, problem, tmp_path, after):
    _, reference = tuned(pretrained, problem, tmp_path / "whole")
    steps = iter(range(1, 100))
    stopped, _ = tuned(
        pretrained, problem, tmp_path / "cut", should_stop=lambda: next(steps) == after
    )
    assert (stopped.is_complete, stopped.step) == (False, after)
    resumed, tuner = tuned(pretrained, problem, tmp_path / "cut")
    assert resumed.is_complete
    assert tuner.history == reference.history
    for name, tensor in reference.model.state_dict().items():
        assert torch.equal(tensor, tuner.model.state_dict()[name]), name
    for name, scores in reference.scores.items():
        assert all(map(np.array_equal, scores, tuner.scores[name]))
    _, other = tuned(pretrained, problem, tmp_path / "other", seed=2)
    assert [r["loss"] for r in other.history] != [r["loss"] for r in tuner.history]


def test_a_checkpoint_of_other_settings_is_refused(pretrained, problem, tmp_path):
    tuned(pretrained, problem, tmp_path, should_stop=lambda: True)
    other = dataclasses.replace(CONFIG, learning_rate=1e-3)
    told(lambda: tuned(pretrained, problem, tmp_path, other), tmp_path, "another config")
    told(lambda: tuned(pretrained, problem, tmp_path, seed=2), tmp_path, "another seed")
    others = pretrained._replace(sha256="0"), problem._replace(sha256="0")
    told(lambda: tuned(others[0], problem, tmp_path), tmp_path, "another pretrained")
    told(lambda: tuned(pretrained, others[1], tmp_path), tmp_path, "another problem")


def test_small_pieces_of_a_batch_sum_up_to_it(pretrained, problem, tmp_path):
    still = dataclasses.replace(
        CONFIG, epochs=1, dropout=0.0, attention_dropout=0.0, pooler_dropout=0.0
    )
    _, one = tuned(pretrained, problem, tmp_path / "whole", still)
    pieces = dataclasses.replace(still, micro_batch_size=3)
    _, two = tuned(pretrained, problem, tmp_path / "parts", pieces)
    assert two.history[0]["loss"] == pytest.approx(one.history[0]["loss"], rel=1e-4)
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(tensor, two.model.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_what_is_not_finite_stops_the_run(pretrained, problem, tmp_path):
    tuner = FineTuner(pretrained, problem, CONFIG, 1, tmp_path / "loss", "cpu")
    with torch.no_grad():
        tuner.model.head.output.bias.fill_(math.nan)
    with pytest.raises(DivergedError, match=r"step 1: .*which lower learning_rate \(0\.01\)"):
        tuner.run()
    tuner = FineTuner(pretrained, problem, CONFIG, 1, tmp_path / "gradient", "cpu")
    tuner.model.head.output.weight.register_hook(lambda gradient: math.inf * gradient)
    with pytest.raises(DivergedError, match=r"loss 0\.\d+, gradient norm (inf|nan) at step 1"):
        tuner.run()
    # One step per epoch: the loss of the only step was still a number.
    config = dataclasses.replace(CONFIG, epochs=1, batch_size=40, learning_rate=1e29)
    tuner = FineTuner(pretrained, problem, config, 1, tmp_path / "weights", "cpu")
    with pytest.raises(DivergedError, match="scores are not finite"):
        tuner.run()


def test_missing_labels_do_not_count_in_the_loss(pretrained, problem, tmp_path):
    labels = np.where(np.arange(40) % 3 == 0, np.nan, problem.train.labels)[:, None]
    task = problem.task._replace(kind="labels")
    train = problem.train._replace(labels=labels)
    part = problem.parts["validation"]._replace(judge=lambda scores: {"accuracy": 0.5})
    parts = {"validation": part}
    problem = problem._replace(task=task, num_outputs=1, train=train, parts=parts)
    still = {"dropout": 0.0, "attention_dropout": 0.0, "pooler_dropout": 0.0}
    config = dataclasses.replace(CONFIG, batch_size=40, micro_batch_size=16, **still)
    tuner = FineTuner(pretrained, problem, config, 1, tmp_path, "cpu")
    (scores_R,) = torch.from_numpy(np.stack(tuner.score(train))).T
    is_there_R = torch.from_numpy(~np.isnan(labels[:, 0]))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        scores_R[is_there_R], torch.from_numpy(labels[:, 0]).float()[is_there_R]
    )
    losses = []
    tuner.run(lambda progress: losses.append(progress.loss), should_stop=lambda: True)
    assert losses == [pytest.approx(expected.item(), rel=1e-5)]


def test_a_run_that_is_killed_goes_on_from_an_epoch(pretrained, problem, tmp_path):
    def die(progress):
        if progress.step == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FineTuner(pretrained, problem, CONFIG, 1, tmp_path, "cpu").run(die)
    steps = []
    FineTuner(pretrained, problem, CONFIG, 1, tmp_path, "cpu").run(steps.append)
    assert steps[0].step == 6, "the first epoch has five steps, and was saved"
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]


def test_tokens_are_repeated_as_in_pretraining(problem, tmp_path):
    run = tiny_run(tmp_path / "run", "smiles", "repeated-mlm")
    repeated = load_pretrained(run, print)
    model = FineTuner(repeated, problem, CONFIG, 1, tmp_path, "cpu").model
    assert model.num_copies == repeated.config.masking.num_copies == 2


@pytest.mark.parametrize("is_dropped", [True, False])
def test_dropout_is_drawn_anew_in_every_piece_of_every_step(
    pretrained, problem, tmp_path, monkeypatch, is_dropped
):
    # The same row each time, and nothing learned: all that can differ.
    monkeypatch.setattr(
        finetuning, "training_batches", lambda *_: [np.zeros(8, dtype=np.int64)] * 5
    )
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "pooler_dropout": 0.0}
    config = dataclasses.replace(
        CONFIG,
        epochs=1,
        learning_rate=1e-12,
        micro_batch_size=4,
        **({} if is_dropped else dropouts),
    )
    tuner = FineTuner(pretrained, problem, config, 1, tmp_path, "cpu")
    found = []

    def note(model, inputs, scores):
        if model.training:
            found.append(round(scores.sum().item(), 5))

    tuner.model.register_forward_hook(note)
    tuner.run()
    assert len(found) == 5 * 2
    assert len(set(found)) == (5 * 2 if is_dropped else 1)


def test_numbers_are_trained_as_shares_of_the_largest(pretrained, tmp_path):
    task = Task("how long", "number", (), "spearman", "smiles")

    def chains(lengths):
        texts = [("C" * n,) for n in lengths]
        return Examples(texts, 10.0 * np.array(lengths))

    splits = Splits(chains([1, 2, 3, 4, 5, 6, 7, 8]), chains([2, 4, 6]), None, {})
    problem = make_problem(task, splits, pretrained)
    assert problem.train.labels.min() == 1 / 8 and problem.train.labels.max() == 1
    scores = [np.array([0.25]), np.array([0.5]), np.array([1.0])]
    assert problem.parts["validation"].judge(scores)["spearman"] == pytest.approx(1.0)


# ---- problems ----


def with_train(examples):
    return Splits(examples, molecules(4, 1), None, {})


def test_a_vocabulary_of_other_data_is_refused(pretrained):
    strange = Examples([("[Xe][Rn]",)] * 4, np.array([0, 1, 0, 1]))
    told(
        lambda: make_problem(TASK, with_train(strange), pretrained),
        "100.0%", "vocabulary", "[Xe], [Rn]", "--max-unknown",
    )  # fmt: skip
    assert make_problem(TASK, with_train(strange), pretrained, 1.0).train.rows


def test_the_hash_of_a_problem_names_its_data(pretrained):
    def digest(train):
        return make_problem(TASK, with_train(train), pretrained).sha256

    train = molecules(8, 0)
    flipped = train._replace(labels=1 - train.labels)
    assert digest(train) == digest(molecules(8, 0))
    assert len({digest(train), digest(flipped), digest(molecules(8, 3))}) == 3


@pytest.mark.gpu
def test_a_run_on_a_gpu_learns_too(pretrained, problem, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    config = dataclasses.replace(CONFIG, epochs=12)
    tuner = FineTuner(pretrained, problem, config, 1, tmp_path, "cuda")
    tuner.run()
    assert tuner.metrics["test"]["accuracy"] > 0.9


@pytest.mark.parametrize(
    "change",
    [
        lambda t, s: s.pop("history"),
        lambda t, s: s.update(best_epoch=9),
        lambda t, s: t["best"].pop("head.output.bias"),
        lambda t, s: t["model"].update({"head.output.bias": torch.ones(7)}),
    ],
)
def test_a_checkpoint_that_is_intact_and_wrong_is_told_by_its_name(
    change, pretrained, problem, tmp_path
):
    steps = iter(range(1, 99))
    tuned(pretrained, problem, tmp_path, should_stop=lambda: next(steps) == 7)
    found = load_checkpoint(tmp_path / "checkpoints" / "step-000007")
    change(found.tensors, found.state)
    save_checkpoint(tmp_path / "checkpoints", 7, found.tensors, found.state)
    with pytest.raises(UserError, match=r"step-000007|checkpoint"):
        tuned(pretrained, problem, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda t, s: s["config"]["model"].update(width=20_000, num_heads=2),
        lambda t, s: t["model"].pop("head.bias"),
        lambda t, s: s["special_ids"].update(unk="3"),
    ],
)
def test_a_model_that_is_intact_and_wrong_is_told_by_its_name(change, pretrained, tmp_path):
    stored = load_checkpoint(pretrained.path)
    change(stored.tensors, stored.state)
    shutil.copytree(pretrained.path.parents[1] / "data", tmp_path / "data")
    save_checkpoint(tmp_path / "checkpoints", 3, stored.tensors, stored.state)
    told(lambda: load_pretrained(tmp_path, print), tmp_path)
    told(lambda: load(tmp_path), tmp_path)
