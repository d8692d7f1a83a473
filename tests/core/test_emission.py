"""The emission equals a gather from log_softmax, in value and in every gradient.

Shapes: B rows, L states, M targets, S any number of states, D width, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from small_models import assert_all_same, assert_same, drawn, gradients
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from exlm_mini.config import ModelConfig
from exlm_mini.model import emission
from exlm_mini.model.emission import VocabularyHead, log_sum_exp_logits
from exlm_mini.model.encoder import initialise

B, L, M, D, V = 2, 5, 3, 8, 13
# Chunk sizes that divide the B * L = 10 states, that do not, and that exceed them.
WAYS = [{"emission": "buffer"}] + [
    {"emission": "chunked", "emission_chunk": n} for n in (5, 3, 100)
]
every_way = pytest.mark.parametrize("way", WAYS)

pytestmark = pytest.mark.usefixtures("nan_in_uninitialised_memory")


def make_head(way: dict, width: int = D, vocab_size: int = V, std: float = 0.5):
    torch.manual_seed(0)
    head = VocabularyHead(ModelConfig(width=width, num_heads=2, **way), vocab_size)
    initialise(head, std)
    for bias in (head.bias, head.dense.bias, head.norm.bias):
        torch.nn.init.normal_(bias, std=std)
    return head.double()


def log_sum_exp(way: dict, *inputs: Tensor) -> Tensor:
    """Call ``log_sum_exp_logits`` as the head of a model with the settings ``way`` does."""
    head = VocabularyHead(ModelConfig(width=D, num_heads=2, **way), V)
    return log_sum_exp_logits(*inputs, head.chunk)


def make_inputs(num_states: int = 10) -> list[Tensor]:
    """Random features, embedding and bias."""
    return [drawn(num_states, D), drawn(V, D, seed=1), drawn(V, seed=2)]


def gather_targets(logits_BLV: Tensor, target_ids_BM: Tensor) -> Tensor:
    """log_emission_BML from logits, by its plain formula."""
    index_BLM = target_ids_BM.unsqueeze(1).expand(-1, logits_BLV.shape[1], -1)
    return logits_BLV.log_softmax(-1).gather(2, index_BLM).transpose(1, 2)


# ---- log-sum-exp ----


@pytest.mark.parametrize("num_states", [10, 0])
@pytest.mark.parametrize("scale", [1.0, 1e4])
@every_way
def test_log_sum_exp_equals_plain_autograd(way, scale, num_states):
    """Cases include huge logits, and no states at all."""
    inputs = make_inputs(num_states)
    inputs[0] = (scale * inputs[0]).detach().requires_grad_()
    before = [t.detach().clone() for t in inputs]
    ours_S, plain_S = log_sum_exp(way, *inputs), F.linear(*inputs).logsumexp(1)
    assert_same(ours_S, plain_S, 1e-12 * scale)
    assert_all_same(gradients(ours_S, inputs), gradients(plain_S, inputs), 1e-12)
    assert all(torch.equal(t, old) for t, old in zip(inputs, before, strict=True))


@every_way
def test_derivatives_are_those_of_autograd_and_of_torch_func(way):
    """Gradients may be asked for repeatedly; second derivatives are refused rather than wrong."""
    inputs = make_inputs(4)
    total = log_sum_exp(way, *inputs).sum()
    expected = torch.autograd.grad(total, inputs, retain_graph=True)
    again = torch.autograd.grad(total, inputs, create_graph=True)
    plain = [t.detach() for t in inputs]
    ours = torch.func.grad(lambda *x: log_sum_exp(way, *x).sum(), argnums=(0, 1, 2))(*plain)
    each = torch.func.jacrev(lambda *x: log_sum_exp(way, *x), argnums=(0, 1, 2))(*plain)
    for others in (again, ours, [rows.sum(0) for rows in each]):
        assert_all_same(others, expected, 1e-12)
    for gradient, leaf in zip(again, inputs, strict=True):
        with pytest.raises(RuntimeError, match="cannot be differentiated again"):
            torch.autograd.grad(gradient.sum(), leaf)


def test_buffers_larger_than_the_cache_are_taken_rows_at_a_time(monkeypatch):
    logits_SV = drawn(10, V).detach()
    expected_S, probability_SV = logits_SV.logsumexp(1), logits_SV.softmax(1)
    for num_numbers in (1, 3 * V, 10 * V, 10**6):
        monkeypatch.setattr(emission, "_CACHED_NUMBERS", num_numbers)
        ours_SV = logits_SV.clone()
        assert_same(emission._normalise_(ours_SV), expected_S)
        assert_same(ours_SV, probability_SV)


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is made inside the context."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            self.num = max(self.num, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return out


def test_in_chunks_no_tensor_grows_with_states_times_vocabulary():
    many = 50 * V
    for way, largest_size in ((WAYS[0], many * V), (WAYS[1], many * D)):
        inputs = make_inputs(many)
        with Largest() as largest:
            gradients(log_sum_exp(way, *inputs), inputs)
        assert largest.num == largest_size  # with chunks: the gradient of the states


# ---- log-probabilities of targets ----


@every_way
def test_log_emission_equals_a_gather_from_log_softmax(way):
    head = make_head(way)
    state_BLD, embedding_VD = drawn(B, L, D), drawn(V, D, seed=1)
    target_ids_BM = torch.tensor([[1, 12, 4], [7, 7, 0]])
    ours_BML = head.log_emission(state_BLD, embedding_VD, target_ids_BM)
    plain_BML = gather_targets(head.logits(state_BLD, embedding_VD), target_ids_BM)
    assert ours_BML.shape == (B, M, L)
    assert_same(ours_BML, plain_BML)
    inputs = [state_BLD, embedding_VD, *head.parameters()]
    theirs = gradients(plain_BML, inputs)
    assert all(gradient.any() for gradient in theirs)
    assert_all_same(gradients(ours_BML, inputs), theirs)


@pytest.mark.parametrize("way", WAYS[:2])
def test_probabilities_of_a_sure_model_are_at_most_one_in_bfloat16(way):
    head = make_head(way, 64, 200).float()
    state_BLD, embedding_VD = (drawn(*s, 64, dtype=torch.float32) for s in ((B, 50), (200,)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        likeliest_BM = head.logits(state_BLD, embedding_VD).argmax(dim=2)
        log_emission_BML = head.log_emission(state_BLD, embedding_VD, likeliest_BM)
    assert log_emission_BML.exp().max() > 0.99
    assert log_emission_BML.max() < 1e-4


def test_chunks_are_added_up_without_loss_in_bfloat16():
    inputs = [(0.1 * t).detach().float() for t in make_inputs(4000)]
    exact = gradients(log_sum_exp(WAYS[0], *map(Tensor.requires_grad_, inputs)), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        low = gradients(log_sum_exp(WAYS[1], *inputs), inputs)
    for ours, theirs in zip(low[1:], exact[1:], strict=True):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("way", WAYS[:2])
def test_bfloat16_autocast_is_as_exact_as_plain_pytorch(way):
    """Errors of value and gradients are at most twice those of plain PyTorch at this precision."""
    big_V, big_D = 200, 64
    head = make_head(way, big_D, big_V, 0.2).float()
    state_BLD = drawn(B, 12, big_D, dtype=torch.float32)
    embedding_VD = (0.3 * drawn(big_V, big_D, seed=10, dtype=torch.float32)).detach()
    embedding_VD.requires_grad_()
    target_ids_BM = torch.randint(big_V, (B, M))
    inputs = [state_BLD, embedding_VD, *head.parameters()]

    def measure(value_BML: Tensor) -> list[Tensor]:
        assert value_BML.isfinite().all()
        return [value_BML.detach(), *gradients(value_BML.float(), inputs)]

    plain = measure(gather_targets(head.logits(state_BLD, embedding_VD), target_ids_BM))
    with torch.autocast("cpu", torch.bfloat16):
        low_BML = head.log_emission(state_BLD, embedding_VD, target_ids_BM)
        plain_low_BLV = head.logits(state_BLD, embedding_VD)
    assert low_BML.dtype == torch.float32 and plain_low_BLV.dtype == torch.bfloat16
    ours = measure(low_BML)
    theirs = measure(gather_targets(plain_low_BLV.float(), target_ids_BM))
    for exact, our, their in zip(plain, ours, theirs, strict=True):
        assert our.isfinite().all()
        error, allowed = ((x.double() - exact.double()).norm() for x in (our, their))
        assert allowed > 0  # the precision is really low
        assert error <= 2 * allowed
