"""The ``Trainer`` of transformers as fine-tuning uses it: rows, loss, stops, checkpoints.

Shapes: R rows, B rows of a batch, N tokens of a row, C outputs of the head.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    EarlyStoppingCallback,
    EvalPrediction,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging

from exlm_lab.downstream.inputs import batch_of
from exlm_lab.downstream.prepared import Part, Problem
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.ledger import StoppedError
from exlm_mini.training.console import Progress
from exlm_mini.training.processes import is_in_bf16
from exlm_mini.training.step import DivergedError

EVALUATION_ROWS = 64
ORDER = "order.pt"
"""File in a mid-epoch checkpoint: the generator's state before it drew the order of the rows."""


@dataclass(eq=False)
class Watcher(TrainerCallback):
    """Reports progress, stops when asked, and ends a run whose loss is not finite.

    ``note`` is called after each checkpoint that is saved.
    """

    on_progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]
    note: Callable[[], float]
    is_stopped: bool = False
    loss: float = math.nan
    resumed: Tensor | None = None
    """State of torch's generator at the start of the resumed epoch."""
    drawn: Tensor | None = None
    """The same for the epoch in training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.best_global_step:  # in this directory, wherever it was when it was saved
            best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(best)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_progress(Progress(state.global_step, self.loss, math.nan, None))
        if self.should_stop():
            self.is_stopped = True
            # At the end of an epoch a checkpoint is saved anyway, after the evaluation.
            control.should_save = control.should_log = _is_within(state.epoch)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        self.loss = logs.get("loss", self.loss)
        if not math.isfinite(logs.get("loss", 0.0)):
            raise DivergedError(_advice(f"the loss before step {state.global_step}", args))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if _is_within(state.epoch):
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save(self.drawn, folder / ORDER)
        self.note()
        # Not before the note: a killed run resumes only from a checkpoint that was noted.
        needed = {
            f"checkpoint-{state.global_step}",
            Path(state.best_model_checkpoint or "").name,
        }
        for checkpoint in Path(args.output_dir).glob("checkpoint-*"):
            if checkpoint.name not in needed:
                shutil.rmtree(checkpoint)
        # Setting should_training_stop would also end, and evaluate, the epoch, so raise instead.
        # If the training ends here anyway, it is simply done.
        if self.is_stopped and not control.should_training_stop:
            raise StoppedError


class _ByLength(LengthGroupedSampler):
    """Puts rows of similar length together, to pad little; a resumed epoch keeps its order.

    The order is drawn from torch's generator, whose state ``Trainer`` restores only afterwards.
    """

    def __init__(self, batch_size: int, dataset: Any, watcher: Watcher) -> None:
        super().__init__(batch_size, dataset)
        self.watcher = watcher

    def __iter__(self) -> Iterator[int]:
        if self.watcher.resumed is not None:
            torch.set_rng_state(self.watcher.resumed)
            self.watcher.resumed = None
        self.watcher.drawn = torch.get_rng_state()
        return super().__iter__()


class _Trainer(Trainer):
    """Trains on batches of rows of similar length, and scores rows in their own order."""

    def __init__(self, watcher: Watcher, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watcher = watcher
        self.add_callback(watcher)

    def _get_train_sampler(self, train_dataset: Any = None) -> _ByLength:
        own = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return _ByLength(own, train_dataset or self.train_dataset, self.watcher)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """The divisor of a step's loss, over all its micro-batches: the number of known answers,
        see ``answers_loss``, or of rows if the model computes its own loss."""
        if self.compute_loss_func is None:
            return sum(len(batch["input_ids"]) for batch in batch_samples)
        return sum((~batch["labels"].isnan()).sum() for batch in batch_samples).to(device)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Like ``Trainer``'s, but weighs the mean loss of a micro-batch by its number of rows."""
        num_rows = len(inputs["input_ids"])
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.compute_loss_func is not None or return_outputs:
            return loss
        return loss * num_rows * self.current_gradient_accumulation_steps / num_items_in_batch


def make_trainer(
    model: Any,
    pad: int,
    problem: Problem,
    config: TuneConfig,
    seed: int,
    directory: Path,
    device: torch.device,
    watcher: Watcher,
) -> Trainer:
    """A ``Trainer`` that evaluates a model with the task's head on the validation rows after each
    epoch, and saves a checkpoint in ``directory``. The seed is for dropout and the order of rows.
    """
    args = _arguments(problem, config, seed, directory, device)
    part = problem.parts["validation"]

    def judge(predicted: EvalPrediction) -> dict[str, float]:
        scores = rows_of(predicted.predictions, part)
        if not all(np.isfinite(row).all() for row in scores):
            raise DivergedError(_advice("a score", args))
        return part.judge(scores)

    stopping = [EarlyStoppingCallback(config.patience)] if config.patience else []
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    trainer = _Trainer(
        watcher,
        model,
        args,
        data_collator=lambda rows: batch_of(rows, pad),
        train_dataset=problem.examples(problem.train),
        eval_dataset=problem.examples(part),
        compute_metrics=judge,
        compute_loss_func=loss_of(problem),
        callbacks=stopping,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(
    problem: Problem, config: TuneConfig, seed: int, directory: Path, device: torch.device
) -> TrainingArguments:
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
        eval_strategy="epoch",
        save_strategy="epoch",
        restore_callback_states_from_checkpoint=True,  # keeps the count of train.patience
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
    if device.type == "cuda":  # transformers would use all GPUs of the machine
        torch.cuda.set_device(device.index or 0)
        args._n_gpu = 1
        vars(args)["_setup_devices"] = device
    return args


def _advice(what: str, args: TrainingArguments) -> str:
    return (
        f"{what} is not finite; lower learning_rate ({args.learning_rate:g}) or weight_decay "
        f"({args.weight_decay:g}), or set clip_norm 1"
    )


def _is_within(epoch: float) -> bool:
    """Whether training is in the middle of an epoch."""
    return abs(epoch - round(epoch)) > 1e-9


def loss_of(problem: Problem) -> Any:
    """The loss function of a task for ``Trainer``; None if the model computes its own loss."""
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
    """Mean loss of the known answers (nan is unknown): squared error for numbers, binary
    cross-entropy for yes-no answers. ``num_items_in_batch`` is the number of known answers in all
    micro-batches whose losses are added; without it, in this batch alone."""
    logits_BC, known_BC = output["logits"].float(), labels_BC.nan_to_num()
    loss_BC = torch.where(
        torch.as_tensor(is_number_C, device=labels_BC.device),
        F.mse_loss(logits_BC, known_BC, reduction="none"),
        F.binary_cross_entropy_with_logits(logits_BC, known_BC, reduction="none"),
    )
    is_known_BC = ~labels_BC.isnan()
    if num_items_in_batch is None:
        num_items_in_batch = is_known_BC.sum()
    return loss_BC[is_known_BC].sum() / num_items_in_batch


def rows_of(predictions: Any, part: Part) -> list[np.ndarray]:
    """Split the output of ``Trainer.predict`` by rows: scores, or unpadded start and end logits."""
    if isinstance(predictions, tuple):  # start and end, padded to the longest row
        start_RN, end_RN = predictions
        pairs = zip(start_RN, end_RN, part.rows, strict=True)
        return [np.stack([s[: len(row)], e[: len(row)]]) for s, e, row in pairs]
    return list(predictions)
