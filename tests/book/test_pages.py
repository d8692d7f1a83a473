"""The programs on pages of the book run as they are, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_runs import tiny_run

BOOK = Path(__file__).resolve().parents[2] / "book"


@pytest.mark.parametrize("name", ["python", "decoding", "transformers"])
def test_a_page_runs_and_prints_what_it_shows(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if name == "python":
        tiny_run(Path("runs/molecules"), "smiles")
    page, names = (BOOK / f"{name}.md").read_text(), {"__name__": name}
    programs = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", page, re.S)
    for code, output in programs:
        capsys.readouterr()
        exec(compile(code, name, "exec"), names)
        assert capsys.readouterr().out.endswith(output)
