"""``python -m exlm_lab.finetune``: fine-tune a pre-trained model on downstream tasks (§5). ::

    python -m exlm_lab.finetune --checkpoint runs/smiles
    python -m exlm_lab.finetune --task bace bbbp --checkpoint runs/smiles --data moleculenet \\
        --recipe finetune/table-8
    python -m exlm_lab.finetune --task rte --checkpoint runs/text --data glue \\
        --recipe finetune/table-11 --grid

Every seed of every setting is a run; a finished one is kept in OUTPUT/cells and not made again, so
the same command with the same --output goes on where it was stopped. OUTPUT/results.json has all
numbers, settings and hashes, OUTPUT/table.md what is printed. Of each run the epoch that is best on
the validation rows counts; predictions lie beside its metrics. Texts that are too long are cut, the
longer one of a pair first, and counted.

Without --task the recipe's tasks that fit the checkpoint are taken; without a recipe the one that
needs no file: embedded-molecules, sections or toy-inference. Without --data the benchmarks are
read from the Hugging Face hub.

SIGINT and SIGTERM save a checkpoint and stop. Exit codes: 0 done, 2 a mistake of the user, 130
stopped and ready to go on.
"""

from __future__ import annotations

import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from exlm_lab.downstream.catalogue import ReadingConfig, input_of, task_names
from exlm_lab.downstream.checks import MAX_UNKNOWN
from exlm_lab.downstream.grid import TUNING, Space, Tuning
from exlm_lab.downstream.runs import Request, run
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import AT_LEAST_1, SHARE, THREADS, UserError, check_integers, nearest
from exlm_mini.options import given, settings_parser
from exlm_mini.recipes import build, load_recipe, recipe_names
from exlm_mini.training.console import INTERRUPTED, exit_code

SEEDS = (1, 2, 3)
GROUPS = {"train": TuneConfig, "data": ReadingConfig}


def _parser() -> Any:
    parser = settings_parser("python -m exlm_lab.finetune", __doc__, GROUPS)
    add = parser.add_argument
    add(
        "--task", nargs="+", default=[], metavar="NAME",
        help=f"{', '.join(task_names())}; default: the recipe's, else an embedded one",
    )  # fmt: skip
    add(
        "--checkpoint", type=Path, required=True, metavar="RUN",
        help="--output of a pre-training run, or checkpoints/step-NNNNNN in it",
    )  # fmt: skip
    add(
        "--data", type=Path, dest="source", metavar="PATH",
        help="the benchmark's files: GLUE's folders, SQuAD's JSON, MoleculeNet's CSV, or the "
        "directory with them; default: hub",
    )  # fmt: skip
    add("--output", type=Path, metavar="DIR", help="default runs/finetune-<time>")
    add("--recipe", metavar="NAME", help=f"{', '.join(recipe_names(TUNING))}, or a .yaml")
    add("--seeds", nargs="+", type=int, metavar="N", help="default: the recipe's, else 1 2 3")
    add("--grid", action="store_true", help="try all settings of the recipe, report the best")
    add(
        "--search-seeds", type=int, metavar="N",
        help="with --grid: seeds per setting while searching; default 1",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="print rows, runs and steps, and stop")
    add("--keep", action="store_true", help="keep the last checkpoint of every run")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--threads", type=int, metavar="N", help="of a CPU; a small model is fastest with 1")
    add(
        "--max-unknown", type=float, default=MAX_UNKNOWN, metavar="X",
        help=f"largest share of [UNK] among the training tokens; default {MAX_UNKNOWN:g}",
    )  # fmt: skip
    return parser


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` prints and exits.

    Raises:
        UserError: for an unknown option, task or recipe, or a value that cannot be.
    """
    found = _parser().parse_args(argv)
    for option, rule in (
        ("threads", THREADS), ("search-seeds", AT_LEAST_1), ("max-unknown", SHARE),
    ):  # fmt: skip
        value = found[option.replace("-", "_")]
        if value is not None and not rule.fits(value):
            raise UserError(f"--{option} is {value}; it must {rule.words}")
    if found.search_seeds is not None and not found.grid:
        raise UserError(f"--search-seeds {found.search_seeds} is for --grid alone; drop it")
    recipe = _recipe(found)
    settings = {"train": {}, "data": {}} | given(found)
    changed = settings["train"]
    # An option stands above the recipe.
    varied = {f.name for f in fields(Space)} & changed.keys()
    spaces = {
        task: replace(space, **dict.fromkeys(varied, ()))
        for task, space in recipe.spaces.items()
    }
    return Request(
        list(dict.fromkeys(found.task)),
        found.checkpoint,
        found.source,
        found.output or Path("runs") / f"finetune-{time.strftime('%Y%m%d-%H%M%S')}",
        recipe._replace(spaces=spaces, changed=tuple(sorted(changed)) if recipe.spaces else ()),
        build(TuneConfig, changed),
        ReadingConfig(**settings["data"]),
        found.grid,
        found.search_seeds or 1,
        found.dry_run,
        found.keep,
        found.device,
        found.threads,
        found.max_unknown,
    )


def _recipe(found: Any) -> Tuning:
    """The recipe that was named, or none, with the seeds that were given."""
    for task in found.task:
        input_of(task)
    recipe = Tuning("none", "mean-sd", SEEDS, {})
    if found.recipe is not None:
        recipe = load_recipe(found.recipe, TUNING)
        for task in found.task:
            if task not in recipe.spaces:
                raise UserError(
                    f"the recipe {recipe.name} has no task {task}; "
                    f"{nearest(task, recipe.spaces)}"
                )
    elif found.grid:
        raise UserError("--grid needs a --recipe with the values to try, finetune/table-11")
    if found.source is not None and not (found.task or recipe.spaces):
        raise UserError(f"--data is {found.source}; name its task with --task")
    if not found.seeds:
        return recipe
    check_integers({"--seeds": found.seeds})
    if len(set(found.seeds)) < len(found.seeds):
        raise UserError(f"--seeds is {found.seeds}; give different ones")
    return recipe._replace(seeds=tuple(found.seeds))


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to go on."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: 0 if run(parse(argv)) else INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
