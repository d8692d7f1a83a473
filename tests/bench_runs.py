"""What tests of the benchmarks share."""

from __future__ import annotations

import json
from pathlib import Path

from exlm_lab import bench
from exlm_mini.alignment import BACKENDS
from exlm_mini.config import ModelConfig


def working() -> set[str]:
    """Backends that work on a CPU; the first call may build one."""
    return {name for name in BACKENDS if BACKENDS[name].why_not("cpu") is None}


def tiny_model(**settings) -> ModelConfig:
    return ModelConfig(num_layers=1, width=16, ffn_width=32, num_heads=2, **settings)


def records_of(path: Path, *argv: str) -> list[dict]:
    """What a benchmark writes to ``path / "bench.json"``."""
    output = path / "bench.json"
    assert bench.main([*argv, "--output", str(output)]) == 0
    return json.loads(output.read_text())


def refuses(argv: list[str], words: list[str], capsys) -> None:
    """Exit code 2, nothing on stdout, and one line on stderr with all the words."""
    assert bench.main(argv) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: ") and told.err.count("\n") == 1, told.err
    for word in words:
        assert word in told.err
