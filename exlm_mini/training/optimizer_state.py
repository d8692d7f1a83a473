"""An optimizer's state as named tensors and back, bit for bit, so that a checkpoint can hold it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from exlm_mini.config import UserError

# How a step is computed, not what it computes: chosen anew for the device of the resumed run.
_IMPLEMENTATION_OPTIONS = {"foreach", "fused", "capturable", "differentiable"}

MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
"""What AdamW holds of a parameter that has had a gradient."""


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, Tensor], list[dict]]:
    """The state of an optimiser such as AdamW, under the names of the model's parameters.

    Args:
        optimizer: its state may hold tensors only, which is so for AdamW.
        named_parameters: ``model.named_parameters()`` of the unwrapped model.

    Returns:
        ``{"parameter/quantity": tensor}``, the optimiser's own tensors and not copies; and one
        JSON-able dict per parameter group, with the names of its parameters and its options.

    Raises:
        ValueError: a parameter without a name, or state that is neither tensor nor JSON.
    """
    names = {id(parameter): name for name, parameter in named_parameters}
    tensors, groups = {}, []
    for group in optimizer.param_groups:
        parameters = group["params"]
        if any(id(parameter) not in names for parameter in parameters):
            raise ValueError("the optimizer holds a parameter that is not in named_parameters")
        options = _options(group)
        if tensor_options := [
            key for key, value in options.items() if isinstance(value, Tensor)
        ]:
            raise ValueError(f"optimizer options {tensor_options} are tensors, not numbers")
        groups.append({"parameters": [names[id(p)] for p in parameters], **options})
        for parameter in parameters:
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, Tensor):
                    raise ValueError(f"optimizer state {key} is {type(value)}, not a tensor")
                tensors[f"{names[id(parameter)]}/{key}"] = value.detach()
    return tensors, groups


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]],
    tensors: dict[str, Tensor],
    groups: list[dict],
) -> None:
    """Undo ``flatten_optimizer``: the next step is bitwise the one that would have followed.

    Whether the step is fused, or runs over lists of tensors, stays as the optimiser was built.

    Args:
        optimizer: newly built, over the same parameters in the same groups.
        named_parameters: ``model.named_parameters()`` of the unwrapped model.
        tensors: first value of ``flatten_optimizer``; copied.
        groups: second value of ``flatten_optimizer``, also after a trip through JSON.

    Raises:
        UserError: names or shapes do not fit the optimiser.
    """
    _, own_groups = flatten_optimizer(optimizer, named_parameters)
    own_names = [group["parameters"] for group in own_groups]
    if [group.get("parameters") for group in groups] != own_names:
        raise UserError(
            "the checkpoint's optimizer state is of other parameters than the model's; resume "
            "with the settings it was saved with"
        )
    names = [name for group in own_names for name in group]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    index = {name: i for i, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for name_key, value in tensors.items():
        name, _, key = name_key.rpartition("/")
        # The step count is a scalar, all else has the shape of its parameter.
        if name not in index or value.shape != (
            () if key == "step" else parameters[index[name]].shape
        ):
            raise UserError(
                f"the checkpoint's optimizer state {name_key} {tuple(value.shape)} does not "
                "fit the model; resume with the settings it was saved with"
            )
        # Optimisers keep the tensors they are given and write into them.
        state.setdefault(index[name], {})[key] = value.clone()
    if any(of_one.keys() != MOMENTS for of_one in state.values()):
        raise UserError(
            "the checkpoint's optimizer state lacks some moments; resume with the settings it "
            "was saved with"
        )
    param_groups = optimizer.state_dict()["param_groups"]
    for param_group, saved in zip(param_groups, groups, strict=True):
        for key in _options(param_group):
            own = param_group[key]
            value = saved.get(key, own)
            value = tuple(value) if isinstance(value, list) else value
            if not _is_like(value, own):
                raise UserError(
                    f"the checkpoint's optimizer has {key} {value!r}, which is not like {own!r}"
                )
            param_group[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _is_like(value: object, own: object) -> bool:
    """Whether an option is of the kind of the optimiser's own."""
    if isinstance(own, tuple):
        return (
            isinstance(value, tuple)
            and len(value) == len(own)
            and all(map(_is_like, value, own))
        )
    if isinstance(own, bool) or own is None:
        return type(value) is type(own)
    return isinstance(value, int | float) and math.isfinite(value)


def _options(group: dict) -> dict:
    """The numbers of a parameter group: learning rate, betas, weight decay, …"""
    skip = {"params", "param_names", *_IMPLEMENTATION_OPTIONS}
    return {key: value for key, value in group.items() if key not in skip}
