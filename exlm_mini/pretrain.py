"""``python -m exlm_mini.pretrain``: train a model from a recipe. ::

    python -m exlm_mini.pretrain --recipe smiles-tiny
    python -m exlm_mini.pretrain --recipe text-tiny --data.source my.txt --model.states_per_mask 8

A recipe is a YAML file of settings; dotted options replace single ones. The same command with
the same ``--output`` goes on where it stopped. On several devices it is started by torchrun, and
``--output`` must be given::

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
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from exlm_mini.config import RunConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.config.options import parse
from exlm_mini.config.recipes import parse_stored
from exlm_mini.data.corpus import Corpus, prepare_corpus
from exlm_mini.data.files import read_text, write_atomically
from exlm_mini.data.tokenizer import MASK, Tokenizer
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.reading.filling import measure_fillings
from exlm_mini.reading.prize import measure_prize
from exlm_mini.reading.trained import load, open_checkpoint
from exlm_mini.training.checkpoint import has_begun
from exlm_mini.training.console import (
    INTERRUPTED,
    ProgressLine,
    Requests,
    exit_code,
    requests_by_signal,
    say,
    this_python,
)
from exlm_mini.training.cost import check_memory
from exlm_mini.training.dry_run import dry_run, lacks_pack, objectives_of, tell_row_length
from exlm_mini.training.loop import Outcome
from exlm_mini.training.parts import chain_share, make_masker, versions
from exlm_mini.training.precision import with_precision
from exlm_mini.training.pretraining import Trainer, check_fits, check_spread, stages_left
from exlm_mini.training.processes import Engine, launched_rank, leave, start_engine
from exlm_mini.training.provenance import commit
from exlm_mini.training.run_directory import CONFIG, LOCK, locked_directory, settle_config


def run(config: RunConfig, output: Path, engine: Engine) -> int:
    """Train the models of a configuration and print a summary; returns the exit code."""
    if config.train.precision == "fp16" and engine.device.type == "cpu":
        raise UserError("train.precision fp16 needs a GPU; on a CPU use auto, bf16 or fp32")
    check_spread(config, engine.world_size)
    with engine.together():
        if lacks_pack(config):
            raise UserError(
                f"there is no {config.data.pack}; make it with python -m exlm_mini.prepare (the "
                "recipe's file begins with the command), or give another --data.pack"
            )
        # Absurd sizes are refused here, others once the vocabulary and the rows are known.
        for single in objectives_of(config):
            check_memory(single, len(SpecialIds()), 3, engine.device, engine.world_size)
        if engine.is_main:
            config = with_precision(_stored_precision(config, output), engine.device)
    config = engine.same(config)
    with contextlib.ExitStack() as lock:
        with engine.together():
            if engine.is_main:
                lock.enter_context(locked_directory(output, say))
        is_new = not (output / CONFIG).exists()
        try:
            corpus = _settle(config, output, engine)
            with requests_by_signal(_teller(engine)) as requests:
                outcomes = _train_all(config, corpus, output, engine, requests)
        except UserError:
            # If the settings were stored just now, the directory held at most a corpus before.
            was_accepted = engine.is_main and is_new and (output / CONFIG).exists()
            if was_accepted and not any(output.rglob("step-*")):
                _forget(output)
            raise
    if not all(outcome.is_complete for outcome in outcomes.values()):
        return INTERRUPTED if launched_rank() is None else 0
    if engine.is_main:
        _print_summary(config, output, outcomes)
        _print_prize(config, corpus, output, engine)
        text = shlex.quote(_masked_example(corpus))
        say(f"to look into it: {this_python()} -m exlm_mini.fill {text} --run {output}")
    return 0


def _stored_precision(config: RunConfig, output: Path) -> RunConfig:
    """For a resumed run, resolve ``train.precision auto`` as on the machine where it started."""
    if config.train.precision != "auto" or not os.path.isfile(output / CONFIG):
        return config
    stored = parse_stored(read_text(output / CONFIG))["train"]["precision"]
    return replace(config, train=replace(config.train, precision=stored))


def _teller(engine: Engine) -> Callable[[str], None]:
    """``say`` in the first process, silence in the others."""
    return say if engine.is_main else lambda line: None


def _train_all(
    config: RunConfig, corpus: Corpus, output: Path, engine: Engine, requests: Requests
) -> dict[str, Outcome]:
    """Train one model after the other until one is stopped; progress on stderr."""
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    singles = objectives_of(config)
    outcomes: dict[str, Outcome] = {}
    for single in singles:
        directory = output if len(singles) == 1 else output / single.objective
        with engine.together():  # before the hours of an earlier stage
            check_fits(single, corpus.train, corpus.validation, engine)
            stages = stages_left(single, directory)
        for stage, end in stages:
            with engine.together():
                trainer = Trainer(
                    stage, corpus.train, corpus.validation, directory, _teller(engine), engine
                )
                if (source := stage.train.start_from) is not None and not has_begun(directory):
                    path, before = open_checkpoint(Path(source), _teller(engine))
                    trainer.begin_from(before, path)
            with ProgressLine(stage.objective, config.train.steps) as progress:
                outcome = trainer.run(
                    progress.show, requests.should_stop, requests.should_save, until=end
                )
            outcomes[single.objective] = outcome
            if not outcome.is_complete:
                _teller(engine)(
                    f"stopped at step {outcome.step} of {config.train.steps}; the same command "
                    f"with --output {output} goes on"
                )
                return outcomes
    return outcomes


def _settle(config: RunConfig, output: Path, engine: Engine) -> Corpus:
    """Check or store the settings, note versions, and prepare the data in the first process."""
    with engine.together():
        if engine.is_main:
            for change in settle_config(output, config):
                say(f"changed since the last start: {change}")
            used: dict[str, object] = {**versions(engine.device), "commit": commit()}
            used["num_processes"] = engine.world_size
            text = json.dumps(used, indent=2) + "\n"
            write_atomically(output / "versions.json", text.encode())
            corpus = prepare_corpus(config.data, output / "data", config.seed, say)
            tell_row_length(config, corpus)
    with engine.together():
        if not engine.is_main:
            corpus = prepare_corpus(config.data, output / "data", config.seed)
    return corpus


def _forget(output: Path) -> None:
    """Undo the start of a run that saved nothing, so that a corrected command can follow.

    A finished corpus stays: it may have taken hours, and its settings are stored with it.
    """
    for path in output.iterdir():
        if path.name == LOCK or (path / "corpus.json").exists():
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _print_summary(config: RunConfig, output: Path, outcomes: dict[str, Outcome]) -> None:
    """Print the results on stdout."""
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


def _print_prize(config: RunConfig, corpus: Corpus, output: Path, engine: Engine) -> None:
    """Print what links win on held-out rows, beside what there is to win (see ``prize``), and how
    many molecules are filled well.

    A model of slots has never seen some of them masked and some not, and cannot be asked in turn.
    """
    singles = objectives_of(config)
    for single in singles:
        if single.objective == "repeated-mlm" or config.masking.strategy == "slots":
            continue
        trained = load(output if len(singles) == 1 else output / single.objective)
        model, pack = trained.model.to(engine.device), corpus.validation
        masker = make_masker(single, pack.special_ids, pack.tokenizer)
        share = chain_share(single, trained.step)
        prize = measure_prize(model, pack, masker, chain_share=share)
        k = single.model.states_per_mask if single.objective == "exlm" else 1
        print(f"{single.objective}, held-out rows: {prize.describe(k)}")
        if corpus.kind == "smiles" and find_spec("rdkit"):
            fillings = measure_fillings(
                model, trained.tokenizer, pack, masker, chain_share=share
            )
            for way, filled in fillings.items():
                print(f"{single.objective}, held-out rows filled {way}: {filled.describe()}")


def _masked_example(corpus: Corpus) -> str:
    """A held-out text, or its beginning, with one token hidden."""
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    special = tokenizer.special_ids
    inner = [i for i in corpus.validation.gather([0])[0][0].tolist() if i not in special]
    inner = inner[:16] if corpus.kind == "text" else inner
    before, after = inner[: len(inner) // 2], inner[len(inner) // 2 + 1 :]
    hidden = {"smiles": MASK, "text": f" {MASK}", "toy": f" {MASK} "}[corpus.kind]
    return " ".join(f"{tokenizer.decode(before)}{hidden}{tokenizer.decode(after)}".split())


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to resume."""
    argv = sys.argv[1:] if argv is None else argv
    is_launched = launched_rank() is not None
    # All processes see the same mistakes: one per machine reports them, later only the first.
    is_talking = not is_launched or os.environ["LOCAL_RANK"] == "0"

    def command() -> int:
        nonlocal is_talking
        if not argv:
            raise UserError(
                "nothing is said of what to train; give a --recipe, smiles-tiny is a small one, or "
                "see --help"
            )
        request = parse(argv)
        if request.is_dry_run:
            source = request.config.train.start_from
            before = None if source is None else open_checkpoint(Path(source), say)[1]
            dry_run(request.config, request.num_devices, request.throughput, before)
            return 0
        if is_launched and not any(word.split("=")[0] == "--output" for word in argv):
            raise UserError(
                "under torchrun --output DIR is needed, so that a restart finds its checkpoints"
            )
        engine = start_engine(request.config.train)
        is_talking = engine.is_main
        return _run_and_finish(request.config, request.output, engine)

    return exit_code(command, is_talking=lambda: is_talking)


def _run_and_finish(config: RunConfig, output: Path, engine: Engine) -> int:
    """Run, then leave the process group in order, except after an unforeseen error."""
    try:
        code = run(config, output, engine)
    except RuntimeError as error:
        if not engine.has_lost_another(error):
            raise
        say(
            f"process {engine.rank}: another one has ended, so this one ends; torchrun with "
            "--max-restarts starts all again, and the same command goes on"
        )
        return 1
    except UserError:
        engine.finish()
        raise
    engine.finish()
    return code


if __name__ == "__main__":
    leave(main())
