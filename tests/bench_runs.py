"""What tests of the benchmarks share."""

from __future__ import annotations

import json

from exlm_lab import bench
from exlm_mini.alignment import BACKENDS
from exlm_mini.config import ModelConfig


def working() -> set[str]:
    """Backends that work on a CPU; the first call may build one."""
    return {name for name in BACKENDS if BACKENDS[name].why_not("cpu") is None}


def tiny_model(**settings) -> ModelConfig:
    return ModelConfig(num_layers=1, width=16, ffn_width=32, num_heads=2, **settings)


def records_of(capsys, *argv: str) -> list[dict]:
    assert bench.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refuses(argv: list[str], words: list[str], capsys) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr with all the words."""
    assert bench.main(argv) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ") and told.err.count("\n") == 1, told.err
    for word in words:
        assert word in told.err
