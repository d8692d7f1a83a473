"""Turn finished runs of ``exlm_mini.pretrain`` into records the book reads.

    python book/record.py RUN… --to book/results/NAME.json

A record holds the command, what was reached, the validation curve, the settings and the versions
of one run directory. The command is rebuilt from the settings: what differs from the recipe is an
option. A record with the same command is replaced, all others stay.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from exlm_mini.config import RunConfig
from exlm_mini.config.checks import UserError
from exlm_mini.config.options import command_parser, parse
from exlm_mini.config.recipes import (
    dotted,
    parse_stored,
    plain,
    recipe_names,
    run_config_from_dict,
)
from exlm_mini.data.files import read_bytes, read_text, reading, write_atomically
from exlm_mini.training.console import exit_code
from exlm_mini.training.run_directory import CONFIG, read_metrics

DIGITS = 4
"""Of the bits in a record, after the point."""
CURVE = ("validation_bits_per_mask", "validation_bits_per_row")


def record_of(run: Path) -> dict[str, Any]:
    """The record of one run directory.

    Raises:
        UserError: it is not one, it is damaged, or its run has not finished.
    """
    text = read_text(run / CONFIG, "give the --output of a run")
    try:
        config = run_config_from_dict(parse_stored(text))
    except UserError as error:
        raise UserError(f"{run}: {error}") from None
    names = config.objective.split("+")
    folders = {name: run if len(names) == 1 else run / name for name in names}
    validation = {name: _curve(folder, config.train.steps) for name, folder in folders.items()}
    with reading(run / "versions.json", "restore it"):
        versions = json.loads(read_bytes(run / "versions.json"))
        if lacking := {"commit", "device", "torch"} - versions.keys():
            raise ValueError(f"without {', '.join(sorted(lacking))}")
    return {
        "command": command_of(config),
        "summary": [_summary(name, curve) for name, curve in validation.items()],
        "validation": validation,
        "config": plain(config),
        "versions": versions,
    }


def command_of(config: RunConfig) -> str:
    """The command that trains a run with these settings, as short as the recipe allows.

    For a run whose recipe is not one of the package's it has options alone.

    Raises:
        UserError: no command gives these settings.
    """
    is_ours = config.recipe in recipe_names()
    arguments = ["--recipe", config.recipe] if is_ours else []
    usual = dotted(plain(parse(arguments).config))
    for name, value in dotted(plain(config)).items():
        if name != "recipe" and value != usual[name]:
            items = value if isinstance(value, list) else [value]
            words = [item if isinstance(item, str) else json.dumps(item) for item in items]
            arguments += [f"--{name}", *words]
    if replace(parse(arguments).config, recipe=config.recipe) != config:
        raise UserError(
            f"no command gives the settings of this run: {shlex.join(arguments)} does not"
        )
    return shlex.join(["python", "-m", "exlm_mini.pretrain", *arguments])


def _curve(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Every validation of a finished run, rounded; ``None`` stands for what is not finite."""
    file = folder / "metrics.jsonl"
    lines = read_metrics(file)
    step = lines[-1]["step"] if lines else 0
    if step != num_steps:
        raise UserError(
            f"{folder} stands at step {step} of {num_steps}; let the run finish, the same "
            "command with the same --output goes on"
        )
    with reading(file, "restore the file"):
        curve = [
            {"step": line["step"]}
            | {n: None if line[n] is None else round(line[n], DIGITS) for n in CURVE}
            for line in lines
            if set(CURVE) <= line.keys()
        ]
    if not curve or curve[-1]["step"] != step:
        raise UserError(f"{file} has no validation of its last step {step}; restore the file")
    return curve


def _summary(objective: str, curve: list[dict[str, Any]]) -> str:
    """One line on the last validation."""
    per_mask, per_row = (
        "not finite" if curve[-1][name] is None else f"{curve[-1][name]:.3f}" for name in CURVE
    )
    return (
        f"{objective}: {curve[-1]['step']:,} steps, validation {per_mask} bits per masked token, "
        f"{per_row} per row"
    )


# ---- files of records ----


def write_json(target: Path, content: Any) -> None:
    """Replace a file of results."""
    write_atomically(target, (json.dumps(content, indent=1) + "\n").encode())


def add_records(target: Path, new: list[dict[str, Any]]) -> int:
    """Put records into a file, in the order of their commands; how many it holds now.

    Raises:
        UserError: the file is there and holds something else.
    """
    records = {}
    if target.exists():
        with reading(target, "choose another --to"):
            stored = json.loads(read_bytes(target))
            records = {_by_number(record["command"]): record for record in stored}
    records |= {_by_number(record["command"]): record for record in new}
    write_json(target, [records[key] for key in sorted(records)])
    return len(records)


def _by_number(command: str) -> tuple[str | int, ...]:
    """A key that sorts ``--seed 10`` behind ``--seed 9``."""
    parts = re.split(r"(\d+)", command)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts))


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    parser = command_parser("python book/record.py", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's --output")
    parser.add_argument("--to", required=True, type=Path, help="the .json file of records")

    def run() -> None:
        arguments = parser.parse_args(argv)
        new = [record_of(path) for path in arguments.runs]
        count = add_records(arguments.to, new)
        for record in new:
            print(f"{record['command']}: {'; '.join(record['summary'])}")
        print(f"{arguments.to} holds {count} records")

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())
