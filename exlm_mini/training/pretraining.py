"""Pre-training: the loop with masked rows and their validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.packs import Pack
from exlm_mini.training.beside_weights import beside_weights
from exlm_mini.training.checkpoint import Checkpoint, latest_checkpoint
from exlm_mini.training.cost import check_memory, plan_batch
from exlm_mini.training.evaluation import Evaluation, evaluate
from exlm_mini.training.loop import Loop
from exlm_mini.training.meter import Meter
from exlm_mini.training.parts import (
    chain_share,
    check_row_length,
    choose_device,
    grow_step,
    make_batches,
    make_masker,
    make_model,
    pretraining,
    stages_of,
)
from exlm_mini.training.precision import with_precision
from exlm_mini.training.processes import Engine
from exlm_mini.training.step import Update


def check_spread(config: RunConfig, num_processes: int) -> None:
    """Raise ``UserError`` if a batch cannot be spread over the processes, naming the sizes."""
    plan = plan_batch(config.train, num_processes, "--nproc-per-node")
    if num_processes > 1 and plan.unit == "tokens" and config.train.micro_batch_tokens is None:
        raise UserError(
            f"train.batch_tokens {plan.size:,} on {num_processes} processes needs "
            f"train.micro_batch_tokens, such as {plan.per_device:,}: it decides which rows are "
            "taken together, and that must not depend on the number of processes"
        )


def check_fits(
    config: RunConfig, train_pack: Pack, validation_pack: Pack, engine: Engine
) -> None:
    """Raise ``UserError`` for rows that a model cannot hold, or a model that memory cannot."""
    asked, vocab_size = config.model.vocab_size, train_pack.vocab_size
    if asked is not None and asked != vocab_size:
        raise UserError(
            f"model.vocab_size is {asked}, the tokenizer has {vocab_size} tokens; leave "
            "model.vocab_size out, it is for --dry-run"
        )
    longest = max(int(train_pack.lengths_R.max()), int(validation_pack.lengths_R.max()))
    check_row_length(config, longest)
    if train_pack.row_length is not None:
        masker = make_masker(config, train_pack.special_ids, train_pack.tokenizer)
        masker.check_row_length(train_pack.row_length)
    check_memory(config, vocab_size, longest, engine.device, engine.world_size)


def stages_left(config: RunConfig, output: Path) -> list[tuple[RunConfig, int]]:
    """The stages of a run that its newest checkpoint does not end; always the last one."""
    *earlier, last = stages_of(config)
    newest = latest_checkpoint(output / "checkpoints", lambda line: None) if earlier else None
    step = 0 if newest is None else newest.step
    # With more steps than at its start, a run may have grown before it would now.
    has_grown = newest is not None and newest.state["config"]["objective"] == "exlm"
    return [*((stage, end) for stage, end in earlier if step < end and not has_grown), last]


class Trainer(Loop):
    """One run: a model, its data and its directory.

    Args:
        config: of the run; the objective is one of the three single ones.
        train_pack, validation_pack: rows for training and for validation.
        output, report: see ``Loop``; the directory is locked by the caller.
        engine: of this process; none: the only one, on ``train.device``.

    Raises:
        UserError: for rows the model cannot hold, settings that do not fit the data, batches
            that cannot be spread over the processes, or a model that does not fit in memory.
    """

    def __init__(
        self,
        config: RunConfig,
        train_pack: Pack,
        validation_pack: Pack,
        output: Path,
        report: Callable[[str], None] = print,
        engine: Engine | None = None,
    ) -> None:
        engine = engine or Engine(choose_device(config.train.device))
        self.config = config = with_precision(config, engine.device)
        check_spread(config, engine.world_size)
        self.train_pack, self.validation_pack = train_pack, validation_pack
        check_fits(config, train_pack, validation_pack, engine)
        special_ids, vocab_size = train_pack.special_ids, train_pack.vocab_size
        self.masker = make_masker(config, special_ids, train_pack.tokenizer)
        model = make_model(config, vocab_size, special_ids)
        self.batches = make_batches(config, train_pack, self.masker)
        objective = pretraining(config, self.batches, special_ids.pad)
        super().__init__(config.train, config.seed, model, objective, output, report, engine)
        self.updater.grown_at = grow_step(config)
        self.meter = Meter(
            config, vocab_size, train_pack.lengths_R, engine.device, engine.world_size
        )

    def _evaluate(self, step: int) -> Evaluation:
        with self.updater.precision():
            found = evaluate(
                self.model,
                self.validation_pack,
                self.masker,
                self.config.train.validation_rows,
                self.engine.device,
                chain_share(self.config, step),
                self.engine.rank,
                self.engine.world_size,
                self.engine.add_up,
            )
        if not found.is_finite:
            bits = f"{found.bits_per_mask:g} bits per masked token"
            raise self.updater.diverged(f"validation at step {step} gives {bits}")
        return found

    def _numbers(
        self, update: Update, speed: float, evaluation: Evaluation | None
    ) -> dict[str, Any]:
        numbers = super()._numbers(update, speed, evaluation) | self.meter.read(speed)
        numbers["rows_without_path"] = update.num_without_path
        if update.mask_accuracy is not None:
            numbers["mask_accuracy"] = update.mask_accuracy
        if evaluation:
            numbers["validation_bits_per_mask"] = evaluation.bits_per_mask
            numbers["validation_bits_per_row"] = evaluation.bits_per_row
            numbers["validation_mask_accuracy"] = evaluation.mask_accuracy
            numbers["validation_perplexity"] = evaluation.perplexity
        return numbers

    def _stored_config(self) -> RunConfig:
        # A prepared corpus has its own; readers ask how long a row the model has learned.
        data = replace(
            self.config.data,
            block_length=int(self.train_pack.lengths_R.max()),
            vocab_size=self.train_pack.vocab_size,
        )
        return replace(self.config, data=data)

    def _beside_weights(self, step: int) -> dict[str, bytes]:
        return beside_weights(self._stored_config(), step, self.train_pack)

    def _own_state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        return {}, {
            "config": asdict(self._stored_config()),
            "special_ids": self.train_pack.special_ids._asdict(),
            "vocab_size": self.train_pack.vocab_size,
            "train_sha256": self.train_pack.sha256,
            "validation_sha256": self.validation_pack.sha256,
            "tokenizer_sha256": self.train_pack.tokenizer_sha256,
            "evaluation": None if self.evaluation is None else self.evaluation._asdict(),
        }

    def begin_from(self, checkpoint: Checkpoint, path: Path) -> None:
        """Start with the weights of another run, see ``train.start_from``.

        Its moments go on, too, unless an MLM grows.

        Args:
            checkpoint: of an MLM, or of a run of this objective.
            path: its name in messages.

        Raises:
            UserError: for another objective, tokenizer or shape.
        """
        state = checkpoint.state
        if state["tokenizer_sha256"] != self.train_pack.tokenizer_sha256:
            raise UserError(
                f"{path} was trained with another tokenizer; prepare the data with its "
                "tokenizer.json (--data.tokenizer)"
            )
        if (objective := state["config"]["objective"]) not in ("mlm", self.config.objective):
            raise UserError(
                f"{path} is of objective {objective}, this run of {self.config.objective}; go on "
                "from an mlm"
            )
        try:
            # A model that was shipped has no moments.
            tensors = {"optimizer": {}, **checkpoint.tensors}
            super()._take_over(self._grown(checkpoint._replace(tensors=tensors)))
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise UserError(
                f"{path} is of another shape ({reason}); give its model.* settings"
            ) from error

    def _grown(self, checkpoint: Checkpoint) -> Checkpoint:
        """An MLM's checkpoint for ExLM: what it lacks, links and clone vectors, stays as
        initialised, and moments begin anew. With an MLM's, in which nothing is known of the new
        weights, clones learn to differ later (``links-pilot.json``)."""
        if (checkpoint.state["config"]["objective"], self.config.objective) != ("mlm", "exlm"):
            return checkpoint
        weights = {**self.model.state_dict(), **checkpoint.tensors["model"]}
        return checkpoint._replace(tensors={"model": weights, "optimizer": {}})

    def _take_over(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        for name, pack in (("train", self.train_pack), ("validation", self.validation_pack)):
            stored = state.get(f"{name}_sha256"), state.get("tokenizer_sha256")
            if stored != (pack.sha256, pack.tokenizer_sha256):
                raise UserError(
                    f"{pack.path} is not the data that {self._checkpoints} was trained with, or "
                    "its tokenizer is another; restore the corpus or choose another --output"
                )
        super()._take_over(self._grown(checkpoint))
        if state["evaluation"]:
            self.evaluation = Evaluation(**state["evaluation"])
