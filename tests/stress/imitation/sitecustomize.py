"""Imitates another machine: gradients differ from this machine's in their last bits.

Every Python process imports a module of this name if it is on its path, so that
PYTHONPATH=tests/stress/imitation reaches pytest, the kernels of the notebooks and the commands
that they start. Nothing happens unless EXLM_NUDGE is a whole number; each number imitates a
different machine.
"""

import importlib.abc
import importlib.machinery
import os
import sys

ULPS = 4
"""The largest change of a number, in units of the last place of float32."""


def nudged(gradient, seed):
    """The gradient with other last bits, as if its sums had been taken in another order.

    The change depends only on the numbers, their positions and the seed, so whatever holds bit for
    bit on one machine holds on the imitated one too. Zeros stay zeros. Where a sum cancels, its
    error is relative to the terms, not to the result; therefore part of the change is relative to
    a typical element of the tensor.
    """
    import torch

    places = torch.arange(gradient.numel(), device=gradient.device).view(gradient.shape)
    mixed = (
        gradient.contiguous().view(torch.int32).long() + places * 0x9E3779B1 + seed * 0x85EBCA6B
    )
    mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D & 0xFFFFFFFF
    mixed = (mixed ^ (mixed >> 12)) * 0x297A2D39 & 0xFFFFFFFF
    ulps = (mixed ^ (mixed >> 15)) % (2 * ULPS + 1) - ULPS
    size = gradient.abs() + gradient.square().mean().sqrt() / ULPS
    return torch.where(gradient == 0, gradient, gradient + ulps * 2.0**-23 * size)


def nudge(optimizer, args, kwargs):
    """Change the float32 gradients that an optimiser is about to read."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype == torch.float32:
                gradient.copy_(nudged(gradient, int(os.environ["EXLM_NUDGE"])))


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Registers the nudge when a process imports PyTorch's optimisers, which most never do."""

    MODULE = "torch.optim.optimizer"

    def find_spec(self, name, path=None, target=None):
        if name != self.MODULE:
            return None
        self.spec = importlib.machinery.PathFinder.find_spec(name, path)
        self.found = self.spec.loader
        self.spec.loader = self
        return self.spec

    def create_module(self, spec):
        return self.found.create_module(spec)

    def exec_module(self, module):
        self.found.exec_module(module)
        module.register_optimizer_step_pre_hook(nudge)


if os.environ.get("EXLM_NUDGE"):
    sys.meta_path.insert(0, AfterImport())
