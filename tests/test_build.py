"""How the compiled backend is built: found, keyed, locked, and what is said when it fails."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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

    def put(device_type: str, script: str) -> Path:
        file = tmp_path / {"cpu": "fake-c++", "cuda": "bin/nvcc"}[device_type]
        file.parent.mkdir(exist_ok=True)
        version = 'if [ "$1" = --version ]; then echo "fake 1.0"; exit 0; fi\n'
        file.write_text("#!/bin/sh\n" + version + script + "\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv(
            *(("CXX", str(file)) if device_type == "cpu" else ("CUDA_HOME", str(tmp_path)))
        )
        return file

    return put


@pytest.fixture
def copied_sources(tmp_path, monkeypatch) -> Path:
    """A copy of the sources in the place of the real ones, with a stand-in for what is missing."""
    folder = tmp_path / "cuda"
    shutil.copytree(build.source_dir(), folder)
    (folder / build.SOURCES["cuda"]).touch()
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "exlm_mini")
    return folder


# ---- what is there ----


def test_sources_and_cache_are_where_they_belong(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert build.cache_dir() == tmp_path / "xdg" / "exlm_mini"
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "site" / "exlm_mini")
    with pytest.raises(build.BuildError, match=r"cuda_src: reinstall exlm-mini"):
        build.source_dir()
    folder = tmp_path / "site" / "exlm_mini" / "cuda_src"
    folder.mkdir(parents=True)
    (folder / "dag_cpu.cpp").touch()
    assert build.source_dir() == folder


def test_the_sources_need_neither_torch_nor_cuda_headers():
    sources = [f for f in build.source_dir().iterdir() if f.suffix in build.SUFFIXES]
    assert {"dag_cpu.cpp", "dag_graph.h"} <= {f.name for f in sources}
    for file in sources:
        for name in re.findall(r'^\s*#\s*include\s*[<"](.+)[>"]', file.read_text(), re.M):
            ours = (file.parent / name).is_file()
            assert ours or not re.search("torch|ATen|c10|pybind", name), (file.name, name)
            assert ours or file.suffix == ".cu" or "cuda" not in name, (file.name, name)


def test_nvcc_is_that_of_cuda_home_else_of_the_path(tmp_path, monkeypatch, put_compiler):
    file = put_compiler("cuda", "exit 1")
    assert build.nvcc() == (str(file), "fake 1.0\n")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")
    assert build.nvcc().path == str(file)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(build.BuildError, match=r"no nvcc in CUDA_HOME, .*elsewhere/bin: inst"):
        build.nvcc()
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(build.BuildError, match="no CUDA compiler nvcc: install the CUDA tool"):
        build.nvcc()


def test_nvcc_of_pips_wheels_is_found_and_links_with_their_runtime(
    tmp_path, monkeypatch, put_compiler
):
    toolkit = tmp_path / "site" / "nvidia" / "cu13"
    file = put_compiler("cuda", "exit 1")
    for place in (toolkit / "bin", toolkit / "lib"):
        place.mkdir(parents=True)
    nvcc = file.rename(toolkit / "bin" / "nvcc")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compilers, "IN_TOOLKIT", tmp_path / "toolkit" / "nvcc")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    assert build.nvcc() == (str(nvcc), "fake 1.0\n")
    assert compilers.runtime_flags(str(nvcc)) == []  # nothing there to link with
    (toolkit / "lib" / "libcudart_static.a").touch()
    assert compilers.runtime_flags(str(nvcc)) == [f"-L{toolkit / 'lib'}"]
    assert build.plan("cuda").link_flags[-1] == f"-L{toolkit / 'lib'}"


@pytest.fixture
def make_cuda(tmp_path, monkeypatch):
    """Runs ``make cuda`` with an empty cache and a script in the place of pip, to fill "$TO"."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a cache"))

    def run(script: str) -> subprocess.CompletedProcess:
        pip = tmp_path / "pip"
        pip.write_text(f'#!/bin/sh\nTO=$7\necho "$@" >> {tmp_path}/calls\n{script}\n')
        pip.chmod(0o755)
        command = ["make", "--no-print-directory", "-o", ".venv/.ready", "cuda", f"PY={pip}"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    return run


def test_make_cuda_fetches_the_pinned_compiler_once(make_cuda, tmp_path):
    script = 'mkdir -p "$TO/nvidia/cu13/bin"; touch "$TO/nvidia/cu13/bin/nvcc"'
    homes = {make_cuda(script).stdout for _ in range(2)}
    (home,) = [Path(line) for out in homes for line in out.splitlines()]
    assert (home / "bin" / "nvcc").is_file()
    assert home.is_relative_to(tmp_path / "a cache" / "exlm_mini")
    (call,) = (tmp_path / "calls").read_text().splitlines()
    assert "--no-deps" in call and call.endswith("-r cuda/toolkit.txt")
    assert [one.name for one in (tmp_path / "a cache" / "exlm_mini").iterdir()] == [
        home.parents[1].name
    ]


def test_a_compiler_that_cannot_be_fetched_leaves_nothing_behind(make_cuda, tmp_path):
    failed = make_cuda('mkdir -p "$TO/nvidia/cu13"; echo no network >&2; exit 1')
    assert failed.returncode != 0 and failed.stdout == "" and "no network" in failed.stderr
    assert list((tmp_path / "a cache" / "exlm_mini").iterdir()) == []


def test_the_pinned_compiler_goes_with_pytorch_and_is_no_part_of_the_set_up():
    pins = dict(
        line.split("==")
        for line in (ROOT / "cuda" / "toolkit.txt").read_text().splitlines()
        if not line.startswith("#")
    )
    tools = {"cuda-nvcc", "cuda-crt", "cuda-cccl", "cuda-runtime", "nvvm"}
    assert pins.keys() == {f"nvidia-{tool}" for tool in tools}
    for name in ("nvcc", "crt", "runtime"):  # parts of one release
        assert pins[f"nvidia-cuda-{name}"] == pins["nvidia-nvvm"]
    if torch.version.cuda:
        assert pins["nvidia-nvvm"].split(".")[0] == torch.version.cuda.split(".")[0]
    assert "nvidia" not in (ROOT / "requirements.lock").read_text()
    assert "nvidia" not in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("listed", ["8.0 9.0a+PTX", "8.0;9.0a+PTX"])
def test_architectures_are_those_of_the_environment(listed, put_compiler, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert build.architectures() == ["8.0", "9.0a+PTX"]
    flags = [flag for name in build.architectures() for flag in compilers.gencode(name)]
    assert flags == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90a,code=compute_90a",
    ]


def test_architectures_are_those_of_the_gpus(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    gpus = [(9, 0), (8, 6), (9, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", gpus.__getitem__)
    assert build.architectures() == ["8.6", "9.0"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(build.BuildError, match=r"no GPU to compile for.* TORCH_CUDA_ARCH_LIST"):
        build.architectures()


def test_there_is_no_library_for_another_device():
    with pytest.raises(build.BuildError, match="for cpu and cuda, not for 'mps'"):
        build.build("mps")
    assert "not for 'mps'" in native.why_not("mps")


# ---- the key ----


@pytest.mark.parametrize("device_type", KINDS)
def test_the_key_depends_on_all_that_matters(
    device_type, copied_sources, monkeypatch, put_compiler
):
    put_compiler(device_type, "exit 1")
    plan = build.plan(device_type)
    keys = {plan.key}
    assert build.plan(device_type).key in keys  # the same again
    for changed in (
        {"compiler": build.Tool(plan.compiler.path, "fake 2.0")},
        {"compiler": build.Tool("/elsewhere/compiler", plan.compiler.version)},
        {"flags": (*plan.flags, "-O0")},
        {"link_flags": (*plan.link_flags, "-s")},
        {"machine": "another"},
    ):
        keys.add(plan._replace(**changed).key)
    for patched, name in ((torch, "__version__"), (torch.version, "cuda")):
        with monkeypatch.context() as patch:
            patch.setattr(patched, name, "0.0.0")
            keys.add(plan.key)
    with (copied_sources / "dag_graph.h").open("a") as stream:
        stream.write("// changed\n")
    keys.add(plan.key)
    assert len(keys) == 9


def test_the_key_depends_on_the_processor_or_the_gpu(put_compiler, copied_sources, monkeypatch):
    for device_type in KINDS:
        put_compiler(device_type, "exit 1")
    before = [build.plan(device_type).key for device_type in KINDS]
    assert len(set(before)) == 2
    monkeypatch.setattr(build, "machine", lambda: "another")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    for device_type, key in zip(KINDS, before, strict=True):
        assert build.plan(device_type).key != key


# ---- failures ----


def test_without_a_compiler_the_message_says_what_to_do(cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match=r"'no-such-compiler': install g\+\+.* CXX"):
        build.build("cpu")
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)
    assert "no-such-compiler" in native.why_not.__wrapped__("cpu")
    with pytest.raises(native.BuildError, match="no-such-compiler"):
        native.log_likelihood(*CASES["ragged"])


def test_without_ninja_the_message_says_what_to_do(cache, put_compiler, monkeypatch):
    put_compiler("cpu", "exit 1")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(build.BuildError, match="no ninja to build with: pip install ninja"):
        build.build("cpu")


@pytest.mark.parametrize("device_type", KINDS)
def test_a_compiler_error_is_cut_to_what_matters(
    device_type, cache, put_compiler, copied_sources
):
    file = put_compiler(
        device_type,
        'for n in $(seq 200); do echo "dag.h:$n:1: note: candidate $n"; done\n'
        "echo 'dag.h:7:3: error: no wings' >&2; exit 1",
    )
    with pytest.raises(build.BuildError) as caught:
        build.build(device_type)
    first, *rest = str(caught.value).splitlines()
    language = build.LANGUAGES[device_type]
    assert first == f"the {language} sources do not build with {file}:"
    assert "dag.h:7:3: error: no wings" in rest
    assert "note: candidate" not in str(caught.value)
    assert len(rest) < 7
    assert list(cache.rglob("*.so")) == [] and list(cache.rglob("build-*")) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, put_compiler):
    put_compiler("cpu", "exit 1")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="TORCH_EXTENSIONS_DIR to a writable folder"):
        build.build("cpu")


def test_a_library_that_does_not_load_or_run_is_no_backend(monkeypatch):
    def refuse(*_):
        raise RuntimeError("driver too old")

    if reason := native.why_not("cpu"):
        pytest.skip(f"no C++ backend here: {reason}")
    with monkeypatch.context() as patch:
        patch.setattr(native, "log_likelihood_with", refuse)
        words = "the built library does not run: driver too old"
        assert native.why_not.__wrapped__("cpu") == words
    monkeypatch.setattr(native, "build", refuse)
    monkeypatch.setattr(native, "_load", native._load.__wrapped__)
    assert native.why_not.__wrapped__("cpu") == "RuntimeError: driver too old"


# ---- success ----


def test_processes_that_start_together_build_once(cache, put_compiler, tmp_path):
    if reason := native.why_not("cpu"):
        pytest.skip(f"no C++ backend here: {reason}")
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
    assert outputs[0][0] == outputs[1][0] and outputs[0][0].startswith("None ")
    assert log.read_text().splitlines() == ["compile"]
    (library,) = cache.rglob("*.so")
    assert str(library) in outputs[0][0]
    # One of them says why nothing happens for a while.
    said = "".join(error for _, error in outputs).splitlines()
    (line,) = [line for line in said if line.startswith("building the C++ ")]
    assert line.endswith(f"kept in {library.parent}")
    build.build("cpu")  # found, not built
    assert log.read_text().splitlines() == ["compile"]


def test_nvcc_is_run_by_ninja_with_every_option_as_it_was(
    cache, put_compiler, copied_sources, tmp_path, monkeypatch
):
    log, folder = tmp_path / "calls", tmp_path / "a $b: folder"
    put_compiler("cuda", f'echo "$@" >> {log}\ntouch built.o built.so')
    monkeypatch.setenv("CXX", "c++")
    folder.mkdir()
    copied_sources.rename(folder / "cuda")
    monkeypatch.setattr(build, "PACKAGE", folder / "exlm_mini")
    assert build.build("cuda").is_file()
    source = str(folder / "cuda" / "dag_cuda.cu")
    target = f"-gencode=arch=compute_90,code=sm_90 -ccbin {shutil.which('c++')}"
    assert log.read_text().splitlines() == [
        f"{' '.join(build.NVCC_FLAGS)} {target} -c {source} -o built.o",
        f"-shared built.o -o built.so {target} -cudart static",
    ]


@pytest.mark.reliability
@pytest.mark.parametrize("damage", [b"", b"lib", b"libRary\n"])
def test_a_damaged_library_is_built_again(damage, cache, put_compiler, copied_sources):
    """To load one may be the end of the process (SIGBUS), or a wrong result."""
    put_compiler("cuda", "touch built.o; echo library > built.so")
    library = build.build("cuda")
    sound = library.read_bytes()
    library.write_bytes(damage)
    (library.parent / "build-left").mkdir()  # by a process that was killed
    assert build.build("cuda") == library and library.read_bytes() == sound
    kept = {library, library.with_suffix(".sha256"), library.parent / "lock"}
    assert set(library.parent.iterdir()) == kept
    written = library.stat().st_mtime_ns
    build.build("cuda")
    assert library.stat().st_mtime_ns == written


def test_a_notebook_is_spared_the_line(cache, put_compiler, copied_sources, monkeypatch, capfd):
    put_compiler("cuda", "touch built.o built.so")
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    build.build("cuda")
    monkeypatch.delitem(sys.modules, "ipykernel")
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    build.build("cuda")
    assert capfd.readouterr().err.startswith("building the CUDA dynamic programme once, ")


@pytest.mark.slow
def test_cuda_compiles_for_sm_80_and_sm_90(cache, monkeypatch):
    """Whether it also runs is for a machine with a GPU."""
    try:
        nvcc = build.nvcc()
    except build.BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0")
    library = build.build("cuda")
    tools = Path(os.path.realpath(nvcc.path)).parent
    names = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True).stdout
    defined = set(re.findall(r" T (dag_cuda_\w+)", names.decode()))
    expected = {f"dag_cuda_{f}_{d}" for f in ("log_likelihood", "gradients", "viterbi")
                for d in ("float32", "float64")}  # fmt: skip
    assert expected | {"dag_cuda_error"} <= defined
    if cuobjdump := shutil.which("cuobjdump", path=f"{tools}{os.pathsep}{os.environ['PATH']}"):
        command = shlex.join([cuobjdump, "--list-elf", str(library)])
        listed = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        assert set(re.findall(r"sm_\d+", listed)) == {"sm_80", "sm_90"}
