"""The book's figures: what stands on the axes, not how it looks. No display is needed."""

from itertools import combinations

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex

from exlm_mini.plot.figures import (
    COLORS,
    draw_curves,
    draw_dag,
    draw_device_hours,
    draw_heatmap,
    draw_tokens,
    use_book_style,
)

# [BOS], two states for each of two masks, [EOS]; one edge inside the first mask.
COLUMNS = [0, 1, 1, 2, 2, 3]
NAMES = ["BOS", "glad\nmerry", "grim", "sang", "wept", "EOS"]
KINDS = ["boundary", "mask", "mask", "second", "second", "boundary"]
TRANSITION = np.zeros((6, 6))
EDGES = {(0, 1): 0.7, (0, 2): 0.3, (1, 2): 0.15, (1, 3): 0.84, (1, 4): 0.01, (2, 4): 1.0,
         (3, 5): 1.0, (4, 5): 1.0}  # fmt: skip
for edge, probability in EDGES.items():
    TRANSITION[edge] = probability


@pytest.fixture
def ax():
    with plt.rc_context():
        use_book_style()
        figure, ax = plt.subplots()
        yield ax
        plt.close(figure)


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_text()]


def edges(ax) -> dict[tuple, float]:
    """Width of each drawn edge by the places of its two ends."""
    arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]
    return {(*a.xyann, *a.xy): a.arrow_patch.get_linewidth() for a in arrows}


def test_dag_draws_each_edge_that_is_likely_enough(ax):
    draw_dag(ax, TRANSITION + np.tril(np.ones((6, 6))), COLUMNS, NAMES, KINDS)  # none backwards
    drawn = edges(ax)
    assert len(drawn) == len(EDGES) - 1  # the one of 0.01 is left out
    # First state of a column on top: BOS (0, 0), 1.1 (1, .5), 1.2 (1, -.5), 2.1 (2, .5), ...
    assert drawn[0, 0, 1, 0.5] > drawn[0, 0, 1, -0.5]
    widths = {e: drawn[*place] for e, place in {
        (1, 2): (1, 0.5, 1, -0.5), (1, 3): (1, 0.5, 2, 0.5), (2, 4): (1, -0.5, 2, -0.5),
    }.items()}  # fmt: skip
    assert sorted(widths, key=widths.get) == sorted(widths, key=EDGES.get)
    with pytest.raises(ValueError):
        draw_dag(ax, TRANSITION, COLUMNS, NAMES[:-1], KINDS)


def test_dag_names_states_and_likely_edges_inside_the_axes(ax):
    draw_dag(ax, TRANSITION, COLUMNS, NAMES, KINDS)
    assert texts(ax)[-len(NAMES) :] == NAMES
    assert sorted(texts(ax)[: -len(NAMES)]) == sorted(
        f"{p:.2f}" for p in EDGES.values() if p >= 0.1
    )
    boxes = [text.get_bbox_patch() for text in ax.texts if text.get_text() in NAMES]
    assert [to_hex(box.get_facecolor()) for box in boxes] == [COLORS[kind] for kind in KINDS]
    (left, right), (low, high) = ax.get_xlim(), ax.get_ylim()
    for x, y in (text.get_position() for text in ax.texts):
        assert left < x < right and low < y < high


def test_no_number_of_a_dag_is_hidden_by_a_state_or_by_another(ax):
    E_LL = np.triu(np.full((6, 6), 0.25), 1)  # every edge has its number
    draw_dag(ax, E_LL, COLUMNS, NAMES, KINDS)
    ax.figure.draw_without_rendering()
    shown = [text for text in ax.texts if text.get_text()]
    assert len(shown) == 15 + len(NAMES)
    extents = {text: text.get_bbox_patch().get_window_extent() for text in shown}
    for one, other in combinations(shown, 2):
        is_hidden = extents[one].overlaps(extents[other])
        assert not is_hidden, (one.get_text(), one.get_position(), other.get_text())


def test_a_number_of_a_dag_lies_on_its_edge_whatever_the_shape_of_the_axes(ax):
    E_LL = np.zeros((6, 6))
    E_LL[0, 3] = 0.25  # bends around state 1.1
    draw_dag(ax, E_LL, COLUMNS, NAMES, KINDS)
    ax.figure.draw_without_rendering()
    arrow, number = ax.texts[:2]
    start, control, end = arrow.arrow_patch.get_path().vertices[:3]
    x, y = ax.transData.transform(number.get_position())
    assert np.allclose([x, y], (start + 2 * control + end) / 4, atol=1)


def test_tokens_stand_side_by_side(ax):
    draw_tokens(ax, ["the", "[MASK]"], ["token", "mask"])
    draw_tokens(ax, ["a"], ["boundary"], y=1)
    assert [text.get_position() for text in ax.texts] == [(0, 0), (1, 0), (0, 1)]
    colors = [to_hex(box.get_facecolor()) for box in ax.patches]
    assert colors == [COLORS[kind] for kind in ("token", "mask", "boundary")]
    assert ax.get_ylim()[1] > 1 > 0 > ax.get_ylim()[0]
    with pytest.raises(ValueError, match="shorter"):
        draw_tokens(ax, ["a", "b"], ["token"])


def test_heatmap_leaves_nan_empty_and_keeps_its_limits(ax):
    values = np.array([[1.0, np.nan], [2.0, 3.0]])
    draw_heatmap(ax, values, "ab", "cd", "bits", limits=(0.0, 9.0))
    assert ax.collections[0].get_clim() == (0.0, 9.0)
    assert texts(ax) == ["1.00", "2.00", "3.00"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["c", "d"]


def test_curves_have_the_colour_of_their_objective(ax):
    draw_curves(ax, {"exlm": {1: 3.0, 2: 2.0}}, {"floor of MLM": 2.5})
    curve, level = ax.lines
    assert to_hex(curve.get_color()) == COLORS["exlm"]
    assert to_hex(level.get_color()) == COLORS["floor"]
    assert texts(ax) == ["floor of MLM 2.50"]


def test_device_hours_are_operations_divided_by_speed(ax):
    flops = {"small": 3.6e15, "large": 3.6e18}
    draw_device_hours(ax, flops, (1e10, 1e14), [(1e12, 7.0)])
    small, large, mark = ax.lines
    # 3.6e15 operations at 1e12 a second are one hour.
    np.testing.assert_allclose(small.get_data(), ([1e10, 1e14], [100, 0.01]))
    np.testing.assert_allclose(large.get_data(), ([1e10, 1e14], [1e5, 10]))
    assert (mark.get_xdata().tolist(), mark.get_ydata().tolist()) == ([1e12], [7.0])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(flops)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    named = {text.get_text(): text.xy[1] for text in ax.texts}
    spans = {"an hour": 1, "a day": 24, "a week": 7 * 24, "a month": 730, "a year": 8766}
    assert named == spans
    low, high = ax.get_ylim()
    assert low < 1 and spans["a year"] < high
