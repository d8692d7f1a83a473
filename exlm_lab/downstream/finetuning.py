"""Fine-tune one model on one task with one seed, using the ``Trainer`` of transformers (§5).

Nothing is masked downstream, but the encoder treats rows as in pre-training: ExLM with the official
boundary gives [BOS] and [EOS] k states each, and Repeated MLM repeats every token (Appendix B.2).

Shapes: R rows, B rows of a batch, N tokens of a row, C outputs of the head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import TrainerState, set_seed

import exlm_mini.hf as hf
from exlm_lab.downstream.inputs import batch_of
from exlm_lab.downstream.prepared import ANOTHER_OUTPUT, Problem, identity_of
from exlm_lab.downstream.saving import digest_of, intact_checkpoint
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.downstream.trainer import ORDER, Watcher, loss_of, make_trainer, rows_of
from exlm_lab.ledger import MADE_AGAIN, check_identity
from exlm_mini.data.files import read_json, write_json
from exlm_mini.reading.trained import Trained
from exlm_mini.training.console import Progress
from exlm_mini.training.processes import choose_device

RUN = "run.json"
"""File that says what a run's directory was made with, and how many seconds were spent so far."""


class Tuned(NamedTuple):
    """A finished run; its model has the weights of the best epoch."""

    model: Any
    """A transformers model: the encoder with the head of the task."""
    metrics: dict[str, dict[str, float]]
    """Metrics of every part, by the part's name."""
    best_epoch: int
    """Counted from 1; best on the validation rows, the first one on a tie."""
    history: list[dict[str, Any]]
    """Number, mean training loss and validation metrics of each epoch."""
    steps: int
    parameters: int
    """Number of parameters in the encoder and the head."""
    seconds: float
    """Time spent on the run, summed over all its starts if it was resumed."""


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
    """Fine-tune a model, evaluating it on the validation rows after each epoch.

    A run that was stopped resumes from its last checkpoint in ``directory``.

    Raises:
        StoppedError: if ``should_stop`` asked it to stop.
        DivergedError: if a loss or a score is not finite.
    """
    chosen, start = choose_device(device), time.monotonic()
    identity, run = identity_of(pretrained, problem, config, seed), directory / RUN
    before: dict[str, Any] = {"identity": identity, "seconds": 0.0, "sha256": {}}
    if run.exists():
        before = read_json(run, MADE_AGAIN)
        check_identity(run, before["identity"], identity, ANOTHER_OUTPUT)
    directory.mkdir(parents=True, exist_ok=True)

    def note() -> float:
        seconds = before["seconds"] + time.monotonic() - start
        saved = {path.name: digest_of(path) for path in directory.glob("checkpoint-*")}
        record = {"identity": identity, "seconds": seconds, "sha256": saved}
        write_json(run, record)
        return seconds

    checkpoint = intact_checkpoint(directory, before["sha256"])
    note()
    watcher = Watcher(on_progress, should_stop, note)
    if checkpoint and (order := Path(checkpoint) / ORDER).exists():
        watcher.resumed = torch.load(order)
    trainer = make_trainer(
        model_for(pretrained, problem, config, seed), pretrained.tokenizer.special_ids.pad,
        problem, config, seed, directory, chosen, watcher,
    )  # fmt: skip
    if checkpoint:
        state = TrainerState.load_from_json(str(Path(checkpoint) / "trainer_state.json"))
        if state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"]:
            trainer.args.num_train_epochs = round(state.epoch or 0)  # patience had run out
    trainer.train(resume_from_checkpoint=checkpoint)
    evaluations = [line for line in trainer.state.log_history if "eval_loss" in line]
    losses = epoch_losses(trainer.state.log_history, config.steps_per_epoch(problem.train.rows))
    metrics = {}
    for name, part in problem.parts.items():
        rows: Any = [{"input_ids": row} for row in part.rows]
        metrics[name] = part.judge(rows_of(trainer.predict(rows).predictions, part))
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
    if problem.task.is_number.any():  # from now on the head predicts in the targets' units
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
    """Seconds per optimiser step, measured on a batch taken evenly from the training rows."""
    model = model_for(pretrained, problem, config, 1).to(device).train()
    examples = problem.examples(problem.train)
    spread = examples[:: math.ceil(len(examples) / config.batch_size)]
    batch = batch_of(spread, pretrained.tokenizer.special_ids.pad)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    own_loss, seconds = loss_of(problem), []
    for _ in range(3):  # the first one also allocates memory
        start = time.monotonic()
        output = model(**batch)
        loss = own_loss(output, batch["labels"]) if own_loss else output.loss
        loss.backward()
        loss.item()  # waits for a GPU
        seconds.append(time.monotonic() - start)
    return min(seconds)


def epoch_losses(log_history: list[dict[str, Any]], steps_per_epoch: int) -> list[float]:
    """Mean training loss of each epoch; an epoch in which the run was stopped has several lines in
    the log."""
    sums: dict[int, float] = {}
    last = 0
    for line in log_history:
        if "loss" in line:
            epoch, steps = -(-line["step"] // steps_per_epoch), line["step"] - last
            sums[epoch] = sums.get(epoch, 0.0) + steps * line["loss"]
            last = line["step"]
    return [total / steps_per_epoch for total in sums.values()]
