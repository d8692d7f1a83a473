"""What the hand-written gradients share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a ``backward`` refuse to be differentiated again.

    PyTorch's own ``once_differentiable`` refuses only where the incoming gradient needs one
    itself, which that of a plain sum does not; otherwise it returns constants, and a second
    derivative comes out wrong without a word.

    Raises:
        RuntimeError: from the decorated function, when a graph of the gradient is asked for
            (``create_graph=True``).
    """

    @functools.wraps(backward)
    def once(*args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this gradient is written by hand and cannot be differentiated again; for second "
                "derivatives use the alignment backend 'naive' or 'enumerate', and "
                "torch.logsumexp of the logits"
            )
        return backward(*args)

    return once
