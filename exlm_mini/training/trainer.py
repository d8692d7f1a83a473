"""The training of one run: makes its steps, and writes checkpoints and metrics.

The trainer reports through a callback and knows nothing of command line or terminal. Each step is a
function of the settings and the step number, so a run that was stopped and resumed ends, bit for
bit, like one that was not, on the same machine with the same versions and threads. Another
processor adds in another order, and runs that differ in a last bit drift apart.

With several processes, all train side by side, and only the first reports and writes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.packs import Pack
from exlm_mini.training.beside_weights import beside_weights
from exlm_mini.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    optimizer_tensors,
    prune_checkpoints,
    restore_optimizer,
    save_checkpoint,
)
from exlm_mini.training.console import Progress
from exlm_mini.training.cost import check_fits, mean_flops_per_token
from exlm_mini.training.evaluation import MOST_ROWS, Evaluation, evaluate
from exlm_mini.training.metrics import MetricsLog, copies_of, peak_memory_mib
from exlm_mini.training.parts import make_masker, make_model, set_weights
from exlm_mini.training.processes import Engine, check_spread, choose_device, with_precision
from exlm_mini.training.provenance import versions
from exlm_mini.training.run_directory import check_start
from exlm_mini.training.step import Stepper, Update


class Trainer:
    """One run, from its newest checkpoint to its last step.

    Args:
        output: run directory, locked by the caller; gets ``checkpoints/`` and ``metrics.jsonl``.
        engine: engine of this process, which also tells the user about anything unusual, such as a
            damaged checkpoint; None: it is the only process, on ``train.device``.
    """

    def __init__(
        self,
        config: RunConfig,
        train_pack: Pack,
        validation_pack: Pack,
        output: Path,
        engine: Engine | None = None,
    ) -> None:
        self.engine = engine = engine or Engine(choose_device(config.train.device))
        config = with_precision(config, engine.device)
        check_spread(config, engine.world_size)
        with engine.together():  # the machines of the processes may differ
            for stage, _ in config.stages:  # all of them, before the first takes hours
                check_fits(stage, train_pack, validation_pack, engine.device, engine.world_size)
        data = train_pack.sha256, validation_pack.sha256, train_pack.tokenizer_sha256
        if engine.any(data != engine.same(data)):
            raise UserError(
                f"processes read different data in {train_pack.path.parent}; give each machine a "
                "copy of the same prepared corpus"
            )
        self.train_pack, self.validation_pack, self.output = train_pack, validation_pack, output
        self._checkpoints = output / "checkpoints"
        self.evaluation: Evaluation | None = None
        """Result of the last validation."""
        self.num_tokens = 0
        """Input tokens of all steps, including those of a run that this one started from; before
        expansion or repetition, without padding."""
        self.seconds = 0.0
        """Training time in seconds over all starts, validation included."""
        newest = self._newest_checkpoint()
        self.step = 0 if newest is None else newest.step
        """Number of steps done."""
        if newest is not None and newest.state["config"]["objective"] == "exlm":
            # If ``train.steps`` was raised since, the run grew earlier than it would now.
            grown_at = newest.state["update"].get("grown_at", config.grow_step)
            train = replace(config.train, grow_at=grown_at / config.train.steps)
            config = config if grown_at == config.grow_step else replace(config, train=train)
        *earlier, last = config.stages
        self._later = [stage for stage in earlier if self.step < stage[1]] + [last]
        self._begin_stage()
        if newest is not None:
            self._check_data(newest)
            self._take_over(newest)
            if evaluation := newest.state["evaluation"]:
                self.evaluation = Evaluation(**evaluation)

    def _begin_stage(self) -> None:
        """Make the model of the next stage and what trains it; its settings become ``config``."""
        self.config, self._end = config, _ = self._later.pop(0)
        pack, engine = self.train_pack, self.engine
        self.masker = make_masker(config, pack.special_ids, pack.tokenizer)
        model = make_model(config, pack.vocab_size, pack.special_ids)
        self.model = engine.wrap(model, config.train)
        self.stepper = Stepper(config, pack, self.masker, engine, self.model)
        self.flops_per_token = mean_flops_per_token(config, pack.vocab_size, pack.lengths_R)

    def _grow(self) -> None:
        """Go on with the next stage, from the weights of this one."""
        grown = self._checkpoint()
        self._begin_stage()
        self._take_over(grown)

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        watch: Callable[[], dict[str, float]] = dict,
    ) -> bool:
        """Train from the newest checkpoint, or from the start; returns whether it is complete.

        Args:
            on_progress: called after every step, in the first process.
            should_stop: called after every step; if it returns true in any process, all processes
                save a checkpoint of the same step and stop.
            watch: called after every validation, in the first process and before ``should_stop``;
                the numbers it returns go into the line of ``metrics.jsonl``.

        Raises:
            DivergedError: if too many steps in a row, a validation or the weights are not finite.
        """
        train, engine, is_stopped = self.config.train, self.engine, False
        with contextlib.ExitStack() as stack:
            with engine.together():
                logs = [stack.enter_context(contextlib.closing(log)) for log in self._logs()]
            start, before, tokens_before = time.monotonic(), self.seconds, self.num_tokens
            flops = 0.0
            while not is_stopped and (self.step < self._end or self._later):
                if self.step == self._end:
                    self._grow()
                update = self.stepper.step(self.step)
                self.step += 1
                self.num_tokens += update.num_tokens
                flops += update.num_tokens * self.flops_per_token
                evaluation, watched = None, {}
                if self.step % train.validate_every == 0 or self.step == self._end:
                    evaluation = self.evaluation = self.validate(self.step)
                    watched = watch() if engine.is_main else {}
                is_stopped = engine.any(should_stop())
                is_last = self.step == self._end or is_stopped
                seconds = max(time.monotonic() - start, 1e-9)
                self.seconds = before + seconds
                speed = (self.num_tokens - tokens_before) / seconds
                if engine.is_main:
                    on_progress(Progress(self.step, update.loss, speed, evaluation))
                if evaluation is not None or is_last or self.step % train.log_every == 0:
                    numbers = self._numbers(update, speed, flops / seconds, evaluation)
                    record = {"step": self.step, **numbers}
                    with engine.together():
                        for log in logs:
                            log.write(record | watched)
                if is_last or self.step % train.save_every == 0:
                    self._save()
        return self.step == self._end and not self._later

    def _logs(self) -> list[Any]:
        """The logs, in the first process; restores ``seconds`` from the metrics."""
        if not self.engine.is_main:
            return []
        self.output.mkdir(parents=True, exist_ok=True)
        # The remains of a save that was cut short; there may be no further save to remove them.
        prune_checkpoints(self._checkpoints, self.config.train.keep_last, self.step)
        metrics = MetricsLog(self.output / "metrics.jsonl", self.step)
        self.seconds = (metrics.last or {}).get("seconds") or 0.0
        return [metrics, *copies_of(self.output, self.config, self.step)]

    def _numbers(
        self,
        update: Update,
        speed: float,
        flops_per_second: float,
        evaluation: Evaluation | None,
    ) -> dict[str, Any]:
        """A line of ``metrics.jsonl``; ``speed`` in input tokens per second since this start."""
        numbers: dict[str, Any] = {
            "loss": update.loss,
            "learning_rate": update.learning_rate,
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "tokens_per_second": speed,
            "num_processes": self.engine.world_size,
            "gradient_norm": update.gradient_norm,
            "skipped_steps": self.stepper.skipped_steps,
            "model_flops_per_second": flops_per_second,
            "peak_memory_mib": peak_memory_mib(self.engine.device),
            "rows_without_path": update.num_without_path,
        }
        if update.mask_accuracy is not None:
            numbers["mask_accuracy"] = update.mask_accuracy
        if evaluation:
            for name in ("bits_per_mask", "bits_per_row", "mask_accuracy", "perplexity"):
                numbers[f"validation_{name}"] = getattr(evaluation, name)
        return numbers

    def validate(self, step: int) -> Evaluation:
        """Evaluate the model on the held-out rows, after ``step`` steps.

        A batch has no more rows than a micro-batch, if its size is set: memory is short then.
        """
        train, pack = self.config.train, self.validation_pack
        rows = train.micro_batch_size
        if train.micro_batch_tokens is not None:
            rows = max(1, train.micro_batch_tokens // int(pack.lengths_R.max()))
        with self.stepper.precision():
            found = evaluate(
                self.model,
                pack,
                self.masker,
                train.validation_rows,
                self.engine,
                self.config.chain_share(step),
                min(MOST_ROWS, rows or MOST_ROWS),
            )
        if not found.is_finite:
            bits = f"{found.bits_per_mask:g} bits per masked token"
            raise self.stepper.diverged(f"validation at step {step} gives {bits}")
        if found.num_rows and not found.num_masks:
            raise UserError(
                f"none of the {found.num_rows} held-out rows has a masked token; raise "
                "masking.mask_ratio, or use more rows"
            )
        return found

    # ---- checkpoints ----

    def _checkpoint(self) -> Checkpoint:
        """The present state of the run; tensors are not copied."""
        moments = optimizer_tensors(self.stepper.optimizer, self.model)
        tensors = {"model": self.model.state_dict(), "optimizer": moments}
        return Checkpoint(self.step, tensors, self._state(), self._checkpoints)

    def _save(self) -> None:
        """Write a checkpoint in the first process; all processes must call this."""
        with self.engine.together():
            if not self.engine.is_main:
                return
            step, tensors, state, path = self._checkpoint()
            for name, weight in tensors["model"].items():
                if not bool(weight.isfinite().all()):
                    what = f"the weights {name} are not finite after step {step}"
                    raise self.stepper.diverged(what)
            others = beside_weights(self._stored_config(), step, self.train_pack)
            save_checkpoint(path, step, tensors, state, others)
            prune_checkpoints(path, self.config.train.keep_last, step)

    def _stored_config(self) -> RunConfig:
        # A prepared corpus has its own values; readers need the longest row the model has learned.
        data = replace(
            self.config.data,
            block_length=int(self.train_pack.lengths_R.max()),
            vocab_size=self.train_pack.vocab_size,
        )
        return replace(self.config, data=data)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint stores besides weights and moments; JSON-serialisable."""
        pack = self.train_pack
        return {
            "config": asdict(self._stored_config()),
            "special_ids": pack.special_ids._asdict(),
            "vocab_size": pack.vocab_size,
            "train_sha256": pack.sha256,
            "validation_sha256": self.validation_pack.sha256,
            "tokenizer_sha256": pack.tokenizer_sha256,
            "evaluation": None if self.evaluation is None else self.evaluation._asdict(),
            "num_tokens": self.num_tokens,
            "update": self.stepper.state(),
            "num_processes": self.engine.world_size,
            "versions": versions(self.engine.device),
        }

    def _newest_checkpoint(self) -> Checkpoint | None:
        """The newest intact checkpoint, if there is one; the same in all processes."""
        engine = self.engine
        with engine.together():
            checkpoint = latest_checkpoint(self._checkpoints, engine.tell)
        step = 0 if checkpoint is None else checkpoint.step
        if engine.any(step != engine.same(step)):
            raise UserError(
                f"processes see different checkpoints in {self._checkpoints}; all machines must "
                "share one --output"
            )
        return checkpoint

    def _check_data(self, checkpoint: Checkpoint) -> None:
        """Raise ``UserError`` if a checkpoint was trained on other data."""
        state = checkpoint.state
        for name, pack in (("train", self.train_pack), ("validation", self.validation_pack)):
            stored = state[f"{name}_sha256"], state["tokenizer_sha256"]
            if stored != (pack.sha256, pack.tokenizer_sha256):
                raise UserError(
                    f"{pack.path} is not the data that {self._checkpoints} was trained with, or "
                    "its tokenizer has changed; restore the corpus or choose another --output"
                )

    def _take_over(self, checkpoint: Checkpoint) -> None:
        """Load the weights, moments and counts of a checkpoint.

        If an MLM grows into an ExLM, the weights that its checkpoint lacks (links and clone
        vectors) stay as initialised, and all moments begin anew: with the MLM's moments, which know
        nothing of the new weights, clones learn to differ later (``links-pilot.json``).
        """
        weights, moments = checkpoint.tensors["model"], checkpoint.tensors.get("optimizer", {})
        state = checkpoint.state
        grows = (state["config"]["objective"], self.config.objective) == ("mlm", "exlm")
        if grows:
            own = self.model.state_dict()
            new = {name: own[name] for name in own if not name.startswith("encoder.layers.")}
            weights, moments = {**new, **weights}, {}
        set_weights(self.model, weights, checkpoint.path, "use its model.* settings")
        restore_optimizer(self.stepper.optimizer, self.model, moments)
        self.num_tokens = state["num_tokens"]
        self.stepper.restore(state["update"])
        if grows:
            self.stepper.grown_at = self.step

    def begin_from(self, checkpoint: Checkpoint) -> None:
        """Start with the weights of another run, an MLM or one of the same objective (see
        ``train.start_from``). Its moments are taken over too, unless an MLM grows into an ExLM."""
        hashes = self.train_pack.tokenizer_sha256, self.validation_pack.sha256
        check_start(checkpoint, self.config, *hashes, self.engine.tell)
        self._take_over(checkpoint)
        # What was skipped, or grew, in the other run does not count.
        self.stepper.restore({"skipped_steps": 0, "skipped_in_row": 0, "grown_at": 0})
