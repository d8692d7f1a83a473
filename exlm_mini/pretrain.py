"""``python -m exlm_mini.pretrain``: train a model from a recipe.

    python -m exlm_mini.pretrain --recipe smiles-tiny
    python -m exlm_mini.pretrain --recipe text-tiny --data.files my.txt --model.states_per_mask 8

A recipe is a YAML file of settings; dotted options replace single ones. The same command with
the same ``--output`` goes on where it stopped. On several devices it is started by torchrun, and
``--output`` must be given:

    torchrun --nproc-per-node 8 --max-restarts 3 -m exlm_mini.pretrain --recipe text-base \\
        --output runs/base

SIGINT and SIGTERM save a checkpoint and stop, SIGUSR1 saves one; under torchrun it is enough that
one process gets the signal. Exit codes: 0 done, 2 a mistake of the user, 130 stopped and ready to
go on; a process of torchrun that was asked to stop ends with 0, for others would be restarted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from exlm_mini.config import RunConfig, SpecialIds, UserError
from exlm_mini.console import ProgressLine, Requests, requests_by_signal, say
from exlm_mini.corpora import Corpus, prepare_corpus
from exlm_mini.corpora.grammars import grammar, slots_of
from exlm_mini.durable import NO_SPACE, write_atomically
from exlm_mini.engine import Engine, launched_rank, leave, start_engine
from exlm_mini.estimate import BatchPlan, Estimate, estimate, plan_batch
from exlm_mini.measure import commit
from exlm_mini.run_directory import CONFIG, LOCK, RunDirectory, settle_config
from exlm_mini.settings import parse, parse_stored, plain
from exlm_mini.throughput import Throughput, throughput
from exlm_mini.trainer import Outcome, Trainer, check_spread
from exlm_mini.training import (
    check_row_length,
    choose_device,
    make_masker,
    versions,
    with_precision,
)
from exlm_mini.watching import check_tensorboard

DRY_RUN_DOCUMENTS = 10_000
SECONDS_TO_SPEAK = 5.0
INTERRUPTED = 130
"""Exit code of a run that was asked to stop, as shells report an interrupt."""


def objectives_of(config: RunConfig) -> list[RunConfig]:
    """One configuration per model to train."""
    return [replace(config, objective=name) for name in config.objective.split("+")]


def check_before_reading(config: RunConfig) -> None:
    """Refuse what cannot work before any data is read.

    Raises:
        UserError: for an unknown device or a precision it lacks, a missing package, rows too long
            for the model or too short for a mask.
    """
    if config.train.tensorboard:
        check_tensorboard()
    device = choose_device(config.train.device)
    if config.train.precision == "fp16" and device.type != "cuda":
        raise UserError(
            f"train.precision fp16 needs a GPU, and this run is on {device}; use auto, bf16 or fp32"
        )
    row_length = _row_length(config)
    for single in objectives_of(config):
        if config.data.pack is None:
            check_row_length(single, row_length, len(slots_of(single)) or None)
        if config.data.kind != "smiles" and config.data.pack is None:
            masker = make_masker(single, special_ids=SpecialIds(), slots=slots_of(single))
            masker.check_row_length(row_length)


def _row_length(config: RunConfig) -> int:
    """Longest row of a corpus that is not built yet."""
    if config.data.kind == "toy":
        return grammar(config.data.grammar).length + 2
    return config.data.block_length


def dry_run(config: RunConfig, num_devices: int = 1, speed: str | None = None) -> None:
    """Print what a run would cost; nothing is written.

    Args:
        config: of the run.
        num_devices: to spread a batch over; memory is that of one of them.
        speed: tokens per second of one device, or the run or file they are in, for the hours.

    Raises:
        UserError: if the batch cannot be spread, or the speed is not that of such a run.
    """
    config = with_precision(config, choose_device(config.train.device))
    plan, singles = plan_batch(config.train, num_devices), objectives_of(config)
    measured = [None if speed is None else throughput(speed, single) for single in singles]
    vocab_size, row_length = _corpus_shape(config)
    for single, its_speed in zip(singles, measured, strict=True):
        check_row_length(single, row_length, len(slots_of(single)) or None)
        _print_costs(single, vocab_size, row_length, plan, its_speed)


def _corpus_shape(config: RunConfig) -> tuple[int, int]:
    """Vocabulary and longest row; without ``model.vocab_size`` those of the data.

    The corpus is built in a temporary directory, of at most ``DRY_RUN_DOCUMENTS`` documents when
    it is not embedded. Of one that is still to be prepared the settings say the shape.
    """
    data, row_length = config.data, _row_length(config)
    if config.model.vocab_size is not None:
        return config.model.vocab_size, row_length
    if _lacks_pack(config):
        say(
            f"{data.pack} is not there yet: counted with data.vocab_size {data.vocab_size:,} and "
            f"rows of data.block_length {row_length}"
        )
        return data.vocab_size, row_length
    if data.files or data.hub:
        limit = min(data.max_documents or DRY_RUN_DOCUMENTS, DRY_RUN_DOCUMENTS)
        data = replace(data, max_documents=limit)
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(data, Path(directory) / "data", config.seed, say)
        _tell_row_length(config, corpus)
        train = corpus.train
        return train.vocab_size, int(train.lengths_R.max())


def _lacks_pack(config: RunConfig) -> bool:
    """The settings name a prepared corpus, and it is not there."""
    return config.data.pack is not None and not Path(config.data.pack).exists()


def _tell_row_length(config: RunConfig, corpus: Corpus) -> None:
    """A prepared corpus has rows of its own length, whatever the settings say."""
    row_length = corpus.train.row_length
    if config.data.pack is not None and row_length not in (None, _row_length(config)):
        say(
            f"{config.data.pack} has rows of {row_length} tokens; data.block_length "
            f"{config.data.block_length} is not used"
        )


def _print_costs(
    config: RunConfig,
    vocab_size: int,
    row_length: int,
    plan: BatchPlan,
    measured: Throughput | None,
) -> None:
    """What a run with a single objective costs, on stdout."""
    # What one device holds at a time.
    micro = "micro_batch_size" if plan.unit == "rows" else "micro_batch_tokens"
    config = replace(config, train=replace(config.train, **{micro: plan.per_device}))
    num_slots = len(slots_of(config)) or None
    costs = estimate(config, vocab_size, row_length, num_slots=num_slots)
    transition = costs.num_transition_parameters
    total = costs.weight_bytes + costs.activation_bytes
    without = f" ({_millions(costs.num_parameters - transition)} without the transition head)"
    is_most = plan.unit == "tokens"
    lines = {
        "objective": config.objective,
        "parameters": f"{costs.num_parameters:,} = {_millions(costs.num_parameters)}"
        f"{without if transition else ''}",
        "vocabulary": f"{vocab_size:,}",
        "row": f"{costs.row_length} tokens, {costs.expanded_length} expanded",
        "batch": f"{plan}",
        "tokens per step": f"{'at most ' * is_most}{costs.tokens_per_step:,}",
        "steps": f"{config.train.steps:,}",
        "tokens": f"{'at most ' * is_most}{costs.num_tokens:,}",
        "operations": f"{costs.flops_per_token:.3g} FLOP per token, {costs.num_flops:.3g} in all, "
        f"for rows of {row_length}",
        "memory": f"about {_mebibytes(total)} = {_mebibytes(costs.weight_bytes)} "
        f"weights, gradients, Adam + {_mebibytes(costs.activation_bytes)} activations",
        "device hours": _hours(costs, plan, measured),
    }
    for name, text in lines.items():
        print(f"{name:18} {text}")


def _hours(costs: Estimate, plan: BatchPlan, measured: Throughput | None) -> str:
    """Hours at a measured speed; without one, how to measure it."""
    if measured is None:
        return (
            "unknown: train 50 steps (--train.steps 50 --output DIR), then add --throughput DIR; "
            "or, without data, python -m exlm_mini.bench train --recipe NAME --json > FILE and "
            "--throughput FILE"
        )
    hours = measured.device_hours(costs.num_tokens)
    on_all = ""
    if plan.num_devices > 1:
        each = _few_digits(hours / plan.num_devices)
        on_all = f"; {each} hours if {plan.num_devices} devices lose nothing to each other"
    return (
        f"{_few_digits(hours)} at {measured.tokens_per_second:,.0f} tokens/s "
        f"({measured.source}), which is {measured.tokens_per_second * costs.flops_per_token:.3g} "
        f"FLOP/s{on_all}"
    )


def _few_digits(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def run(config: RunConfig, output: Path, engine: Engine | None = None) -> int:
    """Train what the configuration names and print a summary; the exit code.

    Args:
        config: of the run.
        output: its directory, seen by all processes.
        engine: of this process; none: the only one, on ``train.device``.
    """
    engine = engine or Engine(choose_device(config.train.device))
    config = with_precision(config, engine.device)
    check_spread(config, engine.world_size)
    with engine.together():
        if _lacks_pack(config):
            raise UserError(
                f"there is no {config.data.pack}; make it with python -m exlm_mini.prepare (the "
                "recipe's file begins with the command), or give another --data.pack"
            )
    with contextlib.ExitStack() as lock:
        with engine.together():
            if engine.is_main:
                lock.enter_context(RunDirectory(output, say))
        is_new = not (output / CONFIG).exists()
        try:
            corpus = _settle(config, output, engine)
            with requests_by_signal(_teller(engine), launched_rank() is not None) as requests:
                outcomes = _train_all(config, corpus, output, engine, requests)
        except UserError:
            # Where settings were stored just now, nothing but a corpus lay there before.
            was_accepted = engine.is_main and is_new and (output / CONFIG).exists()
            if was_accepted and not any(output.rglob("step-*")):
                _forget(output)
            raise
    if not all(outcome.is_complete for outcome in outcomes.values()):
        return INTERRUPTED if launched_rank() is None else 0
    if engine.is_main:
        _print_summary(config, output, outcomes)
    return 0


def _teller(engine: Engine) -> Callable[[str], None]:
    """Of several processes only the first talks."""
    return say if engine.is_main else lambda line: None


def _train_all(
    config: RunConfig, corpus: Corpus, output: Path, engine: Engine, requests: Requests
) -> dict[str, Outcome]:
    """Train one model after the other, up to the first that is stopped."""
    singles = objectives_of(config)
    outcomes: dict[str, Outcome] = {}
    for single in singles:
        directory = output if len(singles) == 1 else output / single.objective
        outcome = _train(single, corpus, directory, engine, requests)
        outcomes[single.objective] = outcome
        if not outcome.is_complete:
            _teller(engine)(
                f"stopped at step {outcome.step} of {config.train.steps}; the same command "
                f"with --output {output} goes on"
            )
            break
    return outcomes


def _settle(config: RunConfig, output: Path, engine: Engine) -> Corpus:
    """Hold a resumed run to its settings, note versions, prepare the data; the others open it."""
    with engine.together():
        if engine.is_main:
            _store_settings(config, output, engine)
            corpus = prepare_corpus(config.data, output / "data", config.seed, say)
            _tell_row_length(config, corpus)
    with engine.together():
        if not engine.is_main:
            corpus = prepare_corpus(config.data, output / "data", config.seed)
    return corpus


def _store_settings(config: RunConfig, output: Path, engine: Engine) -> None:
    import yaml

    text = yaml.safe_dump(plain(config), sort_keys=False)
    for change in settle_config(output, text, plain(config), parse_stored):
        say(f"changed since the last start: {change}")
    used: dict[str, object] = {**versions(engine.device), "commit": commit()}
    used["num_processes"] = engine.world_size
    write_atomically(output / "versions.json", (json.dumps(used, indent=2) + "\n").encode())


def _forget(output: Path) -> None:
    """Undo the start of a run that saved nothing, so that a corrected command may follow.

    A finished corpus stays: it may have taken hours, and it knows its own settings.
    """
    for path in output.iterdir():
        if path.name == LOCK or (path / "corpus.json").exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _train(
    config: RunConfig, corpus: Corpus, directory: Path, engine: Engine, requests: Requests
) -> Outcome:
    """Train one model, with progress on stderr."""
    if engine.is_main:
        directory.mkdir(exist_ok=True)
    if config.train.num_threads is not None:
        import torch

        torch.set_num_threads(config.train.num_threads)
    with engine.together():
        trainer = Trainer(
            config,
            corpus.train,
            corpus.validation,
            directory,
            slots_of(config),
            _teller(engine),
            engine,
        )
    with ProgressLine(config.objective, config.train.steps) as progress:
        return trainer.run(progress.show, requests.should_stop, requests.should_save)


def _print_summary(config: RunConfig, output: Path, outcomes: dict[str, Outcome]) -> None:
    """What was reached, on stdout."""
    for objective, outcome in outcomes.items():
        reached = outcome.evaluation
        print(
            f"{objective}: {outcome.num_parameters:,} parameters, {outcome.step:,} steps, "
            f"validation {reached.bits_per_mask:.3f} bits per masked token "
            f"({reached.num_masks:,} masks in {reached.num_rows:,} rows)"
        )
        if reached.num_without_path:
            print(f"{objective}: {reached.num_without_path} rows without a path were left out")
        if outcome.skipped_steps:
            print(
                f"{objective}: {outcome.skipped_steps} steps were skipped, for their loss or "
                "gradient was not finite"
            )
    if config.masking.strategy == "slots" and "repeated-mlm" not in outcomes:
        language = grammar(config.data.grammar)
        print(f"joint entropy {language.joint_entropy_bits(language.mask()):.3f} bits")
        print(f"MLM floor {language.marginal_entropy_bits(language.mask()):.3f} bits")
        for objective, outcome in outcomes.items():
            print(f"{objective} reached {outcome.evaluation.bits_per_row:.3f} bits")
    print(f"run directory: {output}")


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to resume."""
    argv = sys.argv[1:] if argv is None else argv
    is_launched = launched_rank() is not None
    # All processes see the same mistakes: one of each machine tells, and later the first alone.
    is_talking = not is_launched or os.environ["LOCAL_RANK"] == "0"
    try:
        if not argv:
            raise UserError(
                "nothing is said of what to train; give a --recipe, smiles-tiny is a small one, or "
                "see --help"
            )
        request = parse(argv)
        check_before_reading(request.config)
        if request.is_dry_run:
            if not launched_rank():
                dry_run(request.config, request.num_devices, request.throughput)
            return 0
        if is_launched and not _names_output(argv):
            raise UserError(
                "under torchrun --output DIR is needed, so that a restart finds its checkpoints"
            )
        engine = start_engine(request.config.train)
        is_talking = engine.is_main
        return _run_and_finish(request.config, request.output, engine)
    except UserError as error:
        if is_talking:
            say(f"error: {error}")
        else:
            # torchrun ends all processes once it sees one end: let the first one speak before.
            time.sleep(SECONDS_TO_SPEAK)
        return 2
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        say(f"error: no space left to write {error.filename or request.output}; make room")
        return 2
    except KeyboardInterrupt:  # while data are prepared; training saves and stops by itself
        if is_talking:
            say("interrupted")
        return INTERRUPTED


def _run_and_finish(config: RunConfig, output: Path, engine: Engine) -> int:
    """Run, and leave the other processes in order unless something unforeseen has happened."""
    try:
        code = run(config, output, engine)
    except UserError:
        engine.finish()
        raise
    engine.finish()
    return code


def _names_output(argv: list[str]) -> bool:
    return any(value.partition("=")[0] == "--output" for value in argv)


if __name__ == "__main__":
    leave(main())
