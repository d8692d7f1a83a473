"""Draw the logs of runs as a figure: a panel for each quantity, a colour for each run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from exlm_mini.plot.style import use_book_style
from exlm_mini.training.metrics import read_metrics

TRAINING, HELD_OUT = "training batches", "held-out rows"


class Panel(NamedTuple):
    """One panel of the figure: its quantity's unit and keys in a log."""

    unit: str
    training: str | None
    """Key of the quantity for training batches, in the lines of a log."""
    held_out: str | None = None
    factor: float = 1
    """Factor that converts the numbers of a log to the unit of the panel."""


PANELS = {
    "training loss": Panel("nats per target\n(ExLM: with [BOS], [EOS])", "loss"),
    "mask accuracy": Panel(
        "% of masked tokens", "mask_accuracy", "validation_mask_accuracy", 100
    ),
    "perplexity": Panel("of a masked token", None, "validation_perplexity"),
    "speed": Panel("input tokens per second", "tokens_per_second"),
    "peak memory": Panel("GiB", "peak_memory_mib", None, 1 / 1024),
}
"""The panels by title, in the order in which they are drawn: first those of Figure 9."""


def read(logs: Mapping[str, Path]) -> pd.DataFrame:
    """The logs of runs as one table.

    Args:
        logs: the path of each ``metrics.jsonl`` by the name of its run.

    Returns:
        A table with one row per number and the columns ``run``, ``step``, ``panel``, ``rows``
        (``TRAINING`` or ``HELD_OUT``) and ``value``, in the unit of its panel.
    """
    parts = [pd.DataFrame(columns=["run", "step", "panel", "rows", "value"])]
    for run, log in logs.items():
        lines = pd.DataFrame(read_metrics(log))
        for title, panel in PANELS.items():
            for rows, key in ((TRAINING, panel.training), (HELD_OUT, panel.held_out)):
                if key is not None and key in lines:
                    known = lines.dropna(subset=key)
                    value = panel.factor * known[key].astype(float)
                    about = {"run": run, "panel": title, "rows": rows}
                    parts.append(known[["step"]].assign(value=value, **about))
    return pd.concat([part for part in parts if len(part)] or parts, ignore_index=True)


def draw(table: pd.DataFrame) -> Figure:
    """Draw a table from ``read``; panels for which no run has a number are left out."""
    use_book_style()
    names = list(table["run"].unique())
    # Beyond ten the colours would repeat.
    colors = sns.color_palette("colorblind" if len(names) <= 10 else "husl", len(names))
    titles = [title for title in PANELS if title in set(table["panel"])]
    with plt.rc_context({"figure.constrained_layout.use": False}):  # seaborn lays it out itself
        grid = sns.FacetGrid(
            table, col="panel", col_order=titles, col_wrap=min(3, len(titles)), hue="run",
            palette=dict(zip(names, colors, strict=True)), sharey=False, height=2.8, aspect=1.25,
        )  # fmt: skip
    grid.map_dataframe(_draw_run)
    for title, ax in grid.axes_dict.items():
        ax.set(title=title, xlabel="training step", ylabel=PANELS[title].unit)
        ax.set_yscale("log" if title == "perplexity" else "linear")
    columns = int(10 * grid.figure.get_figwidth() // (8 + max(map(len, names)))) or 1
    handles = [Line2D([], [], color=color, lw=2) for color in colors]
    grid.figure.set_layout_engine("constrained")
    names = [name.replace("$", r"\$") for name in names]  # no formulas
    grid.figure.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=9)
    return grid.figure


def _draw_run(data: pd.DataFrame, color: tuple, **_: str) -> None:
    """Draw one run in one panel: a line for training batches, dots for held-out rows."""
    for rows, style in (
        (TRAINING, {"lw": 1.4}),
        (HELD_OUT, {"lw": 0.8, "ls": ":", "marker": "o"}),
    ):
        part = data[data["rows"] == rows]
        plt.plot(part["step"], part["value"], color=color, **style)
