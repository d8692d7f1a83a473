"""Tokens that belong together and are hidden together (``masking.strategy units``).

In a molecule:

* a branch, from its parenthesis to the closing one;
* a ring system: atoms, and the bonds, ring digits and parentheses between them; rings that share an
  atom are one system, and what hangs on it is not part of it;
* a symbol of several tokens, such as a bracket atom where the tokenizer takes it apart.

In a text:

* a word of several tokens;
* a name, at all its places in the row: a capitalised word of two letters or more that stands more
  than once, and never in small letters (as *The* does). If that is too much to hide, its places are
  units of their own.

So a token may belong to several units, and a unit need not be in one piece.
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
"""On letters, such as accents and vowel signs; ``\\w`` leaves them out."""
# A token may be a part of a letter, which has no text.
_WORD = re.compile(f"[\\w{_MARKS}{JOINERS}\ufffd]+")


class Units:
    """Finds the units of a row in its text, however the tokenizer cuts it.

    Args:
        decode: the text of some ids, special tokens included.
        vocab_size: every id is below.
        is_smiles: whether its texts are molecules.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        vocab_size: int,
        special_ids: SpecialIds,
        is_smiles: bool,
    ) -> None:
        # Behind another token: at the start of a text some decoders drop a token's blank.
        before = decode([special_ids.unk])
        texts = [decode([special_ids.unk, i]) for i in range(vocab_size)]
        self._texts = [text.removeprefix(before) for text in texts]
        if is_smiles:  # a decoder may set blanks between tokens
            self._texts = [text.strip() for text in self._texts]
        for i in special_ids:  # no unit goes on behind one
            self._texts[i] = "."
        self._texts[special_ids.unk] = "*"  # an atom, or no word
        self._find = _in_smiles if is_smiles else _in_text

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Units:
        """The units of a tokenizer's rows."""
        is_smiles = tokenizer.kind == "smiles"
        return cls(tokenizer.decode, tokenizer.vocab_size, tokenizer.special_ids, is_smiles)

    def __call__(self, token_ids: Sequence[int], longest: int) -> list[list[int]]:
        """The units of one row, places from 0 in rising order; each token is in at least one.

        Args:
            token_ids: of the row, nothing hidden.
            longest: most tokens of a unit. A token in no unit is one by itself.
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
"""First character of a word or symbol, and the one behind it."""


def _in_text(text: str) -> list[list[_Piece]]:
    """Words, and names."""
    pieces_of: dict[str, list[_Piece]] = defaultdict(list)
    for match in _WORD.finditer(text):
        pieces_of[match.group()].append(match.span())
    units = []
    for word, pieces in pieces_of.items():
        is_name = len(word) > 1 and word[0].isupper() and word.lower() not in pieces_of
        units += [pieces] if is_name else [[piece] for piece in pieces]
    return units


def _in_smiles(smiles: str) -> list[list[_Piece]]:
    """Symbols, branches and ring systems."""
    matches = [*_SYMBOL.finditer(smiles)]
    branches, systems = _bonded([match.group() for match in matches])
    pieces = [match.span() for match in matches]
    return [
        *([piece] for piece in pieces),
        *([(pieces[start][0], pieces[end][1])] for start, end in branches),
        *([pieces[i] for i in system] for system in systems),
    ]


def _bonded(symbols: list[str]) -> tuple[list[tuple[int, int]], list[set[int]]]:
    """Places of the parentheses of each branch, and of the symbols of each ring system.

    The atoms make a tree: each binds to the last one before it, the first of a branch to the one
    before the branch. Two equal ring digits close the path between their atoms to a ring. Digits
    and parentheses without a partner are left out.
    """
    atom: int | None = None  # to which the next one binds
    bond: list[int] = []  # opened parentheses and bonds since
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
    """The atoms from one to the other, both included; none if no bonds lead there."""
    path = {one, other}
    while one != other:
        way_up = before[max(one, other)]  # an atom stands behind the one that it binds to
        if way_up is None:
            return set()
        one, other = min(one, other), way_up
        path.add(way_up)
    return path
