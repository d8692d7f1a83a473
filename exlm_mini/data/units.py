"""Find tokens that belong together and are hidden together (``masking.strategy units``).

In a molecule:

* a branch, from its parenthesis to the closing one;
* a ring system: atoms, and the bonds, ring digits and parentheses between them; rings that share an
  atom are one system, and substituents are not part of it;
* a symbol that the tokenizer splits into several tokens, as it may split a bracket atom.

In a text:

* a word of several tokens;
* a name, at all its places in the row: a capitalised word of two letters or more that occurs more
  than once, and never in lower case (unlike *The*). If all its places are too much to hide, each
  place is a unit of its own.

So a token may belong to several units, and a unit need not be contiguous.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence

from exlm_mini.config import SpecialIds
from exlm_mini.config.checks import JOINERS
from exlm_mini.data.tokenizer import SMILES_SYMBOL, Tokenizer

_SYMBOL = re.compile(SMILES_SYMBOL)
_MARKS = "".join(
    c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M"
)
"""Combining marks, such as accents and vowel signs, which ``\\w`` does not match."""
# A token that is only a part of a letter decodes to U+FFFD.
_WORD = re.compile(f"[\\w{_MARKS}{JOINERS}\ufffd]+")


class Units:
    """Finds the units of a row in its text, however the tokenizer cuts it.

    Args:
        decode: function that returns the text of some ids, special tokens included.
        vocab_size: size of the vocabulary; every id is smaller.
        is_smiles: whether rows are molecules.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        vocab_size: int,
        special_ids: SpecialIds,
        is_smiles: bool,
    ) -> None:
        # Decode ids after another token: at the start of a text some decoders drop a token's space.
        before = decode([special_ids.unk])
        texts = [decode([special_ids.unk, i]) for i in range(vocab_size)]
        self._texts = [text.removeprefix(before) for text in texts]
        if is_smiles:  # a decoder may put spaces between tokens
            self._texts = [text.strip() for text in self._texts]
        for i in special_ids:  # no word or ring continues past one
            self._texts[i] = "."
        self._texts[special_ids.unk] = "*"  # an atom in SMILES, not a word in text
        self._find = _in_smiles if is_smiles else _in_text

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Units:
        """Make a finder of units for the rows of a tokenizer."""
        is_smiles = tokenizer.kind == "smiles"
        return cls(tokenizer.decode, tokenizer.vocab_size, tokenizer.special_ids, is_smiles)

    def __call__(self, token_ids: Sequence[int], longest: int) -> list[list[int]]:
        """Units of one row, as rising token positions from 0; every token is in at least one unit.

        Args:
            token_ids: ids of the row before masking.
            longest: largest number of tokens in a unit. A token in no unit becomes one by itself.
        """
        texts = [self._texts[i] for i in token_ids]
        token_of = [n for n, text in enumerate(texts) for _ in text]

        def tokens(pieces: list[_Piece]) -> list[int]:
            return sorted(
                {
                    n
                    for start, end in pieces
                    for n in range(token_of[start], token_of[end - 1] + 1)
                }
            )

        units = []
        for pieces in self._find("".join(texts)):
            if self._find is _in_text and len(tokens(pieces)) > longest:  # a name
                units += [tokens([piece]) for piece in pieces]
            else:
                units.append(tokens(pieces))
        units = [unit for unit in units if 1 < len(unit) <= longest]
        covered = {n for unit in units for n in unit}
        return units + [[n] for n in range(len(texts)) if n not in covered]


_Piece = tuple[int, int]
"""Span of a word or symbol: the index of its first character, and the index after its last."""


def _in_text(text: str) -> list[list[_Piece]]:
    """The words and names of a text, as spans of characters."""
    pieces_of: dict[str, list[_Piece]] = defaultdict(list)
    for match in _WORD.finditer(text):
        pieces_of[match.group()].append(match.span())
    units = []
    for word, pieces in pieces_of.items():
        is_name = len(word) > 1 and word[0].isupper() and word.lower() not in pieces_of
        units += [pieces] if is_name else [[piece] for piece in pieces]
    return units


def _in_smiles(smiles: str) -> list[list[_Piece]]:
    """The symbols, branches and ring systems of a SMILES, as spans of characters."""
    matches = [*_SYMBOL.finditer(smiles)]
    branches, systems = _bonded([match.group() for match in matches])
    pieces = [match.span() for match in matches]
    return [
        *([piece] for piece in pieces),
        *([(pieces[start][0], pieces[end][1])] for start, end in branches),
        *([pieces[i] for i in system] for system in systems),
    ]


def _bonded(symbols: list[str]) -> tuple[list[tuple[int, int]], list[set[int]]]:
    """Indices of the parentheses of each branch, and of the symbols of each ring system.

    The atoms form a tree: each binds to the last one before it that is not in a closed branch. Two
    equal ring digits close the path between their atoms to form a ring. Digits and parentheses
    without a partner are ignored.
    """
    atom: int | None = None  # the atom to which the next one binds
    bond: list[int] = []  # opening parentheses and bonds since that atom
    before: dict[int, int | None] = {}
    bond_of: dict[int, list[int]] = {}
    open_branches: list[tuple[int, int | None]] = []
    end_of: dict[int, int] = {}
    open_rings: dict[str, tuple[int, list[int]]] = {}
    systems: list[set[int]] = []
    for i, symbol in enumerate(symbols):
        if symbol[0].isalpha() or symbol[0] in "[*":
            before[i], bond_of[i] = atom, bond
            atom, bond = i, []
        elif symbol[0].isdecimal() or symbol[0] == "%":
            if atom is not None and symbol in open_rings:
                other, digit = open_rings.pop(symbol)
                ring = _path(before, other, atom)
                if ring:
                    ring.update(digit, bond, [i])
                    joined = [system for system in systems if not ring.isdisjoint(system)]
                    systems = [system for system in systems if ring.isdisjoint(system)]
                    systems.append(ring.union(*joined))
            elif atom is not None:
                open_rings[symbol] = atom, [*bond, i]
            bond = []
        elif symbol == "(":
            open_branches.append((i, atom))
            bond.append(i)
        elif symbol == ")":
            if open_branches:
                start, atom = open_branches.pop()
                end_of[start] = i
        elif symbol == ".":
            atom, bond = None, []
        else:
            bond.append(i)
    for system in systems:
        for i in [i for i in system if before.get(i) in system]:
            system.update(bond_of[i])
            system.update(end_of[start] for start in bond_of[i] if start in end_of)
    return [*end_of.items()], systems


def _path(before: dict[int, int | None], one: int, other: int) -> set[int]:
    """The atoms on the path between two atoms, both included; empty if no bonds connect them."""
    path = {one, other}
    while one != other:
        way_up = before[max(one, other)]  # an atom comes after the one that it binds to
        if way_up is None:
            return set()
        one, other = min(one, other), way_up
        path.add(way_up)
    return path
