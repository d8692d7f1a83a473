"""The doctor reports what is installed, finds wrong results, and advises on what is missing."""

from __future__ import annotations

import sys

import pytest

from exlm_mini import alignment, doctor
from exlm_mini.alignment import BACKENDS
from exlm_mini.alignment.check import JUDGE
from exlm_mini.config import checks


@pytest.fixture
def one_backend(monkeypatch):
    """Leave only the reference and one other backend, for tests of something else."""
    for name in {*BACKENDS} - {JUDGE, "vectorized"}:
        monkeypatch.delitem(BACKENDS, name)
    monkeypatch.setattr(alignment, "fastest", lambda device_type: "vectorized")


def test_a_missing_library_or_tool_is_advice(monkeypatch, one_backend, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CUDA_HOME", "/no/such/folder")
    monkeypatch.setitem(checks.EXTRAS, "no_such_library", "train")
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    assert "no C++ compiler 'no-such-compiler': install g++" in text
    assert "no CUDA compiler nvcc in CUDA_HOME, /no/such/folder/bin: install" in text
    assert "no_such_library not installed; it comes with the extra train\n" in text


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("log_likelihood", lambda value_B: value_B * 1.001, "float32 differs from enumeration"),
        ("viterbi", lambda best: (best[0].clamp(min=0), best[1]), "by inf"),
        ("viterbi", lambda best: best.missing, "AttributeError: 'tuple'"),
    ],
)
def test_a_wrong_result_or_an_exception_ends_with_1(
    part, change, words, one_backend, monkeypatch, capsys
):
    right = BACKENDS["vectorized"]
    wrong = {part: lambda *graph: change(getattr(right, part)(*graph))}
    monkeypatch.setitem(BACKENDS, "vectorized", right._replace(**wrong))
    assert doctor.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines[:-1] if "WRONG: " in line]
    assert "vectorized" in line and words in line
    assert lines[-1] == "SOME RESULTS ARE WRONG: see above"


def test_every_backend_is_right_and_no_optional_library_is_needed(monkeypatch, capsys):
    for name in ("datasets", "tokenizers", "rdkit", "yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "all results are right"
    for name in {*BACKENDS} - {JUDGE}:
        (line,) = [line for line in lines if line.startswith(f"  cpu     {name}")]
        assert line.endswith("right") or (name == "native" and "not available: " in line)
