"""The figure of each sweep from its records, in the book's style, and all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from exlm_lab.experiments.drawings import (
    by_language,
    draw_against_exlm,
    draw_against_k,
    draw_against_share,
    draw_bits,
    draw_ceiling,
    draw_cost,
    draw_ladder,
    draw_leaving,
    draw_optimum,
    draw_sizes,
)
from exlm_lab.experiments.records import DOWNSTREAM, Group, summaries
from exlm_lab.experiments.tables import by_input, read_sweep, wanted
from exlm_mini.plot.figures import save_figure, use_book_style


def repeated_mlm(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Accuracy and entropy against the share of lost tokens (Figures 3 and 5)."""
    draw_against_share(axes[0], summaries(groups, DOWNSTREAM), "downstream accuracy, %")
    draw_against_share(axes[1], summaries(groups, "entropy_bits"), "entropy, bits")
    draw_ceiling(axes[0], groups)
    draw_optimum(axes[1], groups)
    axes[1].legend(fontsize=8)


def ablations(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Bits and accuracy of the variants (Tables 2 and 13)."""
    draw_bits(axes[0], groups)
    draw_against_exlm(axes[1], groups)


def saddle(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Bits of every run over its steps: who leaves the floor, and when."""
    for ax, (language, found) in zip(axes, by_language(groups).items(), strict=True):
        draw_leaving(ax, found)
        ax.set_title(language, fontsize=10)


def cost(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """What a step of ExLM costs (Table 12)."""
    draw_cost(axes[0], groups)


def k_and_p(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Accuracy and entropy against k for each mask ratio (Table 4, Figure 12)."""
    draw_against_k(axes[0], groups, DOWNSTREAM, "downstream accuracy, %")
    draw_against_k(axes[1], groups, "entropy_bits", "entropy, bits")
    axes[0].legend(fontsize=8, loc=(0.02, 0.72))  # below the best possible


def scale(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """Bits and accuracy against width and data."""
    draw_sizes(axes[0], groups)
    axes[0].legend(fontsize=8, loc=(0.02, 0.18))  # between the runs and the exact bounds
    draw_sizes(axes[1], groups, DOWNSTREAM, "downstream accuracy, %")


def ladder(axes: Sequence[Axes], groups: Sequence[Group]) -> None:
    """What links win of what masked words share."""
    draw_ladder(axes[0], groups)


FIGURES: dict[str, tuple[int, Callable[[Sequence[Axes], Sequence[Group]], None]]] = {
    "repeated-mlm": (2, repeated_mlm),
    "ablations": (2, ablations),
    "saddle": (1, saddle),
    "cost": (1, cost),
    "k-and-p": (2, k_and_p),
    "scale": (2, scale),
    "ladder": (1, ladder),
}
"""By the name of the sweep or experiment: number of axes, and what draws on them."""


def sweep_figure(name: str, groups: Sequence[Group]) -> Figure:
    """The figure of a sweep on one input.

    Args:
        name: of the sweep.
        groups: of one input, in the order of the grid; at least one.
    """
    use_book_style()
    num_axes, draw = FIGURES[name]
    if name == "saddle":
        num_axes = len(by_language(groups))
    height = max(3.4, 1.2 + 0.32 * len(groups)) if name == "ablations" else 3.4
    width = 4.6 * num_axes if name != "ladder" else 6.2
    figure, axes = plt.subplots(1, num_axes, figsize=(width, height), squeeze=False)
    draw(axes[0], groups)
    return figure


def write_figures(
    name: str,
    scale: str,
    directory: Path,
    output: Path,
    report: Callable[[Path], None] = lambda path: None,
) -> None:
    """Draw a sweep, a figure for each input that has records, as SVG and PNG.

    Args:
        name, scale: of the sweep.
        directory: that holds the folders of all sweeps.
        output: directory of the figures; made where it is missing.
        report: called with each file once it is written.

    Raises:
        UserError: if there is no record, or one is damaged.
    """
    records = read_sweep(name, scale, directory)
    output.mkdir(parents=True, exist_ok=True)
    for kind, groups in by_input(records, wanted(name, scale)).items():
        for suffix in (".svg", ".png"):
            path = output / f"{name}-{scale}-{kind}{suffix}"
            save_figure(sweep_figure(name, groups), path)
            report(path)
