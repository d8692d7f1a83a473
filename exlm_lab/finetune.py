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

import argparse
import ast
import inspect
import itertools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from exlm_lab.downstream.catalogue import ReadingConfig, input_of, task_names
from exlm_lab.downstream.checks import MAX_UNKNOWN
from exlm_lab.downstream.grid import TUNING, Space, Tuning
from exlm_lab.downstream.runs import Request, run
from exlm_lab.downstream.settings import TuneConfig
from exlm_mini.config import AT_LEAST_1, THREADS, Rule, UserError, check_integers, nearest
from exlm_mini.options import GuessingParser, command_parser
from exlm_mini.recipes import load_recipe, recipe_names
from exlm_mini.training.console import INTERRUPTED, exit_code

SEEDS = (1, 2, 3)


def _number(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise UserError(
                f"--{name} is '{text}'; it must be of type {kind.__name__}"
            ) from None

    return read


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


_boolean.__name__ = "true or false"
_GROUPS = {"train": TuneConfig, "data": ReadingConfig}


def _parser() -> GuessingParser:
    parser = command_parser("python -m exlm_lab.finetune", __doc__, GuessingParser)
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
        "--data", type=Path, metavar="PATH",
        help="the benchmark's files: GLUE's folders, SQuAD's JSON, MoleculeNet's CSV, or the "
        "directory with them; default: hub",
    )  # fmt: skip
    add("--output", type=Path, metavar="DIR", help="default runs/finetune-<time>")
    add("--recipe", metavar="NAME", help=f"{', '.join(recipe_names(TUNING))}, or a .yaml")
    add("--seeds", nargs="+", metavar="N", help="default: the recipe's, else 1 2 3")
    add("--grid", action="store_true", help="try all settings of the recipe, report the best")
    add(
        "--search-seeds", metavar="N",
        help="with --grid: seeds per setting while searching; default 1",
    )  # fmt: skip
    add("--dry-run", action="store_true", help="print rows, runs and steps, and stop")
    add("--keep", action="store_true", help="keep the last checkpoint of every run")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--threads", metavar="N", help="CPU threads; a small model is fastest with 1")
    add(
        "--max-unknown", type=_number(float, "max-unknown"), default=MAX_UNKNOWN,
        help=f"largest share of [UNK] among the training tokens; default {MAX_UNKNOWN:g}",
    )  # fmt: skip
    for group, kind in _GROUPS.items():
        about = _about(kind)
        settings = parser.add_argument_group(f"settings of {group}, each above the recipe's")
        for field in fields(kind):
            # The text is read once the type of the setting is known.
            settings.add_argument(
                f"--{group}.{field.name}",
                metavar="V",
                help=f"{about.get(field.name, '')} Default {_shown(field.default)}.".strip(),
            )
    return parser


def _about(kind: type) -> dict[str, str]:
    """What the text below each field of a settings class says."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body)
    return {
        setting.target.id: " ".join(text.value.value.split())
        for setting, text in itertools.pairwise(body)
        if isinstance(setting, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def _shown(default: object) -> str:
    """A default in the words in which an option takes it."""
    if isinstance(default, tuple):
        return ",".join(str(value) for value in default)
    return (
        str(default).lower() if default is None or isinstance(default, bool) else str(default)
    )


def parse(argv: list[str]) -> Request:
    """Read the command line; ``--help`` prints and exits.

    Raises:
        UserError: for an unknown option, task or recipe, or a value that cannot be.
    """
    found = _parser().parse_args(argv)
    (recipe, search_seeds, num_threads, _, (changed, train), (_, reading)) = _all_of(
        [
            partial(_recipe, found),
            partial(_search_seeds, found),
            partial(_count, "threads", found.threads, THREADS),
            partial(_check_unknown, found.max_unknown),
            *(partial(_settings, found, group) for group in _GROUPS),
        ]
    )
    # An option stands above the recipe.
    varied = {f.name for f in fields(Space)} & changed.keys()
    spaces = {
        task: replace(space, **dict.fromkeys(varied, ()))
        for task, space in recipe.spaces.items()
    }
    return Request(
        list(dict.fromkeys(found.task)),
        found.checkpoint,
        found.data,
        found.output or Path("runs") / f"finetune-{time.strftime('%Y%m%d-%H%M%S')}",
        recipe._replace(spaces=spaces, changed=tuple(sorted(changed)) if recipe.spaces else ()),
        train,
        reading,
        found.grid,
        search_seeds,
        found.dry_run,
        found.keep,
        found.device,
        num_threads,
        found.max_unknown,
    )


def _recipe(found: argparse.Namespace) -> Tuning:
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
    if found.data is not None and not (found.task or recipe.spaces):
        raise UserError(f"--data is {found.data}; name its task with --task")
    if not found.seeds:
        return recipe
    seeds = tuple(_number(int, "seeds")(text) for text in found.seeds)
    check_integers({"--seeds": seeds})
    if len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds is {list(seeds)}; give different ones")
    return recipe._replace(seeds=seeds)


def _all_of(readers: Iterable[Callable[[], Any]]) -> list[Any]:
    """What each of them returns.

    Raises:
        UserError: all their mistakes, in one line.
    """
    found, mistakes = [], []
    for read in readers:
        try:
            found.append(read())
        except UserError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UserError("; also: ".join(mistakes))
    return found


def _search_seeds(found: argparse.Namespace) -> int:
    if found.search_seeds is not None and not found.grid:
        raise UserError(f"--search-seeds {found.search_seeds} is for --grid alone; drop it")
    return _count("search-seeds", found.search_seeds, AT_LEAST_1) or 1


def _count(name: str, text: str | None, rule: Rule) -> int | None:
    count = None if text is None else _number(int, name)(text)
    if count is not None and not rule.fits(count):
        raise UserError(f"--{name} is {count}; it must {rule.words}")
    return count


def _check_unknown(share: float) -> None:
    if not 0 <= share <= 1:
        raise UserError(f"--max-unknown is {share:g}; it must lie in [0, 1]")


def _settings(found: argparse.Namespace, group: str) -> tuple[dict[str, Any], Any]:
    """The options of a group that were given, and its settings with them."""
    kind = _GROUPS[group]
    texts = {field.name: getattr(found, f"{group}.{field.name}") for field in fields(kind)}
    given = {name: text for name, text in texts.items() if text is not None}
    values = _all_of(partial(_value, kind, group, *option) for option in given.items())
    changed = dict(zip(given, values, strict=True))
    return changed, kind(**changed)


def _value(kind: type, group: str, name: str, text: str) -> Any:
    """An option, read as the type of its setting."""
    hint, option = get_type_hints(kind)[name], f"{group}.{name}"
    if name == "adam_betas":
        return tuple(_number(float, option)(part) for part in text.split(","))
    if hint is bool:
        return _number(_boolean, option)(text)
    types = [t for t in get_args(hint) if t is not type(None)]
    reader = types[0] if types else hint
    return text if isinstance(reader, str) else _number(reader, option)(text)


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 stopped and ready to go on."""
    argv = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: 0 if run(parse(argv)) else INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
