"""The style of all figures, the colour of each thing in them, and how figures are saved."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import seaborn as sns
from matplotlib.figure import Figure

from exlm_mini.data.files import write_atomically

COLORS = {
    "token": "#d8dee6",
    "mask": "#f2b134",
    "state": "#f2b134",
    "second": "#b5793a",
    "boundary": "#9aa5b1",
    "mlm": "#3b6fb6",
    "repeated-mlm": "#5b8e4b",
    "exlm": "#c8452f",
    "floor": "#3b6fb6",
    "joint": "#c8452f",
}
"""One colour for each thing, the same on every page. ``mask`` and ``second`` are the yellow and the
brown of the paper's figures."""


def use_book_style() -> None:
    """Set matplotlib to the book's style; a chapter calls it once.

    In a notebook, figures are drawn at twice the resolution at which they are shown.
    """
    if "IPython" in sys.modules:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("retina")
    sns.set_theme(context="notebook", style="whitegrid", palette="colorblind")
    plt.rcParams.update(
        {
            "figure.figsize": (6, 3.2),
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.titlesize": "medium",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "font.size": 10,
        }
    )


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix, the same bytes for the same figure."""
    buffer = io.BytesIO()
    suffix = path.suffix[1:].lower()
    when = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(suffix)
    with plt.rc_context({"svg.hashsalt": "exlm_mini"}):
        figure.savefig(buffer, format=suffix, dpi=150, metadata=when)
    plt.close(figure)
    write_atomically(path, buffer.getvalue())
