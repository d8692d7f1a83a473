"""What the processes of ``tests/stress/test_distributed.py`` run, started by torchrun.

    torchrun --nproc-per-node 2 tests/helpers/workers.py trainings DIRECTORY
    torchrun --nproc-per-node 2 tests/helpers/workers.py disturbed DIRECTORY EVENTS OPTION...

The first makes one run after the other in the same processes, and each process writes what it saw
to ``DIRECTORY/NAME/rank-R.json``. The second is ``pretrain`` with processes that signal themselves:
EVENTS ``KILL:1:4,TERM:0:2`` mean SIGKILL for process 1 in step 4, SIGTERM for process 0 in step 2.
"""

import errno
import hashlib
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from packs import pack_of

from exlm_mini.config import MaskingConfig, ModelConfig, RunConfig, SpecialIds, TrainConfig
from exlm_mini.config.checks import UserError
from exlm_mini.pretrain import main
from exlm_mini.training.console import leave
from exlm_mini.training.processes import start_engine
from exlm_mini.training.step import Stepper
from exlm_mini.training.trainer import Trainer

SPECIAL = SpecialIds()
STEPS = 6
VOCAB_SIZE = 90

SMALL = ModelConfig(
    num_layers=2, width=16, ffn_width=16, num_heads=2, max_positions=48, states_per_mask=2,
    activation_dropout=0.1, clone_embedding_std=0.5,
)  # fmt: skip
TRAIN = TrainConfig(
    steps=STEPS, batch_size=8, micro_batch_size=2, warmup_steps=2, chain_warmup=0.3,
    clip_norm=1.0, save_every=1, keep_last=0, log_every=2, validate_every=3,
    validation_rows=19, device="cpu", precision="fp32",
)  # fmt: skip
PLAIN = RunConfig(
    objective="exlm", model=SMALL, masking=MaskingConfig(mask_ratio=0.3), train=TRAIN
)


def changed(config=PLAIN, objective=None, masking=None, model=None, **train):
    """``config`` with some settings replaced; ``train`` holds those of ``TrainConfig``."""
    return replace(
        config,
        objective=objective or config.objective,
        model=replace(config.model, **(model or {})),
        masking=replace(config.masking, **(masking or {})),
        train=replace(config.train, **train),
    )


WITHOUT_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
DROPLESS = changed(model=WITHOUT_DROPOUT, clip_norm=0.0)
SPREAD = {
    "exlm": changed(DROPLESS, micro_batch_size=None),
    "accumulated": changed(DROPLESS, masking={"strategy": "bernoulli", "mask_ratio": 0.1}),
    "mlm": changed(DROPLESS, "mlm", masking={"strategy": "bernoulli"}),
    "tokens": changed(
        DROPLESS, batch_size=32, micro_batch_size=None, batch_tokens=80, micro_batch_tokens=20
    ),
}
"""Settings with which the result must not depend on the number of processes."""


def make_packs(directory):
    """Write packs for training and validation: rows of unequal length, no two of them the same."""
    packs = []
    for name, num_rows, seed in (("train", 37, 0), ("validation", 19, 1)):
        random = np.random.default_rng(seed)
        lengths = random.integers(6, 12, num_rows)
        inner = [random.integers(6, VOCAB_SIZE, n - 2) for n in lengths]
        rows = [[SPECIAL.bos, *tokens, SPECIAL.eos] for tokens in inner]
        packs.append(pack_of(directory / f"{name}.json", rows, VOCAB_SIZE))
    return packs


def make_trainer(config, packs, output):
    """The trainer of a run in this process."""
    output.mkdir(parents=True, exist_ok=True)
    return Trainer(config, *packs, output)


def losses(trainer):
    """Train to the end; returns the loss of every step."""
    progress = []
    trainer.run(progress.append)
    return [step.loss for step in progress]


def digest(model):
    """SHA-256 of the weights that this process has."""
    data = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    return hashlib.sha256(data).hexdigest()


class Witness:
    """Trains a model, and records what this process sees of it."""

    def __init__(self, config, packs, output, engine):
        if engine.is_main:
            output.mkdir(parents=True, exist_ok=True)
        with engine.together():
            self.trainer = Trainer(config, *packs, output, engine=engine)
        self.seen = {"losses": [], "weights": [], "error": None}
        self.spoilt_steps = ()
        self._step, self._score = self.trainer.stepper.step, engine.score
        self.engine, self.output = engine, output

    def run(self):
        """Train to the end, or to an error."""
        with (
            patch.object(self.trainer.stepper, "step", self.step),
            patch.object(self.engine, "score", self.score),
        ):
            try:
                self.trainer.run()
                self.seen["step"] = self.trainer.step
                self.seen["skipped"] = self.trainer.stepper.skipped_steps
            except UserError as error:
                self.seen["error"] = str(error)
        note = json.dumps(self.seen)
        (self.output / f"rank-{self.engine.rank}.json").write_text(note)
        return self.seen

    def step(self, step):
        self.now = step
        update = self._step(step)
        self.seen["losses"].append(update.loss)
        self.seen["weights"].append(digest(self.trainer.model))
        return update

    def score(self, *arguments):
        scored = self._score(*arguments)
        if self.now in self.spoilt_steps:
            scored = scored._replace(loss=scored.loss * torch.nan)
        return scored


def copy_checkpoints(whole, cut, step, engine):
    """Copy a whole run to ``cut`` as if it had been killed in the step after ``step``."""
    if engine.is_main:
        shutil.rmtree(cut, ignore_errors=True)
        later = [f"step-{number:06d}" for number in range(step + 1, STEPS + 1)]
        shutil.copytree(whole, cut, ignore=shutil.ignore_patterns(*later, "rank-*.json"))
    engine.same(None)


def trainings(directory):
    """Make all runs for the tests in which no process has to die."""
    engine = start_engine(TRAIN)
    packs = make_packs(directory / f"rank-{engine.rank}")

    def train(name, config, spoilt=()):
        witness = Witness(config, packs, directory / name, engine)
        witness.spoilt_steps = spoilt
        return witness.run()

    for precision, steps in (("fp32", (1, 4)), ("bf16", (3,))):
        config = changed(precision=precision)
        train(precision, config)
        for step in steps:
            name = f"{precision}-from-{step}"
            copy_checkpoints(directory / precision, directory / name, step, engine)
            train(name, config)
    for name, config in SPREAD.items():
        train(name, config)
    is_second = engine.rank == 1
    train("nan", PLAIN, spoilt=(2,) if is_second else ())
    train("nans", changed(max_skipped=2), spoilt=(1, 3, 4) if is_second else ())
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch("exlm_mini.training.checkpoint.write_atomically", side_effect=full):
        train("full", PLAIN)
    small = UserError("too little memory") if is_second else None
    with patch("exlm_mini.training.trainer.check_fits", side_effect=small):
        try:
            train("small", PLAIN)
        except UserError as error:
            (directory / "small" / f"rank-{engine.rank}.json").write_text(
                json.dumps(str(error))
            )
    engine.finish()


def disturbed(directory, events, arguments):
    """Run ``pretrain`` with signals; each is sent once, however often the command is restarted."""
    step_of, rank = Stepper.step, int(os.environ["RANK"])
    due = [event.split(":") for event in events.split(",")]

    def step(self, number):
        for name, at_rank, at_step in due:
            mark = directory / f"{name}-{at_rank}-{at_step}"
            if (rank, number) == (int(at_rank), int(at_step)) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        return step_of(self, number)

    with patch.object(Stepper, "step", step):
        return main(arguments)


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    if what == "trainings":
        trainings(Path(where))
        leave(0)
    leave(disturbed(Path(where), rest[0], rest[1:]))
