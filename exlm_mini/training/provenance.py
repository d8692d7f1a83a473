"""The machine and the code with which a result was measured."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import exlm_mini

MIB = 2**20


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the software, and the device."""
    return {
        "exlm_mini": exlm_mini.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Versions, processor, GPU, and the commit of the package."""
    gpu = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "cuda": torch.version.cuda,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "gpu_memory_mib": properties.total_memory // MIB,
        }
    return {
        **versions(device),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        **gpu,
        "commit": commit(),
    }


def _cpu_model() -> str:
    """The processor's name, if the system tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Commit of the checkout that the package runs from, or why there is none."""
    # Without git's lock file: a killed run could leave it behind, and git would refuse to work.
    git = ["git", "--no-optional-locks", "-C", str(Path(__file__).parent)]
    quiet: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    try:
        # A package installed inside another project's checkout is in none of its commits.
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], **quiet)
        name = subprocess.run([*git, "rev-parse", "HEAD"], **quiet).stdout.strip()
        # A result that is being written is not part of the code that is measured.
        code = ["--", ":(top)", ":(top,exclude)book/results"]
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", *code], **quiet
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return f"{name} with changes" if changed else name
