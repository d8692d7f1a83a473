"""Pictures of molecules: the right atoms, the same text each time."""

import doctest
import re
from xml.etree import ElementTree

import pytest
from refusals import told

pytest.importorskip("rdkit", reason="rdkit is not installed")
from rdkit import Chem

from exlm_mini.data.tokenizer import train_smiles
from exlm_mini.plot import molecules
from exlm_mini.plot.molecules import Pictures, atoms_of, tokens_of, tokens_svg

ASPIRIN = "CC(=O)Oc1ccccc1C(=O)O"
HARD = [
    "[13CH4]",
    "[H][H]",
    "C[C@@H](N)Cl",
    "F/C=C\\Br",
    "[Na+].[Cl-]",
    "*c1cc[nH]c1",
    "C%10CC%10",
]


def colored(svg, color):
    """Numbers of the atoms with a disc of this colour, and how many bonds have one."""
    shapes = [
        e for e in ElementTree.fromstring(svg).iter() if color.upper() in str(e.attrib).upper()
    ]
    names = [e.get("class", "") for e in shapes]
    atoms = {int(n) for name in names for n in re.findall(r"atom-(\d+)", name)
             if "bond-" not in name}  # fmt: skip
    bonds = {b for name in names for b in re.findall(r"bond-(\d+)", name)}
    return atoms, len(bonds)


def plain_svg(smiles, *size):
    """A molecule without a colour."""
    return tokens_svg(smiles, [None] * len(tokens_of(smiles)), *size)


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


@pytest.mark.parametrize("smiles", [ASPIRIN, *HARD])
def test_tokens_are_those_of_the_tokenizer(smiles):
    tokenizer = train_smiles([smiles])
    assert [tokenizer.token(i) for i in tokenizer.encode(smiles)] == tokens_of(smiles)


def test_the_example_of_the_docstring_runs():
    assert doctest.testmod(molecules) == (0, 1)


def test_atoms_take_the_colour_of_their_tokens():
    tokens = tokens_of(ASPIRIN)
    colors = ["#123456" if t == "O" else "#abcdef" if t in "(=1" else None for t in tokens]
    svg = tokens_svg(ASPIRIN, colors)
    assert colored(svg, "#123456")[0] == {2, 3, 11, 12}
    assert colored(svg, "#abcdef") == (set(), 0)


def test_pictures_stand_side_by_side_with_their_captions():
    svg = plain_svg("CCO", 100, 50)
    assert ElementTree.fromstring(svg).get("viewBox") == "0 0 100 50"
    shown = Pictures({"ethanol": svg, "a < b": plain_svg(ASPIRIN)})
    root = ElementTree.fromstring(shown._repr_html_())
    assert "flex-wrap:wrap" in root.get("style")
    assert [figure.find("figcaption").text for figure in root] == ["ethanol", "a < b"]
    labels = [figure[0].get("aria-label") for figure in root]
    assert labels == ["CCO", ASPIRIN]
    assert svg in shown._repr_html_() and repr(shown) == "drawings: ethanol, a < b"


def test_what_cannot_be_drawn_is_told(capfd):
    told(lambda: plain_svg("C[Xx]"), "'C[Xx]'", "check the SMILES")
    told(lambda: plain_svg(""), "no molecule in ''")
    assert capfd.readouterr() == ("", "")
