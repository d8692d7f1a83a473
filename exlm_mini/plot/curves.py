"""From the logs of runs to the curves that are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.plot.runs import Panel
from exlm_mini.training.console import say
from exlm_mini.training.run_directory import read_metrics

LOG = "metrics.jsonl"


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
AXES = {
    "steps": ("step", "training step"),
    "tokens": ("tokens", "input tokens"),
    "hours": ("seconds", "hours"),
}
"""Key in the lines of a log, and what stands on the axis."""
SHORT_TIMES = {"minutes": 60, "seconds": 1}
"""Units for runs of less than two of the next larger one."""


class Run(NamedTuple):
    """The log of one model."""

    label: str
    records: list[dict[str, Any]]


def find_logs(run: Path) -> list[Path]:
    """The logs of a run: its own, or one for each model it trained.

    Raises:
        UserError: if there is none.
    """
    if (run / LOG).is_file():
        return [run / LOG]
    if not run.is_dir():
        raise UserError(f"there is no run directory {run}; give the --output of a run")
    logs = sorted(run.glob(f"*/{LOG}"))
    if not logs:
        raise UserError(f"{run} holds no {LOG}, so it is not a run that has begun to train")
    return logs


def labels_of(runs: list[Path], logs: list[Path]) -> list[str]:
    """The shortest ends of the runs' paths that tell the curves apart, and which model it is.

    Args:
        runs: as named by the user, one for each log.
        logs: the run's own, or that of one of its models.
    """
    paths = [run.resolve().parts for run in runs]
    models = [
        "" if log.parent == run else f"/{log.parent.name}"
        for run, log in zip(runs, logs, strict=True)
    ]
    for length in range(1, max(map(len, paths)) + 1):
        names = [
            "/".join(parts[-length:]) + model
            for parts, model in zip(paths, models, strict=True)
        ]
        if len(set(names)) == len(names):
            break
    return names


def read_runs(paths: list[Path], labels: list[str] | None = None) -> list[Run]:
    """The runs to draw, each with at least one line; torn last lines are told.

    Raises:
        UserError: if a run is missing, empty or damaged, or the labels are too few or many.
    """
    found = [(path, log) for path in paths for log in find_logs(path)]
    runs_of_logs, logs = [path for path, _ in found], [log for _, log in found]
    resolved = [log.resolve() for log in logs]
    for log in logs:
        if resolved.count(log.resolve()) > 1:
            raise UserError(f"{log.parent} is named twice; leave one out")
    names = labels_of(runs_of_logs, logs)
    if labels is not None:
        if len(set(labels)) != len(logs) or len(labels) != len(logs):
            raise UserError(
                f"--labels gives {len(set(labels))} different labels for {len(logs)} curves "
                f"({', '.join(names)}); give one for each"
            )
        names = labels
    runs = [Run(name, read_metrics(log, say)) for name, log in zip(names, logs, strict=True)]
    for run, log in zip(runs, logs, strict=True):
        if not run.records:
            raise UserError(f"{log} holds no line yet; wait until the run has logged a step")
    return runs


def smoothed(values: list[float], window: int) -> list[float]:
    """Mean over the last ``window`` values, fewer at the start; nan does not count."""
    out = []
    for end in range(1, len(values) + 1):
        known = [v for v in values[max(0, end - window) : end] if not math.isnan(v)]
        # Where nothing was reached nothing is drawn, whatever came before.
        is_gap = math.isnan(values[end - 1])
        out.append(math.nan if is_gap or not known else sum(known) / len(known))
    return out


def curve(
    run: Run, metric: Metric, against: str, window: int
) -> tuple[list[float], list[float]] | None:
    """Horizontal and vertical values of one curve; none if the run did not log them."""
    key, _ = AXES[against]
    lines = [line for line in run.records if metric.key in line and key in line]
    if not lines:
        return None
    with reading(f"the log of {run.label}", f"{metric.key} and {key} must be numbers"):
        values = [math.nan if line[metric.key] is None else line[metric.key] for line in lines]
        drawn = [metric.convert(value) for value in smoothed(values, window)]
        return [float(line[key]) for line in lines], drawn


def logged(runs: list[Run], names: Sequence[str]) -> list[str]:
    """Those of the metrics that are in a log."""
    keys = {key for run in runs for line in run.records for key in line}
    return [name for name in names if METRICS[name].key in keys]


def panel_of(runs: list[Run], metric: Metric, against: str, window: int) -> Panel:
    """What the runs logged of a metric; what they did not is told."""
    lines = {run.label: curve(run, metric, against, window) for run in runs}
    dots = dict.fromkeys(lines)
    if metric.held_out:
        dots = {run.label: curve(run, METRICS[metric.held_out], against, 1) for run in runs}
    if missing := [name for name in lines if lines[name] is None and dots[name] is None]:
        with_axis = "" if against == "steps" else f" with {AXES[against][0]}"
        say(f"not logged: {metric.key}{with_axis} of {', '.join(missing)}")
    known, known_dots = (
        {name: points for name, points in found.items() if points is not None}
        for found in (lines, dots)
    )
    return Panel(metric.title, metric.unit, known, metric.is_log, known_dots)


def in_its_unit(panels: list[Panel], against: str) -> tuple[list[Panel], str]:
    """The panels with a readable unit of time on the horizontal axis, and its label."""
    label = AXES[against][1]
    if against != "hours":
        return panels, label
    seconds = 3600
    longest = max(x[-1] for p in panels for x, _ in [*p.curves.values(), *p.dots.values()])
    for shorter, length in SHORT_TIMES.items():
        if longest < 2 * seconds:
            label, seconds = shorter, length

    def shortened(curves: Mapping) -> dict:
        return {name: ([t / seconds for t in x], y) for name, (x, y) in curves.items()}

    return [
        panel._replace(curves=shortened(panel.curves), dots=shortened(panel.dots))
        for panel in panels
    ], label
