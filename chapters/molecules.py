"""Molecules as pictures: SVG text, the same for the same molecule.

Atoms are numbered as in the SMILES string from left to right, as RDKit does it:
a token of the string can be found in the picture.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.molecules import read_molecule, require_rdkit
from exlm_mini.data.tokenizer import SMILES_SYMBOL


class Pictures:
    """Drawings side by side with a caption each, in a notebook and in the book.

    They wrap where the page is narrow. On paper only the captions are left.

    Args:
        drawings: SVG text by caption.
    """

    def __init__(self, drawings: Mapping[str, str]) -> None:
        self.drawings = dict(drawings)

    def _repr_html_(self) -> str:
        figures = [
            f'<figure style="margin:0;width:min-content">{svg}'
            # The text of a dark page is pale.
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
    """A molecule with the atoms of chosen tokens behind a colour each.

    Args:
        smiles: the molecule.
        colors: "#rrggbb" or none for each token of ``tokens_of``; that of a token
            that is no atom (a bond, a bracket, the number of a ring) is not seen.
        width, height: in pixels.

    Raises:
        UserError: if RDKit does not read it, or is missing.
        ValueError: if there are not as many colours as tokens.
    """
    tokens = tokens_of(smiles)
    if len(colors) != len(tokens):
        raise ValueError(
            f"want {len(tokens)} colours, one a token, got {len(colors)}"
        )
    require_rdkit()
    from matplotlib.colors import to_rgb
    from rdkit import Chem
    from rdkit.Chem.Draw import rdMolDraw2D

    options: Any = Chem.SmilesParserParams()
    options.removeHs = False  # every atom that is written is drawn
    molecule = read_molecule(smiles, options)
    if molecule is None:
        raise UserError(
            f"RDKit reads no molecule in '{smiles[:80]}'; check the SMILES"
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
    """The number of the atom each token stands for; none for what is no atom.

    >>> atoms_of(["C", "(", "=", "O", ")", "[NH2]"])
    [0, None, None, 1, None, 2]
    """
    numbers, num_atoms = [], 0
    for token in tokens:
        is_atom = token.isalpha() or token.startswith("[") or token == "*"
        numbers.append(num_atoms if is_atom else None)
        num_atoms += is_atom
    return numbers
