"""Emission: the log-probability of each target token at each state (§4.2, P).

Shapes: B rows, L states, M targets, S any number of states, D width, V vocabulary.

The dynamic programme needs M numbers per state, not V: log P_u(y_i) = h_u·W[y_i] + b[y_i] - lse_u.
Only the log-sum-exp ``lse_u`` involves the whole vocabulary, so it has its own backward pass. For
this pass, the states x V buffer is either kept, as probabilities (``buffer``), or recomputed chunk
by chunk (``chunked``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import record_function

from exlm_mini.alignment.autograd import with_gradients
from exlm_mini.config import ModelConfig


def _float_logits(hidden_SD: Tensor, weight_VD: Tensor, bias_V: Tensor) -> Tensor:
    """Logits of the vocabulary in float32 or float64; the caller may overwrite them."""
    logits_SV = F.linear(hidden_SD, weight_VD, bias_V)
    return logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))


_CACHED_NUMBERS = 2**17
"""Half a megabyte of float32, which fits into the second-level cache of a CPU core."""


def _normalise_(logits_SV: Tensor) -> Tensor:
    """Turn logits into probabilities in place; returns lse_S.

    This takes five passes; on a CPU they run over a few rows at a time, which stay in the cache.
    """
    S, V = logits_SV.shape
    num_rows = max(1, _CACHED_NUMBERS // V) if logits_SV.device.type == "cpu" else max(1, S)
    lse_S = logits_SV.new_empty(S)
    for rows_SV, lse_of_rows_S in zip(
        logits_SV.split(num_rows), lse_S.split(num_rows), strict=True
    ):
        peak_S1 = rows_SV.amax(dim=1, keepdim=True)
        total_S1 = rows_SV.sub_(peak_S1).exp_().sum(dim=1, keepdim=True)
        rows_SV.div_(total_S1)
        lse_of_rows_S.copy_((peak_S1 + total_S1.log()).squeeze(1))
    return lse_S


def _in_one_buffer(
    hidden_SD: Tensor, weight_VD: Tensor, bias_V: Tensor
) -> tuple[Tensor, Tensor]:
    """lse_S, and the S x V buffer, turned in place from logits into probabilities."""
    buffer_SV = _float_logits(hidden_SD, weight_VD, bias_V)
    return _normalise_(buffer_SV), buffer_SV


def _gradients_of_buffer(
    grad_S: Tensor,
    hidden_SD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    probability_SV: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return _accumulate(hidden_SD, weight_VD, probability_SV.to(hidden_SD.dtype), grad_S)


_buffered = with_gradients(_in_one_buffer, _gradients_of_buffer)


def _in_chunks(
    hidden_SD: Tensor, weight_VD: Tensor, bias_V: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """lse_S, from at most ``chunk`` rows of logits at a time, and a copy for the gradients."""
    lse_S = torch.cat(
        [_float_logits(h, weight_VD, bias_V).logsumexp(dim=1) for h in hidden_SD.split(chunk)]
    )
    return lse_S, lse_S.clone()


def _gradients_of_chunks(
    grad_S: Tensor,
    hidden_SD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    lse_S: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recompute the logits, ``chunk`` rows at a time."""
    grad_hidden_SD = torch.empty_like(hidden_SD)
    summed = torch.promote_types(weight_VD.dtype, torch.float32)  # bfloat16 drops small terms
    grad_weight_VD = torch.zeros_like(weight_VD, dtype=summed)
    grad_bias_V = torch.zeros_like(bias_V, dtype=summed)
    for start in range(0, len(hidden_SD), chunk):
        rows = slice(start, start + chunk)
        logits_SV = _float_logits(hidden_SD[rows], weight_VD, bias_V)
        probability_SV = logits_SV.sub_(lse_S[rows].unsqueeze(1)).exp_().to(hidden_SD.dtype)
        grad_hidden_SD[rows], weight_part_VD, bias_part_V = _accumulate(
            hidden_SD[rows], weight_VD, probability_SV, grad_S[rows]
        )
        grad_weight_VD += weight_part_VD
        grad_bias_V += bias_part_V
    return grad_hidden_SD, grad_weight_VD.to(weight_VD.dtype), grad_bias_V.to(bias_V.dtype)


_chunked = with_gradients(_in_chunks, _gradients_of_chunks)


def _accumulate(
    hidden_SD: Tensor, weight_VD: Tensor, probability_SV: Tensor, grad_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of lse for hidden states, weight and bias, times grad_S.

    The derivative of lse with respect to the logits is the softmax. Scaling by grad_S is applied to
    the smaller tensors, so that the S x V buffer is never copied.
    """
    scale_S1 = grad_S.to(hidden_SD.dtype).unsqueeze(1)
    grad_hidden_SD = (probability_SV @ weight_VD) * scale_S1
    grad_weight_VD = probability_SV.t() @ (hidden_SD * scale_S1)
    grad_bias_V = (probability_SV.t() @ scale_S1).squeeze(1)
    return grad_hidden_SD, grad_weight_VD, grad_bias_V


def log_sum_exp_logits(
    hidden_SD: Tensor, weight_VD: Tensor, bias_V: Tensor, chunk: int | None = None
) -> Tensor:
    """log Σ_w exp(h·W[w] + b[w]) for every state, differentiable once.

    Args:
        hidden_SD, weight_VD, bias_V: all of the same floating dtype.
        chunk: None keeps one S x V buffer for the backward pass; with a number, that many rows at
            a time are recomputed, so that memory for logits does not grow with S.

    Returns:
        lse_S in nats, at least float32.
    """
    if torch.is_autocast_enabled(hidden_SD.device.type):
        # Autocast does not apply to custom functions, so cast here, once for both passes.
        dtype = torch.get_autocast_dtype(hidden_SD.device.type)
        hidden_SD, weight_VD, bias_V = (t.to(dtype) for t in (hidden_SD, weight_VD, bias_V))
    with torch.autocast(hidden_SD.device.type, enabled=False):
        if chunk is None:
            return _buffered(hidden_SD, weight_VD, bias_V)[0]
        return _chunked(hidden_SD, weight_VD, bias_V, chunk)[0]


class VocabularyHead(nn.Module):
    """Token prediction head W_P: dense, GELU, LayerNorm, then the tied embedding and a bias."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        width = config.shape.width
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.chunk = config.emission_chunk if config.emission == "chunked" else None

    @record_function("head")
    def logits(self, hidden_SD: Tensor, embedding_VD: Tensor) -> Tensor:
        """Logits of all tokens for any hidden states, token_logits_SV."""
        return F.linear(self._features(hidden_SD), embedding_VD, self.bias)

    @record_function("head")
    def log_emission(
        self, state_BLD: Tensor, embedding_VD: Tensor, target_ids_BM: Tensor
    ) -> Tensor:
        """log P_u(y_i) of each row's targets at the states of the row, log_emission_BML; in nats,
        at least float32. ``embedding_VD`` is the tied embedding."""
        feature_BLD = self._features(state_BLD)
        lse_BL = log_sum_exp_logits(
            feature_BLD.flatten(0, 1), embedding_VD, self.bias, self.chunk
        ).view(feature_BLD.shape[:2])
        target_BMD = F.embedding(target_ids_BM, embedding_VD)
        bias_BM1 = self.bias[target_ids_BM].unsqueeze(2)
        # Rounded like the logits in lse; otherwise probabilities in bfloat16 would exceed 1.
        logits_BML = torch.baddbmm(bias_BM1, target_BMD, feature_BLD.transpose(1, 2))
        return logits_BML.to(lse_BL.dtype) - lse_BL.unsqueeze(1)

    def _features(self, hidden_SD: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(hidden_SD)))
