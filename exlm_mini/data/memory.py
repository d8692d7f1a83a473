"""The amount of memory, and a refusal before too much is allocated.

On a CPU, allocation succeeds beyond the available memory, and later the system kills the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from exlm_mini.config.checks import UserError

if TYPE_CHECKING:  # preparing data needs no torch
    import torch

CGROUP = Path("/sys/fs/cgroup")
CONTAINER_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")
"""Files below it, of either version."""


class DoesNotFit(UserError):
    """The device has not enough memory."""


def device_memory(device: torch.device | None = None) -> int:
    """Bytes of memory of a device; for a CPU, or None, those of the machine or its container."""
    if device is not None and device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            present = min(present, int((CGROUP / name).read_text()))
    return present


def check_bytes(
    what: str, parts: Mapping[str, float], device: torch.device | None = None
) -> None:
    """Refuse work that does not fit into a device's memory, before anything large is allocated.

    Args:
        what: the work, for the message.
        parts: bytes by remedy; the message names the first remedy at which the sum is too large.
        device: that must hold all parts; None: a CPU.

    Raises:
        DoesNotFit: with the bytes needed and those of the device.
    """
    present, so_far = device_memory(device), 0.0
    for remedy, needed in parts.items():
        so_far += needed
        if so_far > present:
            name = "this machine"
            if device is not None and device.type == "cuda":
                import torch

                name = torch.cuda.get_device_name(device)
            raise DoesNotFit(
                f"{what} needs about {sum(parts.values()) / 2**30:,.1f} GiB, {name} has "
                f"{present / 2**30:,.1f} GiB; {remedy}"
            )
