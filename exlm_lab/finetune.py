"""``python -m exlm_lab.finetune``: fine-tune a model on a table of yours, or a task of §5. ::

    python -m exlm_lab.finetune mine.csv --column SMILES --target pIC50 Active --from molecules
    python -m exlm_lab.finetune reviews.jsonl --column text --target stars \\
        --kind classification --from runs/text --data.split random
    python -m exlm_lab.finetune --task bace bbbp --from runs/smiles \\
        --data moleculenet --recipe finetune/table-8
    python -m exlm_lab.finetune --task rte --from runs/text --data glue \\
        --recipe finetune/table-11 --grid

TABLE is a .csv, .tsv, .jsonl or .parquet, compressed or not; two columns are read as pairs of
texts. A target holds numbers, 0 and 1, or words. Several targets must each hold numbers or 0 and 1;
cells may be empty. Rows that cannot be read are reported and left out. OUTPUT becomes a model that
``predict`` and transformers open, and figure.svg in it shows its predictions. For a --task, the
model is in OUTPUT/TASK.

A run is one setting with one seed. Finished runs are kept in OUTPUT/cells and not repeated, so the
same command with the same --output resumes where it stopped. OUTPUT/results.json has all numbers,
settings and hashes, OUTPUT/table.md what is printed. A run counts with its best epoch, judged on
the validation rows. Texts that are too long are cut, the longer one of a pair first, and counted.

Without TABLE and --task, the tasks are those of the recipe that fit the checkpoint; without a
recipe, the one that needs no file: embedded-molecules or toy-inference. Without --data, benchmarks
are read from the Hugging Face hub.

SIGINT and SIGTERM save a checkpoint and stop. Exit codes: 0 done, 2 a mistake of the user, 130
stopped and ready to resume.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from exlm_lab.downstream.catalogue import EMBEDDED, INPUT_OF, check_task
from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.grid import TUNING, Tuning, check_seeds, combinations
from exlm_lab.downstream.settings import MAX_UNKNOWN, ReadingConfig, TuneConfig
from exlm_lab.downstream.tables import chunks, read_table
from exlm_lab.downstream.task import Task
from exlm_lab.ledger import StoppedError
from exlm_mini.config.checks import Seed, Share, Threads, UserError, nearest
from exlm_mini.config.options import given, of, settings_parser
from exlm_mini.config.recipes import load_recipe, recipe_names
from exlm_mini.data.files import check_file
from exlm_mini.reading.entries import tell
from exlm_mini.reading.runs import SHIPPED, fine_tuning, model_directory
from exlm_mini.training.console import (
    INTERRUPTED,
    exit_code,
    say,
    stop_by_signal,
)
from exlm_mini.training.run_directory import CONFIG, LOCK, locked_directory

if TYPE_CHECKING:  # help and mistakes on the command line need no torch
    import torch

    from exlm_lab.downstream.prepared import Problem
    from exlm_lab.downstream.task import Kind
    from exlm_mini.reading.trained import Trained

SEEDS = (1, 2, 3)
KINDS: dict[str, Kind] = {"classification": "classes", "regression": "numbers"}


class Request(NamedTuple):
    """What the command line asked for."""

    options: Any
    """The options, as parsed."""
    recipe: Tuning
    """The recipe; an empty one, without spaces, if none was given."""
    base: TuneConfig
    """Values of the settings that the recipe does not name."""
    reading: ReadingConfig

    def settings(self, task: str) -> list[TuneConfig]:
        """The settings to try for a task."""
        settings = combinations(self.recipe.spaces.get(task, {}), self.base)
        if len(settings) > 1 and not self.options.grid:
            raise UserError(
                f"the recipe {self.recipe.name} has {len(settings)} settings for {task}; add "
                "--grid to try them all, or choose one with --train.learning_rate and the like"
            )
        return settings

    def problem(self, task: str, pretrained: Trained) -> Problem:
        """Load a task and make it ready for the model."""
        from exlm_lab.downstream.prepared import load_problem, make_problem

        options, most = self.options, self.options.max_unknown
        if options.table is None:
            return load_problem(task, options.source, self.reading, pretrained, most)
        files = {"train": options.table, "validation": options.validation, "test": options.test}
        parts = {name: read_table(file) for name, file in files.items() if file is not None}
        columns, targets = tuple(options.column), tuple(options.target)
        own = Task(task, KINDS.get(options.kind), (), "", pretrained.input, columns, targets)
        cleaning = self.reading.cleaning(pretrained.tokenizer)
        how = self.reading, cleaning, files
        own, splits = load_table(str(options.table), parts, own, *how)
        for what, name in (("row", "rejected"), ("cell", "cells_left_out")):
            faults = splits.notes.get(name, [])
            for table in dict.fromkeys(fault["table"] for fault in faults):
                reasons = {f["row"]: f["why"] for f in faults if f["table"] == table}
                tell(reasons, "row {}", f"this {what} of {table} is left out", say)
        return make_problem(own, splits, pretrained, most)


def _parser() -> Any:
    groups = {"train": TuneConfig, "data": ReadingConfig}
    parser = settings_parser("python -m exlm_lab.finetune", __doc__, groups)
    add = parser.add_argument
    add("table", nargs="?", type=Path, metavar="TABLE", help="your own table")
    columns = "columns of TABLE with the texts or molecules"
    add("--column", nargs="+", metavar="NAME", help=columns)
    add(
        "--target", nargs="+", action="extend", metavar="NAME",
        help="columns of TABLE with the answers",
    )  # fmt: skip
    kinds = (
        "how to treat a target of numbers; default: 0 and 1 as classes, other numbers as a "
        "regression"
    )
    add("--kind", choices=[*KINDS], help=kinds)
    add("--validation", type=Path, metavar="TABLE", help="rows for choosing the best epoch")
    add("--test", type=Path, metavar="TABLE", help="rows for the reported scores")
    add(
        "--task", nargs="+", default=[], metavar="NAME",
        help=f"{', '.join(INPUT_OF)}; default: the recipe's, else an embedded one",
    )  # fmt: skip
    add(
        "--from", "--checkpoint", dest="checkpoint", type=Path, required=True, metavar="RUN",
        help="--output of a pre-training run, checkpoints/step-NNNNNN in it, or a shipped model: "
        f"{', '.join(SHIPPED)}",
    )  # fmt: skip
    add(
        "--data", type=Path, dest="source", metavar="PATH",
        help="directory with the benchmark's files: GLUE's folders, SQuAD's JSON, MoleculeNet's "
        "CSV; default: the Hugging Face hub",
    )  # fmt: skip
    add("--output", type=Path, metavar="DIR", help="default runs/finetune-<time>")
    add("--recipe", metavar="NAME", help=f"{', '.join(recipe_names(TUNING))}, or a .yaml")
    add(
        "--seeds",
        nargs="+",
        type=of(Seed),
        metavar="N",
        help="default: the recipe's, else 1 2 3",
    )
    add("--grid", action="store_true", help="try all settings of the recipe, report the best")
    add("--dry-run", action="store_true", help="print rows, runs, steps and time, and stop")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    threads = "number of CPU threads; default: as in pre-training"
    add("--threads", type=of(Threads), metavar="N", help=threads)
    add(
        "--max-unknown", type=of(Share), default=MAX_UNKNOWN, metavar="X",
        help=f"largest share of [UNK] among the training tokens; default {MAX_UNKNOWN:g}",
    )  # fmt: skip
    return parser


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` prints and exits."""
    options = _parser().parse_args(argv)
    options.task = list(dict.fromkeys(options.task))
    _check_table(options)
    recipe = Tuning("none", {}, SEEDS)
    if options.recipe is not None:
        recipe = load_recipe(options.recipe, TUNING)
    elif options.grid:
        raise UserError("--grid needs a --recipe with values to try, such as finetune/table-11")
    for task in options.task if options.table is None else ():
        check_task(task)
        if recipe.spaces and task not in recipe.spaces:
            known = nearest(task, recipe.spaces)
            raise UserError(f"the recipe {recipe.name} has no task {task}; {known}")
    if options.seeds is not None:
        check_seeds("--seeds", tuple(options.seeds))
        recipe = replace(recipe, seeds=tuple(options.seeds))
    changed = given(options, "train.")
    # An option overrides the recipe.
    spaces = {
        task: {name: values for name, values in space.items() if name not in changed}
        for task, space in recipe.spaces.items()
    }
    recipe = replace(recipe, spaces=spaces, changed=tuple(sorted(changed)) if spaces else ())
    if options.output is None:
        options.output = Path("runs") / f"finetune-{time.strftime('%Y%m%d-%H%M%S')}"
    reading = ReadingConfig(**given(options, "data."))
    return Request(options, recipe, TuneConfig(**changed), reading)


def _check_table(options: Any) -> None:
    """Refuse options for a TABLE if none is given, and options for tasks of the paper if one is."""
    of_table = ("column", "target", "kind", "validation", "test")
    if options.table is None:
        for name in of_table:
            if getattr(options, name) is not None:
                raise UserError(
                    f"--{name} is for a TABLE of your own; give one, before all options, or drop "
                    f"--{name}"
                )
        return
    for name in ("column", "target"):
        if getattr(options, name) is None:
            header = ", ".join(map(str, next(chunks(options.table))))[:300]
            raise UserError(f"--{name} is missing; {options.table} has the columns: {header}")
    of_paper = {
        "task": options.task, "data": options.source, "recipe": options.recipe,
        "grid": options.grid,
    }  # fmt: skip
    for name, value in of_paper.items():
        if value:
            raise UserError(f"--{name} is for tasks of the paper; drop it, or drop TABLE")
    if len(options.column) > 2:
        raise UserError(
            f"--column names {len(options.column)} columns; a model reads one or two"
        )
    options.task = [options.table.name.lstrip(".").partition(".")[0]]


def run(request: Request) -> bool:
    """Fine-tune on every task asked for and print the results; false if it was stopped."""
    options, output, seeds = request.options, request.options.output, request.recipe.seeds
    tables = [t for t in (options.table, options.validation, options.test) if t is not None]
    for number, table in enumerate(tables):
        check_file(table)
        if any(table.samefile(other) for other in tables[:number]):
            raise UserError(f"{table} is given twice; use a different file for each part")
    model_directory(options.checkpoint)
    if tables:  # if the figure lacks its library, say so before the training
        import exlm_lab.downstream.figure  # noqa: F401
    from exlm_lab.downstream.results import data_notes
    from exlm_lab.downstream.runs import plan
    from exlm_mini.reading.trained import load
    from exlm_mini.training.processes import choose_device

    pretrained = load(options.checkpoint, say)
    settings = {task: request.settings(task) for task in _tasks(request, pretrained)}
    device = choose_device(options.device)  # before anything is read
    if threads := options.threads or pretrained.config.train.num_threads:
        import torch

        torch.set_num_threads(threads)
    if options.dry_run:
        for task, configs in settings.items():
            problem = request.problem(task, pretrained)
            work = plan(problem, configs, seeds, pretrained, device)
            print(f"{task}: {'; '.join([work, *data_notes(problem.notes)])}")
        return True
    _check_output(output)
    with locked_directory(output, say), stop_by_signal() as should_stop:
        try:
            lines = _tune(request, pretrained, settings, device, should_stop)
        except StoppedError:
            again = f"--output {shlex.quote(str(output))}"
            say(f"stopped; run the same command again with {again} to resume")
            return False
    print("\n".join(lines))
    print(f"results: {output / 'results.json'}")
    return True


def _check_output(output: Path) -> None:
    """Refuse a directory with files of others, which those of the model could replace."""
    names = {path.name for path in output.iterdir()} - {LOCK} if output.is_dir() else set()
    is_ours = fine_tuning(output) is not None or names & {"cells", "running"}
    if names & {CONFIG, "checkpoints"} or ("config.json" in names and not is_ours):
        raise UserError(f"{output} holds a pre-trained model; choose another --output")
    if names and not is_ours:
        raise UserError(
            f"{output.absolute()} holds {min(names)}, but nothing of an earlier fine-tuning; "
            "choose another --output"
        )


def _tasks(request: Request, pretrained: Trained) -> list[str]:
    """The tasks to run: those named, else the recipe's that the model can read, else an embedded
    one."""
    options, kind = request.options, pretrained.input
    if options.table is not None:
        return options.task
    tasks = options.task or list(request.recipe.spaces)
    if not tasks and kind in EMBEDDED:
        tasks = [EMBEDDED[kind]]
    if not tasks:
        raise UserError(f"no embedded task reads {kind}; give a TABLE, or name a --task")
    others = [task for task in tasks if INPUT_OF[task] != kind]
    if others and (options.task or others == tasks):
        needed = INPUT_OF[others[0]]
        raise UserError(
            f"{others[0]} consists of {needed}, but {pretrained.path} was trained on {kind}; give "
            f"a checkpoint that was trained on {needed}"
        )
    return [task for task in tasks if task not in others]


def _tune(
    request: Request,
    pretrained: Trained,
    settings: dict[str, list[TuneConfig]],
    device: torch.device,
    should_stop: Callable[[], bool],
) -> list[str]:
    """Fine-tune on one task after another, updating ``results.json`` after each; return the lines
    to print."""
    from exlm_lab.downstream.results import earlier_records, task_record, write_results
    from exlm_lab.downstream.runs import TuningLedger, compare, tune
    from exlm_mini.training.provenance import commit, versions

    options, output, recipe = request.options, request.options.output, request.recipe
    records = earlier_records(output, pretrained, say)
    made_with = {**versions(device), "commit": commit()}
    for task, configs in settings.items():
        problem, model = request.problem(task, pretrained), output
        if options.table is None:
            model = output / task
        ledger = TuningLedger(
            output, pretrained, problem, options.device, model, say, should_stop
        )
        result = tune(ledger, configs, recipe.seeds)
        if options.table is not None:
            result = compare(result, problem, recipe.seeds, model)
        record = task_record(result, recipe, made_with)
        # Records written by another version have other keys; drop them.
        records = {n: own for n, own in records.items() if own.keys() == record.keys()}
        records[task] = record
        lines = write_results(output, pretrained, records)
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to resume."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: 0 if run(parse(words)) else INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
