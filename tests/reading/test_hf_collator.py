"""The collator masks by the laws of a run, and draws as that of transformers does."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from exlm_mini.config.checks import UserError
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
def test_the_number_of_masks_is_the_expected_one_rounded(name, strategy, exported):
    tokenizer = exported[name]
    collate, examples = hf.collator(tokenizer, 0.3, strategy, seed=1), rows(tokenizer, name)
    ids = tokenizer.pad(examples, return_tensors="pt").input_ids
    is_special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids))
    expected_B = 0.3 * (~is_special).sum(dim=1)
    seen = set()
    for _ in range(20):
        batch = collate(examples)
        is_masked = batch["labels"] != -100
        assert not is_masked[is_special].any()
        assert torch.equal(is_masked, batch["input_ids"] == tokenizer.mask_token_id)
        assert torch.equal(torch.where(is_masked, batch["labels"], batch["input_ids"]), ids)
        count_B = is_masked.sum(dim=1)
        low_B, high_B = expected_B.floor().clamp(min=1), expected_B.ceil()
        assert ((count_B == low_B) | (count_B == high_B)).all()
        seen.add(tuple(count_B.tolist()))
    assert len(seen) > 1


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


def test_spans_stand_side_by_side(exported):
    tokenizer = exported["molecules"]
    examples = [tokenizer("CC(C)CC1=CC=C(C=C1)C(C)C(=O)OCCNCC")] * 200
    runs = {}
    for strategy in ("fixed_count", "spans"):
        is_masked = hf.collator(tokenizer, 0.2, strategy, seed=1)(examples)["labels"] != -100
        starts = is_masked[:, 1:] & ~is_masked[:, :-1]
        # Six or seven masks: three spans at most, of which one may be cut, or one by the end.
        runs[strategy] = starts.sum(dim=1)
        assert set(is_masked.sum(dim=1).tolist()) <= {6, 7}
    assert runs["spans"].max() <= 4 and runs["spans"].float().mean() < 3
    assert runs["fixed_count"].float().mean() > 4
    longer = hf.collator(tokenizer, 0.2, "spans", span_length=7, seed=1)(examples)["labels"]
    starts = (longer[:, 1:] != -100) & (longer[:, :-1] == -100)
    assert starts.sum(dim=1).max() <= 2


@pytest.mark.parametrize("name", TEXTS)
def test_units_are_those_of_the_package_and_hidden_together(name, owns, exported):
    tokenizer, find = exported[name], Units.of(owns[name])
    row = rows(tokenizer, name)[0]
    labels = hf.collator(tokenizer, 0.4, "units", seed=1)([row] * 300)["labels"]
    is_masked = labels != -100
    (count,) = is_masked.sum(dim=1).unique().tolist()
    units = [unit for unit in find(row.input_ids, count) if len(unit) > 1]
    assert len(units) == {"molecules": 2, "english": 4}[name]
    num_cut = torch.zeros(len(labels), dtype=torch.long)
    for unit in units:
        hidden = is_masked[:, unit]
        is_cut = hidden.any(dim=1) & ~hidden.all(dim=1)
        assert (hidden[:, :-1] >= hidden[:, 1:]).all()  # if cut, then at its end
        assert hidden.all(dim=1).float().mean() > 0.15
        num_cut += is_cut
    assert num_cut.max() == 1  # the last one that is hidden


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
        ({"strategy": "slots"}, ValueError, "needs the positions"),
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
