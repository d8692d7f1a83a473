"""``python -m exlm_mini.pretrain``: train a model from a recipe. ::

    python -m exlm_mini.pretrain --recipe smiles-tiny
    python -m exlm_mini.pretrain --recipe text-tiny --data.source my.txt --model.states_per_mask 8

A recipe is a YAML file of settings; each dotted option replaces one of them. The same command with
the same ``--output`` resumes where it stopped. To train on several devices, start it with torchrun
and give ``--output``::

    torchrun --nproc-per-node 8 --max-restarts 3 -m exlm_mini.pretrain --recipe text-base \\
        --output runs/base

On SIGINT or SIGTERM, the command saves a checkpoint and stops; under torchrun it is enough that one
process gets the signal. Exit codes: 0 done, 2 user error, 130 stopped and ready to resume. Under
torchrun, a process that was asked to stop exits with 0, because torchrun restarts failed processes.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.options import parse
from exlm_mini.reading.runs import model_directory
from exlm_mini.training.console import (
    INTERRUPTED,
    ProgressLine,
    exit_code,
    launched_rank,
    leave,
    say,
    stop_by_signal,
    this_python,
)

if TYPE_CHECKING:  # --help and command-line errors do not import torch
    from exlm_mini.data.corpus import Corpus
    from exlm_mini.training.processes import Engine
    from exlm_mini.training.trainer import Trainer


def run(config: RunConfig, output: Path, engine: Engine, minutes: float | None = None) -> int:
    """Train the model of a configuration and print a summary; returns the exit code.

    Args:
        output: run directory.
        minutes: how long to train, in place of ``train.steps``. The number of steps is computed
            when the run starts, and a resumed run keeps it.
    """
    from exlm_mini.data.corpus import prepare_corpus
    from exlm_mini.reading.summary import summarise
    from exlm_mini.training.processes import check_spread
    from exlm_mini.training.run_directory import CONFIG, as_begun, locked_directory
    from exlm_mini.training.step import low_rate

    with ExitStack() as lock:
        with engine.together():
            check_spread(config, engine.world_size)
            start = config.train.start_from
            if start is not None and not (output / CONFIG).is_file():
                model_directory(Path(start))
            if engine.is_main:
                lock.enter_context(locked_directory(output, say))
            is_begun, is_timed = (output / CONFIG).is_file(), minutes is not None
            config = as_begun(output, config, engine.device, engine.tell, is_timed)
        # The first process prepares the corpus, which the others then open.
        for is_now in (engine.is_main, not engine.is_main):
            with engine.together():
                if is_now:
                    corpus = prepare_corpus(
                        config.data, output / "data", config.seed, engine.tell
                    )
        if config.train.num_threads is not None:
            import torch

            torch.set_num_threads(config.train.num_threads)
        if minutes is not None and not is_begun:
            train, steps = config.train, _steps_in(minutes, config, corpus, output, engine)
            warmup_steps = round(train.warmup_steps * steps / train.steps)
            train = replace(train, steps=steps, warmup_steps=warmup_steps)
            config = replace(config, train=train)
        if not is_begun and (line := low_rate(config)):
            engine.tell(line)
        with stop_by_signal(engine.tell) as should_stop:
            trainer = _train(config, corpus, output, engine, should_stop)
    if trainer.step < config.train.steps:
        return INTERRUPTED if launched_rank() is None else 0
    if engine.is_main:
        example = summarise(config, corpus, output, trainer)
        text = shlex.quote(example)
        run = shlex.quote(str(output))
        say(f"to try the model: {this_python()} -m exlm_mini.fill {text} --run {run}")
    return 0


def _steps_in(
    minutes: float, config: RunConfig, corpus: Corpus, output: Path, engine: Engine
) -> int:
    """Estimate how many steps, with their validations, fit into ``minutes``.

    A few steps, spread over the whole run, are timed and discarded. The number is fixed before the
    first step, because the schedules of the learning rate and the chains need it.
    """
    from exlm_mini.training.trainer import Trainer

    longest, seconds, start = min(10.0, 3 * minutes), 0.0, 0
    for stage, end in config.stages:
        train = replace(stage.train, learning_rate=1e-30, grow_at=0.0)  # weights do not change
        stage = replace(stage, train=train)
        trainer = Trainer(stage, corpus.train, corpus.validation, output, engine)
        for num in count(-1):
            trainer.stepper.step(start + int((end - start) * (num * 0.618 % 1)))
            if num < 1:
                begin = time.monotonic()  # after two steps that allocate and compile
            elif engine.any(num >= 3 and time.monotonic() - begin > longest):
                break
        a_step, begin = (time.monotonic() - begin) / num, time.monotonic()
        trainer.validate(start)
        a_step += (time.monotonic() - begin) / train.validate_every
        seconds += (end - start) * a_step
        start = end
    steps = max(1, round(60 * minutes * config.train.steps / seconds))
    steps = engine.same(steps)
    engine.tell(
        f"{minutes:g} minutes are about {steps:,} steps on this machine, estimated from a few "
        "timed steps"
    )
    return steps


def _train(
    config: RunConfig,
    corpus: Corpus,
    output: Path,
    engine: Engine,
    should_stop: Callable[[], bool],
) -> Trainer:
    """Train to the end, or until ``should_stop`` says so; progress goes to stderr."""
    from exlm_mini.reading.trained import open_checkpoint
    from exlm_mini.training.run_directory import settle
    from exlm_mini.training.trainer import Trainer

    with engine.together():
        trainer = Trainer(config, corpus.train, corpus.validation, output, engine)
        source = config.train.start_from
        if source is not None and trainer.step == 0:
            trainer.begin_from(open_checkpoint(Path(source), engine.tell))
        is_done = trainer.step == config.train.steps and (output / "versions.json").is_file()
        if engine.is_main and not is_done:  # a finished run keeps what it was made with
            settle(output, config, engine.device, engine.world_size)
    with ProgressLine(config.objective, config.train.steps) as progress:
        is_complete = trainer.run(progress.show, should_stop)
    if not is_complete:
        engine.tell(
            f"stopped at step {trainer.step} of {config.train.steps}; run the same command again "
            f"with --output {shlex.quote(str(output))} to resume"
        )
    return trainer


# ---- the command ----


def _command(argv: list[str]) -> int:
    if not argv:
        raise UserError(
            "nothing to train; give a --recipe (smiles-tiny is a small one), or see --help"
        )
    config, options = parse(argv)
    if options.dry_run:
        from exlm_mini.reading.trained import open_checkpoint
        from exlm_mini.training.dry_run import dry_run

        source = config.train.start_from
        before = None if source is None else open_checkpoint(Path(source), say)
        dry_run(config, options.devices or 1, options.throughput, before)
        return 0
    output = options.output
    if output is None and launched_rank() is not None:
        raise UserError("torchrun needs --output DIR, so that a restart finds its checkpoints")
    from exlm_mini.training.processes import start_engine

    engine = start_engine(config.train)
    try:
        code = run(
            config,
            output or Path("runs") / f"{config.recipe}-{time.strftime('%Y%m%d-%H%M%S')}",
            engine,
            options.minutes,
        )
    except UserError:  # after other errors the process group cannot be left cleanly
        engine.finish()
        raise
    engine.finish()
    return code


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 (done), 2 (user error) or 130 (stopped, ready to resume)."""
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # older name of the variable
        # PyTorch reads the variable when it is imported. Batches differ in shape: with blocks of
        # fixed size, a run held 9.1 GiB of GPU memory where 6.3 GiB are enough.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    return exit_code(lambda: _command(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    leave(main())
