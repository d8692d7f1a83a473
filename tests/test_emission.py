"""Emission: equal to a gather from log_softmax, in value and in every gradient.

Shapes: B rows, L states, M targets, S any number of states, D width, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from exlm_mini.config import ModelConfig
from exlm_mini.model import emission
from exlm_mini.model.emission import VocabularyHead, log_sum_exp_logits
from exlm_mini.model.encoder import initialise

B, L, M, D, V = 2, 5, 3, 8, 13
# Of B * L = 10 states: dividing it, not, and beyond.
CHUNKED = [{"emission": "chunked", "emission_chunk": n} for n in (3, 5, 100)]
WAYS = [{"emission": "buffer"}, {"emission": "fused"}, CHUNKED[0]]
EVERY_WAY = [*WAYS, *CHUNKED[1:]]


@pytest.fixture(autouse=True, scope="module")
def nan_in_uninitialised_memory():
    """torch.empty gives NaN, so that a number never written is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def uncompiled(request, monkeypatch):
    """Compiling takes half a minute: what is compiled is tested as it stands, and once so."""
    if "compiled" not in request.node.name:
        monkeypatch.setattr(emission, "_fused", lambda: emission._normalise_rounded_)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype).requires_grad_()


def log_sum_exp(way: dict, *inputs: Tensor) -> Tensor:
    """``log_sum_exp_logits`` as the head of such a model calls it."""
    head = VocabularyHead(ModelConfig(width=D, num_heads=2, **way), V)
    return log_sum_exp_logits(*inputs, head.chunk, head.is_fused)


def make_head(way: dict, std: float = 0.5) -> VocabularyHead:
    torch.manual_seed(0)
    head = VocabularyHead(ModelConfig(width=D, num_heads=2, **way), V).double()
    initialise(head, std)
    for bias in (head.bias, head.dense.bias, head.norm.bias):
        torch.nn.init.normal_(bias, std=std)
    return head


def make_targets() -> Tensor:
    return torch.tensor([[1, 12, 4], [7, 7, 0]])


def gather_targets(logits_BLV: Tensor, target_ids_BM: Tensor) -> Tensor:
    """log_emission_BML from logits, the plain way."""
    index_BLM = target_ids_BM.unsqueeze(1).expand(-1, logits_BLV.shape[1], -1)
    return logits_BLV.log_softmax(-1).gather(2, index_BLM).transpose(1, 2)


def gradients(value: Tensor, inputs: list[Tensor], seed: int = 9) -> list[Tensor]:
    """Gradients of a random weighting of ``value``."""
    weight = drawn(*value.shape, seed=seed, dtype=value.dtype).detach()
    return list(torch.autograd.grad((value * weight).sum(), inputs))


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


# ---- log-sum-exp ----


@pytest.mark.parametrize("way", EVERY_WAY)
def test_log_sum_exp_equals_plain_autograd(way):
    inputs = [drawn(10, D), drawn(V, D, seed=1), drawn(V, seed=2)]
    before = [t.detach().clone() for t in inputs]
    ours_S = log_sum_exp(way, *inputs)
    plain_S = F.linear(*inputs).logsumexp(1)
    assert_same(ours_S, plain_S)
    for ours, theirs in zip(gradients(ours_S, inputs), gradients(plain_S, inputs), strict=True):
        assert_same(ours, theirs)
    assert all(torch.equal(t, old) for t, old in zip(inputs, before, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_the_fused_way_alone_takes_the_compiled_kernel(way, monkeypatch):
    taken = []
    kernel = emission._normalise_rounded_
    monkeypatch.setattr(emission, "_fused", lambda: taken.append(way) or kernel)
    log_sum_exp(way, drawn(10, D), drawn(V, D, seed=1), drawn(V, seed=2))
    assert bool(taken) == (way["emission"] == "fused")


@pytest.mark.parametrize("way", WAYS)
def test_log_sum_exp_gradients_equal_finite_differences(way):
    inputs = (drawn(5, 3), drawn(4, 3, seed=1), drawn(4, seed=2))
    assert torch.autograd.gradcheck(lambda *x: log_sum_exp(way, *x), inputs)


@pytest.mark.parametrize("way", WAYS)
def test_backward_may_run_twice(way):
    inputs = [drawn(10, D), drawn(V, D, seed=1), drawn(V, seed=2)]
    total = log_sum_exp(way, *inputs).sum()
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    second = torch.autograd.grad(total, inputs)
    for once, twice in zip(first, second, strict=True):
        assert torch.equal(once, twice)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_second_derivatives_are_refused_not_wrong(way, place):
    inputs = [drawn(4, D).detach(), drawn(V, D, seed=1).detach(), drawn(V, seed=2).detach()]
    leaf = inputs[place].requires_grad_()
    total = log_sum_exp(way, *inputs).sum()
    (gradient,) = torch.autograd.grad(total, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(gradient.sum(), leaf)


@pytest.mark.parametrize("way", WAYS)
def test_torch_func_gives_the_gradients_of_autograd(way):
    inputs = [drawn(4, D), drawn(V, D, seed=1), drawn(V, seed=2)]
    plain = [t.detach() for t in inputs]
    expected = torch.autograd.grad(log_sum_exp(way, *inputs).sum(), inputs)
    ours = torch.func.grad(lambda *x: log_sum_exp(way, *x).sum(), argnums=(0, 1, 2))(*plain)
    each = torch.func.jacrev(lambda *x: log_sum_exp(way, *x), argnums=(0, 1, 2))(*plain)
    for gradient, same, rows in zip(ours, expected, each, strict=True):
        assert_same(gradient, same)
        assert_same(rows.sum(0), same)


@pytest.mark.parametrize("way", WAYS)
def test_huge_logits_stay_finite(way):
    inputs = [drawn(6, D), drawn(V, D, seed=1), drawn(V, seed=2)]
    scaled = [1e4 * inputs[0], *inputs[1:]]
    ours_S = log_sum_exp(way, *scaled)
    assert_same(ours_S, F.linear(*scaled).logsumexp(1), 1e-9)
    assert all(gradient.isfinite().all() for gradient in gradients(ours_S, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_equals_the_function_it_is_made_of(dtype):
    for num_states in (7, 10, 0):
        logits_SV = drawn(num_states, V, dtype=dtype).detach()
        expected_SV = logits_SV.clone()
        expected_S = emission._normalise_rounded_(expected_SV)
        lse_S = emission._fused()(logits_SV)
        assert lse_S.dtype == torch.float32
        torch.testing.assert_close(lse_S, expected_S, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logits_SV, expected_SV)


def test_buffers_larger_than_the_cache_are_taken_rows_at_a_time(monkeypatch):
    logits_SV = drawn(10, V).detach()
    expected_S, probability_SV = logits_SV.logsumexp(1), logits_SV.softmax(1)
    for num_numbers in (1, 3 * V, 10 * V, 10**6):
        monkeypatch.setattr(emission, "_CACHED_NUMBERS", num_numbers)
        ours_SV = logits_SV.clone()
        assert_same(emission._normalise_(ours_SV), expected_S)
        assert_same(ours_SV, probability_SV)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor made inside."""

    num = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            self.num = max(self.num, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return out


def test_in_chunks_no_tensor_grows_with_states_times_vocabulary():
    many = 50 * V
    inputs = [drawn(many, D), drawn(V, D, seed=1), drawn(V, seed=2)]
    with Largest() as largest:
        gradients(log_sum_exp({"emission": "buffer"}, *inputs), inputs)
    assert largest.num == many * V
    with Largest() as largest:
        gradients(log_sum_exp(CHUNKED[0], *inputs), inputs)
    assert largest.num == many * D  # the gradient of the states


@pytest.mark.parametrize("way", WAYS)
def test_no_states_are_no_problem(way):
    inputs = [drawn(0, D), drawn(V, D, seed=1), drawn(V, seed=2)]
    ours_S = log_sum_exp(way, *inputs)
    assert ours_S.shape == (0,)
    assert not any(gradient.any() for gradient in gradients(ours_S, inputs))


# ---- log-probabilities of targets ----


@pytest.mark.parametrize("way", WAYS)
def test_log_emission_equals_a_gather_from_log_softmax(way):
    head = make_head(way)
    state_BLD, embedding_VD = drawn(B, L, D), drawn(V, D, seed=1)
    target_ids_BM = make_targets()
    ours_BML = head.log_emission(state_BLD, embedding_VD, target_ids_BM)
    plain_BML = gather_targets(head.logits(state_BLD, embedding_VD), target_ids_BM)
    assert ours_BML.shape == (B, M, L)
    assert_same(ours_BML, plain_BML)
    inputs = [state_BLD, embedding_VD, *head.parameters()]
    for ours, theirs in zip(
        gradients(ours_BML, inputs), gradients(plain_BML, inputs), strict=True
    ):
        assert theirs.any()
        assert_same(ours, theirs, 1e-11)


def test_the_head_is_dense_gelu_norm_and_the_tied_embedding():
    head = make_head({})
    hidden_SD, embedding_VD = drawn(4, D), drawn(V, D, seed=1)
    inner_SD = F.gelu(hidden_SD @ head.dense.weight.t() + head.dense.bias)
    mean_S1, var_S1 = inner_SD.mean(1, keepdim=True), inner_SD.var(1, False, keepdim=True)
    normed_SD = (inner_SD - mean_S1) / (var_S1 + head.norm.eps).sqrt()
    normed_SD = normed_SD * head.norm.weight + head.norm.bias
    assert_same(
        head.logits(hidden_SD, embedding_VD), normed_SD @ embedding_VD.t() + head.bias, 1e-11
    )


@pytest.mark.parametrize("way", WAYS)
def test_bfloat16_autocast_is_as_exact_as_plain_pytorch(way):
    """Error at most twice that of plain PyTorch at the same precision, value and gradients."""
    big_V, big_D, num = 200, 64, 12
    torch.manual_seed(0)
    head = VocabularyHead(ModelConfig(width=big_D, num_heads=2, **way), big_V)
    initialise(head, 0.2)
    torch.nn.init.normal_(head.bias, std=0.2)
    state_BLD = drawn(B, num, big_D, dtype=torch.float32)
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
        assert allowed > 0  # it is really low precision
        assert error <= 2 * allowed
