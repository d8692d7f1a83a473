"""How the compiled backend is built: only once, with which tools, and the messages on failure."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cases import RAGGED
from fibers import can_be_built

from exlm_mini.alignment import build, native

ROOT = Path(__file__).resolve().parents[2]
ASK = (
    "from exlm_mini.alignment import build, native\n"
    "print(native.why_not('cpu'), build.build('cpu'))"
)

FUNCTIONS = ("log_likelihood", "gradients", "viterbi")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Folder of the build cache, which is empty."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "exlm_mini"


def script(file: Path, *lines: str) -> Path:
    """Write a shell script that stands in for a program."""
    file.parent.mkdir(exist_ok=True, parents=True)
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return file


@pytest.fixture
def compiler(tmp_path, monkeypatch) -> Path:
    """Path that CXX names; a test writes a script there, which may call c++."""
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    return tmp_path / "compiler"


# ---- the CUDA compiler ----


def test_nvcc_is_that_of_cuda_home_else_of_the_path_else_of_pips_wheels(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    homes = [tmp_path / "home", tmp_path / "path", tmp_path / "site" / "nvidia" / "cu13"]
    files = [str(script(home / "bin" / "nvcc")) for home in homes]
    monkeypatch.setenv("CUDA_HOME", str(homes[0]))
    monkeypatch.setenv("PATH", str(homes[1] / "bin"))
    assert build.nvcc() == files[0]
    monkeypatch.delenv("CUDA_HOME")
    assert build.nvcc() == files[1]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.nvcc() in (files[2], "/usr/local/cuda/bin/nvcc")


@pytest.mark.parametrize("is_online", [True, False])
def test_make_cuda_fetches_the_pinned_compiler_once_or_leaves_nothing_behind(
    is_online, tmp_path, monkeypatch
):
    """A script stands in for pip and fills the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    folder = tmp_path / "a cache" / "exlm_mini"
    fetch = 'touch "$7/nvidia/cu13/bin/nvcc"' if is_online else "echo no network >&2; exit 1"
    log = f'echo "$@" >> {tmp_path}/calls; mkdir -p "$7/nvidia/cu13/bin"'
    pip = script(tmp_path / "pip", log, fetch)
    command = ["make", "--no-print-directory", "-o", ".venv/.ready", "cuda", f"PY={pip}"]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True) for _ in "12"]
    if not is_online:
        assert runs[0].returncode != 0 and runs[0].stdout == ""
        assert "no network" in runs[0].stderr and list(folder.iterdir()) == []
        return
    home = Path(runs[0].stdout.strip())
    assert runs[1].stdout == runs[0].stdout and (home / "bin" / "nvcc").is_file()
    assert list(folder.iterdir()) == [home.parents[1]]
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--no-deps" in call and call.endswith("-r cuda/toolkit.txt")


def test_the_pinned_compiler_goes_with_pytorch():
    pins = dict(
        line.split("==")
        for line in (ROOT / "cuda" / "toolkit.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    parts_of_one_release = {pins[f"nvidia-cuda-{name}"] for name in ("nvcc", "crt", "runtime")}
    assert parts_of_one_release == {pins["nvidia-nvvm"]} and len(pins) == 5
    if torch.version.cuda:
        assert pins["nvidia-nvvm"].split(".")[0] == torch.version.cuda.split(".")[0]


# ---- failures ----


def test_a_cache_that_cannot_be_written_to_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", __file__)
    with pytest.raises(build.BuildError, match="TORCH_EXTENSIONS_DIR to a writable folder"):
        build.build("cpu")


def test_a_library_that_is_there_is_taken_where_nothing_can_be_written(cache, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as as_if:
        as_if.setattr(build, "_compile", lambda source, compiler, library: library.touch())
        built = build.build("cpu")
    monkeypatch.setattr(build.fcntl, "flock", refused)
    assert build.build("cpu") == built


def test_without_ninja_the_remedy_is_said(cache, monkeypatch):
    can_be_built("cpu")
    monkeypatch.setenv("CXX", build.cxx())
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(build.BuildError, match="pip install ninja"):
        build.build("cpu")


UNLESS_IT_COMPILES = 'case "$*" in *" -c "*) ;; *) echo 12.0.0; exit 0;; esac'


def test_a_compiler_error_is_cut_to_what_matters(cache, compiler):
    script(
        compiler,
        UNLESS_IT_COMPILES,
        'for n in $(seq 200); do echo "dag.h:$n:1: note: candidate $n"; done',
        "echo 'dag.h:7:3: error: no wings' >&2; exit 1",
    )
    with pytest.raises(build.BuildError) as caught:
        build.build("cpu")
    said = f"compiling the C++ sources with {compiler} failed: dag.h:7:3: error: no wings"
    assert str(caught.value) == said
    assert not list(cache.glob("*/*.so"))


def test_an_interrupted_build_is_no_missing_backend(cache, compiler):
    # The parent process of the script is ninja, because the script replaces ninja's shell.
    script(compiler, UNLESS_IT_COMPILES, "kill -INT $PPID; sleep 1")
    with pytest.raises(KeyboardInterrupt):
        build.build("cpu")
    assert not list(cache.glob("*/*.so"))


def test_a_library_that_does_not_build_load_or_run_is_no_backend(monkeypatch):
    def refuse(*_):
        raise RuntimeError("driver too old")

    can_be_built("cpu")
    why_not = native.why_not.__wrapped__
    with monkeypatch.context() as patch:
        patch.setattr(native, "log_likelihood_with", refuse)
        assert why_not("cpu") == "the library was built but fails to run: driver too old"
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)
    with monkeypatch.context() as patch:
        patch.setattr(native, "build", refuse)
        assert why_not("cpu") == "RuntimeError: driver too old"
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert why_not("cuda") == "PyTorch sees no CUDA GPU"
    assert why_not("mps") == "the compiled backend supports only CPU and CUDA, not 'mps'"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert why_not("cpu").startswith("no C++ compiler 'no-such-compiler': install")
    with pytest.raises(native.BuildError, match="no-such-compiler"):
        native.log_likelihood(*RAGGED)


# ---- success ----


def test_processes_that_start_together_build_once_also_after_a_kill(cache, compiler, tmp_path):
    """The compiler runs without optimisation, which would take most of the time."""
    log, slow = tmp_path / "calls", tmp_path / "slow"
    script(
        compiler,
        f'case "$*" in *" -c "*) echo compile >> {log}; test -e {slow} && sleep 60;; esac',
        'exec c++ "$@" -O0',
    )
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    slow.touch()
    killed = subprocess.Popen([sys.executable, "-c", ASK], start_new_session=True, **pipes)
    while not log.exists():
        assert killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    slow.unlink()
    assert list(cache.glob("*/build/lock"))  # PyTorch would wait for this lock for ever
    both = [subprocess.Popen([sys.executable, "-c", ASK], **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    (library,) = cache.glob("*/*.so")
    assert [out for out, _ in outputs] == [f"None {library}\n"] * 2
    # Only one of them reports that it compiles, which takes a while.
    (said,) = "".join(error for _, error in outputs).splitlines()
    assert said.startswith("compiling the C++ ") and said.endswith(
        f"(cached in {library.parent})"
    )
    assert log.read_text().splitlines() == ["compile"] * 2


def test_a_changed_source_processor_or_compiler_is_another_build(
    cache, compiler, tmp_path, monkeypatch
):
    monkeypatch.setattr(build, "_compile", lambda source, compiler, library: library.touch())
    folder = tmp_path / "cuda"
    shutil.copytree(build.SOURCE_DIR, folder)
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    script(compiler)
    changes = [
        lambda: monkeypatch.setattr(torch, "__version__", "0.0.0"),
        lambda: (folder / "dag_graph.h").write_text("// changed\n"),
        lambda: monkeypatch.setattr(build, "machine", lambda: "another processor"),
        lambda: monkeypatch.setenv("CXX", str(script(tmp_path / "other"))),
    ]
    libraries = {build.build("cpu")}
    for number, change in enumerate(changes, 2):
        change()
        libraries |= {build.build("cpu"), build.build("cpu")}
        assert len(libraries) == number


@pytest.mark.slow
def test_cuda_builds_for_sm_80_and_sm_90_without_a_gpu(cache, tmp_path, monkeypatch):
    """Whether the library also runs can only be tested on a machine with a GPU. PyTorch's CUDA
    libraries, which the linker asks for, are replaced by empty ones."""
    can_be_built("cpu")
    try:
        home = Path(build.nvcc()).parents[1]
    except build.BuildError as error:
        pytest.skip(str(error))
    if not list(home.glob("lib*/libcudart.so*")):
        pytest.skip(f"{home} is no CUDA toolkit: name one in CUDA_HOME")
    for name in ("c10_cuda", "torch_cuda"):
        command = [build.cxx(), "-shared", "-o", f"lib{name}.so", "-x", "c++", "/dev/null"]
        subprocess.run(command, cwd=tmp_path, check=True)
    functions = [f"dag_cuda_{f}_float{bits}" for f in FUNCTIONS for bits in (32, 64)]
    program = (
        "import ctypes\n"
        "from exlm_mini.alignment import build\n"
        "library = ctypes.CDLL(str(build.build('cuda')))\n"
        f"for name in {['dag_cuda_error', *functions]}: getattr(library, name)\n"
    )
    places = {"LIBRARY_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    env = os.environ | places | {"TORCH_CUDA_ARCH_LIST": "8.0 9.0"}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=env, check=True)
