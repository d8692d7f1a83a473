"""Fine-tuning of one model on one task with one seed, by the ``Trainer`` of transformers (§5).

Nothing is masked downstream, but the encoder treats rows as in pre-training: ExLM with the official
boundary clones [BOS] and [EOS] k times, and Repeated MLM repeats every token (Appendix B.2).

Shapes: R rows, B rows of a batch, N tokens of a row, C outputs of the head.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import SequentialSampler
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import exlm_mini.hf as hf
from exlm_lab.downstream.inputs import batch_of
from exlm_lab.downstream.prepared import Part, Problem, identity_of
from exlm_lab.downstream.saving import digest_of, intact_checkpoint
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.ledger import MADE_AGAIN, StoppedError, check_identity
from exlm_mini.data.files import read_json, write_json
from exlm_mini.reading.trained import Trained
from exlm_mini.training.console import Progress
from exlm_mini.training.processes import choose_device, is_in_bf16
from exlm_mini.training.step import DivergedError

EVALUATION_ROWS = 64
RUN = "run.json"
"""What a directory was made with, and the seconds that were spent there."""


class Tuned(NamedTuple):
    """A finished run; its model has the weights of the best epoch."""

    model: Any
    """For transformers."""
    metrics: dict[str, dict[str, float]]
    """Of every part, by the weights of the best epoch."""
    best_epoch: int
    """From 1, chosen on the validation rows; of equals the first."""
    history: list[dict[str, Any]]
    """Number, mean training loss and evaluation of each epoch."""
    steps: int
    parameters: int
    """Of the encoder and the head."""
    seconds: float
    """Of all starts."""


def model_for(pretrained: Trained, problem: Problem, config: TuneConfig, seed: int) -> Any:
    """The pre-trained encoder with a new head for a task."""
    kind = problem.task.kind
    classes = (
        hf.ExLMForQuestionAnswering if kind == "span" else hf.ExLMForSequenceClassification
    )
    run, tokenizer = pretrained.config, pretrained.tokenizer
    dropout = {"dropout": config.dropout, "attention_dropout": config.attention_dropout}
    settings = hf.ExLMConfig(
        asdict(run.model) | dropout, run.objective, run.num_copies,
        special_ids=tokenizer.special_ids._asdict(), vocab_size=tokenizer.vocab_size,
        classifier_dropout=config.pooler_dropout, **problem.meaning,
    )  # fmt: skip
    set_seed(seed)
    model = classes(settings)
    model.exlm.load_state_dict(pretrained.model.state_dict())
    return model


def fine_tune(
    pretrained: Trained,
    problem: Problem,
    config: TuneConfig,
    seed: int,
    directory: Path,
    device: str = "auto",
    on_progress: Callable[[Progress], None] = lambda progress: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Tuned:
    """Fine-tune, evaluated after each epoch by the task's metrics on the validation rows.

    Raises:
        StoppedError: if it was asked to stop.
        DivergedError: if a loss or a score is not finite.
    """
    chosen, start = choose_device(device), time.monotonic()
    identity, run = identity_of(pretrained, problem, config, seed), directory / RUN
    before: dict[str, Any] = {"identity": identity, "seconds": 0.0, "sha256": {}}
    if run.exists():
        before = read_json(run, MADE_AGAIN)
        remedy = "use the same settings, or choose another --output"
        check_identity(run, before["identity"], identity, remedy)
    directory.mkdir(parents=True, exist_ok=True)

    def note() -> float:
        seconds = before["seconds"] + time.monotonic() - start
        saved = {path.name: digest_of(path) for path in directory.glob("checkpoint-*")}
        record = {"identity": identity, "seconds": seconds, "sha256": saved}
        write_json(run, record)
        return seconds

    checkpoint = intact_checkpoint(directory, before["sha256"])
    note()
    watcher = _Watcher(on_progress, should_stop, note)
    trainer = _trainer(pretrained, problem, config, seed, directory, chosen, watcher)
    trainer.train(resume_from_checkpoint=checkpoint)
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    metrics = {name: part.judge(_scores(trainer, part)) for name, part in problem.parts.items()}
    history = [
        {
            "epoch": n,
            "loss": loss,
            "validation": {k: line[f"eval_{k}"] for k in metrics["validation"]},
        }
        for n, (loss, line) in enumerate(zip(losses, evaluations, strict=True), start=1)
    ]
    reached = [line[f"eval_{problem.task.metric}"] for line in evaluations]
    model: Any = trainer.model
    if problem.task.is_number.any():  # from now on the head speaks in their units
        with torch.no_grad():
            output, spread = model.heads[-1], torch.as_tensor(problem.spread).to(model.device)
            output.weight *= spread[:, None]
            output.bias.mul_(spread).add_(torch.as_tensor(problem.center).to(model.device))
    trained = [*model.exlm.encoder.parameters(), *model.heads.parameters()]
    return Tuned(
        model,
        metrics,
        1 + int(np.argmax(reached)),
        history,
        trainer.state.global_step,
        sum(parameter.numel() for parameter in trained),
        note(),
    )


def seconds_per_step(
    pretrained: Trained, problem: Problem, config: TuneConfig, device: torch.device
) -> float:
    """Seconds of an optimiser step on a device, measured on a batch across the training rows."""
    model = model_for(pretrained, problem, config, 1).to(device).train()
    examples = problem.examples(problem.train)
    spread = examples[:: math.ceil(len(examples) / config.batch_size)]
    batch = batch_of(spread, pretrained.tokenizer.special_ids.pad)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    loss_of, seconds = _loss(problem), []
    for _ in range(3):  # the first allocates
        start = time.monotonic()
        output = model(**batch)
        loss = loss_of(output, batch["labels"]) if loss_of else output.loss
        loss.backward()
        loss.item()  # waits for a GPU
        seconds.append(time.monotonic() - start)
    return min(seconds)


@dataclass(eq=False)
class _Watcher(TrainerCallback):
    """Reports progress, stops when asked, and ends a run whose loss is not finite."""

    on_progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]
    note: Callable[[], float]
    is_stopped: bool = False
    loss: float = math.nan

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_progress(Progress(state.global_step, self.loss, math.nan, None))
        if self.should_stop():
            self.is_stopped = True
            # At the end of an epoch a checkpoint is saved anyway, after the epoch is judged.
            control.should_save = abs(state.epoch - round(state.epoch)) > 1e-9

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        self.loss = logs.get("loss", self.loss)
        if not math.isfinite(logs.get("loss", 0.0)):
            raise DivergedError(_advice(f"the loss before step {state.global_step}", args))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note()
        # Not sooner: a run that is killed goes on from a checkpoint that was noted.
        needed = {
            f"checkpoint-{state.global_step}",
            Path(state.best_model_checkpoint or "").name,
        }
        for checkpoint in Path(args.output_dir).glob("checkpoint-*"):
            if checkpoint.name not in needed:
                shutil.rmtree(checkpoint)
        # To end the training would also end, and judge, its epoch; one that ends anyway is done.
        if self.is_stopped and not control.should_training_stop:
            raise StoppedError


class _Trainer(Trainer):
    """Scores come in the order of the rows, though training sorts them by length."""

    def _get_eval_sampler(self, eval_dataset: Any) -> SequentialSampler:
        return SequentialSampler(eval_dataset)


def _trainer(
    pretrained: Trained,
    problem: Problem,
    config: TuneConfig,
    seed: int,
    directory: Path,
    device: torch.device,
    watcher: _Watcher,
) -> Trainer:
    micro = config.micro_batch_size or config.batch_size
    num_steps = config.epochs * config.steps_per_epoch(problem.train.rows)
    args = TrainingArguments(
        str(directory),
        num_train_epochs=config.epochs,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=config.batch_size // micro,
        per_device_eval_batch_size=EVALUATION_ROWS,
        learning_rate=config.learning_rate,
        warmup_steps=round(config.warmup_share * num_steps),
        adam_beta1=config.adam_betas[0],
        adam_beta2=config.adam_betas[1],
        adam_epsilon=config.adam_eps,
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip_norm,
        train_sampling_strategy="group_by_length",  # little padding
        eval_strategy="epoch",
        save_strategy="epoch",
        restore_callback_states_from_checkpoint=True,  # the count of train.patience
        logging_strategy="epoch",
        logging_nan_inf_filter=False,
        load_best_model_at_end=True,
        metric_for_best_model=problem.task.metric,
        seed=seed,
        use_cpu=device.type == "cpu",
        bf16=is_in_bf16(config.precision, device),
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    part = problem.parts["validation"]

    def judge(predicted: EvalPrediction) -> dict[str, float]:
        scores = _rows(predicted.predictions, part)
        if not all(np.isfinite(row).all() for row in scores):
            raise DivergedError(_advice("a score", args))
        return part.judge(scores)

    pad = pretrained.tokenizer.special_ids.pad
    stopping = [EarlyStoppingCallback(config.patience)] if config.patience else []
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    trainer = _Trainer(
        model_for(pretrained, problem, config, seed),
        args,
        data_collator=lambda rows: batch_of(rows, pad),
        train_dataset=problem.examples(problem.train),
        eval_dataset=problem.examples(part),
        compute_metrics=judge,
        compute_loss_func=_loss(problem),
        callbacks=[watcher, *stopping],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _advice(what: str, args: TrainingArguments) -> str:
    return (
        f"{what} is not finite; lower learning_rate ({args.learning_rate:g}) or weight_decay "
        f"({args.weight_decay:g}), or set clip_norm 1"
    )


def _loss(problem: Problem) -> Any:
    """The loss of a task for ``Trainer``; None: the model knows its own."""
    task = problem.task
    if task.kind in ("classes", "span"):
        return None
    return partial(answers_loss, is_number_C=task.is_number)


def answers_loss(
    output: Any,
    labels_BC: Tensor,
    num_items_in_batch: Any = None,
    is_number_C: np.ndarray | bool = False,
) -> Tensor:
    """Mean over the answers that are there, nan is missing: of a number the squared error, of a
    yes or no the binary cross-entropy."""
    logits_BC, known_BC = output["logits"].float(), labels_BC.nan_to_num()
    loss_BC = torch.where(
        torch.as_tensor(is_number_C, device=labels_BC.device),
        F.mse_loss(logits_BC, known_BC, reduction="none"),
        F.binary_cross_entropy_with_logits(logits_BC, known_BC, reduction="none"),
    )
    return loss_BC[~labels_BC.isnan()].mean()


def _scores(trainer: Trainer, part: Part) -> list[np.ndarray]:
    """The head's output for each row, (C,) or (2, N)."""
    examples: Any = [{"input_ids": row} for row in part.rows]
    return _rows(trainer.predict(examples).predictions, part)


def _rows(predictions: Any, part: Part) -> list[np.ndarray]:
    if isinstance(predictions, tuple):  # start and end, padded to the longest row
        start_RN, end_RN = predictions
        pairs = zip(start_RN, end_RN, part.rows, strict=True)
        return [np.stack([s[: len(row)], e[: len(row)]]) for s, e, row in pairs]
    return list(predictions)
