"""Wraps hand-written gradients so that both autograd and ``torch.func`` accept them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
INSTEAD = "the alignment backend 'naive' or 'enumerate', and torch.logsumexp of the logits"


def is_in_torch_func() -> bool:
    """Whether a transform such as ``torch.func.grad`` or ``vmap`` is active, outside a compiler."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_eager() -> bool:
    """Whether neither a compiler nor a transform is active."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def with_gradients(
    compute: Callable[..., Tensors], gradients: Callable[..., Tensors]
) -> Callable[..., Tensors]:
    """Combine a function with its gradient, both written by hand; differentiable once.

    Args:
        compute: returns the tensor to differentiate, then the tensors to keep for its gradient.
        gradients: returns the gradients of the first inputs of ``compute``; the others have none.
            Its arguments are the gradient of the tensor, those inputs of ``compute`` that are
            tensors, the kept tensors, and the other inputs.

    Returns:
        ``compute``, with a gradient for its first result.
    """

    class Function(torch.autograd.Function):
        forward = staticmethod(compute)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)  # True would allocate zeros for the kept tensors
            ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *output[1:])
            ctx.settings = [x for x in inputs if not isinstance(x, Tensor)]

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            num_inputs = len(ctx.needs_input_grad)
            if grad is None:
                return (None,) * num_inputs
            inputs = (grad, *ctx.saved_tensors, *ctx.settings)
            # Not under a compiler, which does not accept ``_Once`` and differentiates only once.
            is_once = torch.is_grad_enabled() or is_in_torch_func()
            results = _Once.apply(gradients, *inputs) if is_once else gradients(*inputs)
            return *results, *[None] * (num_inputs - len(results))

    class Eager(Function):
        """The same without a separate ``setup_context``: with one, PyTorch inspects the signature
        of ``forward`` at every call, which for a few rows takes longer than the kernel."""

        setup_context = staticmethod(torch.autograd.Function.setup_context)

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensors:
            output = compute(*inputs)
            Function.setup_context(ctx, inputs, output)
            return output

    return lambda *inputs: (Eager if is_eager() else Function).apply(*inputs)


class _Once(torch.autograd.Function):
    """Calls a function, and raises an error if its results are differentiated.

    PyTorch's own ``once_differentiable`` raises one only if the incoming gradient itself requires
    a gradient, and that of a plain sum does not. Otherwise it returns constants, and a second
    derivative is silently wrong.
    """

    @staticmethod
    def forward(function: Callable[..., Tensors], *inputs: Any) -> Tensors:
        return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        pass  # torch.func requires it

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        """One call per entry of the batch: ``jacrev`` asks for the gradients of all outputs."""
        calls = [
            _Once.apply(
                *(
                    x if dim is None else x.select(dim, n)
                    for x, dim in zip(inputs, in_dims, strict=True)
                )
            )
            for n in range(info.batch_size)
        ]
        stacked = tuple(torch.stack(results) for results in zip(*calls, strict=True))
        return stacked, (0,) * len(stacked)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(
            "this gradient is written by hand and cannot be differentiated again; for second "
            f"derivatives use {INSTEAD}"
        )
