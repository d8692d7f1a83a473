"""The CUDA kernels under compute-sanitizer, as ``book/evidence.py`` runs it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from evidence_file import Result
from measurements import Item, Setting

SCRIPT = Path(__file__).with_name("evidence.py")
SANITIZER_SECONDS = 300


def sanitizer(setting: Setting) -> Iterator[Item]:
    """The quick checks of the CUDA kernels under compute-sanitizer."""
    folder = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    program = shutil.which("compute-sanitizer") or shutil.which(folder / "compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        reason = None
        if setting.device.type != "cuda":
            reason = "the device is no GPU"
        elif "native" not in setting.backends:
            reason = "the compiled backend does not work here"
        elif program is None:
            reason = f"compute-sanitizer is neither on PATH nor in {folder}"
        if reason is None:
            yield Item(tool, partial(_sanitize, str(program), tool, setting.device))
        else:
            yield Item(tool, partial(dict, skipped=reason))


def _sanitize(program: str, tool: str, device: torch.device) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "checks.json")
        command = [
            program,
            "--tool",
            tool,
            "--error-exitcode",
            "99",
            sys.executable,
            str(SCRIPT),
        ]
        command += ["--only", "checks", "--quick", "--backend", "native", "--again"]
        command += ["--device", str(device), "--output", output]
        # Without PyTorch's cache every tensor has an allocation of its own, with an end to miss.
        environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        process = subprocess.Popen(
            command, env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            told, _ = process.communicate(timeout=SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            return {"skipped": f"{tool} was not done after {SANITIZER_SECONDS} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started, too
            process.wait()
    verdict = [line for line in told.splitlines() if "SUMMARY" in line]
    result = {"passed": process.returncode == 0, "verdict": verdict}
    if process.returncode != 0:
        result |= {"exit_status": process.returncode, "failures": told.splitlines()[-20:]}
    return result
