"""How fast a recipe trains, as measured: tokens per second, and the hours that follow from it.

Nothing here guesses. A speed is a number that somebody gives, or it is read from the log of a run
of the same model on rows of the same length.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config import RunConfig, UserError
from exlm_mini.run_directory import CONFIG, read_metrics
from exlm_mini.settings import parse_stored, plain

LEAST_INTERVALS = 3
"""A median of fewer says nothing."""
SAME_SPEED = (
    "objective", "model", "masking", "data.kind", "data.block_length", "train.precision",
    "train.batch_size", "train.micro_batch_size", "train.batch_tokens",
    "train.micro_batch_tokens",
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


def throughput(text: str, config: RunConfig) -> Throughput:
    """The speed a command line names.

    Args:
        text: tokens per second, or the directory of a run.
        config: of the run to be estimated, with a single objective.

    Raises:
        UserError: if it is neither, or the run had another model or other rows.
    """
    try:
        number = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        return measured_throughput(Path(text), config)
    if not 0 < number < float("inf"):
        raise UserError(f"--throughput is {text}; it must be positive tokens per second")
    return Throughput(number, "given")


def measured_throughput(run: Path, config: RunConfig) -> Throughput:
    """Median over the lines of a run's log, which leaves out slow first steps and validations.

    Raises:
        UserError: if there is no such run, its log is too short, or it differs in a setting of
            ``SAME_SPEED``.
    """
    if not (run / CONFIG).is_file():
        raise UserError(
            f"--throughput {run} is neither a number nor the directory of a run; give tokens per "
            "second of one device, or the --output of a run"
        )
    try:
        stored = parse_stored((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {run / CONFIG} ({error}); restore it") from None
    several = stored["objective"].split("+")
    if len(several) > 1 and config.objective in several:
        run, stored["objective"] = run / config.objective, config.objective
    for name in SAME_SPEED:
        theirs, ours = _setting(stored, name), _setting(plain(config), name)
        if theirs != ours:
            raise UserError(
                f"{run} was measured with {_difference(name, theirs, ours)}; measure a run of "
                "the same settings"
            )
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "tokens" in line]
    speeds = [
        (b["tokens"] - a["tokens"]) / (b["seconds"] - a["seconds"])
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


def _difference(name: str, theirs: Any, ours: Any) -> str:
    """The first setting that differs, with both values."""
    if isinstance(theirs, dict):
        inner = next(key for key in ours if theirs.get(key) != ours[key])
        return _difference(f"{name}.{inner}", theirs.get(inner), ours[inner])
    return f"{name} {theirs}, not {ours}"
