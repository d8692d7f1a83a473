"""The exported tokenizer and the collator give the tokens, words and masks of the package."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from exlm_mini.config import SPECIAL_TOKENS, MaskingConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import Masker
from exlm_mini.data.tokenizer import MASK, Tokenizer, train_byte_level_bpe, word_level
from exlm_mini.data.units import Units
from exlm_mini.reading.trained import SHIPPED, load

transformers = pytest.importorskip("transformers")

from exlm_mini import hf  # noqa: E402
from exlm_mini.hf.training import Strategy  # noqa: E402

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
TO_MASK = {
    "molecules": ["CC(=O)NC1=CC=C(O)C=C1", "CC(C)CC1=CC=C(C=C1)C(C)C(=O)O", "CC[U]O"],
    "english": [
        "The Python Debugger is an extensible Debugger of statements.",
        "If an object has no value, None is returned; None is not a string.",
    ],
}


def again(tokenizer, folder: Path):
    """The tokenizer after it was saved and opened twice."""
    for name in ("once", "twice"):
        tokenizer.save_pretrained(folder / name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
    assert type(tokenizer) is hf.ExLMTokenizer
    return tokenizer


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict:
    """The package's tokenizer and its export, for each shipped model and for a list of words."""
    owns = {name: load(path, print).tokenizer for name, path in SHIPPED.items()}
    owns["words"] = word_level(["the", "cat", "sat"])
    folder = tmp_path_factory.mktemp("tokenizers")
    return {
        name: (own, again(hf.tokenizer_for(own), folder / name)) for name, own in owns.items()
    }


@pytest.fixture(scope="module")
def english(pairs):
    return pairs["english"][1]


def framed(own: Tokenizer, text: str) -> list[int]:
    return [own.special_ids.bos, *own.encode_with_masks(text), own.special_ids.eos]


# ---- tokens ----


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
def test_a_text_without_masks_comes_back(english, text):
    assert english.decode(english(text).input_ids, skip_special_tokens=True) == text


def test_a_tokenizer_of_its_own_construction_keeps_its_masks(tmp_path):
    """It has a normalizer, a template, truncation and padding, and [MASK] only as an entry."""
    import tokenizers

    definition = json.loads(train_byte_level_bpe(["the cat"] * 9, 300).definition)
    del definition["added_tokens"][-1]
    inner = tokenizers.Tokenizer.from_str(json.dumps(definition))
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[SEP] $A [SEP]", special_tokens=[("[SEP]", inner.token_to_id("[SEP]"))]
    )
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    own = Tokenizer(inner.to_str().encode())
    own.save(tmp_path / "tokenizer.json")  # as in a checkpoint
    opened = hf.ExLMTokenizer.from_pretrained(tmp_path)
    for text in ("The [MASK]Cat\n [MASK]", "THE CAT the cat"):
        for exported in (again(hf.tokenizer_for(own), tmp_path), opened):
            assert exported(text).input_ids == framed(own, text)


def test_a_tokenizer_trained_anew_finds_masks(english):
    new = english.train_new_from_iterator(["the dog ran"] * 9, 300)
    tokens = [*new.tokenize("dog\n"), MASK, *new.tokenize(" [BOS]")]
    assert new.tokenize("dog\n [MASK] [BOS]") == tokens
    special = [*SPECIAL_TOKENS]
    assert new.convert_tokens_to_ids(special) == english.convert_tokens_to_ids(special)


def test_tokens_that_are_added_later_are_found(english, tmp_path):
    exported = copy.deepcopy(english)
    assert exported.add_tokens(["<one>"]) == 1
    assert exported.add_special_tokens({"extra_special_tokens": ["<two>"]}) == 1
    for tokenizer in (exported, again(exported, tmp_path)):
        tokens = tokenizer("a<one>b<two>c [MASK] [BOS]").tokens()
        assert tokens[1:7] == ["a", "<one>", "b", "<two>", "c", MASK]
        assert "[BOS]" not in tokens[1:]


@pytest.mark.slow
def test_without_the_package_transformers_still_finds_masks(pairs, tmp_path):
    own, exported = pairs["english"]
    exported.save_pretrained(tmp_path)
    text = "x\n [MASK] y"
    program = f"""
import transformers
tokenizer = transformers.AutoTokenizer.from_pretrained({str(tmp_path)!r})
assert tokenizer({text!r}).input_ids == {framed(own, text)}, tokenizer({text!r}).tokens()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# ---- words ----


def test_offsets_begin_at_letters(english):
    offsets = english(SENTENCE, return_offsets_mapping=True).offset_mapping
    assert offsets[1:5] == [(0, 3), (4, 6), (7, 12), (12, 16)]
    text = "a [MASK] the  man\n [MASK]"
    row = english(text, return_offsets_mapping=True)
    spans = zip(row.input_ids, row.offset_mapping, strict=True)
    parts = [text[start:end] for i, (start, end) in spans if i not in (1, 2)]
    assert [part for part in parts if part] == ["a", MASK, "the", "man", "\n", MASK]


def test_whole_words_are_masked(english):
    """Either all tokens of a word are masked or none; words are masked independently."""
    row = english(SENTENCE, return_offsets_mapping=True)
    torch.manual_seed(0)
    words = hf.collator(english, 0.3, whole_word_mask=True)
    masked = words([dict(row) for _ in range(400)])["labels"][:, 1:-1] != -100
    share = masked.float().mean(dim=1)
    assert (share == 0).float().mean() < 0.02 and (share < 1).all()
    assert 0.25 < share.mean() < 0.35
    offsets = row.offset_mapping[1:-1]
    is_inside = [offsets[i][0] == offsets[i - 1][1] for i in range(1, len(offsets))]
    is_equal = [torch.equal(masked[:, i], masked[:, i - 1]) for i in range(1, len(offsets))]
    assert is_equal == is_inside and any(is_inside)


def test_how_to_mask_is_said_in_our_words(english):
    for name, value in (("mlm", False), ("mlm_probability", 0.6), ("random_replace_prob", 0.1)):
        with pytest.raises(ValueError, match=f"{name} would do nothing here; set mask_ratio"):
            hf.collator(english, **{name: value})


# ---- masks ----

every = pytest.mark.parametrize(
    ("name", "strategy"),
    [
        (name, strategy)
        for name in TO_MASK
        for strategy in ("bernoulli", "fixed_count", "spans", "units")
    ],
)


def rows(tokenizer, name: str) -> list:
    return [tokenizer(text) for text in TO_MASK[name]]


@every
def test_masks_are_those_of_a_run_with_a_drawn_number(name, strategy, pairs):
    own, tokenizer = pairs[name]
    collate, collate_numpy = (
        hf.collator(tokenizer, 0.3, strategy, span_length=2, seed=1) for _ in range(2)
    )
    masking = MaskingConfig(mask_ratio=0.3, strategy=strategy, span_length=2)
    units = Units.of(own) if strategy == "units" else None
    masker, draws = Masker(masking, own.special_ids, 0, units=units), torch.Generator()
    draws.manual_seed(1)
    ids = tokenizer.pad(rows(tokenizer, name), return_tensors="pt").input_ids
    # Unknown tokens may be masked, too.
    assert (ids == own.special_ids.unk).any() == (name == "molecules")
    for _ in range(5):
        number = int(torch.randint(2**62, (), generator=draws))
        counters = np.full(len(ids), number), np.arange(len(ids))
        masked_ids, is_masked, _ = masker(ids, *counters, step=number)
        batch = collate(rows(tokenizer, name))
        assert torch.equal(batch["input_ids"], masked_ids)
        assert torch.equal(batch["labels"], ids.masked_fill(~is_masked, -100))
        arrays = collate_numpy(rows(tokenizer, name), return_tensors="np")
        for key in ("input_ids", "labels"):
            assert (arrays[key] == batch[key].numpy()).all()
            assert isinstance(arrays[key], np.ndarray)


@every
def test_masks_are_drawn_from_the_generator_of_torch_or_of_a_seed(name, strategy, pairs):
    tokenizer = pairs[name][1]

    def masks(collate, seed: int) -> list:
        torch.manual_seed(seed)
        return [collate(rows(tokenizer, name))["labels"] for _ in range(3)]

    collate = hf.collator(tokenizer, 0.3, strategy)
    first, same, other = (masks(collate, seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])
    own = [masks(hf.collator(tokenizer, 0.3, strategy, seed=3), seed) for seed in (1, 2)]
    assert all(map(torch.equal, *own))


@pytest.mark.filterwarnings("ignore:This DataLoader")  # it warns of two workers on one core
@pytest.mark.parametrize(("name", "strategy"), [("english", "units"), ("molecules", "spans")])
def test_a_collator_survives_copies_and_workers(name, strategy, pairs):
    tokenizer = pairs[name][1]
    collate, fresh = (hf.collator(tokenizer, 0.3, strategy, seed=1) for _ in range(2))
    copies = [copy.deepcopy(collate), pickle.loads(pickle.dumps(collate))]
    examples = rows(tokenizer, name)
    labels = collate(examples)["labels"]
    for other in copies:
        assert torch.equal(other(examples)["labels"], labels)
    loader = DataLoader(examples * 2, batch_size=len(examples), collate_fn=fresh, num_workers=2)
    first, second = (batch["labels"] for batch in loader)
    assert not torch.equal(first, second)  # the two workers draw different masks


@pytest.mark.parametrize(
    "names",
    [
        {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "unk": "<unk>", "mask": "<mask>"},
        {"cls": "[CLS]", "sep": "[SEP]", "pad": "[PAD]", "unk": "[UNK]", "mask": "[MASK]"},
    ],
)
def test_special_tokens_may_have_other_names(names):
    vocabulary = {token: n for n, token in enumerate([*names.values(), "a", "b"])}
    own = tokenizers.models.WordLevel(vocabulary, names["unk"])
    tokens = {f"{name}_token": token for name, token in names.items()}
    core = {"tokenizer_object": tokenizers.Tokenizer(own)}
    tokenizer = transformers.PreTrainedTokenizerFast(**core, **tokens)
    first, last, a, b = 0, 1, 5, 6
    row = {"input_ids": [first, a, b, a, b, last], "attention_mask": [1] * 6}
    for name in ("bernoulli", "spans"):
        batch = hf.collator(tokenizer, 0.9, name, seed=1)([row] * 8)
        hidden = batch["labels"] != -100
        assert not hidden[:, [0, -1]].any() and hidden[:, 1:-1].any()
        assert (batch["input_ids"][hidden] == tokenizer.mask_token_id).all()
    nameless = transformers.PreTrainedTokenizerFast(**core, pad_token=names["pad"])
    with pytest.raises(ValueError, match=r"has no .*_token; set it"):
        hf.collator(nameless)


def test_every_way_to_mask_but_that_of_toy_languages_works_with_transformers():
    ways = get_args(get_type_hints(MaskingConfig)["strategy"])
    assert {*get_args(Strategy)} == {*ways} - {"slots"}


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("molecules", {"whole_word_mask": True}, ValueError, "no words"),
        ("english", {"strategy": "units", "whole_word_mask": True}, ValueError, "be used with"),
        ("english", {"strategy": "span"}, ValueError, "did you mean spans"),
        ("english", {"strategy": "slots"}, ValueError, "strategy is 'slots'; known"),
        ("english", {"strategy": "spans", "span_length": 0}, UserError, "masking.span_length"),
        ("english", {"strategy": "spans", "mask_ratio": 1.5}, UserError, "masking.mask_ratio"),
    ],
)
def test_what_has_no_meaning_is_refused(name, options, error, words, pairs):
    with pytest.raises(error, match=words):
        hf.collator(pairs[name][1], **options)
