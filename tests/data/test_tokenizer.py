"""Encoding and decoding lose nothing; a literal "[MASK]" in raw text is never a mask."""

import doctest
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import told

from exlm_mini.config import SPECIAL_TOKENS, DataConfig, SpecialIds

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
from exlm_mini.data import tokenizer as tokenization
from exlm_mini.data.molecules import embedded_molecules
from exlm_mini.data.tokenizer import (
    Tokenizer,
    given_tokenizer,
    train_byte_level_bpe,
    train_smiles,
    word_level,
)

ENGLISH = ["The old baker looked at the sea.", "The sea looked back at the old baker."] * 3
BPE = train_byte_level_bpe(ENGLISH, 300)
HARD_SMILES = [
    "C[C@@H](N)C(=O)[O-]",
    "F/C=C\\F",
    "C%10CCCCC%10",
    "C%(100)CC%(100)",
    "[13CH4]",
    "[Cu+2].[O-]S(=O)(=O)[O-]",
    "c1cc[nH]c1",
    "[te]1cccc1",
    "CCO>>CC=O",
    "[CH3:1][OH:2]",
    "C*.[*:1]C",
    "C~C$C",
    "[C@TH2](F)(Cl)(Br)I",
    "BrCCl",
    "C-C=C#C:C?C@C",
]
SMILES = train_smiles(HARD_SMILES)
WORDS = word_level(["the", "cat", "sat"])


# ---- text ----


@settings(max_examples=50)
@given(st.text())
def test_any_text_survives_byte_level_bpe(text):
    assert BPE.decode(BPE.encode(text)) == text


@pytest.mark.parametrize("tokenizer", [BPE, SMILES, WORDS])
@pytest.mark.parametrize("literal", [t for t in SPECIAL_TOKENS if t != "[UNK]"])
def test_raw_text_never_becomes_a_structural_token(tokenizer, literal):
    ids = tokenizer.encode(f"the {literal} C{literal}C")
    assert not set(ids) & (set(tokenizer.special_ids) - {tokenizer.special_ids.unk})
    assert tokenizer.encode_batch([f"the {literal} C{literal}C"]) == [ids]


def test_a_word_of_any_length_is_learnt_from_in_time():
    tokenizer = train_byte_level_bpe(["ab" * 1_000_000], 300)  # as one word it would take hours
    ids = tokenizer.encode("ab" * 1024)
    assert len(ids) < 100 and tokenizer.decode(ids) == "ab" * 1024


def test_bytes_and_special_tokens_must_fit():
    assert train_byte_level_bpe(["a"], 262).vocab_size == 262
    assert train_byte_level_bpe(["abcd"], 300).vocab_size == 262  # no pair occurs twice
    assert train_byte_level_bpe(["xyz", "xyz"], 300).encode("xyz") == [263]
    assert train_byte_level_bpe(["abab abab"], 5).vocab_size == 262


# ---- requested masks ----


def test_a_mask_asked_for_is_a_mask():
    mask = BPE.special_ids.mask
    ids = BPE.encode_with_masks("The [MASK] looked at[MASK] [MASK] sea.")
    assert ids.count(mask) == 3
    want = [*BPE.encode("The"), mask, *BPE.encode(" looked at"), mask, mask]
    assert ids == [*want, *BPE.encode(" sea.")]
    # No other special token can be requested.
    ids = BPE.encode_with_masks("[PAD] [MASK] [EOS]")
    assert set(ids) & set(BPE.special_ids) == {mask}
    assert WORDS.encode_with_masks("the [MASK] sat") == [6, 5, 8]
    assert BPE.encode_with_masks("") == []


# ---- SMILES ----


def test_the_example_of_an_unknown_symbol_runs():
    assert doctest.testmod(tokenization) == (0, 3)


def test_hard_and_real_smiles_survive():
    pytest.importorskip("rdkit")
    real = list(embedded_molecules())
    tokenizer = train_smiles([*HARD_SMILES, *real])
    assert tokenizer.vocab_size < 150
    for smiles in (HARD_SMILES, real):
        encoded = tokenizer.encode_batch(smiles)
        assert [tokenizer.decode(ids) for ids in encoded] == smiles
        assert [tokenizer.encode(text) for text in smiles] == encoded
        assert not any(map(tokenizer.unknown_pieces, smiles))


def test_symbols_are_split_as_the_published_examples(data_dir):
    path = data_dir / "smiles" / "tokenise_examples.json"
    for example in json.loads(path.read_text())["examples"]:
        tokenizer = train_smiles([example["smiles"]])
        tokens = [tokenizer.token(i) for i in tokenizer.encode(example["smiles"])]
        assert " ".join(tokens) == example["tokens"]


def test_symbols_are_ranked_by_frequency_then_alphabet():
    tokenizer = train_smiles(["CCO", "CNBr", "[MASK]C"])
    symbols = [tokenizer.token(i) for i in range(6, tokenizer.vocab_size)]
    assert symbols == ["C", "Br", "N", "O"]


def test_a_cap_keeps_the_frequent_symbols():
    tokenizer = train_smiles(["CCCOON"], vocab_size=8)
    assert tokenizer.vocab_size == 8
    assert tokenizer.unknown_pieces("CON") == ["N"]


@pytest.mark.parametrize("vocab_size", [1, 5, 6])
def test_a_cap_below_the_special_tokens_leaves_them_alone(vocab_size):
    assert train_smiles(["CCCOON"], vocab_size=vocab_size).vocab_size == 6


def test_unknown_symbols_are_told():
    ids = SMILES.encode("C[Xx]Cq")
    assert ids.count(SMILES.special_ids.unk) == 2
    assert SMILES.unknown_pieces("C[Xx]Cq") == ["[Xx]", "q"]
    assert SMILES.unknown_pieces("C[MASK]C") == ["[MASK]"]
    assert SMILES.decode(ids) == "C[UNK]C[UNK]"


# ---- words ----


def test_words_keep_their_order():
    assert WORDS.decode(WORDS.encode("sat the cat")) == "sat the cat"
    assert WORDS.encode("the dog") == [6, SpecialIds().unk]


# ---- files ----


@pytest.mark.parametrize(
    ("tokenizer", "kind"), [(BPE, "text"), (SMILES, "smiles"), (WORDS, "toy")]
)
def test_a_saved_tokenizer_is_the_same(tmp_path, tokenizer, kind):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    loaded = Tokenizer.load(path)
    assert loaded.kind == tokenizer.kind == kind
    assert loaded.sha256 == tokenizer.sha256
    assert loaded.vocab_size == tokenizer.vocab_size
    text = "the [MASK] CC(=O)O sat"
    assert loaded.encode(text) == tokenizer.encode(text)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


def test_foreign_ids_are_looked_up_by_name(tmp_path):
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, pre_tokenizers

    names = ["hello", *reversed(SPECIAL_TOKENS)]
    vocabulary = {name: i for i, name in enumerate(names)} | {"behind a gap": 20}
    inner = Inner(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.enable_truncation(1)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "foreign.json"))
    tokenizer = Tokenizer.load(tmp_path / "foreign.json")
    assert tokenizer.special_ids == SpecialIds(6, 5, 4, 3, 2, 1)
    assert tokenizer.encode("hello [MASK] hello") == [0, 3, 0]  # neither truncated nor padded
    assert tokenizer.vocab_size == 21
    assert tokenizer.encode_with_masks("hello [MASK]") == [0, 1]


def test_a_token_without_a_text_of_its_own_is_shown_as_it_is_stored():
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    vocabulary = {name: i for i, name in enumerate([*SPECIAL_TOKENS, "\u2581", "\u2581a"])}
    inner = Inner(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(inner.to_str().encode())
    assert tokenizer.decode([6]) == ""
    assert [tokenization.visible(tokenizer, i) for i in (6, 7)] == ["\u2581", "a"]


def test_a_tokenizer_that_puts_a_space_before_every_text_is_refused(tmp_path):
    from tokenizers import Tokenizer as Inner
    from tokenizers import models, trainers
    from tokenizers.pre_tokenizers import ByteLevel, Metaspace

    data = DataConfig(kind="text", tokenizer=str(tmp_path / "own.json"))
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(SPECIAL_TOKENS))
    for good, bad in (
        (ByteLevel(add_prefix_space=False), ByteLevel()),
        (Metaspace(prepend_scheme="never"), Metaspace()),
    ):
        inner = Inner(models.BPE(unk_token="[UNK]"))
        inner.pre_tokenizer = bad
        inner.train_from_iterator(ENGLISH, trainer)
        inner.save(data.tokenizer)
        told(lambda: given_tokenizer(data), data.tokenizer, "puts a space before every text")
        inner.pre_tokenizer = good
        inner.save(data.tokenizer)
        assert given_tokenizer(data).definition


def test_a_missing_special_token_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    definition = json.loads(WORDS.definition)
    del definition["model"]["vocab"]["[SEP]"]
    definition["added_tokens"] = [
        t for t in definition["added_tokens"] if t["content"] != "[SEP]"
    ]
    path.write_text(json.dumps(definition))
    told(lambda: Tokenizer.load(path), path, "[SEP]", "train one")
    for content in (b"", b"\x00\xff\xfe", b"{}", b"[1]"):
        path.write_bytes(content)
        told(lambda: Tokenizer.load(path), path, "is not a valid tokenizer", "train one")
