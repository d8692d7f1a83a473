"""``python -m exlm_mini.fill`` end to end, on runs of a few steps."""

import io
import itertools
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import DATA, tiny_run

from exlm_mini.fill import main
from exlm_mini.reading.explorer import explorer
from exlm_mini.reading.scene import read_scene
from exlm_mini.reading.trained import encode_row, load, read

TEXT = "the old baker felt [MASK] this morning so his sister [MASK]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Tiny runs: of ExLM in each language, and one of MLM and ExLM in turn."""
    folder = tmp_path_factory.mktemp("fill")
    tiny_run(folder / "pairs", "pairs", states_per_mask=2, max_positions=24)
    tiny_run(folder / "smiles", "smiles")
    tiny_run(folder / "text", "text", boundary="paper")
    for objective in ("mlm", "exlm"):
        tiny_run(folder / "both" / objective, "pairs", objective)
    return folder


@pytest.fixture(scope="module")
def toy(runs):
    return runs / "pairs"


def fill(capsys, *arguments):
    """Run the command in this process: exit code, stdout, stderr."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def fill_json(capsys, *arguments):
    code, out, err = fill(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


def fails(capsys, *arguments):
    """The one line a mistake gets."""
    code, out, err = fill(capsys, *arguments)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


def test_json_tells_the_whole_reading(toy, capsys):
    reading = fill_json(capsys, TEXT, "--run", toy, "--top", 3)
    assert (reading["run"], reading["step"], reading["objective"]) == (str(toy), 3, "exlm")
    assert reading["text"] == TEXT
    first, second = reading["masks"]
    assert reading["filled"] == TEXT.replace("[MASK]", first["text"], 1).replace(
        "[MASK]", second["text"]
    )
    assert (first["mask"], second["mask"]) == (1, 2)
    labels = [state["label"] for state in reading["states"]]
    assert labels == ["BOS.1", "BOS.2", "1.1", "1.2", "2.1", "2.2", "EOS.1", "EOS.2"]
    owners = [state["mask"] for state in reading["states"]]
    assert owners == [None, None, 1, 1, 2, 2, None, None]
    assert [state["clone"] for state in reading["states"]] == [1, 2] * 4
    for entry in reading["masks"] + reading["states"]:
        probabilities = [token["probability"] for token in entry["top"]]
        assert len(probabilities) == 3
        assert probabilities == sorted(probabilities, reverse=True)
    # The path's probability, again from what is printed.
    path = [labels.index(label) for label in reading["path"]]
    assert (path[0], path[-1], len(path)) == (0, len(labels) - 1, 4)
    product = 1.0
    for v, u in itertools.pairwise(path):
        product *= reading["transition"][v][u]
    for u, mask in zip(path[1:-1], reading["masks"], strict=True):
        assert mask["id"] == reading["states"][u]["top"][0]["id"]
        product *= reading["states"][u]["top"][0]["probability"]
    assert reading["path_probability"] == pytest.approx(product, rel=1e-5)
    assert reading["path_probability"] <= reading["joint_probability"] * (1 + 1e-6)
    assert reading["joint_probability"] <= reading["fit_probability"] * (1 + 1e-6)
    assert reading["joint_bits"] == pytest.approx(-math.log2(reading["joint_probability"]))


def test_table_shows_what_json_tells(toy, capsys):
    code, out, err = fill(capsys, TEXT, "--run", toy)
    assert (code, err) == (0, "")
    reading = fill_json(capsys, TEXT, "--run", toy)
    lines = out.splitlines()
    assert f"filled  {reading['filled']}" in lines
    words = [f"{label} {mask['text']}" for label, mask in zip(
        reading["path"][1:-1], reading["masks"], strict=True)]  # fmt: skip
    assert f"path    {' -> '.join([reading['path'][0], *words, reading['path'][-1]])}" in lines
    assert any(
        line.startswith(f"joint   {reading['joint_probability']:.3g} =") for line in lines
    )
    matrix = lines[lines.index("Transitions: the row hands over to the column") + 1 :]
    assert matrix[0].split() == [state["label"] for state in reading["states"]]
    for line, state, row in zip(
        matrix[1:], reading["states"], reading["transition"], strict=True
    ):
        cells = ["." if f"{p:.2f}" == "0.00" else f"{p:.2f}" for p in row]
        assert line.split() == [state["label"], *cells]
    is_starred = [line.split()[0] for line in lines if line.split()[:1] and "*" in line[:20]]
    assert is_starred == [f"{label}*" for label in reading["path"][1:-1]]


def test_a_wide_matrix_is_cut_into_blocks_of_columns(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = " ".join(["[MASK]"] * 6)
    reading = fill_json(capsys, text, "--run", runs / "both")
    _, out, _ = fill(capsys, text, "--run", runs / "both")
    lines = out.splitlines()
    matrix = lines[lines.index("Transitions: the row hands over to the column") + 1 :]
    assert 70 < max(map(len, matrix)) <= 80
    blocks = [block.splitlines() for block in "\n".join(matrix).split("\n\n")]
    assert len(blocks) > 1
    labels = [state["label"] for state in reading["states"]]
    assert [label for block in blocks for label in block[0].split()] == labels
    printed = {}
    for header, *rows in blocks:
        for row in rows:
            label, *cells = row.split()
            printed |= {(label, c): x for c, x in zip(header.split(), cells, strict=True)}
    for v, row in zip(labels, reading["transition"], strict=True):
        for u, probability in zip(labels, row, strict=True):
            shown = printed.get((v, u), ".")
            assert shown == ("." if f"{probability:.2f}" == "0.00" else f"{probability:.2f}")


def test_a_run_of_two_objectives_reads_exlm_and_each_by_name(runs, capsys):
    both = runs / "both"
    assert fill_json(capsys, TEXT, "--run", both)["objective"] == "exlm"
    reading = fill_json(capsys, TEXT, "--run", both / "mlm")
    assert reading["objective"] == "mlm"
    assert reading["states"] is reading["path"] is reading["transition"] is None
    product = math.prod(mask["top"][0]["probability"] for mask in reading["masks"])
    assert reading["joint_probability"] == pytest.approx(product, rel=1e-5)
    code, out, _ = fill(capsys, TEXT, "--run", both / "mlm")
    assert code == 0
    assert "Transitions" not in out
    assert "path" not in out


def test_html_is_the_explorer_of_the_reading(toy, tmp_path, capsys):
    page = tmp_path / "explorer.html"
    page.write_text("an older page")
    code, out, err = fill(capsys, TEXT, "--run", toy, "--html", page)
    assert (code, err) == (0, f"wrote {page}; open it in a browser\n")
    assert out == fill(capsys, TEXT, "--run", toy)[1]  # what is printed stays the same
    loaded = load(toy)
    row_BN = encode_row(loaded, TEXT)
    scene = read_scene(read(loaded, row_BN), loaded.tokenizer, row_BN)
    explorer(scene).save(tmp_path / "expected.html", title=TEXT)
    assert page.read_bytes() == (tmp_path / "expected.html").read_bytes()
    assert f"<title>{TEXT}</title>" in page.read_text()


def test_html_goes_with_json_which_stays_alone_on_stdout(toy, tmp_path, capsys):
    page = tmp_path / "explorer.html"
    code, out, err = fill(capsys, TEXT, "--run", toy, "--html", page, "--json")
    assert (code, err.count("\n")) == (0, 1)
    assert json.loads(out)["objective"] == "exlm"
    assert page.read_text().startswith("<!doctype html>")


def test_models_without_links_are_read_without_a_path_or_a_page(tmp_path, capsys):
    for objective, kind in (("repeated-mlm", "2 copies"), ("exlm", "ctc transitions")):
        run = tiny_run(tmp_path / objective, "pairs", objective, transition="ctc")
        reading = fill_json(capsys, TEXT, "--run", run)
        assert reading["path"] is None
        assert "[MASK]" not in reading["filled"]
        code, out, _ = fill(capsys, TEXT, "--run", run)
        assert code == 0
        assert ("mean over 2 copies" in out) == (objective == "repeated-mlm")
        assert ("Each state" in out) == (objective == "exlm")
        page = tmp_path / "explorer.html"
        line = fails(capsys, TEXT, "--run", run, "--html", page)
        assert str(run) in line and kind in line
        assert not page.exists()


def test_a_checkpoint_from_the_chain_warmup_is_read_with_its_chains(tmp_path, capsys):
    model = {"states_per_mask": 2, "boundary": "paper"}
    run = tiny_run(tmp_path / "run", "pairs", chain_warmup=0.5, **model)
    _, out, _ = fill(capsys, TEXT, "--run", run)
    assert "chains" not in out
    shutil.rmtree(run / "checkpoints" / "step-000003")
    _, out, _ = fill(capsys, TEXT, "--run", run)
    assert "still 67% fixed parallel chains" in out
    # Two thirds of the chains' 1, and some of the model's own.
    transition = fill_json(capsys, TEXT, "--run", run)["transition"]
    assert 2 / 3 < transition[1][3] < 1
    assert 2 / 3 < transition[2][4] < 1


def test_smiles_are_filled_without_blanks(runs, capsys):
    smiles = runs / "smiles"
    reading = fill_json(capsys, "CC[MASK]C(=O)[MASK]", "--run", smiles)
    first, second = reading["masks"]
    assert reading["filled"] == f"CC{first['text']}C(=O){second['text']}"
    line = fails(capsys, "CC[MASK]C(=O)[Xx]", "--run", smiles)
    assert "'[Xx]'" in line


def test_text_is_filled_with_the_blank_of_the_token(runs, capsys):
    text = runs / "text"
    reading = fill_json(capsys, "The cat [MASK] on the mat. Déjà", "--run", text)
    assert reading["filled"] == f"The cat{reading['masks'][0]['text']} on the mat. Déjà"
    assert [reading["states"][u]["label"] for u in (0, -1)] == ["BOS", "EOS"]
    code, out, _ = fill(capsys, "The cat\n[MASK] \x1b[31m on", "--run", text)
    assert code == 0
    assert "text    The cat\\n[MASK] \\x1b[31m on" in out.splitlines()


def test_the_newest_run_is_the_default(runs, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy, "runs/newer")
    shutil.copytree(runs / "both", "runs/older")
    Path("runs/empty").mkdir()
    for age, name in enumerate(["newer", "older/exlm", "older/mlm"]):
        os.utime(f"runs/{name}/checkpoints", (1e9 - age, 1e9 - age))
    code, out, err = fill(capsys, TEXT)
    assert code == 0
    assert err == "reading the newest run, runs/newer\n"
    assert out.startswith("run     runs/newer, step 3\n")
    os.utime("runs/older/exlm/checkpoints")
    assert fill(capsys, TEXT)[2] == "reading the newest run, runs/older/exlm\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["the old baker"], "no [MASK]"),
        (["[MASK]" + "[" * 20_000], "20,000"),
        (["the tired [MASK] felt [mask] tired"], "'tired', '[mask]'"),
        (["[BOS] [MASK]"], "'[BOS]'"),
        (["the [MASK] \udce9"], "UTF-8"),
        ([TEXT, "--run", "nowhere"], "there is no checkpoint in nowhere"),
        ([TEXT, "--top", 0], "--top is 0"),
        ([TEXT, "--ran", "x"], "--ran"),
        ([TEXT, "--html", "no/explorer.html"], "no/explorer.html (No such file"),
    ],
)
def test_a_mistake_is_one_line(arguments, words, toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert words in fails(capsys, "--run", toy, *arguments)


def test_a_text_too_long_for_the_model_names_both_lengths(toy, capsys):
    # 2 of 13 tokens and both boundaries have one state more: 17 of 24 positions.
    assert fill(capsys, TEXT, "--run", toy)[0] == 0
    longest = f"{TEXT} so so so so so so so"
    assert fill(capsys, longest, "--run", toy)[0] == 0
    line = fails(capsys, f"{longest} so", "--run", toy)
    assert "21 tokens" in line
    assert "25 after expansion" in line
    assert "model.max_positions 24" in line


def test_another_tokenizer_is_refused(toy, runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(toy, run)
    shutil.copy(runs / "smiles" / "data" / "tokenizer.json", run / "data" / "tokenizer.json")
    assert "is not the tokenizer" in fails(capsys, TEXT, "--run", run)
    (run / "data" / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in fails(capsys, TEXT, "--run", run)


def test_a_run_on_a_shared_corpus_finds_its_tokenizer_there(toy, tmp_path, capsys):
    data = replace(DATA["pairs"], pack=str(toy / "data"))
    run = tiny_run(tmp_path / "run", "pairs", data=data)
    shutil.rmtree(run / "data", ignore_errors=True)
    assert fill_json(capsys, TEXT, "--run", run)["run"] == str(run)


def test_output_fits_any_terminal_encoding(runs, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["D\u00e9j\u00e0 [MASK] vu", "--run", str(runs / "text")]) == 0
    assert b"D\\xe9j\\xe0" in raw.getvalue()
