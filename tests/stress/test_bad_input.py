"""Whatever the input, every command ends in one line of error or in what was asked for."""

import gzip
import importlib
import json
import lzma
import pickle
import shutil
from pathlib import Path

import pytest
from commands import contents, ended, main_of
from corpus_files import write_lmdb
from glue_files import write_task
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from squad_files import PETS
from tiny_runs import tiny_run, write_molecules

from exlm_mini.config.checks import UserError
from exlm_mini.data.text import file_documents
from exlm_mini.data.tokenizer import train_byte_level_bpe

pytestmark = pytest.mark.reliability
MOLECULES = ["CCO", "c1ccccc1O", "C[C@H](N)C(=O)O", "CCN", "CC(=O)O", "C1CC1"]
SENTENCES = [
    "the cell of a cat",
    "of a \u00e9 dog",
    'said "yes", twice',
    "and no cell is a dog",
]
RUN = """--recipe toy-pairs --objective exlm --data.num_sentences 64 --data.grammar town
    --model.num_layers 1 --model.width 16 --model.num_heads 2 --model.ffn_width 16 --train.steps 2
    --train.batch_size 4 --train.warmup_steps 1 --train.validation_rows 4 --train.save_every 1
    --train.log_every 1 --train.validate_every 1 --train.device cpu --train.num_threads 1"""
CORPUS = """--workers 1 --data.vocab_size 300 --data.block_length 8 --data.max_rejected 1
    --data.validation_share 0.3 --data.max_unknown 1"""
TASKS = (
    ("bbbp", "smiles", "molecules"), ("rte", "text", "glue"), ("squad_v2", "text", "squad"),
)  # fmt: skip
"""Tasks: name, kind of data of the model, folder of the files."""
RESULTS = Path(__file__).parents[2] / "book" / "results"


def ends(command, argv, capsys):
    """Run a command; return 0 if it did its work, 2 if it ended in one line of error."""
    try:
        code, _, err = ended(capsys, main_of(command), *argv)
    except SystemExit as end:  # --help
        code, err = end.code, ""
    print(err)  # pytest shows it if the test fails
    assert code in (0, 2) and "Traceback" not in err, (command, argv)
    told = [line for line in err.split("\n") if line.startswith("error: ")]
    assert len(told) == (code == 2), (command, argv)
    assert all(line.isprintable() and len(line) < 2000 for line in told), told
    return code


# ---- damaged files ----


def write_documents(folder):
    """Write a file of each kind that ``prepare`` reads."""
    import pandas

    for name, column, rows in (("t", "text", SENTENCES), ("m", "smiles", MOLECULES)):
        table = pandas.DataFrame({column: rows})
        table.to_csv(folder / f"{name}.csv", index=False)
        table.to_json(folder / f"{name}.jsonl", orient="records", lines=True)
        table.to_parquet(folder / f"{name}.parquet")
        (folder / f"{name}.txt").write_text("\n\n".join(rows))
    (folder / "m.smi").write_text("\n".join(MOLECULES))
    (folder / "t.txt.gz").write_bytes(gzip.compress((folder / "t.txt").read_bytes(), mtime=0))
    (folder / "t.csv.xz").write_bytes(lzma.compress((folder / "t.csv").read_bytes()))
    write_lmdb(folder / "m.lmdb", [pickle.dumps({"smi": smiles}) for smiles in MOLECULES])


def kind_of(path):
    return "smiles" if path.name.startswith("m.") else "text"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with every kind of file that a command reads."""
    pytest.importorskip("rdkit")
    pytest.importorskip("lmdb")
    folder = tmp_path_factory.mktemp("files")
    (folder / "documents").mkdir()
    write_documents(folder / "documents")
    (folder / "recipe.yaml").write_text("model:\n  width: 16\ndata: {kind: smiles}\nseed: 3\n")
    train_byte_level_bpe(SENTENCES, 270).save(folder / "tokenizer.json")
    for name in ("molecules", "squad"):
        (folder / name).mkdir()
    write_molecules(folder / "molecules")
    write_task(folder / "glue", "rte")
    for name in ("train-v2.0.json", "dev-v2.0.json"):
        (folder / "squad" / name).write_text(json.dumps(PETS))
    (folder / "sweeps").mkdir()
    shutil.copy(RESULTS / "ablations.jsonl", folder / "sweeps")
    assert main_of("pretrain")([*RUN.split(), "--output", str(folder / "run")]) == 0
    for kind in ("text", "smiles"):
        tiny_run(folder / kind, kind)
    return folder


def uses(folder):
    """The commands that read each file below ``folder``, by the path of the file."""
    out, run = folder / "out", folder / "run"
    prepare = ["--output", out, *CORPUS.split(), "--source"]
    tune = ["--dry-run", "--output", out, "--max-unknown", 1, "--device", "cpu"]
    commands = {
        path: [("prepare", [*prepare, path, "--data.kind", kind_of(path)])]
        for path in (folder / "documents").iterdir()
    }
    text = folder / "documents" / "t.txt"
    tokenizer = folder / "tokenizer.json"
    commands[tokenizer] = [("prepare", [*prepare, text, "--data.tokenizer", tokenizer])]
    recipe = folder / "recipe.yaml"
    commands[recipe] = [("pretrain", ["--recipe", recipe, "--dry-run"])]
    for task, kind, name in TASKS:
        argv = [*tune, "--checkpoint", folder / kind, "--task", task, "--data", folder / name]
        commands |= {path: [("finetune", argv)] for path in (folder / name).rglob("*.*")}
    records = folder / "sweeps" / "ablations.jsonl"
    commands[records] = [("sweep", ["ablations", "--report", "--output", records.parent])]
    of_runs = [
        ("pretrain", [*RUN.split(), "--output", run]),
        ("fill", ["[MASK] [MASK]", "--run", run]),
        ("export", [run, out]),
        ("plot", [run, "--output", folder / "out.svg"]),
        ("finetune", [*tune, "--checkpoint", run, "--task", "toy-inference"]),
    ]
    return commands | {path: of_runs for path in run.rglob("*.*") if path.is_file()}


@st.composite
def damages(draw):
    """A function that spoils bytes in one of the ways a disk, a copy or an editor does."""
    place, size = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 20))
    way = draw(st.sampled_from(["flip", "over", "drop", "cut", "twice", "more"]))
    some = draw(st.binary(min_size=1, max_size=20))

    def spoil(content):
        at = int(place * len(content))
        before, piece, after = content[:at], content[at : at + size], content[at + size :]
        new = {"flip": bytes([content[at] ^ 1 << size % 8]) + content[at + 1 : at + size]}
        new |= {"over": some, "drop": b"", "cut": b"", "twice": piece * 2, "more": some + piece}
        return before + new[way] + (b"" if way == "cut" else after)

    return spoil


@pytest.mark.slow
def test_whole_files_are_read(files, tmp_path, capsys):
    folder = tmp_path / "files"
    num_uses = len({str(use) for some in uses(files).values() for use in some})
    for place in range(num_uses):
        shutil.copytree(files, folder)
        every = {str(use): use for some in uses(folder).values() for use in some}
        command, argv = list(every.values())[place]
        assert ends(command, argv, capsys) == 0, (command, argv)
        shutil.rmtree(folder)


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_damaged_file_is_read_right_or_told(files, tmp_path_factory, capsys, data):
    folder = tmp_path_factory.mktemp("damaged") / "files"
    shutil.copytree(files, folder)
    commands = uses(folder)
    # LMDB maps its file into memory, where a wrong page number kills the process.
    commands.pop(folder / "documents" / "m.lmdb")
    path = data.draw(st.sampled_from(sorted(commands)))
    command, argv = data.draw(st.sampled_from(commands[path]))
    if content := path.read_bytes():
        path.write_bytes(data.draw(damages())(content))
    before = contents(folder)
    if ends(command, argv, capsys) == 2:
        after = contents(folder)
        assert {name: after.get(name) for name in before} == before
        assert not (folder / "out" / "corpus.json").exists()
    shutil.rmtree(folder.parent)


# ---- documents that nobody wrote ----

PIECES = [
    "C", "c1ccccc1", "C(", ")", "[", "]", "%(5", "1", ".", "=", "[MASK]", "\0", "\ud800", "\ufeff",
    "\u2028", "\r", "\x85", "\x1b[2J", "{", '"', ",", "\\", "the ", "\u00e9",
]  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


def read_or_told(path):
    """Assert that a file gives documents, or an error of one line."""
    try:
        documents = list(file_documents(path, kind_of(path)))
    except UserError as error:
        assert str(error).isprintable() and len(str(error)) <= 1000
    else:
        assert all(isinstance(text, str) and text.strip() == text != "" for text in documents)


@settings(max_examples=150)
@given(
    st.sampled_from(["t.txt", "m.smi", "m.csv", "t.csv", "t.jsonl", "m.jsonl"]),
    st.lists(st.tuples(st.sampled_from(PIECES), st.sampled_from([1, 3, 200])), max_size=6),
)
def test_odd_text_is_read_or_told(tmp_path_factory, name, pieces):
    path = tmp_path_factory.mktemp("odd") / name
    content = "text\n" * name.endswith("csv") + "".join(piece * n for piece, n in pieces)
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    read_or_told(path)


@settings(max_examples=100)
@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from(["text", "body"]))
@example([10**30], "text")
def test_odd_cells_are_read_or_told(tmp_path_factory, values, column):
    path = tmp_path_factory.mktemp("odd") / "t.jsonl"
    path.write_text("\n".join(json.dumps({column: value}) for value in values))
    read_or_told(path)


@settings(max_examples=50)
@given(damages(), VALUES)
def test_odd_entries_of_lmdb_are_read_or_told(tmp_path_factory, spoil, value):
    pytest.importorskip("lmdb")
    path = tmp_path_factory.mktemp("odd") / "m.lmdb"
    values = [pickle.dumps({"smi": "CCO"}), pickle.dumps({"smi": value}), pickle.dumps(value)]
    write_lmdb(path, [*values, spoil(values[0])])
    read_or_told(path)
    shutil.rmtree(path.parent)


# ---- the command line ----

WORDS = [
    "", " ", "x", "a\nb", "-1", "0", "1", "7", "2147483648", "9" * 400, "1e9", "1e400", "nan",
    "inf", "-inf", "0.5", "1_000", "1:30", "0x10", "\u0661", "null", "true", "auto", "cuda:99",
    "mlm", "text-tiny", "hub:x", "../..", "[a", "{}", "%s", "\u202e", "not/there.txt",
]  # fmt: skip


def plans(folder):
    """A command line of each command, with little to do."""
    run = folder / "run"
    return {
        "pretrain": ["--dry-run", "--recipe", "toy-pairs"],
        "prepare": ["--dry-run", "--source", "zinc"],
        "fill": ["[MASK] [MASK]", "--run", run],
        "export": [run, "exported"],
        "plot": [run, "--output", "curves.svg"],
        "finetune": ["--dry-run", "--checkpoint", run, "--task", "toy-inference"],
        "sweep": ["--list", "ablations"],
        "bench": ["dag", "--device", "cpu", "--threads", "1", "--shape", "2,4,8"],
    }


def options_of(command):
    """All options of a command but ``--debug``, which prints the traceback that must not appear."""
    if command == "export":
        return ["--help"]
    name = "exlm_mini.config.options" if command == "pretrain" else main_of(command).__module__
    parser = importlib.import_module(name)._parser()
    if command == "bench":
        parser = parser._subparsers._group_actions[0].choices["dag"]
    return [option for option in parser._option_string_actions if option != "--debug"]


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_an_odd_word_is_taken_or_told(files, tmp_path_factory, monkeypatch, capsys, data):
    command, argv = data.draw(st.sampled_from(list(plans(files).items())))
    word = data.draw(st.sampled_from(WORDS))
    if data.draw(st.booleans()):
        option = data.draw(st.sampled_from(options_of(command)))
        argv = [*argv, *data.draw(st.sampled_from([[option, word], [f"{option}={word}"]]))]
    else:
        place = data.draw(st.integers(0, len(argv) - 1))
        argv = [*argv[:place], word, *argv[place + 1 :]]
    folder = tmp_path_factory.mktemp("empty")
    monkeypatch.chdir(folder)
    before = contents(files)
    if ends(command, argv, capsys) == 2:
        assert not contents(folder), argv
    assert contents(files) == before, argv
