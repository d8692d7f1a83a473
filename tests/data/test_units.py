"""Units against lists by hand and against RDKit, and the order in which they are hidden.

Shapes: B rows, N tokens of a row.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm_mini.config import SPECIAL_TOKENS, MaskingConfig, SpecialIds
from exlm_mini.data.masking import Masker, counter_uniform
from exlm_mini.data.molecules import embedded_molecules
from exlm_mini.data.tokenizer import Tokenizer, train_byte_level_bpe, train_smiles
from exlm_mini.data.units import Units, _in_text

SPECIAL = SpecialIds()

# Each line: a molecule, and the symbols of each of its units of more than one symbol.
MOLECULES = """
CCO |
CC(C)(C)O | (C) (C)
CC(=O)N | (=O)
C(C(F)Cl)O | (C(F)Cl) (F)
c1ccccc1O | c1ccccc1
C1=CCCCC=1 | C1=CCCCC=1
C=1CCCCC1O | C=1CCCCC1
c1ccc2ccccc2c1 | c1ccc2ccccc2c1
C1CCC2(CC1)CCC2 | C1CCC2(CC1)CCC2 (CC1)
c1ccc(-c2ccccc2)cc1C | c1ccccc1 c2ccccc2 (-c2ccccc2)
c1ccc(CC(=O)O)c(C)c1 | c1ccccc1 (CC(=O)O) (=O) (C)
C1CC(C2CCCCC=2)CC1 | C1CCCC1 C2CCCCC=2 (C2CCCCC=2)
C1CC(CC1C)N | C1CC(CC1) (CC1C)
CC1CC(=O)N1 | C1CCN1 (=O)
CN1C(=O)/C(=C/c2ccco2)SC1=S | N1C/CSC1 c2ccco2 (=O) (=C/c2ccco2)
C%10CC%10[nH]Br | C%10CC%10
CC.C1CC1.C1CC1 | C1CC1 C1CC1
C1CC2CC1CC2 | C1CC2CC1CC2
C(C1CC1)C1CC1 | C1CC1 C1CC1 (C1CC1)
O1C.C1 |
C)C(C1% |
1(C)1 | (C)
"""
CASES = [[part.strip() for part in line.split("|")] for line in MOLECULES.split("\n")[1:-1]]
LONG_SYMBOLS = {"%10", "[nH]", "Br", "Cl"}


def symbols() -> Tokenizer:
    """One token for each symbol of the molecules."""
    return train_smiles(molecule for molecule, _ in CASES)


def characters() -> Tokenizer:
    """One token for each character of the molecules."""
    words = [*SPECIAL_TOKENS, *sorted(set("".join(molecule for molecule, _ in CASES)))]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return Tokenizer(inner.to_str().encode())


def texts(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    """Sorted texts of the units of several tokens; every other token must be a unit by itself."""
    units = Units.of(tokenizer)(token_ids, len(token_ids))
    several = [unit for unit in units if len(unit) > 1]
    others = set(range(len(token_ids))).difference(*several)
    assert units == several + [[n] for n in sorted(others)]
    words = [[tokenizer.decode([token_ids[n]]) for n in unit] for unit in several]
    return sorted(map("".join, words))


# ---- molecules ----


@pytest.mark.parametrize(("molecule", "units"), CASES)
def test_branches_and_ring_systems_are_units_however_symbols_are_cut(molecule, units):
    whole, cut = symbols(), characters()
    assert texts(whole, whole.encode(molecule)) == sorted(units.split())
    long = [name for name in LONG_SYMBOLS for _ in range(molecule.count(name))]
    assert texts(cut, cut.encode(molecule)) == sorted([*units.split(), *long])


def test_a_ring_that_is_too_large_to_hide_leaves_its_symbols_single():
    tokenizer = characters()
    units = Units.of(tokenizer)(tokenizer.encode("C%10CCC%10[nH]"), 5)
    assert len(set(map(tuple, units))) == len(units)


def test_an_unknown_symbol_is_an_atom():
    tokenizer = symbols()
    ids = tokenizer.encode("[Xx]1C[Yy](F)1")
    assert SPECIAL.unk in ids
    units = Units.of(tokenizer)(ids, 99)
    assert units == [[4, 5, 6], [0, 1, 2, 3, 7]]


def test_ring_systems_are_those_of_rdkit():
    pytest.importorskip("rdkit")
    from rdkit import Chem

    molecules = [text for text, _ in zip(embedded_molecules(), range(800), strict=False)]
    tokenizer = train_smiles(molecules)
    find, num_systems = Units.of(tokenizer), 0
    for text in molecules:
        molecule = Chem.MolFromSmiles(text, sanitize=False)
        if molecule is None:
            continue
        systems: list[set[int]] = []
        for ring in map(set, Chem.GetSSSR(molecule)):
            apart = [system for system in systems if system.isdisjoint(ring)]
            joined = [system for system in systems if not system.isdisjoint(ring)]
            systems = [*apart, ring.union(*joined)]
        ids = tokenizer.encode(text)
        names = [tokenizer.token(i) for i in ids]
        number = count()
        atoms = [
            next(number) if name[0].isalpha() or name[0] == "[" else None for name in names
        ]
        found = [
            {atoms[n] for n in unit} - {None}
            for unit in find(ids, 999)
            if len(unit) > 1 and names[unit[0]] != "("
        ]
        assert sorted(map(sorted, found)) == sorted(map(sorted, systems)), text
        num_systems += len(systems)
    assert num_systems > 500


# ---- text ----

SENTENCE = "Marta told Rex of Zoë. Rex, unbelievable! The dog barks; The end, the marta. I? I."


def byte_level() -> Tokenizer:
    """A tokenizer whose tokens are pieces of words; it splits ë into two bytes."""
    return train_byte_level_bpe(["Marta Marta Marta told the told the"], 300)


def metaspace() -> Tokenizer:
    """A tokenizer that marks spaces as T5 and Llama do; most of its tokens are letters."""
    letters = [*SPECIAL_TOKENS, *dict.fromkeys("▁" + SENTENCE.replace(" ", "▁"))]
    merges = [("▁", "t"), ("▁", "R"), ("▁R", "e"), ("▁Re", "x"), ("R", "e")]
    words = letters + ["".join(pair) for pair in merges]
    vocabulary = {word: i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    inner.decoder = tokenizers.decoders.Metaspace()
    return Tokenizer(inner.to_str().encode())


def word_pieces() -> Tokenizer:
    """A tokenizer that marks the continuation of a word as BERT does."""
    letters = dict.fromkeys(SENTENCE.replace(" ", ""))
    words = [*SPECIAL_TOKENS, "Rex", "The", "the", "I", *(f"##{letter}" for letter in letters)]
    words += [letter for letter in letters if letter != "I"]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(
            {word: i for i, word in enumerate(words)}, unk_token="[UNK]"
        )
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    inner.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return Tokenizer(inner.to_str().encode())


def words_of_units(tokenizer: Tokenizer) -> list[str]:
    """Texts of the units of several tokens in ``SENTENCE``, read off the token offsets."""
    encoded = tokenizer._inner.encode(SENTENCE, add_special_tokens=False)
    found = []
    for unit in Units.of(tokenizer)(encoded.ids, 99):
        # The offsets of each byte of an ë span the whole letter.
        places = dict.fromkeys(encoded.offsets[n] for n in unit)
        if len(unit) > 1:
            found.append("".join(SENTENCE[start:end] for start, end in places).replace(" ", ""))
    return found


@pytest.mark.parametrize("make", [byte_level, metaspace, word_pieces])
def test_words_of_several_tokens_and_repeated_names_are_units(make):
    found = words_of_units(make())
    whole = {"unbelievable", "Zoë", "dog", "barks", "end", "marta"}
    assert whole <= set(found)
    # Capitalised twice but not names: The (also occurs in lower case) and I (a single letter).
    assert [word for word in found if word not in SENTENCE] == ["RexRex"]


@pytest.mark.parametrize(  # German, Hebrew, Hindi, Persian
    "word",
    [
        "Ko\u0308nigin",
        "\u05e9\u05b8\u05dc\u05d5\u05b9\u05dd",
        "\u0939\u093f\u0928\u094d\u0926\u0940",
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",
    ],
)
def test_marks_and_joiners_do_not_end_a_word(word):
    assert _in_text(f"{word}.") == [[(0, len(word))]]


def test_a_name_that_stands_too_often_to_be_hidden_whole_is_hidden_place_by_place():
    tokenizer = byte_level()
    ids = tokenizer.encode("Zoe " * 4)
    find, whole = Units.of(tokenizer), max(Units.of(tokenizer)(ids, len(ids)), key=len)
    assert find(ids, len(whole))[0] == whole
    units = [unit for unit in find(ids, len(whole) - 1) if len(unit) > 1]
    assert [tokenizer.decode([ids[n] for n in unit]).strip() for unit in units] == 4 * ["Zoe"]


@pytest.mark.parametrize(
    ("word", "is_name"), [("Al", True), ("I", False), ("12", False), ("iPod", False)]
)
def test_a_name_is_a_capitalised_word_of_two_letters_or_more(word, is_name):
    n = len(word)
    pieces = [(0, n), (n + 1, 2 * n + 1)]
    units = [pieces] if is_name else [[piece] for piece in pieces]
    assert _in_text(f"{word} {word}") == units


def test_a_unit_ends_at_a_special_token():
    tokenizer = byte_level()
    ids = [*tokenizer.encode("dog"), SPECIAL.sep] * 2
    n = len(ids) // 2
    words = [[*range(n - 1)], [*range(n, 2 * n - 1)]]
    assert Units.of(tokenizer)(ids, 99) == [*words, [n - 1], [2 * n - 1]]
    molecules = symbols()
    row = [*molecules.encode("C1C"), SPECIAL.sep, *molecules.encode("C1")]
    assert Units.of(molecules)(row, 99) == [[n] for n in range(6)]


# ---- both ----


@pytest.mark.parametrize("make", [symbols, characters, byte_level])
@given(st.data())
def test_any_row_is_covered_by_units_that_are_not_too_long(make, data):
    tokenizer = make()
    row = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    longest = data.draw(st.integers(1, 30))
    units = Units.of(tokenizer)(row, longest)
    assert {n for unit in units for n in unit} == set(range(len(row)))
    for unit in units:
        assert unit == sorted(set(unit)) and 1 <= len(unit) <= longest
    shorter = [unit for unit in Units.of(tokenizer)(row, 30) if 1 < len(unit) <= longest]
    assert [unit for unit in units if len(unit) > 1] == shorter


# ---- hiding ----


def rows_of(tokenizer: Tokenizer, several: list[str]) -> torch.Tensor:
    rows = [[SPECIAL.bos, *tokenizer.encode(text), SPECIAL.eos] for text in several]
    longest = max(map(len, rows))
    return torch.tensor([row + [SPECIAL.pad] * (longest - len(row)) for row in rows])


LARGE = ["c1ccc(-c2ccccc2)cc1C(=O)OC(C)(C)C1CCNCC1", "CN1C(=O)/C(=C/c2ccco2)SC1=S", "CCO"]


@pytest.mark.parametrize("ratio", [0.15, 0.3, 0.6])
def test_units_are_hidden_in_the_order_of_their_noise_and_the_last_is_cut(ratio):
    tokenizer = train_smiles(LARGE)
    find = Units.of(tokenizer)
    masker = Masker(MaskingConfig(ratio, "units"), SPECIAL, 3, units=find)
    rows_BN, num_cut = rows_of(tokenizer, LARGE), 0
    for epoch in range(40):
        epoch_B, sample_B = np.full(3, epoch), np.arange(3)
        is_masked_BN = masker(rows_BN, epoch_B, sample_B, step=0).is_masked_BN
        for b, row_N in enumerate(rows_BN.tolist()):
            inner = range(1, row_N.index(SPECIAL.eos))
            num_masks = int(is_masked_BN[b].sum())
            assert abs(num_masks - max(1, ratio * len(inner))) < 1
            units = [unit for unit in find(row_N, num_masks) if set(unit) <= set(inner)]
            noise = {
                tuple(unit): float(counter_uniform(3, epoch, b, unit[0], unit[-1]))
                for unit in units
            }
            hidden: list[int] = []
            for unit in sorted(noise, key=lambda unit: noise[unit]):
                new = [n for n in unit if n not in hidden]
                num_cut += len(hidden) < num_masks < len(hidden) + len(new)
                hidden += new[: num_masks - len(hidden)]
            assert sorted(hidden) == is_masked_BN[b].nonzero()[:, 0].tolist()
    assert num_cut > 5
