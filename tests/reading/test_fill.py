"""``python -m exlm_mini.fill`` end to end, on runs of a few steps."""

import io
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import ended, fails
from tiny_runs import tiny_run

from exlm_mini.fill import main
from exlm_mini.reading.trained import load

TEXT = "the old baker felt [MASK] this morning so his sister [MASK]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder with tiny runs of ExLM on each kind of data, and of the models without edges."""
    folder = tmp_path_factory.mktemp("fill")
    tiny_run(folder / "pairs", "pairs", chain_warmup=0.5, states_per_mask=2, max_positions=24)
    tiny_run(folder / "smiles", "smiles")
    tiny_run(folder / "text", "text", boundary="paper")
    tiny_run(folder / "mlm", "pairs", "mlm")
    tiny_run(folder / "repeated", "pairs", "repeated-mlm")
    tiny_run(folder / "ctc", "pairs", transition="ctc")
    return folder


@pytest.fixture(scope="module")
def toy(runs):
    return runs / "pairs"


def fill(capsys, *arguments):
    """Run the command in this process: exit code, stdout, stderr."""
    return ended(capsys, main, *arguments)


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_shows_the_reading(columns, runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text, run = " ".join(["[MASK]"] * 6), runs / "text"  # its matrix is wider than 80 columns
    filled = load(run).fill(text)
    states, graph = filled.reading.states, filled.reading.graph
    code, out, err = fill(capsys, text, "--run", run, "--top", 3)
    assert (code, err) == (0, "")
    head, matrix = out.split(
        "\nTransitions: probability of going from the row's state to the column's\n"
    )
    lines, path = head.splitlines(), [states.labels[u] for u in graph.path_M]
    assert any(line.startswith(f"path    {path[0]} -> {path[1]} ") for line in lines)
    assert any(line.startswith(f"joint   {filled.probability:.3g} =") for line in lines)
    assert re.findall(r"^  (\S+)\*", head, re.M) == path[1:-1]
    shares = [
        re.findall(r" (\d\.\d\d)(?= |$)", line) for line in lines if re.match(r"  \S", line)
    ]
    assert [len(row) for row in shares] == [3] * (6 + len(states.labels) - 2)
    assert all(row == sorted(row, reverse=True) for row in shares)
    assert max(map(len, matrix.splitlines())) <= columns
    printed = {}
    for header, *rows in (block.splitlines() for block in matrix.split("\n\n")):
        for label, *cells in map(str.split, rows):
            printed |= {(label, c): x for c, x in zip(header.split(), cells, strict=True)}
    for v, row in zip(states.labels, graph.log_transition_LL.exp().tolist(), strict=True):
        for u, probability in zip(states.labels, row, strict=True):
            shown = f"{probability:.2f}".replace("0.00", ".")
            assert printed.get((v, u), ".") == shown


def test_html_is_the_explorer_of_the_reading(toy, tmp_path, capsys):
    page = tmp_path / "explorer.html"
    page.write_text("an older page")
    code, out, err = fill(capsys, TEXT, "--run", toy, "--html", page)
    assert (code, err) == (0, f"wrote {page}; open it in a browser\n")
    assert out == fill(capsys, TEXT, "--run", toy)[1]
    load(toy).explore(TEXT).save(tmp_path / "expected.html", title=TEXT)
    assert page.read_bytes() == (tmp_path / "expected.html").read_bytes()


@pytest.mark.parametrize(
    ("name", "kind"), [("mlm", "MLM"), ("repeated", "2 copies"), ("ctc", "ctc transitions")]
)
def test_models_without_links_are_read_without_a_path(name, kind, runs, capsys):
    code, out, _ = fill(capsys, TEXT, "--run", runs / name)
    assert code == 0 and kind in out and "Transitions" not in out and "path " not in out
    assert ("Each state" in out) == (name == "ctc")
    page = runs / f"{name}.html"
    if name == "ctc":
        fails(capsys, main, TEXT, "--run", runs / name, "--html", page, parts=["linked states"])
        assert not page.exists()
    else:  # each mask has one state, which leads to the next mask
        assert fill(capsys, TEXT, "--run", runs / name, "--html", page)[0] == 0
        assert page.exists()


def test_a_checkpoint_from_the_chain_warmup_is_read_with_its_chains(toy, capsys):
    assert "chains" not in fill(capsys, TEXT, "--run", toy)[1]
    step = toy / "checkpoints" / "step-000002"
    assert "still 67% fixed parallel chains" in fill(capsys, TEXT, "--run", step)[1]
    graph = load(step).fill(TEXT).reading.graph
    is_chain_LL = graph.log_transition_LL.exp() > 2 / 3
    assert is_chain_LL.sum() == 4  # 1.j to 2.j and 2.j to EOS.2, for both clones j


def test_words_come_with_their_blanks_and_symbols_without(runs, capsys):
    for run, text in (("smiles", "CC[MASK]C(=O)[MASK]"), ("text", "The cat [MASK] on. Déjà")):
        trained = load(runs / run)
        filled = trained.fill(text)
        for token_id in filled.reading.token_ids_S.tolist():
            text = re.sub(r" ?\[MASK\]", trained.tokenizer.decode([token_id]), text, count=1)
        assert filled.text == text
    _, out, _ = fill(capsys, "The cat\n[MASK] \x1b[31m on", "--run", runs / "text")
    assert "text    The cat\\n[MASK] \\x1b[31m on" in out.splitlines()


def test_the_newest_run_is_the_default(runs, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy, "runs/newer")
    shutil.copytree(runs / "mlm", "runs/older")
    Path("runs/empty").mkdir()
    for age, name in enumerate(["newer", "older"]):
        os.utime(f"runs/{name}/checkpoints", (1e9 - age, 1e9 - age))
    code, out, err = fill(capsys, TEXT)
    assert (code, err) == (0, "reading the newest run, runs/newer\n")
    assert out.startswith("run     runs/newer, step 3\n")
    os.utime("runs/older/checkpoints")
    assert fill(capsys, TEXT)[2] == "reading the newest run, runs/older\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["the old baker"], "no [MASK]"),
        (["the tired [MASK] felt [mask] tired"], "'tired', '[mask]'"),
        (["[BOS] [MASK]"], "'[BOS]'"),
        (["the [MASK] \udce9"], "UTF-8"),
        # Two masks and two boundaries have one extra state each: 21 tokens take 25 positions of 24.
        ([f"{TEXT} so so so so so so so so"], "21 tokens with [BOS] and [EOS], 25 after"),
        ([TEXT, "--run", "nowhere"], "there is no checkpoint in nowhere"),
        ([TEXT, "--top", 0], "--top: it is '0'"),
        ([TEXT, "--ran", "x"], "--ran"),
        ([TEXT, "--html", "no/explorer.html"], "there is no folder no; create it"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fails(capsys, main, "--run", toy, *arguments, parts=[words])


def test_another_tokenizer_is_refused(toy, runs, tmp_path, capsys):
    step = tmp_path / "step"
    shutil.copytree(toy / "checkpoints" / "step-000003", step)
    assert fill(capsys, TEXT, "--run", step)[0] == 0
    shutil.copy(runs / "smiles" / "data" / "tokenizer.json", step)
    fails(capsys, main, TEXT, "--run", step, parts=["does not belong to the model"])


def test_output_fits_any_terminal_encoding(runs, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["D\u00e9j\u00e0 [MASK] vu", "--run", str(runs / "text")]) == 0
    assert b"D\\xe9j\\xe0" in raw.getvalue()
