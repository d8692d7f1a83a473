"""From the logs of runs to the curves that are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.training.console import say
from exlm_mini.training.run_directory import read_metrics

LOG = "metrics.jsonl"


class Panel(NamedTuple):
    """One quantity of several runs."""

    title: str
    unit: str
    """Of the vertical axis."""
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    """By run: where it stands and what it reached; nan leaves a gap."""
    is_log: bool = False
    dots: Mapping[str, tuple[Sequence[float], Sequence[float]]] = MappingProxyType({})
    """By run: the same of held-out rows."""


class Metric(NamedTuple):
    """A curve that can be drawn."""

    key: str
    """In the lines of a log."""
    title: str
    unit: str
    convert: Callable[[float], float] = float
    """From the number of the log, smoothed, to what is drawn."""
    is_log: bool = False
    held_out: str | None = None
    """Name of the metric that says the same of held-out rows; drawn as dots in this panel."""


def _perplexity(nats: float) -> float:
    return math.exp(min(nats, 700))  # beyond is no float


def _percent(share: float) -> float:
    return 100 * share


METRICS = {
    "loss": Metric("loss", "training loss", "nats per target"),
    "mask_accuracy": Metric(
        "mask_accuracy", "mask accuracy", "% of masked tokens", _percent,
        held_out="validation_mask_accuracy",
    ),
    "perplexity": Metric(
        "loss", "perplexity", "exp(loss)", _perplexity, is_log=True,
        held_out="validation_perplexity",
    ),
    "validation": Metric("validation_bits_per_mask", "validation", "bits per masked token"),
    "validation_mask_accuracy": Metric(
        "validation_mask_accuracy", "held-out mask accuracy", "% of masked tokens", _percent
    ),
    "validation_perplexity": Metric(
        "validation_perplexity", "held-out perplexity", "per masked token", is_log=True
    ),
    "learning_rate": Metric("learning_rate", "learning rate", ""),
    "tokens_per_second": Metric("tokens_per_second", "speed", "input tokens per second"),
    "flops": Metric("model_flops_per_second", "operations", "FLOP per second"),
    "utilisation": Metric(
        "model_flops_utilisation", "utilisation", "% of the devices' peak", _percent
    ),
    "memory": Metric("peak_memory_mib", "peak memory", "GiB", lambda mib: mib / 1024),
}  # fmt: skip


class Axis(NamedTuple):
    """What curves are drawn against."""

    key: str
    """In the lines of a log."""
    label: str
    size: float = 1
    """Of the unit on the axis, in that of the log."""


AXES = {
    "steps": Axis("step", "training step"),
    "tokens": Axis("tokens", "input tokens"),
    "hours": Axis("seconds", "hours", 3600),
}


class Run(NamedTuple):
    """The log of one model."""

    label: str
    records: list[dict[str, Any]]


def read_runs(paths: Sequence[Path], labels: Sequence[str] | None = None) -> list[Run]:
    """The runs to draw, each with at least one line; a torn last line is reported and left out.

    Args:
        paths: directories of runs; of one that trained several models all are drawn.
        labels: one for each model, in order; by default the directories of the models.

    Raises:
        UserError: if a run is missing, empty or damaged, or the labels are too few or many.
    """
    logs = []
    for path in paths:
        found = [path / LOG] if (path / LOG).is_file() else sorted(path.glob(f"*/{LOG}"))
        if not found:
            raise UserError(
                f"{path} holds no {LOG}; give the --output of a run that has begun to train"
            )
        logs += found
    names = [str(log.parent) for log in logs] if labels is None else labels
    if len(names) != len(logs) or len(set(names)) != len({log.resolve() for log in logs}):
        raise UserError(
            f"{len(set(names))} different labels for {len(logs)} curves "
            f"({', '.join(str(log.parent) for log in logs)}); give each run once, and --labels "
            "one for each"
        )
    runs = [Run(name, read_metrics(log, say)) for name, log in zip(names, logs, strict=True)]
    for run, log in zip(runs, logs, strict=True):
        if not run.records:
            raise UserError(f"{log} holds no line yet; wait until the run has logged a step")
    return runs


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last ``window`` values, fewer at the start; nan stays and does not count."""
    out = []
    for end, value in enumerate(values, start=1):
        known = [v for v in values[max(0, end - window) : end] if not math.isnan(v)]
        out.append(math.nan if math.isnan(value) else sum(known) / len(known))
    return out


def curve(
    run: Run, metric: Metric, against: str, window: int
) -> tuple[list[float], list[float]] | None:
    """Horizontal and vertical values of one curve; none if the run did not log them."""
    axis = AXES[against]
    lines = [line for line in run.records if metric.key in line and axis.key in line]
    if not lines:
        return None
    with reading(f"the log of {run.label}", f"{metric.key} and {axis.key} must be numbers"):
        values = [math.nan if line[metric.key] is None else line[metric.key] for line in lines]
        drawn = [metric.convert(value) for value in smoothed(values, window)]
        return [float(line[axis.key]) / axis.size for line in lines], drawn


def panel_of(runs: Sequence[Run], metric: Metric, against: str, window: int) -> Panel:
    """What the runs logged of a metric; a line on stderr names those without it."""
    curves, dots = {}, {}
    for run in runs:
        if (line := curve(run, metric, against, window)) is not None:
            curves[run.label] = line
        if metric.held_out:
            held_out = curve(run, METRICS[metric.held_out], against, 1)
            if held_out is not None:
                dots[run.label] = held_out
        if run.label not in curves and run.label not in dots:
            say(f"not logged: {metric.key} of {run.label}")
    return Panel(metric.title, metric.unit, curves, metric.is_log, dots)
