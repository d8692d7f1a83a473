"""How fast a recipe trains, as measured: tokens per second, and the hours that follow from it.

Nothing here guesses. A speed is a number that somebody gives, or it is read from the log of a run
of the same model on rows of the same length.
"""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config import RunConfig, UserError
from exlm_mini.outside import read_bytes, read_text, reading
from exlm_mini.run_directory import CONFIG, read_metrics
from exlm_mini.settings import parse_stored, plain

LEAST_INTERVALS = 3
"""A median of fewer says nothing."""
SAME_SPEED = (
    "objective", "model", "masking", "data.kind", "data.block_length", "train.precision",
    "train.batch_size", "train.micro_batch_size", "train.batch_tokens",
    "train.micro_batch_tokens", "train.compile", "train.sharding",
)  # fmt: skip
"""Settings that decide how fast a token is worked on."""


class Throughput(NamedTuple):
    """A measured speed of one device."""

    tokens_per_second: float
    """Input tokens, before expansion or repetition and without padding."""
    source: str
    """Where the number is from."""

    def device_hours(self, num_tokens: float) -> float:
        """Hours of one device for so many tokens."""
        return num_tokens / self.tokens_per_second / 3600


def speed_settings(config: RunConfig) -> dict[str, Any]:
    """The settings of ``SAME_SPEED`` by their names, as JSON knows them."""
    settings = plain(config)
    return {name: _setting(settings, name) for name in SAME_SPEED}


def throughput(text: str, config: RunConfig) -> Throughput:
    """The speed a command line names.

    Args:
        text: tokens per second, the directory of a run, or a file of measured speeds.
        config: of the run to be estimated, with a single objective.

    Raises:
        UserError: if it is none of these, or the speed is that of another model or other rows.
    """
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        path = Path(text)
        return (
            recorded_throughput(path, config)
            if path.is_file()
            else measured_throughput(path, config)
        )
    if not 0 < number < float("inf"):
        raise UserError(f"--throughput is {text}; it must be positive tokens per second")
    return Throughput(number, "given")


def recorded_throughput(file: Path, config: RunConfig) -> Throughput:
    """The speed of these settings in a file of ``bench train --json`` or ``book/evidence.py``.

    Raises:
        UserError: if the file holds no speeds, or none of these settings.
    """
    ours = speed_settings(config)
    differing = []
    for record in _records(file):
        difference = _first_difference(record["settings"], ours)
        if difference is None:
            return Throughput(record["tokens_per_second"], _source(record, file))
        is_other = record["recipe"] != config.recipe, record["objective"] != config.objective
        differing.append((is_other, difference))
    _, nearest = min(differing, key=lambda found: found[0])
    raise UserError(
        f"{file} holds no speed of these settings; the nearest was measured with {nearest}; "
        "measure it with python -m exlm_mini.bench train"
    )


def _source(record: dict[str, Any], file: Path) -> str:
    machine = record["machine"]
    device = machine["cpu"] if machine["device"] == "cpu" else machine["device"]
    part, whole = record["accumulated"], record["accumulated_by_recipe"]
    of_whole = f", {part} of {whole} micro-batches a step" if part != whole else ""
    return f"measured on {device}{of_whole}, {file}"


def _records(file: Path) -> list[dict[str, Any]]:
    """Speeds of recipes in a file, whatever else it holds."""
    remedy = (
        "make a file of speeds with python -m exlm_mini.bench train --recipe NAME --json > FILE"
    )
    with reading(f"--throughput {file}", remedy):
        content = json.loads(read_bytes(file, remedy))
        if isinstance(content, dict):  # of evidence: the machine is told once for all
            found = [
                {**record, "machine": content["machine"]}
                for result in content["sections"].get("train", {}).values()
                for record in result.get("records", [])
            ]
        else:
            found = [record for record in content if record["benchmark"] == "train"]
        for record in found:
            is_whole = (
                isinstance(record["settings"], dict)
                and {"recipe", "objective", "accumulated", "accumulated_by_recipe"}
                <= set(record)
                and {"device", "cpu"} <= set(record["machine"])
                and isinstance(record["tokens_per_second"], float)
                and 0 < record["tokens_per_second"] < float("inf")
            )
            if not is_whole:
                raise ValueError("a speed lacks its settings")
        if not found:
            raise ValueError("no measured speed of a recipe")
    return found


def measured_throughput(run: Path, config: RunConfig) -> Throughput:
    """Median over the lines of a run's log, which leaves out slow first steps and validations.

    A run on several devices gives the speed of one of them, what they lose to each other included.

    Raises:
        UserError: if there is no such run, its log is too short, or it differs in a setting of
            ``SAME_SPEED``.
    """
    if not (run / CONFIG).is_file():
        raise UserError(
            f"--throughput {run} is neither a number nor the directory of a run; give tokens per "
            "second of one device, the --output of a run, or a file of bench train --json"
        )
    stored = parse_stored(read_text(run / CONFIG))
    several = stored["objective"].split("+")
    if len(several) > 1 and config.objective in several:
        run, stored["objective"] = run / config.objective, config.objective
    theirs = {name: _setting(stored, name) for name in SAME_SPEED}
    difference = _first_difference(theirs, speed_settings(config))
    if difference is not None:
        raise UserError(
            f"{run} was measured with {difference}; measure a run of the same settings"
        )
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "tokens" in line]
    with reading(run / "metrics.jsonl"):
        speeds = [
            (b["tokens"] - a["tokens"])
            / (b["seconds"] - a["seconds"])
            / b.get("num_processes", 1)
            for a, b in pairwise(lines)
            if b["seconds"] > a["seconds"]
        ]
    if len(speeds) < LEAST_INTERVALS:
        raise UserError(
            f"{run} logged {len(speeds)} intervals of steps, too few for a speed; let it train "
            f"for more than {LEAST_INTERVALS} lines of metrics.jsonl (--train.log_every)"
        )
    return Throughput(statistics.median(speeds), f"measured in {run}")


def _setting(settings: dict[str, Any], name: str) -> Any:
    group, _, inner = name.partition(".")
    value = settings[group]
    if inner:
        return value[inner]
    # Given for --dry-run alone, the vocabulary's size is the tokenizer's otherwise.
    return {k: v for k, v in value.items() if k != "vocab_size"} if group == "model" else value


def _first_difference(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """The first of ``SAME_SPEED`` that differs, with both values; none if all agree.

    What ``train.precision auto`` comes to depends on the device, and so does the speed.
    """
    for name in SAME_SPEED:
        if name == "train.precision" and ours[name] == "auto":
            continue
        if theirs.get(name) != ours[name]:
            return _difference(name, theirs.get(name), ours[name])
    return None


def _difference(name: str, theirs: Any, ours: Any) -> str:
    """The first setting that differs, with both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        keys = [*ours, *theirs]  # a setting of another version may be in one of them only
        inner = next(key for key in keys if theirs.get(key) != ours.get(key))
        return _difference(f"{name}.{inner}", theirs.get(inner), ours.get(inner))
    return f"{name} {theirs}, not {ours}"
