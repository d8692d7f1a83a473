"""What the hand-written gradients share, so that autograd and ``torch.func`` both take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
INSTEAD = "the alignment backend 'naive' or 'enumerate', and torch.logsumexp of the logits"


def is_in_torch_func() -> bool:
    """Whether a transform such as ``torch.func.grad`` or ``vmap`` is at work, and no compiler."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_eager() -> bool:
    """Whether neither a compiler nor a transform is at work."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def with_gradients(
    compute: Callable[..., Tensors], gradients: Callable[..., Tensors]
) -> Callable[..., Tensors]:
    """A function together with its gradient, both written by hand; differentiable once.

    Args:
        compute: gives a tensor to differentiate, then what its gradient needs of the way there.
        gradients: of the first inputs of ``compute``; the others have none. Called with the
            gradient of the tensor, the inputs that are tensors, what was kept, the other inputs.

    Returns:
        ``compute``, with a gradient for its first result.
    """

    class Function(torch.autograd.Function):
        forward = staticmethod(compute)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
            ctx.mark_non_differentiable(*output[1:])
            ctx.set_materialize_grads(False)  # would allocate zeros as large as what is kept
            ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)), *output[1:])
            ctx.settings = [x for x in inputs if not isinstance(x, Tensor)]

        @staticmethod
        def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
            num_inputs = len(ctx.needs_input_grad)
            if grad is None:
                return (None,) * num_inputs
            inputs = (grad, *ctx.saved_tensors, *ctx.settings)
            # A compiler takes none of it, and differentiates once.
            is_once = torch.is_grad_enabled() or is_in_torch_func()
            results = _Once.apply(gradients, *inputs) if is_once else gradients(*inputs)
            return *results, *[None] * (num_inputs - len(results))

    class Eager(Function):
        """The same in one step; with a ``setup_context`` PyTorch looks at the signature of
        ``forward`` at every call, which takes longer than the kernel does for a few rows."""

        setup_context = staticmethod(torch.autograd.Function.setup_context)

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensors:
            output = compute(*inputs)
            Function.setup_context(ctx, inputs, output)
            return output

    return lambda *inputs: (Eager if is_eager() else Function).apply(*inputs)


class _Once(torch.autograd.Function):
    """Calls a function, and refuses to differentiate its results.

    PyTorch's own ``once_differentiable`` refuses only where the incoming gradient needs one
    itself, which that of a plain sum does not; otherwise it returns constants, and a second
    derivative comes out wrong without a word.
    """

    @staticmethod
    def forward(function: Callable[..., Tensors], *inputs: Any) -> Tensors:
        return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        pass  # defined, because torch.func asks for it

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
        """One call after the other: ``jacrev`` asks for the gradients of all outputs at once."""
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
