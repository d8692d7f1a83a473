"""The vocabulary head two ways: with one buffer, and in chunks that are computed again.

Shapes: B rows, M targets, L states, D width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from exlm_lab.benchmarks.measure import time_side_by_side
from exlm_lab.benchmarks.record import Record, Shape, compared, record
from exlm_mini.alignment.check import relative_error
from exlm_mini.config import ModelConfig
from exlm_mini.model.emission import VocabularyHead

WAYS = ("buffer", "chunked")


def emission(
    shape: Shape,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    width: int = 384,
    chunk: int = 128,
) -> Iterator[Record]:
    """log-emission of the targets and its gradients, compared with float64 on the same numbers."""
    torch.manual_seed(0)
    state_BLD = torch.randn(shape.B, shape.L, width).to(device, dtype)
    embedding_VD = (0.02 * torch.randn(vocab_size, width)).to(device, dtype)
    target_ids_BM = torch.randint(vocab_size, (shape.B, shape.M)).to(device)
    grad_BML = torch.rand(shape.B, shape.M, shape.L).to(device)
    heads = {}
    for name in WAYS:
        torch.manual_seed(1)
        kind: Any = name
        config = ModelConfig(width=width, num_heads=1, emission=kind, emission_chunk=chunk)
        heads[name] = VocabularyHead(config, vocab_size).to(device, dtype)

    def call(name: str, is_exact: bool = False) -> dict[str, Tensor]:
        in_dtype = torch.float64 if is_exact else dtype
        inputs = [t.to(in_dtype).detach().requires_grad_() for t in (state_BLD, embedding_VD)]
        head = copy.deepcopy(heads[name]).double() if is_exact else heads[name]
        log_emission_BML = head.log_emission(inputs[0], inputs[1], target_ids_BM)
        inputs += head.parameters()
        incoming_BML = grad_BML.to(log_emission_BML.dtype)
        gradients = torch.autograd.grad(log_emission_BML, inputs, incoming_BML)
        return {
            "log_emission": log_emission_BML.detach(),
            "grad_state": gradients[0],
            "grad_embedding": gradients[1],
        }

    exact = call("buffer", is_exact=True)
    calls = {name: partial(call, name) for name in WAYS}
    timings = time_side_by_side(calls, device)

    def records() -> Iterator[Record]:
        for name, timing in timings.items():
            ours = calls[name]()
            errors = {key: relative_error(ours[key], exact[key]) for key in exact}
            details = {"dtype": str(dtype)[6:], "width": width, "vocab_size": vocab_size}
            details |= {"chunk": chunk} if name == "chunked" else {}
            yield record("emission", name, shape, timing, calls[name], device, errors, details)

    yield from compared(records(), WAYS[0])
