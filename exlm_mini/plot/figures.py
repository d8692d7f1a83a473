"""The book's figures: one style, one colour for each thing, and the drawings several pages share.

Figures have a white ground, so that they read the same in a light page, a dark page and print.
Every function draws on axes it is given and returns nothing, but for the figure of several runs;
numbers come from the caller.
"""

from exlm_mini.plot.basics import draw_curves, draw_heatmap, draw_tokens
from exlm_mini.plot.graphs import draw_dag, draw_transition
from exlm_mini.plot.runs import Panel, draw_device_hours, runs_figure
from exlm_mini.plot.style import COLORS, save_figure, use_book_style

__all__ = [
    "COLORS",
    "Panel",
    "draw_curves",
    "draw_dag",
    "draw_device_hours",
    "draw_heatmap",
    "draw_tokens",
    "draw_transition",
    "runs_figure",
    "save_figure",
    "use_book_style",
]
