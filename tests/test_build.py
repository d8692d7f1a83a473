"""How the compiled backend is built: found, keyed, locked, and what is said when it fails.

Shell scripts stand in for the compilers, named in the variables a user would name them in.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fibers import can_be_built

from exlm_mini.alignment import build, compilers, native
from exlm_mini.alignment.cases import CASES

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("cpu", "cuda")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "exlm_mini"


@pytest.fixture
def put_compiler(tmp_path, monkeypatch):
    """Puts shell scripts in the place of the compilers; they may use "$@"."""
    for name in ("CUDA_PATH", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")

    def put(device_type: str, script: str = "exit 1", folder: Path = tmp_path) -> Path:
        file = folder / {"cpu": "fake-c++", "cuda": "bin/nvcc"}[device_type]
        file.parent.mkdir(exist_ok=True, parents=True)
        version = 'if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n'
        file.write_text("#!/bin/sh\n" + version + script + "\n")
        file.chmod(0o755)
        variable = ("CXX", file) if device_type == "cpu" else ("CUDA_HOME", folder)
        monkeypatch.setenv(variable[0], str(variable[1]))
        return file

    return put


@pytest.fixture
def copied_sources(tmp_path, monkeypatch) -> Path:
    """A copy of the sources in the place of the real ones, in a folder ninja must quote."""
    folder = tmp_path / "a $b: folder" / "cuda"
    shutil.copytree(build.source_dir(), folder)
    monkeypatch.setattr(build, "PACKAGE", folder.parent / "exlm_mini")
    return folder


# ---- what is there ----


def test_an_installed_package_has_its_sources_or_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "site" / "exlm_mini")
    with pytest.raises(build.BuildError, match=r"cuda_src: reinstall exlm-mini"):
        build.source_dir()
    folder = tmp_path / "site" / "exlm_mini" / "cuda_src"
    folder.mkdir(parents=True)
    (folder / "dag_cpu.cpp").touch()
    assert build.source_dir() == folder


def test_builds_are_kept_where_caches_are(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_dir() == tmp_path / "xdg" / "exlm_mini"


def test_nvcc_is_that_of_cuda_home_else_of_the_path_else_of_pips_wheels(
    tmp_path, monkeypatch, put_compiler
):
    monkeypatch.setattr(compilers, "IN_TOOLKIT", tmp_path / "no toolkit" / "nvcc")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    wheels = tmp_path / "site" / "nvidia" / "cu13"
    files = [put_compiler("cuda", folder=place) for place in (wheels, tmp_path, tmp_path / "h")]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert build.nvcc() == (str(files[2]), "fake 1.0\n")
    monkeypatch.delenv("CUDA_HOME")
    assert build.nvcc().path == str(files[1])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.nvcc().path == str(files[0])
    # The wheels' runtime lies where nvcc does not look.
    assert build.plan("cuda").link_flags[-1] == "static"
    (wheels / "lib").mkdir()
    (wheels / "lib" / "libcudart_static.a").touch()
    assert build.plan("cuda").link_flags[-1] == f"-L{wheels / 'lib'}"


@pytest.mark.parametrize("is_online", [True, False])
def test_make_cuda_fetches_the_pinned_compiler_once_or_leaves_nothing_behind(
    is_online, tmp_path, monkeypatch
):
    """With a script in the place of pip, which fills its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))
    folder, pip = tmp_path / "a cache" / "exlm_mini", tmp_path / "pip"
    pip.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls; mkdir -p "$7/nvidia/cu13/bin"\n'
        + ('touch "$7/nvidia/cu13/bin/nvcc"' if is_online else "echo no network >&2; exit 1")
    )
    pip.chmod(0o755)
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


def test_architectures_are_those_of_the_environment_else_of_the_gpus(monkeypatch):
    gpus = [(9, 0), (8, 6), (9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    for listed, expected in (
        ("8.0 9.0a+PTX", ["8.0", "9.0a+PTX"]),
        ("8.0;9.0a+PTX", ["8.0", "9.0a+PTX"]),
        ("", ["8.6", "9.0"]),
    ):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
        assert build.architectures() == expected


# ---- the key ----


@pytest.mark.parametrize("device_type", KINDS)
def test_the_key_depends_on_all_that_matters(
    device_type, copied_sources, monkeypatch, put_compiler
):
    for kind in KINDS:
        put_compiler(kind)
    plan = build.plan(device_type)
    plans = [plan] + [
        plan._replace(**changed)
        for changed in (
            {"compiler": build.Tool(plan.compiler.path, "fake 2.0")},
            {"compiler": build.Tool("/elsewhere/compiler", plan.compiler.version)},
            {"flags": (*plan.flags, "-O0")},
            {"link_flags": (*plan.link_flags, "-s")},
            {"machine": "another"},
        )
    ]
    keys = [each.key for each in plans]
    assert build.plan(device_type).key == plan.key  # the same again
    for module, name in ((torch, "__version__"), (torch.version, "cuda")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, "0.0.0")
            keys.append(plan.key)
    with (copied_sources / "dag_graph.h").open("a") as stream:
        stream.write("// changed\n")
    keys.append(plan.key)
    # Another processor, another GPU.
    monkeypatch.setattr(build, "machine", lambda: "another processor")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    keys.append(build.plan(device_type).key)
    assert len(set(keys)) == len(keys)


# ---- failures ----


@pytest.mark.parametrize(
    ("device_type", "changes", "words"),
    [
        ("cpu", {"CXX": "no-such-compiler"}, r"'no-such-compiler': install g\+\+.* CXX"),
        ("cpu", {"PATH": "/nowhere"}, "no ninja to build with: pip install ninja"),
        (
            "cpu",
            {"TORCH_EXTENSIONS_DIR": __file__},
            "TORCH_EXTENSIONS_DIR to a writable folder",
        ),
        ("cuda", {"CUDA_HOME": "/elsewhere"}, r"no nvcc in CUDA_HOME, /elsewhere/bin: install"),
        ("cuda", {"CUDA_HOME": ""}, "no CUDA compiler nvcc: install the CUDA toolkit"),
        ("cuda", {"TORCH_CUDA_ARCH_LIST": ""}, "no GPU to compile for.* TORCH_CUDA_ARCH_LIST"),
        ("mps", {}, "for cpu and cuda, not for 'mps'"),
    ],
)
def test_what_is_missing_is_said_with_the_remedy(
    device_type, changes, words, cache, put_compiler, monkeypatch, tmp_path
):
    for kind in KINDS:
        put_compiler(kind)
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if changes.get("CUDA_HOME") == "":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setattr(compilers, "IN_TOOLKIT", tmp_path / "nvcc")
        monkeypatch.setattr(sys, "path", [])
    with pytest.raises(build.BuildError, match=words):
        build.build(device_type)


@pytest.mark.parametrize("device_type", KINDS)
def test_a_compiler_error_is_cut_to_what_matters(device_type, cache, put_compiler):
    file = put_compiler(
        device_type,
        'for n in $(seq 200); do echo "dag.h:$n:1: note: candidate $n"; done\n'
        "echo 'dag.h:7:3: error: no wings' >&2; exit 1",
    )
    with pytest.raises(build.BuildError) as caught:
        build.build(device_type)
    first, *rest = str(caught.value).splitlines()
    assert first == f"the {build.LANGUAGES[device_type]} sources do not build with {file}:"
    assert "dag.h:7:3: error: no wings" in rest and len(rest) < 7
    assert "note: candidate" not in str(caught.value)
    assert list(cache.rglob("*.so")) == [] and list(cache.rglob("build-*")) == []


def test_a_library_that_does_not_build_load_or_run_is_no_backend(monkeypatch):
    def refuse(*_):
        raise RuntimeError("driver too old")

    can_be_built("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(native, "log_likelihood_with", refuse)
        words = "the built library does not run: driver too old"
        assert native.why_not.__wrapped__("cpu") == words
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)
    with monkeypatch.context() as patch:
        patch.setattr(native, "build", refuse)
        assert native.why_not.__wrapped__("cpu") == "RuntimeError: driver too old"
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no-such-compiler" in native.why_not.__wrapped__("cpu")
    with pytest.raises(native.BuildError, match="no-such-compiler"):
        native.log_likelihood(*CASES["ragged"])


# ---- success ----


def test_processes_that_start_together_build_once(cache, put_compiler, tmp_path):
    can_be_built("cpu")
    log = tmp_path / "calls"
    # Without optimisation, which takes most of the time.
    put_compiler(
        "cpu", f'case "$*" in *" -c "*) echo compile >> {log};; esac\nexec c++ "$@" -O0'
    )
    program = (
        "from exlm_mini.alignment import build, native\n"
        "print(native.why_not('cpu'), build.build('cpu'))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [
        subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, **pipes) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    (library,) = cache.rglob("*.so")
    assert [out for out, _ in outputs] == [f"None {library}\n"] * 2
    # One of them says why nothing happens for a while.
    said = "".join(error for _, error in outputs).splitlines()
    (line,) = [line for line in said if line.startswith("building the C++ ")]
    assert line.endswith(f"kept in {library.parent}")
    build.build("cpu")  # found, not built
    assert log.read_text().splitlines() == ["compile"]


def test_nvcc_is_run_by_ninja_with_every_option_as_it_was(
    cache, put_compiler, copied_sources, tmp_path, monkeypatch
):
    log = tmp_path / "calls"
    put_compiler("cuda", f'echo "$@" >> {log}\ntouch built.o built.so')
    monkeypatch.setenv("CXX", "c++")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    assert build.build("cuda").is_file()
    codes = ("80,code=sm_80", "90a,code=sm_90a", "90a,code=compute_90a")
    target = " ".join(f"-gencode=arch=compute_{code}" for code in codes)
    target += f" -ccbin {shutil.which('c++')}"
    source = copied_sources / "dag_cuda.cu"
    assert log.read_text().splitlines() == [
        f"{' '.join(build.NVCC_FLAGS)} {target} -c {source} -o built.o",
        f"-shared built.o -o built.so {target} -cudart static",
    ]


@pytest.mark.reliability
@pytest.mark.parametrize("damage", [b"", b"lib", b"libRary\n"])
def test_a_damaged_library_is_built_again(damage, cache, put_compiler):
    """To load one may be the end of the process (SIGBUS), or a wrong result."""
    put_compiler("cuda", "touch built.o; echo library > built.so")
    library = build.build("cuda")
    sound = library.read_bytes()
    library.write_bytes(damage)
    (library.parent / "build-left").mkdir()  # by a process that was killed
    assert build.build("cuda") == library and library.read_bytes() == sound
    files = {library, library.with_suffix(".sha256"), library.parent / "lock"}
    assert set(library.parent.iterdir()) == files
    written = library.stat().st_mtime_ns
    build.build("cuda")
    assert library.stat().st_mtime_ns == written


def test_a_notebook_is_spared_the_line(cache, put_compiler, monkeypatch, capfd):
    put_compiler("cuda", "touch built.o built.so")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    build.build("cuda")
    assert capfd.readouterr().err == ""
    monkeypatch.delitem(sys.modules, "ipykernel")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    build.build("cuda")
    assert capfd.readouterr().err.startswith("building the CUDA dynamic programme once, ")


@pytest.mark.slow
def test_cuda_compiles_for_sm_80_and_sm_90(cache, monkeypatch):
    """Whether it also runs is for a machine with a GPU."""
    try:
        build.nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0")
    library = ctypes.CDLL(str(build.build("cuda")))
    assert hasattr(library, "dag_cuda_error")
    for name in ("log_likelihood", "gradients", "viterbi"):
        assert all(hasattr(library, f"dag_cuda_{name}_float{bits}") for bits in (32, 64))
