"""The collator masks by the laws of a run, and draws as that of transformers does."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from exlm_mini.config import MaskingConfig
from exlm_mini.config.checks import UserError
from exlm_mini.data.masking import Masker
from exlm_mini.data.units import Units
from exlm_mini.reading.trained import SHIPPED, load

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from exlm_mini import hf  # noqa: E402

TEXTS = {
    "molecules": ["CC(=O)NC1=CC=C(O)C=C1", "CC(C)CC1=CC=C(C=C1)C(C)C(=O)O", "CCO"],
    "english": [
        "The Python Debugger is an extensible Debugger of statements.",
        "If an object has no value, None is returned; None is not a string.",
    ],
}
STRATEGIES = ["fixed_count", "spans", "units"]
every = pytest.mark.parametrize(
    ("name", "strategy"), [(name, strategy) for name in TEXTS for strategy in STRATEGIES]
)


@pytest.fixture(scope="module")
def owns() -> dict:
    return {name: load(path, print).tokenizer for name, path in SHIPPED.items()}


@pytest.fixture(scope="module")
def exported(owns) -> dict:
    return {name: hf.tokenizer_for(tokenizer) for name, tokenizer in owns.items()}


def rows(tokenizer, name: str) -> list:
    return [tokenizer(text) for text in TEXTS[name]]


@every
def test_masks_are_those_of_a_run_with_a_drawn_number(name, strategy, owns, exported):
    """What ``test_masking`` and ``test_units`` say of them holds."""
    tokenizer, own = exported[name], owns[name]
    collate = hf.collator(tokenizer, 0.3, strategy, span_length=2, seed=1)
    masking = MaskingConfig(mask_ratio=0.3, strategy=strategy, span_length=2)
    units = Units.of(own) if strategy == "units" else None
    masker, draws = Masker(masking, own.special_ids, 0, units=units), torch.Generator()
    draws.manual_seed(1)
    ids = tokenizer.pad(rows(tokenizer, name), return_tensors="pt").input_ids
    for _ in range(5):
        number = int(torch.randint(2**62, (), generator=draws))
        counters = np.full(len(ids), number), np.arange(len(ids))
        masked_ids, is_masked, _ = masker(ids, *counters, step=number)
        batch = collate(rows(tokenizer, name))
        assert torch.equal(batch["input_ids"], masked_ids)
        assert torch.equal(batch["labels"], ids.masked_fill(~is_masked, -100))


@every
def test_masks_are_drawn_from_the_generator_of_torch_or_of_a_seed(name, strategy, exported):
    tokenizer = exported[name]

    def masks(collate, seed: int) -> list:
        torch.manual_seed(seed)
        return [collate(rows(tokenizer, name))["labels"] for _ in range(3)]

    collate = hf.collator(tokenizer, 0.3, strategy)
    first, again, other = masks(collate, 1), masks(collate, 1), masks(collate, 2)
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])
    own = [masks(hf.collator(tokenizer, 0.3, strategy, seed=3), seed) for seed in (1, 2)]
    assert all(map(torch.equal, *own))


@every
def test_a_collator_survives_copies_and_workers(name, strategy, exported):
    tokenizer = exported[name]
    collate = hf.collator(tokenizer, 0.3, strategy, seed=1)
    copies = [copy.deepcopy(collate), pickle.loads(pickle.dumps(collate))]
    examples = rows(tokenizer, name)
    labels = collate(examples)["labels"]
    for other in copies:
        assert torch.equal(other(examples)["labels"], labels)
    fresh = hf.collator(tokenizer, 0.3, strategy, seed=1)
    loader = DataLoader(examples * 2, batch_size=len(examples), collate_fn=fresh, num_workers=2)
    first, second = (batch["labels"] for batch in loader)
    assert not torch.equal(first, second)  # of two workers


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"strategy": "units", "whole_word_mask": True},
            ValueError,
            "no meaning with strategy",
        ),
        ({"strategy": "words"}, UserError, "masking.strategy"),
        ({"strategy": "spans", "span_length": 0}, UserError, "masking.span_length"),
        ({"strategy": "spans", "mask_ratio": 1.5}, UserError, "masking.mask_ratio"),
    ],
)
def test_what_has_no_meaning_is_refused(options, error, words, exported):
    with pytest.raises(error, match=words):
        hf.collator(exported["english"], **options)
    with pytest.raises(ValueError, match="no words"):
        hf.collator(exported["molecules"], whole_word_mask=True)
