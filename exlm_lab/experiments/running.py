"""Run one cell with one seed, from its settings to its numbers: train, measure, fine-tune.

The work directory holds a folder for each corpus, shared by all cells that read it::

    WORK/CORPUS/data/          the prepared corpus
    WORK/CORPUS/MODEL/         run of a model: checkpoints, metrics.jsonl, finetune-…/

Folders are named by a hash of the settings, so cells with equal settings share a trained model,
even across sweeps, and an interrupted run resumes from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from exlm_lab.benchmarks.step import step_costs
from exlm_lab.downstream.catalogue import ReadingConfig, load_task
from exlm_lab.downstream.prepared import Problem, load_problem, make_problem
from exlm_lab.downstream.task import Examples
from exlm_lab.experiments.cells import Cell, Downstream, Watched, is_enough
from exlm_lab.experiments.frozen import Molecules, held_out, measure_molecules
from exlm_lab.experiments.measures import measure, measure_together
from exlm_lab.ledger import StoppedError
from exlm_mini.config import RunConfig, settings_with
from exlm_mini.config.checks import Effect, UserError
from exlm_mini.config.recipes import plain, replaced
from exlm_mini.data.corpus import Corpus, prepare_corpus
from exlm_mini.data.files import seal_of
from exlm_mini.reading.trained import Trained, load, open_checkpoint
from exlm_mini.training.console import ProgressLine
from exlm_mini.training.metrics import read_metrics
from exlm_mini.training.run_directory import locked_directory
from exlm_mini.training.trainer import Trainer

CORPUS_SEED = 1
"""Seed of the split and of the toy sentences, the same for all cells and seeds."""
CURVE = ("validation_bits_per_mask", "validation_bits_per_row", "validation_mask_accuracy")
TESTED = ("bits_per_mask", "bits_per_row", "floor_bits_per_row", "joint_bits_per_row")
"""Metrics that are also measured with the other masks of a cell (``Cell.tested_with``)."""
NOTHING: Watched = MappingProxyType({})
SECONDS_BETWEEN_LOOKS = 1.0
"""Time between checks of a folder that another process is writing to."""


@dataclass
class Runner:
    """Trains and measures in one work directory."""

    work: Path
    """The work directory, as described above; created if missing."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    data: Path | None = None
    """Directory or file of a downstream task that is not embedded."""
    report: Callable[[str], None] = print
    """Receives lines about unusual events."""
    should_stop: Callable[[], bool] = lambda: False
    """Called after every step; if true, a checkpoint is saved and ``StoppedError`` raised."""
    _corpora: dict[Path, Corpus] = field(default_factory=dict)
    _molecules: dict[Path, Molecules] = field(default_factory=dict)

    def corpus(self, config: RunConfig) -> Corpus:
        """The corpus of a run, prepared on first use."""
        if reason := self.lacks(config):
            raise UserError(reason)
        folder = self._corpus_folder(config)
        if folder not in self._corpora:
            with self.alone(folder):
                self._corpora[folder] = prepare_corpus(
                    config.data, folder / "data", CORPUS_SEED, self.report
                )
        return self._corpora[folder]

    def lacks(self, config: RunConfig) -> str:
        """What to do about the prepared corpus that a run reads, if it is missing; else empty."""
        pack = config.data.pack
        if pack is None or Path(pack).exists():
            return ""
        return (
            f"there is no {pack}; make it with python -m exlm_mini.prepare (the full command is at "
            f"the top of the recipe {config.recipe})"
        )

    def train(
        self,
        config: RunConfig,
        watched: Watched = NOTHING,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Train a model unless it is trained already; progress lines show it as ``name``.

        Returns:
            ``curve``, ``steps`` and ``seconds`` for the record; the seconds add up all starts of
            the run, validation included.

        Raises:
            StoppedError: if training was stopped before the last step.
        """
        config = self._here(config)
        corpus, folder = self.corpus(config), self.folder(config, watched)
        seen: dict[str, float] = {}
        with self.alone(folder):
            trainer = Trainer(config, corpus.train, corpus.validation, folder)
            if config.train.start_from is not None and trainer.step == 0:
                before = open_checkpoint(self.work / config.train.start_from, self.report)
                trainer.begin_from(before)

            def watch() -> dict[str, float]:
                run, num_rows = trainer.config, trainer.config.train.validation_rows
                numbers = measure(trainer.model, run, corpus, num_rows, with_probe=False)
                seen.update((name, numbers[name]) for name in watched if name in numbers)
                return dict(seen)

            def should_stop() -> bool:
                return self.should_stop() or is_enough(seen, watched)

            if not _got_there(folder, trainer.step, watched):
                with ProgressLine(name or config.objective, config.train.steps) as line:
                    is_complete = trainer.run(
                        line.show, should_stop, watch=watch if watched else dict
                    )
                if not (is_complete or is_enough(seen, watched)):
                    raise StoppedError
        lines = read_metrics(folder / "metrics.jsonl")
        if not lines or lines[-1]["step"] != trainer.step:
            raise UserError(
                f"{folder / 'metrics.jsonl'} is missing the last lines of the run; remove {folder} "
                "and the cell will be run again"
            )
        names, last = ("step", *CURVE, *watched), lines[-1]
        return {
            "curve": [
                {n: line[n] for n in names if n in line} for line in lines if CURVE[0] in line
            ],
            "steps": last["step"],
            "seconds": last["seconds"],
        }

    def run(self, cell: Cell, config: RunConfig) -> dict[str, Any]:
        """Train, measure and fine-tune a cell; returns what its record says about the run."""
        trained = self.train(config, cell.watched, cell.name)
        start = time.monotonic()
        metrics = self.measure(config, cell)
        for name, masks in cell.tested_with.items():
            others = self.measure(config, cell, masks)
            metrics |= {f"{m}@{name}": others[m] for m in TESTED if m in others}
        seconds = {"pretrain": trained["seconds"], "measure": time.monotonic() - start}
        downstream, seconds["finetune"] = self.fine_tune(config, cell)
        metrics["steps"] = trained["steps"]
        return {
            "metrics": metrics,
            "downstream": downstream,
            "curve": trained["curve"],
            "seconds": seconds,
        }

    def measure(
        self, config: RunConfig, cell: Cell, masks: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Metrics of a cell's trained model: those of ``measures.measure``, and further ones for
        cells ``with_prize`` and for molecules. ``masks``: dotted settings to replace its own."""
        pretrained = load(self.folder(config, cell.watched), self.report)
        with_masks = replaced(pretrained.config, masks or {})
        model, corpus = pretrained.model, self.corpus(config)
        numbers = measure(model, with_masks, corpus)
        if cell.with_prize:
            numbers |= measure_together(model, with_masks, corpus, pretrained.tokenizer)
        elif corpus.kind == "smiles" and masks is None:
            pack, folder = corpus.validation, self._corpus_folder(config)
            known = self._molecules[folder] = self._molecules.get(folder) or held_out(
                pack, pretrained.tokenizer
            )
            is_repeated = config.objective == "repeated-mlm"
            k = config.masking.num_copies if is_repeated else None
            numbers |= measure_molecules(model, pretrained.tokenizer, pack, known, k)
        return numbers

    def time(self, config: RunConfig) -> dict[str, Any]:
        """Time steps without training; returns what the record says, see ``step_costs``."""
        start, corpus = time.monotonic(), self.corpus(config)
        metrics = step_costs(self._here(config), corpus)
        seconds = {"measure": time.monotonic() - start}
        return {"metrics": metrics, "curve": [], "downstream": None, "seconds": seconds}

    def fine_tune(self, config: RunConfig, cell: Cell) -> tuple[dict[str, Any] | None, float]:
        """Fine-tune the trained model of a cell; returns the result and the seconds it took.

        The seed is that of the run. The best epoch is chosen on the validation rows. The result is
        None if the cell has no task.

        Raises:
            StoppedError: if fine-tuning was stopped before the last step.
        """
        from exlm_lab.downstream.finetuning import fine_tune  # transformers takes seconds

        downstream, model = cell.downstream, self.folder(config, cell.watched)
        if downstream is None:
            return None, 0.0
        pretrained = load(model, self.report)
        problem = self._problem(downstream, pretrained)
        name = seal_of({"downstream": asdict(downstream), "problem": problem.sha256})[:16]
        folder = model / f"finetune-{name}"
        with self.alone(folder):
            tuned = fine_tune(
                pretrained, problem, downstream.tune, config.seed, folder, self.device,
                should_stop=self.should_stop,
            )  # fmt: skip
        metric = problem.task.metric
        reached = {part: scores[metric] for part, scores in tuned.metrics.items()}
        return {
            "task": downstream.task,
            "metric": metric,
            "test": reached.get("test", reached["validation"]),
            "validation": reached["validation"],
            "setting": asdict(downstream),
        }, tuned.seconds

    def folder(self, config: RunConfig, watched: Watched = NOTHING) -> Path:
        """The folder of a model's run."""
        settings = plain(config)
        settings.pop("recipe")
        for name in settings_with(Effect.NOTHING):
            group, _, key = name.partition(".")
            del settings[group][key]
        if watched:
            settings["watched"] = dict(watched)
        return self._corpus_folder(config) / seal_of(settings)[:16]

    def _corpus_folder(self, config: RunConfig) -> Path:
        return self.work / f"{config.data.kind}-{seal_of(plain(config)['data'])[:16]}"

    def _here(self, config: RunConfig) -> RunConfig:
        """The settings for this process's device; also sets the number of threads."""
        if config.train.num_threads is not None:
            torch.set_num_threads(config.train.num_threads)
        return replace(config, train=replace(config.train, device=self.device))

    def _problem(self, downstream: Downstream, pretrained: Trained) -> Problem:
        counts = (downstream.num_train, downstream.num_validation, downstream.num_test)
        if counts == (None, None, None):
            return load_problem(downstream.task, self.data, ReadingConfig(), pretrained)
        task, splits = load_task(downstream.task, None, ReadingConfig(), pretrained.tokenizer)
        firsts: dict[str, Any] = {
            part: examples and Examples(*(column[:count] for column in examples))
            for (part, examples), count in zip(splits._asdict().items(), counts, strict=False)
        }
        return make_problem(task, splits._replace(**firsts), pretrained)

    @contextlib.contextmanager
    def alone(self, folder: Path) -> Iterator[None]:
        """Lock a folder, waiting while another process is writing there."""
        while True:
            with taken(folder, self.report) as is_ours:
                if is_ours:
                    yield
                    return
            if self.should_stop():
                raise StoppedError
            time.sleep(SECONDS_BETWEEN_LOOKS)


@contextlib.contextmanager
def taken(folder: Path, report: Callable[[str], None]) -> Iterator[bool]:
    """Try to lock a folder for the block; yields whether it succeeded."""
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(locked_directory(folder, report))
            is_ours = True
        except UserError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            is_ours = False
        yield is_ours


def _got_there(folder: Path, step: int, watched: Watched) -> bool:
    """Whether a run ended early, with a watched metric low enough at the step of its weights."""
    metrics = folder / "metrics.jsonl"
    lines = read_metrics(metrics) if metrics.exists() else []
    return any(line["step"] == step and is_enough(line, watched) for line in lines)
