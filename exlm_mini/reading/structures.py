"""Draw the likeliest fillings of a molecule with RDKit, with the new atoms marked."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from exlm_mini.data.molecules import read_molecule
from exlm_mini.reading.scene import Scene, conditionals

NUM_FILLINGS = 6
SIZE = (250, 180)
"""Width and height of a drawing, in pixels."""
_ATOM = re.compile(r"\[[^]]*\]|Br|Cl|[BCNOPSFIbcnops*]")


def likeliest_fillings(
    scene: Scene, num_fillings: int = NUM_FILLINGS
) -> list[tuple[list[str], float]]:
    """Fillings of all masks, each with its joint probability over all paths, likeliest first.

    This is a beam search from mask to mask, by exact probabilities (``conditionals``); a filling
    whose first words are unlikely may be missed.
    """
    fillings: list[tuple[list[str], float]] = [([], 1.0)]
    for mask, offered in enumerate(scene.offered, start=1):
        longer = []
        for words, _ in fillings:
            said = conditionals(scene, dict(enumerate(words, start=1)))
            longer += [
                ([*words, scene.words[w]], said.probability * float(said.word_SW[mask - 1, w]))
                for w in offered
            ]
        fillings = sorted(longer, key=lambda filling: -filling[1])[:num_fillings]
    return fillings


def structures(scene: Scene) -> str:
    """HTML with a drawing of each of the likeliest fillings; a SMILES that RDKit cannot read is
    shown as text."""
    figures = []
    for words, probability in likeliest_fillings(scene):
        smiles, new = scene.text[0], list[int]()
        for word, text in zip(words, scene.text[1:], strict=True):
            begin = len(_ATOM.findall(smiles))
            smiles += word
            new += range(begin, len(_ATOM.findall(smiles)))
            smiles += text
        drawing = _drawing(smiles, new) or "<p>RDKit cannot read this one.</p>"
        figures.append(
            f'<figure style="display:inline-block;margin:8px;width:{SIZE[0]}px;'
            f'vertical-align:top">{drawing}<figcaption style="overflow-wrap:anywhere">'
            f"{probability:.3g}: {escape(smiles)}</figcaption></figure>"
        )
    return "<h2>The likeliest fillings</h2>\n" + "\n".join(figures)


def _drawing(smiles: str, new_atoms: list[int]) -> str | None:
    """The molecule as an SVG element; None if RDKit cannot read it."""
    from rdkit import Chem
    from rdkit.Chem.Draw import rdMolDraw2D

    options: Any = Chem.SmilesParserParams()
    options.removeHs = False  # atoms keep their indices
    molecule = read_molecule(smiles, options)
    if molecule is None:
        return None
    drawer = rdMolDraw2D.MolDraw2DSVG(*SIZE)
    rdMolDraw2D.PrepareAndDrawMolecule(drawer, molecule, highlightAtoms=new_atoms)
    drawer.FinishDrawing()
    return drawer.GetDrawingText().partition("?>")[2]
