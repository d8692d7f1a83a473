"""Fine-tuning: agreement with the released head, learning, model selection, stops and errors."""

import itertools
import math
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from official import Golden, assert_close, golden_files, state_dict_from_official
from refusals import told
from safetensors.torch import load_file
from small_tasks import TASK, molecules
from tiny_runs import tiny_run
from torch.nn import functional as F
from transformers import EvalPrediction

import exlm_mini.hf as hf
from exlm_lab.downstream.finetuning import fine_tune, model_for
from exlm_lab.downstream.inputs import padded
from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_lab.downstream.trainer import Watcher, _arguments, answers_loss, make_trainer
from exlm_lab.ledger import StoppedError
from exlm_mini.data.files import read_json, write_json
from exlm_mini.model import ExLM
from exlm_mini.reading.trained import load
from exlm_mini.training.step import DivergedError

HEAD, ENCODER = "classification_heads.h.", "encoder.sentence_encoder."
OURS = {
    "0.weight": "dense.weight", "0.bias": "dense.bias",
    "1.weight": "out_proj.weight", "1.bias": "out_proj.bias",
}  # fmt: skip


@pytest.mark.parametrize("path", golden_files("finetune*.npz"))
def test_scores_loss_and_gradients_equal_the_released_ones(path):
    golden = Golden(path)
    # The head's arrays are taken out: the pre-trained model has no such parameters.
    head = {name: golden.arrays.pop(f"param/{HEAD}{theirs}") for name, theirs in OURS.items()}
    exlm = golden.load(ExLM, golden.config)
    config = hf.ExLMConfig(
        architecture=asdict(exlm.config),
        vocab_size=exlm.encoder.embedding.num_embeddings,
        special_ids=exlm.special_ids._asdict(), num_labels=len(head["1.weight"]),
        problem_type="single_label_classification",
    )  # fmt: skip
    model = hf.ExLMForSequenceClassification(config).to(next(exlm.parameters()).dtype).eval()
    model.exlm = exlm
    model.heads.load_state_dict(head)
    output = model(golden["src_tokens"].long(), labels=golden["target"].long())
    assert_close(output.logits, golden["logits"], "scores")
    loss = output.loss * len(output.logits)  # the released loss is a sum
    assert_close(loss, golden["loss"], "loss")
    loss.backward()
    expected = golden.group("grad/")
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in expected.values())
    for ours, theirs in OURS.items():
        gradient = model.heads.get_parameter(ours).grad
        assert_close(gradient, expected.pop(HEAD + theirs), theirs, floor=floor)
    encoder = state_dict_from_official(
        {n: expected.pop(n) for n in list(expected) if n.startswith(ENCODER)}
    )
    for name, gradient in encoder.items():
        assert_close(exlm.get_parameter(name).grad, gradient, name, floor=floor)
    # In the released code, too, parameters that are not used downstream have no gradient.
    assert expected and all(not gradient.any() for gradient in expected.values())


# ---- a small task ----


@pytest.fixture(scope="module")
def problem(pretrained):
    splits = Splits(molecules(40, 0), molecules(30, 1), molecules(30, 2), {})
    return make_problem(TASK, splits, pretrained)


CONFIG = TuneConfig(epochs=4, batch_size=8, learning_rate=1e-2, pooler_dropout=0.1)


def tuned(pretrained, problem, directory, config=CONFIG, seed=1, **watchers):
    return fine_tune(pretrained, problem, config, seed, directory, "cpu", **watchers)


def trainer_of(pretrained, problem, config, seed, directory):
    """A trainer of transformers that has not made a step yet."""
    model = model_for(pretrained, problem, config, seed)
    watcher = Watcher(print, lambda: False, lambda: 0.0)
    pad, device = pretrained.tokenizer.special_ids.pad, torch.device("cpu")
    return make_trainer(model, pad, problem, config, seed, directory, device, watcher)


def stop_after(step, pretrained, problem, directory):
    """Start a run and stop it after ``step`` steps."""
    steps = itertools.count(1)
    with pytest.raises(StoppedError):
        tuned(pretrained, problem, directory, should_stop=lambda: next(steps) == step)


def test_an_easy_task_is_learnt_and_the_first_best_epoch_is_kept(pretrained, problem, tmp_path):
    run = tuned(pretrained, problem, tmp_path, replace(CONFIG, epochs=12))
    assert run.metrics["test"]["accuracy"] > 0.9
    reached = [record["validation"]["accuracy"] for record in run.history]
    assert len(reached) == 12 and run.steps == 12 * 5
    assert run.best_epoch == 1 + reached.index(max(reached))
    assert run.metrics["validation"]["accuracy"] == max(reached)
    encoder = sum(p.numel() for p in run.model.exlm.encoder.parameters())
    assert run.parameters == encoder + 16 * 16 + 16 + 2 * 16 + 2


def test_every_setting_arrives_at_the_trainer(pretrained, problem, tmp_path):
    config = TuneConfig(
        epochs=3, batch_size=8, micro_batch_size=4, learning_rate=0.04, warmup_share=0.3,
        patience=5,
        dropout=0.15, attention_dropout=0.2, pooler_dropout=0.25, adam_betas=(0.6, 0.75),
        adam_eps=1e-3, weight_decay=0.3, clip_norm=0.05, precision="bf16",
    )  # fmt: skip
    own, default = vars(config), vars(TuneConfig())
    assert not [name for name in own if own[name] == default[name]]
    trainer = trainer_of(pretrained, problem, config, 7, tmp_path)
    args, model = trainer.args, trainer.model.config
    assert (args.seed, args.num_train_epochs, args.learning_rate) == (7, 3, 0.04)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.6, 0.75, 1e-3)
    assert (args.weight_decay, args.max_grad_norm, args.bf16) == (0.3, 0.05, True)
    (stopping,) = (c for c in trainer.callback_handler.callbacks if "Early" in type(c).__name__)
    assert stopping.early_stopping_patience == 5
    assert args.warmup_steps == round(0.3 * 3 * 5) and args.lr_scheduler_type == "linear"
    assert (model.dropout, model.attention_dropout, model.classifier_dropout) == (
        0.15, 0.2, 0.25,
    )  # fmt: skip


def test_scores_stand_in_the_order_of_the_rows(pretrained, problem, tmp_path):
    run = tuned(pretrained, problem, tmp_path, replace(CONFIG, epochs=1))
    part, scores = problem.parts["test"], []
    run.model.eval()
    with torch.no_grad():
        for row in part.rows:  # one at a time, without padding
            scores.append(run.model(torch.from_numpy(row).long()[None]).logits[0].numpy())
    assert part.judge(scores) == run.metrics["test"]


def test_a_stopped_run_ends_like_one_that_was_not(pretrained, problem, tmp_path):
    whole = tuned(pretrained, problem, tmp_path / "whole")
    for after in (8, 5):  # within the second epoch, and at the end of one
        stop_after(after, pretrained, problem, tmp_path / str(after))
        resumed = tuned(pretrained, problem, tmp_path / str(after))
        validations = [[r["validation"] for r in run.history] for run in (whole, resumed)]
        assert validations[0] == validations[1]
        losses = [[r["loss"] for r in run.history] for run in (whole, resumed)]
        assert losses[0] == pytest.approx(losses[1])
        torch.testing.assert_close(whole.model.state_dict(), resumed.model.state_dict())


def test_a_run_that_is_killed_goes_on_from_an_epoch(pretrained, problem, tmp_path):
    def die(progress):
        if progress.step == 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuned(pretrained, problem, tmp_path, on_progress=die)
    steps = []
    run = tuned(pretrained, problem, tmp_path, on_progress=steps.append)
    assert steps[0].step == 11, "an epoch has five steps, and the second was saved"
    assert len(run.history) == 4


def test_a_damaged_checkpoint_is_told_by_its_name(pretrained, problem, tmp_path):
    stop_after(2, pretrained, problem, tmp_path)
    for file in ("model.safetensors", "scheduler.pt", "trainer_state.json"):
        path = tmp_path / "checkpoint-2" / file
        whole = path.read_bytes()
        path.write_bytes(whole[:100])
        told(lambda: tuned(pretrained, problem, tmp_path), "checkpoint-2", "sha256", "restore")
        path.write_bytes(whole)


def test_neither_half_a_checkpoint_nor_what_is_left_of_an_old_one_does_harm(
    pretrained, problem, tmp_path
):
    stop_after(5, pretrained, problem, tmp_path)
    for other in ("checkpoint-1", "checkpoint-9"):
        shutil.copytree(tmp_path / "checkpoint-5", tmp_path / other)
    (tmp_path / "checkpoint-9" / "optimizer.pt").write_bytes(b"cut")
    record = read_json(tmp_path / "run.json", "")
    record["sha256"]["checkpoint-1"] = "of all its files, when they were there"
    write_json(tmp_path / "run.json", record)
    seen = []
    run = tuned(pretrained, problem, tmp_path, on_progress=seen.append)
    assert seen[0].step == 6 and len(run.history) == 4
    assert not (tmp_path / "checkpoint-1").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_stops_the_run(value, pretrained, problem, tmp_path):
    trainer = trainer_of(pretrained, problem, CONFIG, 1, tmp_path)
    scores_RC = np.zeros((len(problem.parts["validation"].rows), 2))
    scores_RC[3, 1] = value
    with pytest.raises(DivergedError, match=r"^a score is not finite; lower learning_rate"):
        trainer.compute_metrics(EvalPrediction(scores_RC, None))


def test_the_seconds_of_all_starts_are_counted(pretrained, problem, tmp_path):
    stop_after(1, pretrained, problem, tmp_path)
    record = read_json(tmp_path / "run.json", "")
    write_json(tmp_path / "run.json", {**record, "seconds": 1000.0})
    assert tuned(pretrained, problem, tmp_path).seconds > 1000


def test_a_directory_of_another_run_is_refused(pretrained, problem, tmp_path):
    stop_after(1, pretrained, problem, tmp_path)
    other = replace(CONFIG, learning_rate=1e-3)
    told(lambda: tuned(pretrained, problem, tmp_path, other), tmp_path, "another config")
    told(lambda: tuned(pretrained, problem, tmp_path, seed=2), tmp_path, "another seed")
    others = replace(pretrained, sha256="0"), problem._replace(sha256="0")
    told(lambda: tuned(others[0], problem, tmp_path), tmp_path, "another pretrained")
    told(lambda: tuned(pretrained, others[1], tmp_path), tmp_path, "another problem")


def test_a_loss_that_is_not_finite_stops_the_run(pretrained, problem, tmp_path):
    config = replace(CONFIG, epochs=2, batch_size=8, learning_rate=1e29)
    with pytest.raises(DivergedError, match=r"the loss before step .* \(1e\+29\)"):
        tuned(pretrained, problem, tmp_path, config)


def test_missing_labels_do_not_count_in_the_loss():
    labels_BC = torch.tensor([[1.0, math.nan], [math.nan, 0.0], [0.0, 1.0]])
    logits_BC = torch.tensor([[0.5, 9.0], [-9.0, 1.0], [2.0, -1.0]], requires_grad=True)
    loss = answers_loss({"logits": logits_BC}, labels_BC)
    each = [
        F.softplus(torch.tensor(-x if y else x))
        for x, y in ((0.5, 1), (1.0, 0), (2.0, 0), (-1.0, 1))
    ]
    assert loss.item() == pytest.approx(sum(each).item() / 4)
    loss.backward()
    assert logits_BC.grad[0, 1] == logits_BC.grad[1, 0] == 0
    mixed = answers_loss({"logits": logits_BC}, labels_BC, is_number_C=np.array([False, True]))
    squares = (1.0 - 0.0) ** 2 + (-1.0 - 1.0) ** 2
    assert mixed.item() == pytest.approx((each[0].item() + each[2].item() + squares) / 4)


@pytest.mark.parametrize("kind", ["labels", "classes"])
def test_micro_batches_add_up_to_the_whole_batch(kind, pretrained, tmp_path):
    """This includes the last step of an epoch, which has only five rows."""
    metric = {"labels": "roc_auc", "classes": "accuracy"}[kind]
    task = Task("which", kind, ("odd", "long"), metric, "smiles")
    labels = np.array([[n % 2, n > 5] for n in range(13)], dtype=float)
    labels[1:9, 1], labels[9:, 0] = np.nan, np.nan
    if kind == "classes":
        labels = np.arange(13) % 2
    examples = Examples([("C" * (1 + n),) for n in range(13)], labels)
    problem = make_problem(task, Splits(examples, examples, None, {}), pretrained)
    base = TuneConfig(epochs=2, batch_size=8, adam_eps=0.1, clip_norm=0.5)
    whole, parts = (
        tuned(pretrained, problem, tmp_path / f"{micro}", replace(base, micro_batch_size=micro))
        for micro in (8, 2)
    )
    torch.testing.assert_close(
        dict(whole.model.state_dict()), dict(parts.model.state_dict()), rtol=1e-3, atol=1e-5
    )
    losses = [[epoch["loss"] for epoch in run.history] for run in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_of_several_gpus_only_the_named_one_is_used(problem, tmp_path, monkeypatch):
    for name, value in (("is_available", True), ("device_count", 2), ("set_device", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    device = torch.device("cuda:1")
    args = _arguments(problem, replace(CONFIG, precision="fp32"), 1, tmp_path, device)
    assert (args.device, args.n_gpu, args.train_batch_size) == (device, 1, CONFIG.batch_size)


def test_numbers_are_trained_standardised_and_given_back_in_their_units(pretrained, tmp_path):
    task = Task("how long", "numbers", ("length", "size"), "r2", "smiles")

    def chains(lengths):
        labels = np.stack([1000.0 + 10 * np.array(lengths), np.array(lengths) / 1e3], axis=1)
        labels[::3, 1] = np.nan
        return Examples([("C" * n,) for n in lengths], labels)

    splits = Splits(chains(list(range(1, 9)) * 4), chains([2, 4, 6]), None, {})
    problem = make_problem(task, splits, pretrained)
    labels_RC = problem.train.labels
    np.testing.assert_allclose(np.nanmean(labels_RC, axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(np.nanstd(labels_RC, axis=0), 1)
    part = problem.parts["validation"]
    perfect = part.judge(list(np.nan_to_num(part.labels)))
    assert perfect["r2"] == 1 and perfect["rmse length"] == pytest.approx(0)
    run = tuned(pretrained, problem, tmp_path, replace(CONFIG, epochs=30))
    assert run.metrics["validation"]["r2"] > 0.8
    rows_BN = padded(part.rows, 0)
    with torch.no_grad():
        said_RC = run.model.eval()(rows_BN).logits.numpy()
    error_R = said_RC[:, 0] - splits.validation.labels[:, 0]
    rmse = run.metrics["validation"]["rmse length"]
    assert np.sqrt(np.mean(error_R**2)) == pytest.approx(rmse, rel=1e-3)


@pytest.mark.parametrize("after", [13, 15])  # within the last epoch, and at its end
def test_a_run_without_progress_is_ended_and_keeps_its_first_weights(
    pretrained, problem, tmp_path, after
):
    # At this learning rate the model predicts one class for all rows.
    config = replace(CONFIG, epochs=9, patience=2, learning_rate=0.3, warmup_share=0.0)
    steps, started = itertools.count(1), tmp_path / "started"
    try:
        run = tuned(
            pretrained, problem, started, config, should_stop=lambda: next(steps) == after
        )
    except StoppedError:
        run = tuned(pretrained, problem, started, config)
    assert (run.best_epoch, len(run.history)) == (1, 3)
    saved = load_file(started / "checkpoint-5" / "model.safetensors")
    # Cut off after its last checkpoint and moved, it ends no differently.
    moved = tuned(pretrained, problem, started.rename(tmp_path / "moved"), config)
    assert (moved.metrics, moved.history) == (run.metrics, run.history)
    for model in (run.model, moved.model):
        torch.testing.assert_close(dict(model.state_dict()), saved)


def test_tokens_are_repeated_as_in_pretraining(problem, tmp_path):
    run = tiny_run(tmp_path / "run", "smiles", "repeated-mlm")
    repeated = load(run, print)
    model = model_for(repeated, problem, CONFIG, 1)
    assert model.config.num_copies == repeated.config.masking.num_copies == 2


@pytest.mark.gpu
def test_a_run_on_a_gpu_learns_too(pretrained, problem, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    run = fine_tune(pretrained, problem, replace(CONFIG, epochs=12), 1, tmp_path, "cuda")
    assert run.metrics["test"]["accuracy"] > 0.9
