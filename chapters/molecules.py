"""Molecules as SVG pictures; the same molecule always gives the same text.

Atoms are numbered from left to right in the SMILES string, as in RDKit, so that
each token of the string can be found in the picture.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.molecules import read_molecule, require_rdkit
from exlm_mini.data.tokenizer import SMILES_SYMBOL


class Pictures:
    """Drawings side by side, each with a caption, for notebooks and the book.

    They wrap on a narrow page. In print only the captions appear.

    Args:
        drawings: SVG text by caption.
    """

    def __init__(self, drawings: Mapping[str, str]) -> None:
        self.drawings = dict(drawings)

    def _repr_html_(self) -> str:
        figures = [
            f'<figure style="margin:0;width:min-content">{svg}'
            # A dark page has pale text, unreadable on white.
            '<figcaption style="text-align:center;color:black">'
            f"{escape(caption)}</figcaption></figure>"
            for caption, svg in self.drawings.items()
        ]
        frame = (
            "display:flex;flex-wrap:wrap;gap:0.5rem;background:white;color:black"
        )
        return f'<div style="{frame}">{"".join(figures)}</div>'

    def __repr__(self) -> str:
        return f"drawings: {', '.join(self.drawings)}"


def tokens_svg(
    smiles: str, colors: Sequence[str | None], width: int = 260, height: int = 180
) -> str:
    """Draw a molecule with the atoms of chosen tokens highlighted in colour.

    Args:
        smiles: SMILES string of the molecule.
        colors: "#rrggbb" or None for each token of ``tokens_of``; colours of tokens
            that are not atoms (bonds, brackets, ring numbers) have no effect.
        width, height: size in pixels.

    Raises:
        UserError: if RDKit cannot read the molecule or is not installed.
        ValueError: if the numbers of colours and tokens differ.
    """
    tokens = tokens_of(smiles)
    if len(colors) != len(tokens):
        raise ValueError(
            f"expected {len(tokens)} colours, one per token, got {len(colors)}"
        )
    require_rdkit()
    from matplotlib.colors import to_rgb
    from rdkit import Chem
    from rdkit.Chem.Draw import rdMolDraw2D

    options: Any = Chem.SmilesParserParams()
    options.removeHs = False  # draw every atom that is written
    molecule = read_molecule(smiles, options)
    if molecule is None:
        raise UserError(
            f"RDKit cannot read '{smiles[:80]}' as a molecule; check the SMILES"
        )
    atom_colors = {
        atom: to_rgb(color)
        for atom, color in zip(atoms_of(tokens), colors, strict=True)
        if atom is not None and color is not None
    }
    drawer: Any = rdMolDraw2D.MolDraw2DSVG(width, height)
    rdMolDraw2D.PrepareAndDrawMolecule(
        drawer,
        molecule,
        highlightAtoms=list(atom_colors),
        highlightAtomColors=atom_colors,
        highlightBonds=[],
    )
    drawer.FinishDrawing()
    svg = drawer.GetDrawingText()
    start = svg.index("<svg")  # an XML header would not be allowed inside a page
    return svg[start:].replace(
        "<svg", f'<svg role="img" aria-label="{escape(smiles)}"', 1
    )


def tokens_of(smiles: str) -> list[str]:
    """The symbols of a SMILES string, as the tokenizer cuts it."""
    return [piece for piece in re.split(SMILES_SYMBOL, smiles) if piece]


def atoms_of(tokens: Sequence[str]) -> list[int | None]:
    """The number of each token's atom; None for a token that is not an atom.

    >>> atoms_of(["C", "(", "=", "O", ")", "[NH2]"])
    [0, None, None, 1, None, 2]
    """
    numbers, num_atoms = [], 0
    for token in tokens:
        is_atom = token.isalpha() or token.startswith("[") or token == "*"
        numbers.append(num_atoms if is_atom else None)
        num_atoms += is_atom
    return numbers
