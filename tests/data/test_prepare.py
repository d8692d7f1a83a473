"""``exlm_mini.prepare``: the same packs however often it is stopped, with any number of workers."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from commands import contents, fails, succeeds
from corpus_files import write_hub_copy, write_text
from refusals import told

from exlm_mini.config import DataConfig
from exlm_mini.data import pipeline, shards, sources
from exlm_mini.data.corpus import open_corpus, prepare_corpus
from exlm_mini.data.files import refused
from exlm_mini.data.molecules import Cleaning
from exlm_mini.data.shards import hash_of
from exlm_mini.data.tokenizer import Tokenizer, train_byte_level_bpe
from exlm_mini.prepare import main

TEXT = DataConfig(vocab_size=300, block_length=16, validation_share=0.2)


def prepare(data, directory, seed=1, **options):
    return prepare_corpus(data, directory, seed, **options)


def counts_of(pack):
    return json.loads(pack.path.read_text())["counts"]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 2500)
    monkeypatch.setattr(shards, "NUM_AT_ONCE", 9)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Settings with two text files, which are one source."""
    folder = tmp_path_factory.mktemp("data")
    files = write_text(folder / "a.txt"), write_text(folder / "b.txt", 150, seed=1)
    return replace(TEXT, source=files)


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    """A corpus of ``data``, made without a stop, in shards of the usual size: one per file."""
    corpus = prepare(data, tmp_path_factory.mktemp("undisturbed"))
    return contents(corpus.train.path.parent)


@pytest.fixture
def stopped_after(monkeypatch):
    """A function that interrupts another after ``n`` renamed files, and returns whether it did."""

    def run(n, function):
        left = iter(range(n))

        def rename(*paths, original=os.rename):
            if next(left, None) is None:
                raise KeyboardInterrupt
            original(*paths)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, "rename", rename)
            function()
            return False
        return True

    return run


# ---- stopping and resuming ----


@pytest.mark.reliability
def test_a_run_stopped_anywhere_goes_on_to_the_same_bytes(
    data, tmp_path, undisturbed, stopped_after
):
    output = tmp_path / "stopped"
    stops = 0
    while stopped_after(stops, lambda: prepare(data, output)):
        assert not (output / "corpus.json").exists()
        stops += 1
        (output / f"train.bin.{stops}.partial").write_bytes(b"killed while it was written")
        (output / "train.offsets.bin").write_bytes(b"of molecules, in an earlier call")
    assert stops > 5 and not (output / ".shards").exists()
    assert contents(output) == undisturbed


@pytest.mark.parametrize("what", ["source", "given", "seed", "share", "vocabulary"])
def test_a_shard_of_something_else_is_made_again(tmp_path, what, stopped_after):
    """A run is stopped and the file or a setting changes: the result must be that of a new run."""
    path, seed = tmp_path / "a.txt", 1
    data = replace(TEXT, source=(write_text(path),))
    if what == "given":  # the tokenizer stays the same, whatever the file
        train_byte_level_bpe(["a b", "c d"], 270).save(tmp_path / "tokenizer.json")
        data = replace(data, tokenizer=str(tmp_path / "tokenizer.json"))
    assert stopped_after(7, lambda: prepare(data, tmp_path / "c"))
    if what in ("source", "given"):  # other text of the same size
        path.write_text(path.read_text().swapcase())
    elif what == "seed":
        seed = 2
    else:
        other = {"validation_share": 0.4} if what == "share" else {"vocab_size": 310}
        data = replace(data, **other)
    prepare(data, tmp_path / "c", seed)
    prepare(data, tmp_path / "new", seed)
    assert contents(tmp_path / "c") == contents(tmp_path / "new")


@pytest.mark.reliability
@pytest.mark.parametrize("room", [0, 100, 3_000, 12_000])
def test_a_full_disk_loses_no_finished_shard(data, tmp_path, undisturbed, room):
    """A limit on the size of files imitates a full disk: the same call fails, with an OSError."""
    output, limits = tmp_path / "c", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError) as full:
            prepare(data, output)
        assert "free some space" in str(refused(full.value))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(output.rglob("*.partial")) and not list(output.rglob("tmp*"))
    prepare(data, output)
    assert contents(output) == undisturbed


def test_a_shard_holds_whole_documents_up_to_its_size(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_BYTES", 4)
    cut = shards._cut(["ab", " ", " cd\n", "e", "", "fghij", "klmn"])
    assert list(cut) == [["ab", "cd"], ["e", "fghij"], ["klmn"]]


# ---- workers, which only molecules use ----


@pytest.fixture
def molecules(tmp_path):
    """Settings for 404 molecules, of which some are rejected or can be cleaned."""
    pytest.importorskip("rdkit")
    from exlm_mini.data.molecules import embedded_molecules

    lines = [*islice(embedded_molecules(), 400), "nonsense", "C1CC", "CCO.[Na+]", "C[C@H](N)O"]
    (tmp_path / "a.smi").write_text("\n".join(f"{line} {i}" for i, line in enumerate(lines)))
    return DataConfig(
        kind="smiles", source=(str(tmp_path / "a.smi"),), block_length=40, validation_share=0.2,
        max_rejected=0.1,
    )  # fmt: skip


def test_the_packs_do_not_depend_on_the_number_of_workers(molecules, tmp_path):
    for num_workers in (1, 2, 3):
        prepare(molecules, tmp_path / str(num_workers), num_workers=num_workers)
        assert contents(tmp_path / str(num_workers)) == contents(tmp_path / "1")


def test_a_worker_that_dies_is_told(molecules, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "clean", dies)
    told(
        lambda: prepare(molecules, tmp_path / "c", num_workers=2),
        "died", "run the same command again",
    )  # fmt: skip


def dies(*_):
    os._exit(1)


def test_no_worker_outlives_its_parent(molecules, tmp_path):
    program = (
        "import sys, time; from exlm_mini.config import DataConfig\n"
        "from exlm_mini.data import corpus, shards\n"
        "shards.clean = lambda *_: print(1, flush=True) or time.sleep(3600)\n"
        "data = DataConfig(kind='smiles', source=(sys.argv[1],))\n"
        "corpus.prepare_corpus(data, sys.argv[2], 1, num_workers=2)"
    )
    command = [sys.executable, "-c", program, molecules.source[0], tmp_path / "c"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout.readline().startswith(b"1")
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=60)  # ends when no process holds the pipe any more


# ---- what the packs hold ----


def test_the_rows_are_the_text_of_one_side_by_its_hash(tmp_path):
    path = write_text(tmp_path / "a.txt")
    corpus = prepare(replace(TEXT, source=(path,)), tmp_path / "c")
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    lines = Path(path).read_text().split("\n")
    bound = sorted(hash_of(line, 1) for line in lines)[39]
    for pack, side in ((corpus.train, False), (corpus.validation, True)):
        text = [line for line in lines if (hash_of(line, 1) <= bound) == side]
        stream = "[SEP]".join(text)
        rows = pack.gather(range(len(pack)))
        assert stream.startswith(tokenizer.decode(rows[:, 1:-1].reshape(-1)))
        counts = counts_of(pack)
        assert counts["documents"] == len(text) and counts["dropped_tokens"] < 14
    assert hash_of(lines[0], seed=1) != hash_of(lines[0], seed=2)


def test_the_tokenizer_learns_from_a_sample_of_the_training_documents(tmp_path, monkeypatch):
    lessons = []

    def learn(texts, vocab_size):
        lessons.extend(texts)
        return train_byte_level_bpe(lessons, vocab_size)

    monkeypatch.setattr(pipeline, "train_byte_level_bpe", learn)
    monkeypatch.setattr(pipeline, "LESSON_BYTES", 25_000)
    path = write_text(tmp_path / "a.txt", 500)
    prepare(replace(TEXT, source=(path,)), tmp_path / "c")
    assert 12_500 < sum(map(len, lessons)) < 25_000
    lines = Path(path).read_text().split("\n")
    held_out = sorted(lines, key=lambda line: hash_of(line, 1))[:100]
    assert set(lessons) <= set(lines) - set(held_out)


def test_a_stream_stopped_half_way_reads_finished_files_no_more(data, tmp_path, monkeypatch):
    hub = write_hub_copy(tmp_path / "copy", [f"the {n} cats" for n in range(80)])
    data = replace(data, source=(*data.source, hub), max_documents=60)
    opened, original = [], sources._hub_documents
    written, write = [], shards.write_table
    monkeypatch.setattr(shards, "write_table", lambda *a: written.append(a[0]) or write(*a))
    monkeypatch.setattr(shards, "SHARD_BYTES", 100)

    def stopping(*arguments):
        opened.append(arguments[-1])
        for i, document in enumerate(original(*arguments)):
            if len(opened) == 2 and i == 20:
                raise KeyboardInterrupt
            yield document

    monkeypatch.setattr(sources, "_hub_documents", stopping)
    with pytest.raises(KeyboardInterrupt):
        prepare(data, tmp_path / "c")
    prepare(data, tmp_path / "c")
    assert opened == [0, 1, 1, 2] and len(written) == len(set(written))
    made = json.loads((tmp_path / "c" / "corpus.json").read_text())
    files, hub = made["sources"]
    assert files["documents_read"] == hub["documents_read"] == 60
    assert set(data.source[:2]) < set(made["files"]) and hub["revision"].startswith("local")


def test_molecules_are_cleaned_and_losses_counted(molecules, tmp_path):
    cleaning, lines = Cleaning(largest_fragment=True, strip_stereo=True, canonical=True), []
    corpus = prepare(molecules, tmp_path / "c", cleaning=cleaning, report=lines.append)
    (source,) = json.loads((tmp_path / "c" / "corpus.json").read_text())["sources"]
    assert source["documents_read"] == 404 and source["rejected"] == 2
    assert any("rejects 2 (RDKit" in line and "such as 'nonsense" in line for line in lines)
    train, validation = map(counts_of, corpus[:2])
    assert train["documents"] + validation["documents"] == 402
    assert train["dropped_documents"] > 0 and corpus.train.lengths_R.max() <= 40
    tokens = json.loads(corpus.tokenizer_path.read_text())["model"]["vocab"]
    assert not {".", "[Na+]", "[C@H]"} & set(tokens)
    limited = replace(molecules, source=molecules.source * 2, max_documents=500)
    prepare(limited, tmp_path / "e", report=lines.append)
    assert any("read 500 documents" in line for line in lines)  # rejected ones count too
    strict = replace(molecules, max_rejected=0.001)
    line = told(
        lambda: prepare(strict, tmp_path / "d"), "a.smi", "rejects 2", "'nonsense", "0.50%"
    )
    assert "raise data.max_rejected" in line and "data.kind to text" in line


# ---- the directory ----


def test_a_finished_corpus_is_opened_or_refused(data, tmp_path):
    files = write_text(tmp_path / "a.txt"), write_text(tmp_path / "b.txt")
    data = replace(data, source=files)
    prepare(data, tmp_path / "c")
    before, lines = contents(tmp_path / "c"), []
    prepare(data, tmp_path / "c", report=lines.append)
    assert "already holds this corpus" in lines[0]
    for other, words in (
        (replace(data, block_length=20), "data.block_length 16, not 20"),
        (replace(data, source=data.source[:1]), "data.source"),
    ):
        told(lambda other=other: prepare(other, tmp_path / "c"), words, "another directory")
    assert contents(tmp_path / "c") == before
    with open(data.source[0], "a") as file:
        file.write("\none more")
    told(lambda: prepare(data, tmp_path / "c"), data.source[0], "has changed")
    os.unlink(data.source[0])  # a corpus does not need its source
    assert len(open_corpus(tmp_path / "c", TEXT).train) > 0


def test_foreign_files_are_never_overwritten(data, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.bin").write_text("mine")
    told(lambda: prepare(data, tmp_path / "c"), "train.bin", "another directory")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError):
        prepare(data, tmp_path / "file")
    assert (tmp_path / "c" / "train.bin").read_text() == "mine"


# ---- the command ----


def test_the_command_makes_a_corpus_and_names_it(data, tmp_path, capsys):
    options = ["--data.vocab_size", 300, "--data.block_length", 16, "--workers", 1]
    out = succeeds(capsys, main, *options, "--source", *data.source, "--output", tmp_path / "c")
    corpus = open_corpus(tmp_path / "c", TEXT)
    assert f"--data.pack {tmp_path / 'c'}" in out
    line = f"train: {len(corpus.train):,} rows, {corpus.train.num_tokens:,} tokens"
    assert line in out and corpus.train.sha256 in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("", "give a --source"),
        ("--source wikipedai", "did you mean wikipedia"),
        ("--source a.txt --data.kind toy", "pretrain draws its sentences"),
        ("--source a.txt --canonical", "only molecules can be cleaned"),
        ("--source a.txt --seed -1", "--seed"),
    ],
)
def test_mistakes_get_one_line(arguments, part, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(Path(data.source[0]).parent)
    fails(capsys, main, *arguments.split(), "--output", tmp_path / "c", parts=[part])


def test_a_dry_run_tells_sizes_and_writes_nothing(data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--source", *data.source, "wikipedia", "--dry-run", "--workers", 3]
    out = succeeds(capsys, main, *options)
    for part in (
        "about 6,400,000 documents", "CC BY-SA 3.0", "20231101.en", "by 3 processes", "corpora/a"
    ):  # fmt: skip
        assert part in out
    assert "unknown" in succeeds(capsys, main, "--source", "hub:some/thing", "--dry-run")
    assert list(tmp_path.iterdir()) == []
