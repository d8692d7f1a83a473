"""The chapters' drawings: what they show, not how it looks."""

import re
from itertools import combinations
from xml.etree import ElementTree

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from drawings import draw_dag, draw_tokens
from matplotlib.colors import to_hex
from molecules import Pictures, atoms_of, tokens_of, tokens_svg
from run_drawings import draw_against_share, draw_device_hours

from exlm_mini.config.checks import UserError
from exlm_mini.data.tokenizer import train_smiles
from exlm_mini.plot.style import COLORS, use_book_style

# A graph of [BOS], two masks of two states each, and [EOS], with one edge inside the first mask.
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
    """Width of each drawn edge, by the positions of its two ends."""
    arrows = [text for text in ax.texts if getattr(text, "arrow_patch", None) is not None]
    return {(*a.xyann, *a.xy): a.arrow_patch.get_linewidth() for a in arrows}


def test_dag_draws_each_edge_that_is_likely_enough(ax):
    # Backward edges are not drawn.
    draw_dag(ax, TRANSITION + np.tril(np.ones((6, 6))), COLUMNS, NAMES, KINDS)
    drawn = edges(ax)
    assert len(drawn) == len(EDGES) - 1  # all but that of 0.01
    # A column's first state is on top: BOS (0, 0), 1.1 (1, .5), 1.2 (1, -.5), 2.1 (2, .5), ...
    assert drawn[0, 0, 1, 0.5] > drawn[0, 0, 1, -0.5]
    widths = {e: drawn[*place] for e, place in {
        (1, 2): (1, 0.5, 1, -0.5), (1, 3): (1, 0.5, 2, 0.5), (2, 4): (1, -0.5, 2, -0.5),
    }.items()}  # fmt: skip
    assert sorted(widths, key=widths.get) == sorted(widths, key=EDGES.get)
    with pytest.raises(ValueError):
        draw_dag(ax, TRANSITION, COLUMNS, NAMES[:-1], KINDS)


EVERY_EDGE = np.triu(np.full((6, 6), 0.25), 1)  # likely enough to be drawn with numbers
WIDE = ["BOS", "happy/\nsad", "happy/\nsad", "smiled/\nwept", "smiled/\nwept", "EOS"]


@pytest.mark.parametrize(
    ("E_LL", "names", "size"),
    [(EVERY_EDGE, NAMES, (6.4, 4.8)), (TRANSITION, WIDE, (3.6, 2.2))],
)
def test_no_number_of_a_dag_is_hidden_by_a_state_or_by_another(ax, E_LL, names, size):
    ax.figure.set_size_inches(size)
    draw_dag(ax, E_LL, COLUMNS, names, KINDS)
    shown = [text for text in ax.texts if text.get_text()]
    assert len(shown) == (E_LL >= 0.1).sum() + len(names)
    ax.figure.draw_without_rendering()
    extents = {text: text.get_bbox_patch().get_window_extent() for text in shown}
    for one, other in combinations(shown, 2):
        is_hidden = extents[one].overlaps(extents[other])
        assert not is_hidden, (one.get_text(), one.get_position(), other.get_text())


def test_tokens_stand_side_by_side(ax):
    draw_tokens(ax, ["the", "[MASK]"], ["token", "mask"])
    draw_tokens(ax, ["a"], ["boundary"], y=1)
    assert [text.get_position() for text in ax.texts] == [(0, 0), (1, 0), (0, 1)]
    colors = [to_hex(box.get_facecolor()) for box in ax.patches]
    assert colors == [COLORS[kind] for kind in ("token", "mask", "boundary")]
    assert ax.get_ylim()[1] > 1 > 0 > ax.get_ylim()[0]
    with pytest.raises(ValueError, match="shorter"):
        draw_tokens(ax, ["a", "b"], ["token"])


def test_device_hours_are_operations_divided_by_speed(ax):
    draw_device_hours(ax, {"small": 3.6e15, "large": 3.6e18}, (1e10, 1e14), [(1e12, 7.0)])
    small, large, mark = ax.lines
    # 3.6e15 operations at 1e12 per second take one hour.
    np.testing.assert_allclose(small.get_data(), ([1e10, 1e14], [100, 0.01]))
    np.testing.assert_allclose(large.get_data(), ([1e10, 1e14], [1e5, 10]))
    assert (mark.get_xdata().tolist(), mark.get_ydata().tolist()) == ([1e12], [7.0])


def test_cells_of_equal_shares_stand_side_by_side(ax):
    means = pd.Series({(0.15, 1): 3.0, (0.387, 2): 4.0, (0.387, 1): 5.0, (0.789, 1): 6.0})
    draw_against_share(ax, means, means / 10, "bits")
    points = [tuple(p) for c in ax.containers for p in c.lines[0].get_xydata()]
    assert sorted((round(x), y) for x, y in points) == [(1, 3), (1, 4), (2, 5), (4, 6)]
    assert len({x for x, _ in points}) == 4 and ax.get_xticklabels()[1].get_text() == "15"


# ---- molecules ----

Chem = pytest.importorskip("rdkit.Chem", reason="rdkit is not installed")

ASPIRIN = "CC(=O)Oc1ccccc1C(=O)O"
HARD = [
    "[13CH4]", "[H][H]", "C[C@@H](N)Cl", "F/C=C\\Br", "[Na+].[Cl-]", "*c1cc[nH]c1", "C%10CC%10",
]  # fmt: skip


def colored(svg, color):
    """Numbers of the atoms on a disc of this colour, and the number of bonds drawn in it."""
    shapes = [
        e for e in ElementTree.fromstring(svg).iter() if color.upper() in str(e.attrib).upper()
    ]
    names = [e.get("class", "") for e in shapes]
    atoms = {int(n) for name in names for n in re.findall(r"atom-(\d+)", name)
             if "bond-" not in name}  # fmt: skip
    bonds = {b for name in names for b in re.findall(r"bond-(\d+)", name)}
    return atoms, len(bonds)


@pytest.mark.parametrize("smiles", [ASPIRIN, *HARD])
def test_tokens_are_numbered_as_rdkit_numbers_atoms(smiles):
    tokens = tokens_of(smiles)
    assert "".join(tokens) == smiles
    options = Chem.SmilesParserParams()
    options.removeHs = False
    molecule = Chem.MolFromSmiles(smiles, options)
    found = {
        n: token for n, token in zip(atoms_of(tokens), tokens, strict=True) if n is not None
    }
    assert list(found) == list(range(molecule.GetNumAtoms()))
    for atom in molecule.GetAtoms():
        assert atom.GetSymbol().lower() in found[atom.GetIdx()].lower()
    tokenizer = train_smiles([smiles])
    assert [tokenizer.token(i) for i in tokenizer.encode(smiles)] == tokens


def test_atoms_take_the_colour_of_their_tokens():
    tokens = tokens_of(ASPIRIN)
    colors = ["#123456" if t == "O" else "#abcdef" if t in "(=1" else None for t in tokens]
    svg = tokens_svg(ASPIRIN, colors)
    assert colored(svg, "#123456")[0] == {2, 3, 11, 12}
    assert colored(svg, "#abcdef") == (set(), 0)


def test_pictures_stand_side_by_side_with_their_captions():
    svg = tokens_svg("CCO", [None] * 3, 100, 50)
    assert ElementTree.fromstring(svg).get("viewBox") == "0 0 100 50"
    shown = Pictures({"ethanol": svg, "a < b": svg})
    root = ElementTree.fromstring(shown._repr_html_())
    assert [figure.find("figcaption").text for figure in root] == ["ethanol", "a < b"]
    assert [figure[0].get("aria-label") for figure in root] == ["CCO", "CCO"]


@pytest.mark.parametrize("smiles", ["C[Xx]", ""])
def test_what_cannot_be_drawn_is_told(smiles):
    with pytest.raises(UserError, match="RDKit cannot read"):
        tokens_svg(smiles, [None] * len(tokens_of(smiles)))
