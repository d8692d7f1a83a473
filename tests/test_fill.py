"""``python -m exlm_mini.fill`` end to end, on runs of a few steps."""

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exlm_mini.config import DataConfig, MaskingConfig, ModelConfig, RunConfig, TrainConfig
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.tokenizer import train_byte_level_bpe, visible
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.fill import main
from exlm_mini.reading.explorer import explorer
from exlm_mini.reading.scene import read_scene
from exlm_mini.reading.trained import encode_row, load, read
from exlm_mini.training.pretraining import Trainer

ROOT = Path(__file__).resolve().parents[1]
TEXT = "the old baker felt [MASK] this morning so his sister [MASK]"


def train(
    output,
    data_directory,
    data,
    model=None,
    objective="exlm",
    strategy="fixed_count",
    warmup=0.0,
):
    """Train a tiny model for three steps, in the layout of ``pretrain``."""
    config = RunConfig(
        objective=objective,
        model=ModelConfig(width=16, num_heads=2, ffn_width=16, **(model or {})),
        masking=MaskingConfig(strategy=strategy),
        data=data,
        train=TrainConfig(
            steps=3,
            batch_size=4,
            save_every=2,
            validation_rows=4,
            device="cpu",
            chain_warmup=warmup,
        ),
    )
    corpus = prepare_corpus(data, data_directory, config.seed)
    slots = ()
    if data.kind == "toy":
        slots = tuple(slot + 1 for slot in grammar(data.grammar).slots)
    output.mkdir(parents=True, exist_ok=True)
    Trainer(config, corpus.train, corpus.validation, output, slots).run()
    return output


TOY = DataConfig(kind="toy", grammar="pairs", num_sentences=64)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A run of one objective."""
    output = tmp_path_factory.mktemp("toy") / "run"
    return train(output, output / "data", TOY, {"states_per_mask": 2, "max_positions": 24})


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A run that trained MLM, then ExLM, in one place."""
    output = tmp_path_factory.mktemp("both") / "run"
    for objective in ("mlm", "exlm"):
        train(output / objective, output / "data", TOY, None, objective, "slots")
    return output


@pytest.fixture(scope="module")
def smiles(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smiles")
    molecules = directory / "some.smi"
    molecules.write_text("".join(f"{'C' * n}C(=O)O\n{'C' * n}CN\n" for n in range(1, 30)))
    data = DataConfig(kind="smiles", files=(str(molecules),), block_length=48)
    return train(directory / "run", directory / "run" / "data", data)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    file = directory / "some.txt"
    file.write_text(
        "\n\n".join(f"The cat number {n} sat on the mat. Déjà vu." for n in range(80))
    )
    data = DataConfig(kind="text", files=(str(file),), block_length=16, vocab_size=300)
    return train(directory / "run", directory / "run" / "data", data, {"boundary": "paper"})


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
    assert [state["mask"] for state in reading["states"]] == [
        None,
        None,
        1,
        1,
        2,
        2,
        None,
        None,
    ]
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


@pytest.mark.parametrize("num_columns", [80, 120])
def test_a_wide_matrix_is_cut_into_blocks_of_columns(both, capsys, monkeypatch, num_columns):
    monkeypatch.setenv("COLUMNS", str(num_columns))
    text = " ".join(["[MASK]"] * 6)
    reading = fill_json(capsys, text, "--run", both)
    _, out, _ = fill(capsys, text, "--run", both)
    lines = out.splitlines()
    matrix = lines[lines.index("Transitions: the row hands over to the column") + 1 :]
    assert max(map(len, matrix)) <= num_columns
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


def test_a_run_of_two_objectives_reads_exlm_and_each_by_name(both, capsys):
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


def test_html_goes_with_json_which_stays_alone_on_stdout(smiles, tmp_path, capsys):
    page = tmp_path / "explorer.html"
    code, out, err = fill(
        capsys, "CC[MASK]C(=O)[MASK]", "--run", smiles, "--html", page, "--json"
    )
    assert (code, err.count("\n")) == (0, 1)
    assert json.loads(out)["objective"] == "exlm"
    assert page.read_text().startswith("<!doctype html>")


def test_html_needs_linked_states(both, tmp_path, capsys):
    page = tmp_path / "explorer.html"
    line = fails(capsys, TEXT, "--run", both / "mlm", "--html", page)
    assert f"{both / 'mlm'} has none (MLM)" in line
    run = train(tmp_path / "ctc", tmp_path / "data", TOY, {"transition": "ctc"})
    assert "ctc transitions" in fails(capsys, TEXT, "--run", run, "--html", page)
    assert not page.exists()


def test_html_that_cannot_be_written_is_one_line(toy, tmp_path, capsys):
    for file, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "explorer.html", "No such file"),
        (toy / "metrics.jsonl" / "explorer.html", "Not a directory"),
        (Path("/dev/full"), "No space left"),
    ):
        line = fails(capsys, TEXT, "--run", toy, "--html", file)
        assert f"cannot write {file} ({why}" in line
    assert "--html" in fails(capsys, TEXT, "--run", toy, "--html")


def test_repeated_mlm_and_ctc_are_read_without_a_path(toy, tmp_path, capsys):
    for name, model, objective, strategy in (
        ("repeated", {}, "repeated-mlm", "bernoulli"),
        ("ctc", {"transition": "ctc"}, "exlm", "fixed_count"),
    ):
        run = train(tmp_path / name, tmp_path / "data", TOY, model, objective, strategy)
        reading = fill_json(capsys, TEXT, "--run", run)
        assert reading["path"] is None
        assert "[MASK]" not in reading["filled"]
        code, out, _ = fill(capsys, TEXT, "--run", run)
        assert code == 0
        assert ("mean over 2 copies" in out) == (objective == "repeated-mlm")
        assert ("Each state" in out) == (objective == "exlm")


def test_a_checkpoint_from_the_chain_warmup_is_read_with_its_chains(tmp_path, capsys):
    model = {"states_per_mask": 2, "boundary": "paper"}
    run = train(tmp_path / "run", tmp_path / "data", TOY, model, warmup=0.5)
    _, out, _ = fill(capsys, TEXT, "--run", run)
    assert "chains" not in out
    shutil.rmtree(run / "checkpoints" / "step-000003")
    _, out, _ = fill(capsys, TEXT, "--run", run)
    assert "still 67% fixed parallel chains" in out
    # Two thirds of the chains' 1, and some of the model's own.
    transition = fill_json(capsys, TEXT, "--run", run)["transition"]
    assert 2 / 3 < transition[1][3] < 1
    assert 2 / 3 < transition[2][4] < 1


def test_smiles_are_filled_without_blanks(smiles, capsys):
    reading = fill_json(capsys, "CC[MASK]C(=O)[MASK]", "--run", smiles)
    first, second = reading["masks"]
    assert reading["filled"] == f"CC{first['text']}C(=O){second['text']}"
    line = fails(capsys, "CC[MASK]C(=O)[Xx]", "--run", smiles)
    assert "'[Xx]'" in line


def test_text_is_filled_with_the_blank_of_the_token(text, capsys):
    reading = fill_json(capsys, "The cat [MASK] on the mat. Déjà", "--run", text)
    assert reading["filled"] == f"The cat{reading['masks'][0]['text']} on the mat. Déjà"
    assert [reading["states"][u]["label"] for u in (0, -1)] == ["BOS", "EOS"]
    code, out, _ = fill(capsys, "The cat\n[MASK] \x1b[31m on", "--run", text)
    assert code == 0
    assert "text    The cat\\n[MASK] \\x1b[31m on" in out.splitlines()


def test_visible_tokens_stay_on_their_line():
    tokenizer = train_byte_level_bpe(["a cat\n a cat"] * 5, 270)
    (blank_a,) = tokenizer.encode(" a")
    (newline,) = tokenizer.encode("\n")
    part, _ = tokenizer.encode("é")
    assert visible(tokenizer, blank_a) == "\u2423a"
    assert visible(tokenizer, newline) == "\\n"
    assert visible(tokenizer, part) == tokenizer.token(part)


def test_the_newest_run_is_the_default(toy, both, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(toy, "runs/newer")
    shutil.copytree(both, "runs/older")
    Path("runs/empty").mkdir()
    for age, name in enumerate(["newer", "older/exlm", "older/mlm"]):
        os.utime(f"runs/{name}/checkpoints", (1e9 - age, 1e9 - age))
    code, out, err = fill(capsys, TEXT)
    assert code == 0
    assert err == "reading the newest run, runs/newer\n"
    assert out.startswith("run     runs/newer, step 3\n")
    os.utime("runs/older/exlm/checkpoints")
    assert fill(capsys, TEXT)[2] == "reading the newest run, runs/older/exlm\n"


def test_a_missing_run_or_checkpoint_is_named(tmp_path, capsys):
    assert "there is no " in fails(capsys, TEXT, "--run", tmp_path / "nowhere")
    assert f"{tmp_path} holds no checkpoints" in fails(capsys, TEXT, "--run", tmp_path)


def test_the_text_is_checked(toy, capsys):
    assert "no [MASK]" in fails(capsys, "the old baker", "--run", toy)
    assert "no [MASK]" in fails(capsys, "", "--run", toy)
    assert "20,000" in fails(capsys, "[MASK]" + "[" * 20_000, "--run", toy)
    line = fails(capsys, "the tired [MASK] felt [mask] tired", "--run", toy)
    assert "'tired', '[mask]'" in line
    assert "'[BOS]'" in fails(capsys, "[BOS] [MASK]", "--run", toy)
    assert "not valid UTF-8" in fails(capsys, "the [MASK] \udce9", "--run", toy)


def test_a_text_too_long_for_the_model_names_both_lengths(toy, capsys):
    # 2 of 13 tokens and both boundaries have one state more: 17 of 24 positions.
    assert fill(capsys, TEXT, "--run", toy)[0] == 0
    longest = f"{TEXT} so so so so so so so"
    assert fill(capsys, longest, "--run", toy)[0] == 0
    line = fails(capsys, f"{longest} so", "--run", toy)
    assert "21 tokens" in line
    assert "25 after expansion" in line
    assert "model.max_positions 24" in line


def test_options_are_checked(toy, capsys):
    assert "--top is 0" in fails(capsys, TEXT, "--run", toy, "--top", 0)
    assert "--top" in fails(capsys, TEXT, "--run", toy, "--top", "many")
    assert "--ran" in fails(capsys, TEXT, "--ran", toy)
    assert "text" in fails(capsys)
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    assert "joint_probability" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_passed_over_or_refused(toy, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(toy, run)
    newest, older = (run / "checkpoints" / f"step-00000{n}" for n in (3, 2))
    for broken, rest in ((newest, 2), (older, None)):
        weights = bytearray((broken / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (broken / "model.safetensors").write_bytes(weights)
        if rest:
            code, out, err = fill(capsys, TEXT, "--run", run)
            assert code == 0
            assert out.startswith(f"run     {run}, step {rest}\n")
            assert err.startswith("skipped checkpoint step-000003")
        else:
            line = fails(capsys, TEXT, "--run", run)
            assert "is intact" in line and "step-000003/model.safetensors is damaged" in line


def test_another_tokenizer_is_refused(toy, smiles, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(toy, run)
    shutil.copy(smiles / "data" / "tokenizer.json", run / "data" / "tokenizer.json")
    assert "is not the tokenizer" in fails(capsys, TEXT, "--run", run)
    (run / "data" / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in fails(capsys, TEXT, "--run", run)


def test_a_run_on_a_shared_corpus_finds_its_tokenizer_there(toy, tmp_path, capsys):
    data = DataConfig(kind="toy", grammar="pairs", pack=str(toy / "data"))
    run = train(tmp_path / "run", tmp_path / "run" / "data", data)
    assert fill_json(capsys, TEXT, "--run", run)["run"] == str(run)


def test_a_checkpoint_of_something_else_is_refused(toy, tmp_path, capsys):
    from exlm_mini.training.checkpoint import save_checkpoint

    save_checkpoint(tmp_path / "checkpoints", 1, {"model": {}}, {"task": "other"})
    assert "a pre-training run" in fails(capsys, TEXT, "--run", tmp_path)


def test_the_command_survives_a_reader_that_leaves(toy):
    # Until the pipe is full nothing breaks, so close it before the first line is written.
    command = [sys.executable, "-m", "exlm_mini.fill", TEXT, "--run", str(toy)]
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        result = subprocess.run(
            command, stdout=write_end, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    finally:
        os.close(write_end)
    assert (result.returncode, result.stderr) == (0, "")


def test_output_fits_any_terminal_encoding(text):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "exlm_mini.fill", "The cat [MASK] on", "--run", str(text)]
    result = subprocess.run(command, env=environment, capture_output=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.isascii()
