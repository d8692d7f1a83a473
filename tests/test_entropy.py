"""Entropies: against closed forms, and Appendix E's filter against loops over single tokens.

Shapes: B rows, N positions, M tokens, k copies, S masked positions, R fully masked tokens,
V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from exlm_lab.experiments.entropy import (
    entropy_bits,
    fully_masked,
    path_entropy,
    repeated_entropy_bits,
)
from exlm_mini.alignment.enumeration import paths
from exlm_mini.config import MaskingConfig, ModelConfig, SpecialIds
from exlm_mini.data.masking import Masker
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.reading.decoding import read_row


def random_log_p(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Uneven distributions, float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator, dtype=torch.float64)
    return (3 * logits).log_softmax(dim=1)


def random_masks(num_rows: int, num_tokens: int, k: int, p: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_rows, num_tokens * k, generator=generator) < p


def by_loops(log_p_SV: Tensor, is_masked_BN: Tensor, k: int) -> list[float]:
    """Appendix E.1 word by word: visit each token, drop it if a copy is visible, else average."""
    place_of = {(int(b), int(n)): s for s, (b, n) in enumerate(is_masked_BN.nonzero().tolist())}
    found = []
    for b in range(len(is_masked_BN)):
        for token in range(is_masked_BN.shape[1] // k):
            copies = [(b, token * k + j) for j in range(k)]
            if not all(copy in place_of for copy in copies):
                continue
            total = 0.0
            for copy in copies:
                for log_p in log_p_SV[place_of[copy]].tolist():
                    total -= math.exp(log_p) * log_p / math.log(2)
            found.append(total / k)
    return found


# ---- entropy ----


@pytest.mark.parametrize(
    ("probabilities", "bits"),
    [
        ([1.0], 0.0),
        ([0, 1, 0], 0.0),
        ([1 / 7] * 7, math.log2(7)),
        ([1 / 4, 3 / 4], 2 - 3 / 4 * math.log2(3)),
        ([1 / 2, 1 / 4, 1 / 8, 1 / 8], 1.75),
        ([1 / 2, 0, 1 / 2, 0], 1.0),
    ],
)
def test_entropies_in_closed_form(probabilities, bits):
    log_p_V = torch.tensor(probabilities, dtype=torch.float64).log()
    assert entropy_bits(log_p_V).item() == pytest.approx(bits, abs=1e-12)
    assert str(entropy_bits(log_p_V).item()) != "-0.0"


def test_entropy_keeps_leading_dimensions_and_dtype():
    log_p = random_log_p(6, 5).view(2, 3, 5)
    assert entropy_bits(log_p).shape == (2, 3)
    assert entropy_bits(log_p.float()).dtype == torch.float32
    torch.testing.assert_close(entropy_bits(log_p)[1, 2], entropy_bits(log_p[1, 2]))


# ---- fully masked tokens ----


def test_a_token_is_lost_when_every_copy_is_masked():
    is_masked_BN = torch.tensor([[1, 1, 1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 1, 1, 1, 1]]).bool()
    assert fully_masked(is_masked_BN, 2).tolist() == [
        [True, False, False, False],
        [False, False, True, True],
    ]
    assert fully_masked(is_masked_BN, 4).tolist() == [[False, False], [False, True]]
    assert torch.equal(fully_masked(is_masked_BN, 1), is_masked_BN)


@pytest.mark.parametrize("num_copies", [0, 4])
def test_rows_that_do_not_hold_whole_tokens_are_refused(num_copies):
    with pytest.raises(
        ValueError, match=f"rows of 6 positions do not hold {num_copies} copies"
    ):
        fully_masked(torch.ones(2, 6, dtype=torch.bool), num_copies)


# ---- the rule of Appendix E ----


@settings(max_examples=30)
@given(
    st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.floats(0, 1), st.integers(0, 99)
)
def test_the_rule_equals_loops_over_tokens(k, num_tokens, num_rows, p, seed):
    is_masked_BN = random_masks(num_rows, num_tokens, k, p, seed)
    log_p_SV = random_log_p(int(is_masked_BN.sum()), 5, seed)
    found_R = repeated_entropy_bits(log_p_SV, is_masked_BN, k)
    assert found_R.tolist() == pytest.approx(by_loops(log_p_SV, is_masked_BN, k), abs=1e-12)


def test_values_belong_to_the_tokens_that_masking_has_lost():
    # The distribution at each position has as many bits as its token is numbered.
    k, special_ids = 3, SpecialIds()
    token_ids_BN = torch.arange(10, 10 + 40).view(4, 10)
    masker = Masker(MaskingConfig(0.8, "bernoulli"), special_ids, seed=0, num_copies=k)
    batch = masker(token_ids_BN, np.zeros(4, dtype=np.int64), np.arange(4), step=0)
    id_S = batch.token_ids_BN[batch.is_masked_BN].double()
    log_p_SV = torch.where(torch.arange(64) < id_S[:, None], -id_S.log()[:, None], -torch.inf)
    is_lost_BM = fully_masked(batch.is_masked_BN, k)
    assert 0 < is_lost_BM.sum() < is_lost_BM.numel()
    found_R = repeated_entropy_bits(log_p_SV, batch.is_masked_BN, k)
    torch.testing.assert_close(found_R, token_ids_BN[is_lost_BM].double().log2())


# ---- where the uncertainty of a reading sits ----

ROW = torch.tensor([[1, 6, 5, 7, 5, 8, 5, 2]])  # three masks
SMALL = ModelConfig(
    width=16, num_heads=2, ffn_width=16, max_positions=64, states_per_mask=2, init_std=0.5
)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, boundary="paper", states_per_mask=3),
        replace(SMALL, boundary="paper", transition="paper"),
        replace(SMALL, states_per_mask=1, sparse=True),
    ],
)
def test_path_entropy_is_the_mean_over_all_paths(config):
    torch.manual_seed(0)
    reading = read_row(ExLM(config, 12).double().eval(), ROW)
    E_LL = reading.graph.log_transition_LL.exp().tolist()
    says_L = entropy_bits(reading.states.log_token_LV).tolist()
    step_L = entropy_bits(reading.graph.log_transition_LL).tolist()
    total, word_S, step_S = 0.0, np.zeros(3), np.zeros(3)
    for path in paths(5, len(E_LL)):
        weight = math.prod(E_LL[v][u] for v, u in itertools.pairwise(path))
        total += weight
        word_S += weight * np.array([says_L[u] for u in path[1:-1]])
        step_S += weight * np.array([step_L[u] for u in path[:-2]])
    found = path_entropy(reading)
    np.testing.assert_allclose(found.word_S, word_S / total, rtol=1e-6)
    np.testing.assert_allclose(found.step_S, step_S / total, rtol=1e-6)
    assert found.word_S.dtype == found.step_S.dtype == torch.float64


def test_path_entropy_needs_paths():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="not linked"):
        path_entropy(read_row(MaskedLM(SMALL, 12).eval(), ROW))
    with pytest.raises(ValueError, match="not linked"):
        path_entropy(read_row(ExLM(replace(SMALL, transition="ctc"), 12).eval(), ROW))
