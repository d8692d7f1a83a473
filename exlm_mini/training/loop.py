"""The training loop: batches in, checkpoints and metrics out.

The loop knows nothing of the command line or the terminal: it reports through a callback. What
it does at a step is a function of the settings and the step, so a run that was stopped and
resumed ends with the same bits as one that was not: on one machine, with the same versions and
threads. Another processor adds in another order, and a training follows the last bits.

Of several processes all go through the loop side by side, and the first alone tells and writes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from exlm_mini.config import RunConfig, UserError
from exlm_mini.data.files import reading
from exlm_mini.data.packs import Pack
from exlm_mini.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    not_finite,
    prune_checkpoints,
    save_checkpoint,
)
from exlm_mini.training.cost import check_memory, plan_batch
from exlm_mini.training.evaluation import Evaluation, evaluate
from exlm_mini.training.manifest import USE_EARLIER
from exlm_mini.training.meter import Meter, ScalarLog
from exlm_mini.training.optimizer_state import flatten_optimizer, restore_optimizer
from exlm_mini.training.parts import (
    chain_share,
    check_row_length,
    choose_device,
    learning_rate,
    make_batches,
    make_masker,
    make_model,
    make_optimizer,
    versions,
)
from exlm_mini.training.precision import with_precision
from exlm_mini.training.processes import Engine
from exlm_mini.training.run_directory import MetricsLog
from exlm_mini.training.step import Update, Updater, diverged


class Progress(NamedTuple):
    """What the loop tells after a step."""

    step: int
    """Steps done, from 1."""
    loss: float
    """Nats per target of the last batch."""
    tokens_per_second: float
    """Input tokens, before expansion or repetition and without padding, since this start."""
    evaluation: Evaluation | None
    """Present after a validation."""


class Outcome(NamedTuple):
    """How a run ended."""

    step: int
    is_complete: bool
    """False when it was asked to stop before its last step."""
    evaluation: Evaluation | None
    """Of the last validation; none if the run stopped before any."""
    num_parameters: int
    skipped_steps: int
    """Steps whose loss or gradient was not finite, see ``update``."""


class _Best(NamedTuple):
    """The best of the checkpoints whose step was also validated."""

    step: int
    bits_per_mask: float


def check_spread(config: RunConfig, num_processes: int) -> None:
    """Refuse batches that cannot be spread over processes.

    Raises:
        UserError: naming the sizes.
    """
    plan = plan_batch(config.train, num_processes, "--nproc-per-node")
    if num_processes > 1 and plan.unit == "tokens" and config.train.micro_batch_tokens is None:
        raise UserError(
            f"train.batch_tokens {plan.size:,} on {num_processes} processes needs "
            f"train.micro_batch_tokens, such as {plan.per_device:,}: it decides which rows are "
            "taken together, and that must not depend on the number of processes"
        )


class Trainer:
    """One run: a model, its data and its directory.

    Args:
        config: of the run; the objective is one of the three single ones.
        train_pack, validation_pack: rows to learn from and to validate with.
        output: run directory, locked by the caller; gets ``checkpoints/`` and
            ``metrics.jsonl``.
        slots: positions the masking strategy ``slots`` hides.
        report: takes a line about something unusual, such as a damaged checkpoint.
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
        slots: tuple[int, ...] = (),
        report: Callable[[str], None] = print,
        engine: Engine | None = None,
    ) -> None:
        self.engine = engine or Engine(choose_device(config.train.device))
        self.config = config = with_precision(config, self.engine.device)
        check_spread(config, self.engine.world_size)
        self.train_pack, self.validation_pack = train_pack, validation_pack
        self.output, self.report = output, report
        asked = config.model.vocab_size
        if asked is not None and asked != train_pack.vocab_size:
            raise UserError(
                f"model.vocab_size is {asked}, the tokenizer has {train_pack.vocab_size} tokens; "
                "leave model.vocab_size out, it is for --dry-run"
            )
        special_ids = train_pack.special_ids
        self.masker = make_masker(config, special_ids, slots)
        longest = max(int(train_pack.lengths_R.max()), int(validation_pack.lengths_R.max()))
        check_row_length(config, longest, len(slots) or None)
        if train_pack.row_length is not None:
            self.masker.check_row_length(train_pack.row_length)
        check_memory(
            config,
            train_pack.vocab_size,
            longest,
            self.engine.device,
            self.engine.world_size,
            len(slots) or None,
        )
        model = make_model(config, train_pack.vocab_size, special_ids)
        self.model = self.engine.wrap(model, config.train)
        self.optimizer = make_optimizer(self.model, config.train)
        self.batches = make_batches(config, train_pack, self.masker)
        self.updater = Updater(
            config, self.engine, self.model, self.optimizer, self.batches, special_ids.pad
        )
        self.meter = Meter(
            config,
            train_pack.vocab_size,
            train_pack.lengths_R,
            self.engine.device,
            self.engine.world_size,
            len(slots) or None,
        )
        self.evaluation: Evaluation | None = None
        self.best: _Best | None = None
        self.num_tokens = 0
        """Input tokens of all steps done, before expansion or repetition, without padding."""

    def run(
        self,
        on_progress: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        should_save: Callable[[], bool] = lambda: False,
        watch: Callable[[], dict[str, float]] = dict,
    ) -> Outcome:
        """Train from the newest checkpoint, or from the start, to the last step.

        Args:
            on_progress: called after every step, in the first process.
            should_stop: asked after every step; if true in any process, all save a checkpoint of
                the same step and the run ends.
            should_save: the same, but the run goes on.
            watch: called after every validation, in the first process and before ``should_stop``;
                its numbers go into the line of ``metrics.jsonl``.

        Raises:
            UserError: when too many steps, a validation or weights are not finite, or a
                checkpoint cannot be read or written.
        """
        train, engine = self.config.train, self.engine
        with engine.together():
            checkpoint = self._newest()
        step = self._restore(checkpoint)
        start_time, start_tokens = time.monotonic(), self.num_tokens
        with contextlib.ExitStack() as open_files:
            logs, seconds_before = [], 0.0
            with engine.together():
                if engine.is_main:
                    self._prune()  # no save may follow the one that was cut short
                    metrics = MetricsLog(self.output / "metrics.jsonl", step)
                    logs.append(open_files.enter_context(metrics))
                    seconds_before = (metrics.last or {}).get("seconds") or 0.0
                    if train.tensorboard:
                        scalars = ScalarLog(self.output / "tensorboard", step)
                        logs.append(open_files.enter_context(scalars))
            while step < train.steps:
                rate = learning_rate(train, step)
                update = self.updater.step(step, rate)
                step += 1
                self.num_tokens += update.num_tokens
                evaluation, watched = None, {}
                if step % train.validate_every == 0 or step == train.steps:
                    evaluation = self.evaluation = self._evaluate(step)
                    watched = watch() if engine.is_main else {}
                is_stopped, is_asked = engine.any(should_stop(), should_save())
                is_last = step == train.steps or is_stopped
                seconds = max(time.monotonic() - start_time, 1e-9)
                speed = (self.num_tokens - start_tokens) / seconds
                if engine.is_main:
                    on_progress(Progress(step, update.loss, speed, evaluation))
                if evaluation or is_last or step % train.log_every == 0:
                    record = self._record(
                        step, rate, update, seconds_before + seconds, speed, evaluation
                    )
                    with engine.together():
                        for log in logs:
                            log.write(record | watched)
                if evaluation and not evaluation.is_finite:
                    told = f"{evaluation.bits_per_mask:g} bits per masked token"
                    raise diverged(f"validation at step {step} gives {told}", self.config)
                if is_last or is_asked or step % train.save_every == 0:
                    self._save(step, evaluation)
                if is_last:
                    break
        return Outcome(
            step,
            step == train.steps,
            self.evaluation,
            sum(p.numel() for p in self.model.parameters()),
            self.updater.skipped_steps,
        )

    @property
    def _checkpoints(self) -> Path:
        return self.output / "checkpoints"

    def _evaluate(self, step: int) -> Evaluation:
        with self.updater.precision():
            return evaluate(
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

    def _record(
        self,
        step: int,
        rate: float,
        update: Update,
        seconds: float,
        speed: float,
        evaluation: Evaluation | None,
    ) -> dict[str, Any]:
        """A line of ``metrics.jsonl``.

        Args:
            step: steps done.
            rate: learning rate of the last of them.
            update: what that step told.
            seconds: of training in all, starts before this one included.
            speed: input tokens per second since this start.
            evaluation: present after a validation.
        """
        record: dict[str, Any] = {"step": step, "loss": update.loss, "learning_rate": rate}
        record |= {"tokens": self.num_tokens, "seconds": seconds}
        record["tokens_per_second"] = speed
        record["num_processes"] = self.engine.world_size
        record |= self.meter.read(speed)
        record["rows_without_path"] = update.num_without_path
        record["gradient_norm"] = update.gradient_norm
        record["skipped_steps"] = self.updater.skipped_steps
        if update.mask_accuracy is not None:
            record["mask_accuracy"] = update.mask_accuracy
        if evaluation:
            record["validation_bits_per_mask"] = evaluation.bits_per_mask
            record["validation_bits_per_row"] = evaluation.bits_per_row
            record["validation_mask_accuracy"] = evaluation.mask_accuracy
            record["validation_perplexity"] = evaluation.perplexity
        return record

    def _save(self, step: int, evaluation: Evaluation | None) -> None:
        """Write a checkpoint; all processes must call, for one may hold a part of each tensor."""
        best = math.inf if self.best is None else self.best.bits_per_mask
        if evaluation and evaluation.bits_per_mask < best:
            self.best = _Best(step, evaluation.bits_per_mask)
        weights = {name: self._fetch(t) for name, t in self.model.state_dict().items()}
        moments, groups = flatten_optimizer(self.optimizer, self.model.named_parameters())
        # A resumed process has them in the order in which it happened to read them, and in one
        # order all must fetch.
        moments = {name: self._fetch(moments[name]) for name in sorted(moments)}
        state = {
            "config": asdict(self.config),
            "special_ids": self.train_pack.special_ids._asdict(),
            "vocab_size": self.train_pack.vocab_size,
            "train_sha256": self.train_pack.sha256,
            "validation_sha256": self.validation_pack.sha256,
            "tokenizer_sha256": self.train_pack.tokenizer_sha256,
            "optimizer_groups": groups,
            "num_tokens": self.num_tokens,
            "update": self.updater.state(),
            "evaluation": None if self.evaluation is None else self.evaluation._asdict(),
            "best": None if self.best is None else self.best._asdict(),
            "num_processes": self.engine.world_size,
            "versions": versions(self.engine.device),
        }
        with self.engine.together():
            if self.engine.is_main:
                if name := not_finite(weights):
                    told = f"the weights {name} are not finite after step {step}"
                    raise diverged(told, self.config)
                tensors = {"model": weights, "optimizer": moments}
                save_checkpoint(self._checkpoints, step, tensors, state)
                self._prune()

    def _prune(self) -> None:
        """Keep the newest checkpoints and the best."""
        best_step = None if self.best is None else self.best.step
        prune_checkpoints(self._checkpoints, self.config.train.keep_last, best_step)

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor; from other devices than the first process's it is not kept."""
        whole = self.engine.whole(tensor)
        if whole is tensor:
            return tensor
        return whole.cpu() if self.engine.is_main else whole.new_empty(0)

    def _newest(self) -> Checkpoint | None:
        """The newest whole checkpoint of this run, the same in every process."""
        if not self._checkpoints.is_dir():
            return None
        report = self.report if self.engine.is_main else lambda line: None
        checkpoint = latest_checkpoint(self._checkpoints, report)
        if checkpoint is None:
            return None
        for name, pack in (("train", self.train_pack), ("validation", self.validation_pack)):
            if checkpoint.state.get(f"{name}_sha256") != pack.sha256:
                raise UserError(
                    f"{pack.path} is not the data that {self._checkpoints} was trained with; "
                    "restore the data or choose another --output"
                )
            if checkpoint.state.get("tokenizer_sha256") != pack.tokenizer_sha256:
                raise UserError(
                    f"{pack.path} belongs to another tokenizer than {self._checkpoints}; restore "
                    "the corpus or choose another --output"
                )
        return checkpoint

    def _restore(self, checkpoint: Checkpoint | None) -> int:
        """Take over a checkpoint; the number of steps done."""
        step = 0 if checkpoint is None else checkpoint.step
        first = self.engine.same(step)
        with self.engine.together():
            if step != first:
                raise UserError(
                    f"process {self.engine.rank} finds step {step} newest in "
                    f"{self._checkpoints}, the first one step {first}; all machines must see "
                    "one --output"
                )
        if checkpoint is None:
            return 0
        path = self._checkpoints / f"step-{step:06d}"
        with reading(path, USE_EARLIER.format(path)):
            self._take_over(checkpoint)
        before = checkpoint.state.get("num_processes", 1)
        if before != self.engine.world_size and self.engine.is_main:
            self.report(
                f"{before} process(es) until step {step}, {self.engine.world_size} from here: the "
                "same rows and masks, sums in another order"
            )
        return step

    def _take_over(self, checkpoint: Checkpoint) -> None:
        """Put weights, moments and counts where they belong."""
        state = checkpoint.state
        weights = checkpoint.tensors["model"]
        own = self.model.state_dict()
        self.model.load_state_dict(
            {n: self.engine.part(t, own[n]) if n in own else t for n, t in weights.items()}
        )
        parameters = dict(self.model.named_parameters())
        moments = checkpoint.tensors["optimizer"]
        restore_optimizer(
            self.optimizer,
            parameters.items(),
            {
                n: self.engine.part(t, parameters[n.rpartition("/")[0]])
                for n, t in moments.items()
            },
            state["optimizer_groups"],
        )
        # Older checkpoints hold neither of these.
        self.num_tokens = int(state.get("num_tokens", 0))
        self.updater.restore(state.get("update", {}))
        if state["evaluation"]:
            self.evaluation = _numbers(Evaluation, state["evaluation"])
        if state.get("best"):
            self.best = _numbers(_Best, state["best"])


def _numbers(kind: type[NamedTuple], stored: dict[str, Any]) -> Any:
    """Counts and sums as a checkpoint holds them."""
    found = kind(**stored)
    for name, number in found._asdict().items():
        if number is not None and not math.isfinite(number):
            raise ValueError(f"{name} is {number}")
    return found
