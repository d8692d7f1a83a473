"""Fine-tuning as a person asks for it: several tasks, for each a search and several seeds.

A run that is finished is kept and not made again, so a request may be stopped and repeated.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from exlm_lab.downstream.catalogue import EMBEDDED_OF, ReadingConfig, input_of
from exlm_lab.downstream.grid import (
    Result,
    Space,
    Tuning,
    TuningLedger,
    best_setting,
)
from exlm_lab.downstream.prepared import DEV_ALONE, Problem, load_problem
from exlm_lab.downstream.results import (
    check_results,
    notes,
    scale,
    table,
    task_record,
    write_results,
)
from exlm_lab.downstream.settings import TuneConfig
from exlm_lab.ledger import StoppedError
from exlm_mini.config import UserError
from exlm_mini.reading.pretrained import Pretrained, load_pretrained
from exlm_mini.training.console import ProgressLine, Requests, requests_by_signal, say
from exlm_mini.training.loop import Progress
from exlm_mini.training.parts import choose_device, versions
from exlm_mini.training.provenance import commit
from exlm_mini.training.run_directory import CONFIG, LOCK, RunDirectory


class Request(NamedTuple):
    """What is asked for."""

    tasks: list[str]
    """None: those of the recipe, or the embedded one, that the checkpoint can read."""
    checkpoint: Path
    data: Path | None
    output: Path
    recipe: Tuning
    base: TuneConfig
    """Settings the recipe does not name."""
    reading: ReadingConfig
    is_grid: bool
    search_seeds: int
    is_dry_run: bool
    is_kept: bool
    device: str
    num_threads: int | None
    max_unknown: float

    def settings(self, task: str) -> list[TuneConfig]:
        """The settings to try for a task.

        Raises:
            UserError: several, and not asked for a grid.
        """
        settings = self.recipe.spaces.get(task, Space()).settings(self.base)
        if len(settings) > 1 and not self.is_grid:
            raise UserError(
                f"the recipe {self.recipe.name} has {len(settings)} settings for {task}; add "
                "--grid to try them all, or choose one with --train.learning_rate and the like"
            )
        return settings


def run(request: Request) -> bool:
    """Fine-tune on every task asked for and print the results; false if asked to stop before."""
    pretrained = load_pretrained(request.checkpoint, say)
    if not request.tasks:
        request = request._replace(tasks=_default_tasks(request.recipe, pretrained))
    settings = {task: request.settings(task) for task in request.tasks}
    for task in request.tasks:
        if (found := input_of(task)) != pretrained.input:
            raise UserError(
                f"{task} consists of {found}, and {pretrained.path} was trained on "
                f"{pretrained.input}; give a checkpoint that was trained on {found}"
            )
    choose_device(request.device)  # before anything is read
    if request.num_threads is not None:
        import torch

        torch.set_num_threads(request.num_threads)
    if request.is_dry_run:
        for task in request.tasks:
            _print_plan(_problem(request, task, pretrained), settings[task], request)
        return True
    if any((request.output / name).exists() for name in (CONFIG, "checkpoints")):
        raise UserError(f"{request.output} holds a pre-training run; choose another --output")
    with RunDirectory(request.output, say), requests_by_signal() as requests:
        try:
            whole = _tune_all(request, pretrained, settings, requests)
        except StoppedError:
            say(f"stopped; the same command with --output {request.output} goes on")
            return False
        except UserError:
            if [path.name for path in request.output.iterdir()] == [LOCK]:
                shutil.rmtree(request.output, ignore_errors=True)
            raise
    shown = {**whole, "tasks": {task: whole["tasks"][task] for task in request.tasks}}
    lines = [*table(shown), "", *notes(shown["tasks"]), "", *scale(shown)]
    print("\n".join(lines))
    print(f"results: {request.output / 'results.json'}")
    return True


def _default_tasks(recipe: Tuning, pretrained: Pretrained) -> list[str]:
    """The tasks that are meant where none is named; says so."""
    kind = pretrained.input
    if not recipe.spaces:
        task = EMBEDDED_OF[kind]
        say(f"no --task: {task}, the embedded task of {kind}")
        return [task]
    tasks = [task for task in recipe.spaces if input_of(task) == kind]
    if not tasks:
        known = " or ".join(sorted({input_of(task) for task in recipe.spaces}))
        raise UserError(
            f"the tasks of the recipe {recipe.name} consist of {known}, and {pretrained.path} "
            f"was trained on {kind}; give a checkpoint that was trained on {known}"
        )
    say(f"no --task: {', '.join(tasks)} of the recipe {recipe.name}")
    return tasks


def _tune_all(
    request: Request,
    pretrained: Pretrained,
    settings: dict[str, list[TuneConfig]],
    requests: Requests,
) -> dict[str, Any]:
    """One task after the other, each in ``results.json`` as soon as it is done; what that holds."""
    check_results(request.output, pretrained)
    made_with = {**versions(choose_device(request.device)), "commit": commit()}
    for task in request.tasks:
        problem = _problem(request, task, pretrained)
        where = request.output, pretrained, problem, request.device
        ledger = TuningLedger(*where, request.is_kept, say, requests.should_stop)
        result = tune(ledger, settings[task], request)
        record = {task: task_record(result, request.recipe)}
        whole = write_results(request.output, pretrained, record, request.recipe, made_with)
    return whole


def tune(ledger: TuningLedger, settings: list[TuneConfig], request: Request) -> Result:
    """All runs of a task: the search for a setting if there are several, then every seed of it.

    Raises:
        StoppedError: if a signal asked to stop.
        UserError: if every run of a search diverged.
    """
    seeds, task = request.recipe.seeds, ledger.problem.task
    searching = seeds[: request.search_seeds] if len(settings) > 1 else ()
    plan = [(config, seed) for config in settings for seed in searching]
    num_runs = len(plan) + len(seeds) - len(searching)
    searched = [
        _run(ledger, config, seed, f"{i}/{num_runs}")
        for i, (config, seed) in enumerate(plan, 1)
    ]
    chosen = best_setting(searched, task) if searched else settings[0]
    first = len(plan) + 1 - len(searching)
    cells = [
        _run(ledger, chosen, seed, f"{i}/{num_runs}") for i, seed in enumerate(seeds, first)
    ]
    return Result(task, chosen, cells, searched, ledger.problem.notes)


def _run(ledger: TuningLedger, config: TuneConfig, seed: int, number: str) -> dict[str, Any]:
    """The record of one run, with progress on stderr."""
    if ledger.should_stop():
        raise StoppedError
    problem, metric = ledger.problem, ledger.problem.task.metric
    steps_per_epoch = -(-len(problem.train.rows) // config.batch_size)
    validated = ""
    name = f"{problem.task.name} {number} seed {seed}"
    with ProgressLine(name, config.epochs * steps_per_epoch) as line:

        def show(progress: Progress) -> None:
            nonlocal validated
            if progress.evaluation is not None:
                validated = f", validation {metric} {100 * progress.evaluation[metric]:.1f}"
            epoch = -(-progress.step // steps_per_epoch)
            line.tell(progress.step, f"epoch {epoch}, loss {progress.loss:.3f}{validated}")

        return ledger.run(config, seed, show)


def _problem(request: Request, task: str, pretrained: Pretrained) -> Problem:
    problem = load_problem(task, request.data, request.reading, pretrained, request.max_unknown)
    if problem.notes.get("split") == DEV_ALONE:
        say(
            f"{task}: the dev set alone cannot train; most of its articles do, the rest validate"
        )
    return problem


def _print_plan(problem: Problem, settings: list[TuneConfig], request: Request) -> None:
    """What a task would take, on stdout; nothing is written."""
    seeds, num_rows = request.recipe.seeds, len(problem.train.rows)
    num_searching = min(request.search_seeds, len(seeds)) if len(settings) > 1 else 0
    num_runs = len(settings) * num_searching + len(seeds) - num_searching
    steps = [config.epochs * -(-num_rows // config.batch_size) for config in settings]
    longest = max(part["longest"] for part in problem.notes["rows"].values())
    print(f"{problem.task.name}: {num_rows:,} training rows, longest row {longest} tokens")
    print(
        f"{problem.task.name}: {len(settings)} setting(s), {len(seeds)} seed(s), {num_runs} "
        f"run(s) of {min(steps):,} to {max(steps):,} steps"
    )
    for part, found in problem.notes["rows"].items():
        print(f"{problem.task.name}: {part} {json.dumps(found)}")
    for line in _split_lines(problem.notes):
        print(f"{problem.task.name}: {line}")


def _split_lines(found: dict[str, Any]) -> list[str]:
    """How molecules were divided: what it takes to compare a split with another's."""
    if "split_sha1" not in found:
        return []
    lines = [f"split {found['split']}, sizes {_slashed(found['sizes'])}"]
    if printed := found.get("paper_sizes"):
        lines[0] += f" (paper {_slashed(printed)})"
    lines += [f"{part} rows sha1 {digest}" for part, digest in found["split_sha1"].items()]
    lines += [
        f"row {bad['row']} rejected by RDKit: {bad['smiles']}" for bad in found["rejected"]
    ]
    return lines


def _slashed(counts: list[int]) -> str:
    return "/".join(map(str, counts))
