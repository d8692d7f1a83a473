"""The exported tokenizer and the package's give the same tokens, and its offsets begin at words."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from exlm_mini.data.tokenizer import (
    MASK,
    Tokenizer,
    train_byte_level_bpe,
    word_level,
)
from exlm_mini.reading.trained import SHIPPED, load

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from exlm_mini import hf  # noqa: E402

SENTENCE = "The if statement is used for conditional execution of one or more suites"
PIECES = [
    MASK, MASK, " ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2003", "\u2028", "[BOS]", "[EOS]",
    "[PAD]", "[UNK]", "[SEP]", "[MASK", "MASK]", "[mask]", "[", "]", "the", " cat", "sat", "C",
    "(=O)", "[nH]", "Cl", "%12", "e\u0301", "\U0001f600", "\x00", "0", "'s",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
    st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join),
)


def again(tokenizer, folder: Path):
    """Saved and opened twice."""
    for name in ("once", "twice"):
        tokenizer.save_pretrained(folder / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    assert type(tokenizer) is hf.ExLMTokenizer
    return tokenizer


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict:
    """The package's tokenizer and the exported one, of the shipped models and of a word list."""
    owns = {name: load(path, print).tokenizer for name, path in SHIPPED.items()}
    owns["words"] = word_level(["the", "cat", "sat"])
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: (own, again(hf.tokenizer_for(own), folder / name)) for name, own in owns.items()
    }


def framed(own: Tokenizer, text: str) -> list[int]:
    return [own.special_ids.bos, *own.encode_with_masks(text), own.special_ids.eos]


@pytest.mark.parametrize("name", ["english", "molecules", "words"])
@given(TEXTS)
def test_any_text_has_the_tokens_of_the_package(pairs, name, text):
    own, exported = pairs[name]
    assert exported(text).input_ids == framed(own, text)


def test_pairs_and_copies_hold_the_same_tokens(pairs):
    own, exported = pairs["english"]
    first, second = "a\n[MASK] b", "[BOS] [MASK]"
    one, two = framed(own, first), framed(own, second)
    assert exported.mask_token == MASK and exported.mask_token_id == own.special_ids.mask
    for tokenizer in (exported, pickle.loads(pickle.dumps(exported)), copy.deepcopy(exported)):
        assert tokenizer(first, second).input_ids == [*one, own.special_ids.eos, *two[1:]]


@given(st.text(max_size=30).filter(lambda text: MASK not in text))
def test_a_text_without_masks_comes_back(pairs, text):
    _, exported = pairs["english"]
    assert exported.decode(exported(text).input_ids, skip_special_tokens=True) == text


def test_a_tokenizer_of_its_own_construction_keeps_its_masks(tmp_path):
    # A normalizer, truncation, padding, and [MASK] only in the vocabulary.
    import tokenizers

    definition = json.loads(train_byte_level_bpe(["the cat"] * 9, 300).definition)
    del definition["added_tokens"][-1]
    inner = tokenizers.Tokenizer.from_str(json.dumps(definition))
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    own = Tokenizer(inner.to_str().encode())
    exported = again(hf.tokenizer_for(own), tmp_path)
    for text in ("The [MASK]Cat\n [MASK]", "THE CAT the cat"):
        assert exported(text).input_ids == framed(own, text)


def test_a_tokenizer_trained_anew_finds_masks(pairs):
    _, exported = pairs["english"]
    new = exported.train_new_from_iterator(["the dog ran"] * 9, 300)
    assert new.tokenize("dog\n [MASK] [BOS]") == [
        *new.tokenize("dog\n"),
        MASK,
        *new.tokenize(" [BOS]"),
    ]


def test_tokens_that_are_added_later_are_found(pairs, tmp_path):
    exported = copy.deepcopy(pairs["english"][1])
    assert exported.add_tokens(["<one>"]) == 1
    assert exported.add_special_tokens({"extra_special_tokens": ["<two>"]}) == 1
    for tokenizer in (exported, again(exported, tmp_path)):
        tokens = tokenizer("a<one>b<two>c [MASK] [BOS]").tokens()
        assert tokens[1:7] == ["a", "<one>", "b", "<two>", "c", MASK]
        assert "[BOS]" not in tokens[1:]


def test_offsets_begin_at_letters(pairs):
    _, exported = pairs["english"]
    offsets = exported(SENTENCE, return_offsets_mapping=True).offset_mapping
    assert offsets[1:5] == [(0, 3), (4, 6), (7, 12), (12, 16)]
    text = "a [MASK] the  cat\n [MASK]"
    row = exported(text, return_offsets_mapping=True)
    spans = zip(row.input_ids, row.offset_mapping, strict=True)
    parts = [text[start:end] for i, (start, end) in spans if i not in (1, 2)]
    assert [part for part in parts if part] == ["a", MASK, "the", "cat", "\n", MASK]


def test_whole_words_are_masked(pairs):
    _, exported = pairs["english"]
    row = exported(SENTENCE, return_offsets_mapping=True)
    starts = [i for i in range(2, len(row.input_ids) - 1)
              if row.offset_mapping[i][0] != row.offset_mapping[i - 1][1]]  # fmt: skip
    torch.manual_seed(0)
    words = hf.collator(exported, 0.3, whole_word_mask=True)
    masked = words([dict(row) for _ in range(400)])["labels"][:, 1:-1] != -100
    share = masked.float().mean(dim=1)
    assert (share == 0).float().mean() < 0.02 and (share < 1).all()
    assert 0.25 < share.mean() < 0.35
    # Inside a word all tokens are masked or none; across a blank they are independent.
    inside = [i for i in range(2, len(row.input_ids) - 1) if i not in starts]
    assert inside
    for i in inside:
        assert torch.equal(masked[:, i - 1], masked[:, i - 2])
    for i in starts:
        assert not torch.equal(masked[:, i - 1], masked[:, i - 2])


@pytest.mark.slow
def test_without_the_package_transformers_still_finds_masks(tmp_path):
    own = load(SHIPPED["english"], print).tokenizer
    hf.tokenizer_for(own).save_pretrained(tmp_path)
    text = "x\n [MASK] y"
    program = f"""
import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained({str(tmp_path)!r})
assert tokenizer({text!r}).input_ids == {framed(own, text)}, tokenizer({text!r}).tokens()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
