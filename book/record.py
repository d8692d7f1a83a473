"""Turn finished runs of ``exlm_mini.pretrain`` into records the book reads.

    python book/record.py RUN… --to book/results/NAME.json

A record holds the command, what was reached, the validation curve, the settings and the versions
of one run directory. The command is rebuilt from the settings: what differs from the recipe is an
option. A record with the same command is replaced, all others stay. What a record holds beyond
that (``book/case_study.py`` adds some) is never dropped: such a record is not replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from exlm_mini.config import RunConfig, UserError, run_config_from_dict
from exlm_mini.data.files import write_atomically
from exlm_mini.options import command_parser, parse
from exlm_mini.recipes import parse_stored, plain, recipe_names
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
    config = _config_of(run)
    names = config.objective.split("+")
    folders = {name: run if len(names) == 1 else run / name for name in names}
    validation = {name: _curve(folder, config.train.steps) for name, folder in folders.items()}
    return {
        "command": command_of(config),
        "summary": [_summary(name, curve) for name, curve in validation.items()],
        "validation": validation,
        "config": plain(config),
        "versions": _versions_of(run),
    }


def command_of(config: RunConfig) -> str:
    """The command that trains a run with these settings, as short as the recipe allows.

    A run whose recipe is not one of the package's is told by its options alone.

    Raises:
        UserError: no command gives these settings.
    """
    is_ours = config.recipe in recipe_names()
    arguments = ["--recipe", config.recipe] if is_ours else []
    usual = _dotted(plain(parse(arguments).config))
    for name, value in _dotted(plain(config)).items():
        if name != "recipe" and value != usual[name]:
            arguments += [f"--{name}", *_words(value)]
    if replace(parse(arguments).config, recipe=config.recipe) != config:
        raise UserError(
            f"no command gives the settings of this run: {shlex.join(arguments)} does not"
        )
    return shlex.join(["python", "-m", "exlm_mini.pretrain", *arguments])


def read_records(target: Path) -> list[dict[str, Any]]:
    """The records of a file; none if there is no file yet.

    Raises:
        UserError: the file holds something else, or its name does not end in .json.
    """
    if target.suffix != ".json":
        raise UserError(f"--to is {target}; records are kept in a .json file")
    if not target.exists():
        return []
    records = read_json(target, "choose another --to")
    if not isinstance(records, list) or not all(map(_is_record, records)):
        raise UserError(f"{target} holds no records of runs; choose another --to")
    return records


def _is_record(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("command"), str)


def read_json(path: Path, remedy: str) -> Any:
    """What a JSON file holds.

    Args:
        path: of the file.
        remedy: what to do if it cannot be read.

    Raises:
        UserError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError:
        reason = "it is not text"
    except json.JSONDecodeError as error:
        reason = f"no JSON in line {error.lineno}: {error.msg}"
    except RecursionError:
        reason = "its lists are too deep"
    raise UserError(f"cannot read {path} ({reason}); {remedy}")


def add_records(target: Path, new: list[dict[str, Any]]) -> int:
    """Put records into a file, in the order of their commands; how many it holds now.

    Raises:
        UserError: the file is there and holds something else, or more about one of these runs
            than the new record, or cannot be written.
    """
    records = {record["command"]: record for record in read_records(target)}
    for record in new:
        lost = records.get(record["command"], {}).keys() - record.keys()
        if lost:
            raise UserError(
                f"{target} would lose {', '.join(sorted(lost))} of the run {record['command']}; "
                "record it with the script that added them, or choose another --to"
            )
        records[record["command"]] = record
    return write_records(target, list(records.values()))


def write_records(target: Path, records: list[dict[str, Any]]) -> int:
    """Make these the records of a file, in the order of their commands; how many there are.

    Raises:
        UserError: the file cannot be written.
    """
    ordered = sorted(records, key=lambda record: _by_number(record["command"]))
    write_json(target, ordered)
    return len(ordered)


def write_json(target: Path, content: Any) -> None:
    """Replace a file of results.

    Raises:
        UserError: it cannot be written.
    """
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        raise UserError(
            f"cannot write {target} ({error.strerror}); check its folder and the disk"
        ) from None
    except UnicodeEncodeError:
        raise UserError(
            f"{target} holds half a surrogate pair, which is no text; mend it"
        ) from None


def _config_of(run: Path) -> RunConfig:
    if not run.is_dir():
        raise UserError(f"there is no run directory {run}; give the --output of a run")
    file = run / CONFIG
    if not file.is_file():
        raise UserError(f"{run} holds no {CONFIG}, so it is not the directory of a run")
    try:
        return run_config_from_dict(parse_stored(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file} ({error}); restore the file") from None
    except UserError as error:
        raise UserError(f"{run}: {error}") from None


def _curve(folder: Path, num_steps: int) -> list[dict[str, Any]]:
    """Every validation of a finished run, rounded."""
    file = folder / "metrics.jsonl"
    lines = read_metrics(file)
    step = lines[-1]["step"] if lines else 0
    if step != num_steps:
        raise UserError(
            f"{folder} stands at step {step} of {num_steps}; let the run finish, the same "
            "command with the same --output goes on"
        )
    validations = [line for line in lines if set(CURVE) <= line.keys()]
    if lines[-1] not in validations:
        raise UserError(f"{file} has no validation of its last step {step}; restore the file")
    for line in validations:
        for name in CURVE:
            if not isinstance(line[name], int | float | None):
                raise UserError(
                    f"{file}: {name} of step {line['step']} is {line[name]!r}, no number; "
                    "restore the file"
                )
    return [
        {"step": line["step"]} | {name: _rounded(line[name]) for name in CURVE}
        for line in validations
    ]


def _rounded(bits: float | None) -> float | None:
    """``None`` stands for what is not finite."""
    return None if bits is None else round(bits, DIGITS)


def _summary(objective: str, curve: list[dict[str, Any]]) -> str:
    """One line on the last validation."""
    per_mask, per_row = (curve[-1][name] for name in CURVE)
    if per_mask is None or per_row is None:
        return f"{objective}: {curve[-1]['step']:,} steps, validation not finite"
    return (
        f"{objective}: {curve[-1]['step']:,} steps, validation {per_mask:.3f} bits per masked "
        f"token, {per_row:.3f} per row"
    )


def _versions_of(run: Path) -> dict[str, str]:
    file = run / "versions.json"
    versions = read_json(file, "the run wrote it; restore it")
    if not isinstance(versions, dict) or not {"commit", "device", "torch"} <= versions.keys():
        raise UserError(f"{file} does not name commit, device and torch")
    return versions


def _dotted(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _dotted(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _words(value: Any) -> list[str]:
    """A value as the command line takes it."""
    if isinstance(value, str):
        return [value]
    is_names = isinstance(value, list) and all(isinstance(item, str) for item in value)
    if is_names and not any(item.startswith(("-", "[")) for item in value):
        return value or ["[]"]
    return [json.dumps(value)]


def _by_number(command: str) -> list[Any]:
    """Sorts ``--seed 10`` behind ``--seed 9``."""
    parts = re.split(r"(\d+)", command)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def tell(records: list[dict[str, Any]], target: Path, count: int) -> None:
    """Print what was recorded."""
    for record in records:
        print(f"{record['command']}: {'; '.join(record['summary'])}")
    print(f"{target} holds {count} records")


def run(arguments: argparse.Namespace) -> None:
    """Record the named runs."""
    read_records(arguments.to)  # refuse it before any run is read
    new = [record_of(path) for path in arguments.runs]
    tell(new, arguments.to, add_records(arguments.to, new))


def main(argv: list[str] | None = None) -> int:
    """Run the command; 0 done, 2 a mistake of the user, 130 interrupted."""
    parser = command_parser("python book/record.py", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's --output")
    parser.add_argument("--to", required=True, type=Path, help="the .json file of records")
    return exit_code(lambda: run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
