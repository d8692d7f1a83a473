"""The doctor says what is there, finds wrong results, and takes what is missing calmly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exlm_mini import doctor
from exlm_mini.alignment import BACKENDS, build, cases, native
from exlm_mini.config import checks

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
OURS = [name for name in BACKENDS if name != cases.JUDGE]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Nothing is built, and nothing remembered of what was."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for function in (native._load, native.why_not):
        function.cache_clear()
    yield tmp_path
    for function in (native._load, native.why_not):
        function.cache_clear()


@pytest.fixture
def one_backend(monkeypatch):
    """Only the judge and one other, for tests that look at something else."""
    for name in [name for name in OURS if name != "vectorized"]:
        monkeypatch.delitem(BACKENDS, name)
    monkeypatch.setattr(doctor, "fastest", lambda device_type: "vectorized")


def wrong(monkeypatch, name: str, part: int, change) -> None:
    """Change one of the two functions of a backend."""
    functions = list(BACKENDS[name][:2])
    right = functions[part]
    functions[part] = lambda *graph: change(right(*graph))
    monkeypatch.setitem(BACKENDS, name, BACKENDS[name]._replace(
        log_likelihood=functions[0], viterbi=functions[1]
    ))  # fmt: skip


def test_every_backend_is_right_on_this_machine():
    for check in doctor.checks(may_build=True):
        if check.is_right is None:
            assert check.backend == "native" and check.reason == native.why_not("cpu")
            continue
        assert check.is_right and check.reason is None
        assert 0 < check.errors["float32"] < 2e-3 and check.errors["float64"] < 1e-11


def test_a_missing_library_or_tool_is_advice(monkeypatch, one_backend, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CUDA_HOME", "/no/such/folder")
    monkeypatch.setitem(checks.EXTRAS, "no_such_library", "train")
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "no C++ compiler 'no-such-compiler': install g++" in text
    assert "no nvcc in CUDA_HOME, /no/such/folder/bin: install the CUDA toolkit" in text
    assert "missing no_such_library: pip install 'exlm-mini[train]'\n" in text
    assert "numpy" in text and text.endswith("\nevery result is right\n")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("part", [0, 1])
def test_a_wrong_result_is_found(name, part, monkeypatch):
    if reason := BACKENDS[name].why_not("cpu"):
        pytest.skip(reason)
    changes = [lambda value_B: value_B * 1.001, lambda best: (best[0].clamp(min=0), best[1])]
    wrong(monkeypatch, name, part, changes[part])
    check = cases.check(name, CPU, None)
    assert check.is_right is False and "differs from enumeration by" in check.reason
    if part == 1:
        assert check.errors == {"float32": None, "float64": None}


def test_a_wrong_result_or_an_exception_ends_with_1(one_backend, monkeypatch, capsys):
    wrong(monkeypatch, "vectorized", 0, lambda value_B: value_B + 1)
    assert doctor.main([]) == 1
    text = capsys.readouterr().out
    assert "vectorized" in text and "WRONG: float32 differs" in text
    assert text.splitlines()[-1] == "SOME RESULTS ARE WRONG: see above"
    monkeypatch.setitem(BACKENDS, "vectorized", BACKENDS["vectorized"]._replace(viterbi=None))
    assert doctor.main([]) == 1
    assert "TypeError: 'NoneType'" in capsys.readouterr().out


def test_without_building_nothing_is_built(empty_cache, monkeypatch):
    for name in ("naive", "vectorized", "scaled"):
        monkeypatch.delitem(BACKENDS, name, raising=False)
    (check,) = doctor.checks(may_build=False)
    assert list(empty_cache.iterdir()) == []
    try:
        build.plan("cpu")
    except build.BuildError as error:
        assert check.reason == str(error)
    else:
        assert check.reason == doctor.NOT_BUILT
        assert list(doctor.automatic(False)) == [("cpu", "native")]  # it would be built


def test_it_runs_on_the_core_libraries_alone(tmp_path):
    program = """
import sys
for name in ("datasets", "tokenizers", "jsonargparse", "rdkit", "yaml"):
    sys.modules[name] = None
from exlm_mini import doctor
sys.exit(doctor.main(["--no-build"]))
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "every result is right" in result.stdout
