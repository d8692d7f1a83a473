"""``python -m exlm_mini.prepare``: the same packs however often it is stopped, and by how many."""

import errno
import hashlib
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from refusals import told

from exlm_mini.config import DataConfig
from exlm_mini.data import corpus as corpora
from exlm_mini.data import files, pipeline, shards
from exlm_mini.data.cleaning import Cleaning
from exlm_mini.data.corpus import open_corpus, prepare
from exlm_mini.data.packs import Pack
from exlm_mini.data.pipeline import bucket_bound
from exlm_mini.data.request import Preparation
from exlm_mini.data.shards import hash_of
from exlm_mini.data.tokenizer import Tokenizer, train_byte_level_bpe
from exlm_mini.data.toy_grammars import grammar
from exlm_mini.data.workers import Workers
from exlm_mini.prepare import main

TEXT = DataConfig(vocab_size=300, block_length=16, validation_share=0.2)
TINY_SHARDS = 0.004
NUM_SHARDS = 10


def write_text(path, num_documents=200, seed=0):
    """About 200 bytes a document: a shard holds some twenty."""
    rng = np.random.default_rng(seed)
    words = grammar("pairs").words
    path.write_text("\n".join(" ".join(rng.choice(words, 30)) for _ in range(num_documents)))
    return str(path)


def wanted(*words, data=TEXT, **more):
    return Preparation(
        data=data, sources=tuple((w,) if isinstance(w, str) else w for w in words),
        **({"shard_megabytes": TINY_SHARDS} | more),
    )  # fmt: skip


def contents(directory):
    """Every file of a finished corpus."""
    assert not (directory / ".shards").exists()
    return {
        path.name: path.read_bytes() for path in directory.iterdir() if path.name != ".lock"
    }


@pytest.fixture
def texts(tmp_path):
    return write_text(tmp_path / "a.txt"), write_text(tmp_path / "b.txt", 150, seed=1)


@pytest.fixture
def undisturbed(texts, tmp_path):
    prepare(wanted(*texts), tmp_path / "undisturbed")
    return contents(tmp_path / "undisturbed")


class Stopper:
    """Stands for the progress of a run: stops it after some shards."""

    def __init__(self, num_shards):
        self.left = num_shards

    def __call__(self, name, done):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


# ---- stopping and going on ----


@pytest.mark.reliability
def test_a_stopped_run_goes_on_to_the_same_bytes(texts, tmp_path, undisturbed):
    output = tmp_path / "stopped"
    stops = 0
    while True:
        try:
            prepare(wanted(*texts), output, progress=Stopper(6 + stops * 5))
            break
        except KeyboardInterrupt:
            stops += 1
    assert stops > 4
    assert contents(output) == undisturbed


@pytest.mark.parametrize("what", ["source", "given", "seed", "share", "vocabulary"])
def test_a_shard_of_something_else_is_made_again(tmp_path, what):
    """Stopped half way, then the file or a setting changes: as if begun anew."""
    path, data, more = write_text(tmp_path / "a.txt"), TEXT, {}
    if what == "given":  # the tokenizer stays, whatever the file
        train_byte_level_bpe(["a b", "c d"], 270).save(tmp_path / "tokenizer.json")
        data = replace(TEXT, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted(path, data=data), tmp_path / "c", progress=Stopper(18))
    if what in ("source", "given"):  # other text of the same size
        Path(path).write_text(Path(path).read_text().swapcase())
    elif what == "seed":
        more = {"seed": 2}
    else:
        other = {"validation_share": 0.4} if what == "share" else {"vocab_size": 310}
        data = replace(data, **other)
    prepare(wanted(path, data=data, **more), tmp_path / "c")
    prepare(wanted(path, data=data, **more), tmp_path / "new")
    assert contents(tmp_path / "c") == contents(tmp_path / "new")


@pytest.fixture
def written(monkeypatch):
    """Names of the shards that are written."""
    names, original = [], shards.write_shard
    monkeypatch.setattr(
        shards,
        "write_shard",
        lambda path, *rest: names.append(path.name) or original(path, *rest),
    )
    return names


@pytest.mark.parametrize("num_moves", [0, 2, 5])
def test_a_run_stopped_at_its_end_goes_on(texts, tmp_path, monkeypatch, undisturbed, num_moves):
    output, moves = tmp_path / "c", []

    def move(source, target, original=os.replace):
        if ".shards/corpus" in str(source) and not str(source).endswith(".partial"):
            moves.append(target)
            if len(moves) > num_moves:
                raise KeyboardInterrupt
        return original(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(corpora.os, "replace", move)
        prepare(wanted(*texts), output)
    assert not (output / "corpus.json").exists()
    prepare(wanted(*texts), output)
    assert contents(output) == undisturbed


def test_finished_shards_are_not_made_again(texts, tmp_path, written):
    output = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted(*texts), output, progress=Stopper(NUM_SHARDS // 2))
    first = len(written)
    prepare(wanted(*texts), output)
    assert first == NUM_SHARDS // 2
    assert len(written) == len(set(written)) > 2 * NUM_SHARDS


def test_a_damaged_shard_is_made_again(texts, tmp_path, undisturbed):
    output = tmp_path / "c"
    with pytest.raises(KeyboardInterrupt):
        prepare(wanted(*texts), output, progress=Stopper(30))
    files = sorted((output / ".shards").glob("*.npz")) + sorted(
        (output / ".shards").glob("*.json")
    )
    rng = random.Random(0)
    for file in rng.sample(files, 12):
        content = bytearray(file.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    files[3].unlink()
    prepare(wanted(*texts), output)
    assert contents(output) == undisturbed


@pytest.mark.parametrize("num_workers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_packs_do_not_depend_on_shards_or_workers(
    texts, tmp_path, undisturbed, num_workers
):
    prepare(wanted(*texts, shard_megabytes=0.01), tmp_path / "c", num_workers)
    assert contents(tmp_path / "c") == undisturbed


def test_a_worker_that_dies_is_told():
    with Workers(2) as workers:
        told(lambda: list(workers.run(os._exit, [(1,)])), "died", "the same command goes on")


def test_no_worker_outlives_its_parent():
    program = (
        "from exlm_mini.data.workers import Workers\n"
        "task = 'import time; print(1, flush=True); time.sleep(3600)'\n"
        "with Workers(2) as workers: list(workers.run(exec, [(task,)]))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout.readline() == b"1\n"
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=60)  # ends when no process holds the pipe any more


OPTIONS = [
    *("--data.vocab_size", "300", "--data.block_length", "16", "--shard-megabytes", "0.02"),
    *("--data.validation_share", "0.2"),
]


# ---- what the packs hold ----


def test_the_command_makes_a_corpus_and_names_it(texts, tmp_path, capsys):
    output = str(tmp_path / "c")
    assert main([*OPTIONS, "--source", *texts, "--output", output, "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"--data.pack {output}" in printed
    corpus = open_corpus(output, TEXT)
    told_rows = f"train: {len(corpus.train):,} rows, {corpus.train.num_tokens:,} tokens"
    assert told_rows in printed and corpus.train.sha256 in printed


def test_the_rows_are_the_text_of_one_side_by_its_hash(tmp_path):
    path = write_text(tmp_path / "a.txt")
    corpus = prepare(wanted(path), tmp_path / "c")
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    lines = Path(path).read_text().split("\n")
    bound = sorted(hash_of(line, 1) for line in lines)[39]
    for pack, side in ((corpus.train, False), (corpus.validation, True)):
        text = [line for line in lines if (hash_of(line, 1) <= bound) == side]
        stream = "[SEP]".join(text)
        rows, _ = pack.gather(range(len(pack)))
        assert stream.startswith(tokenizer.decode(rows[:, 1:-1].reshape(-1)))
        assert pack.counts.documents == len(text) and pack.counts.dropped_tokens < 14
    assert hash_of(lines[0], seed=1) != hash_of(lines[0], seed=2)


def test_the_tokenizer_learns_from_a_sample_of_the_training_documents(tmp_path, monkeypatch):
    lessons = []

    def learn(texts, vocab_size):
        lessons.extend(texts)
        return train_byte_level_bpe(lessons, vocab_size)

    monkeypatch.setattr(pipeline, "train_byte_level_bpe", learn)
    path = write_text(tmp_path / "a.txt")
    monkeypatch.setattr(pipeline, "LESSON_BYTES", 10_000)
    prepare(wanted(path), tmp_path / "c")
    assert 9_900 < sum(map(len, lessons)) < 10_500  # no more than a document above
    lines = Path(path).read_text().split("\n")
    held_out = sorted(lines, key=lambda line: hash_of(line, 1))[:40]
    assert set(lessons) <= set(lines) - set(held_out)


def test_a_bound_takes_the_first_buckets_that_are_enough():
    totals = np.array([2.0, 0, 3, 5, 0])
    assert [bucket_bound(totals, wanted) for wanted in (1, 2, 3, 5, 6, 10, 11)] == [
        1, 1, 3, 3, 4, 5, 5
    ]  # fmt: skip


def test_the_side_files_say_where_the_rows_come_from(texts, tmp_path):
    prepare(wanted(*texts), tmp_path / "c")
    provenance = json.loads((tmp_path / "c" / "train.json").read_text())["provenance"]
    for path, source in zip(texts, provenance["sources"], strict=True):
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        assert source["sha256"] == {path: digest}
        assert source["documents_read"] in (150, 200)
    assert provenance["settings"]["data.vocab_size"] == 300
    assert {"exlm_mini", "python", "numpy", "tokenizers"} == set(provenance["versions"])


def test_a_hub_data_set_becomes_a_corpus(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "copy").mkdir()
    lines = Path(write_text(tmp_path / "a.txt")).read_text().split("\n")
    for part in range(2):
        table = pyarrow.table({"text": lines[part::2]})
        parquet.write_table(table, tmp_path / "copy" / f"{part}.parquet")
    request = wanted(f"hub:{tmp_path / 'copy'}", data=replace(TEXT, max_documents=150))
    with pytest.raises(KeyboardInterrupt):
        prepare(request, tmp_path / "c", progress=Stopper(5))
    corpus = prepare(request, tmp_path / "c")
    counts = corpus.train.counts.documents, corpus.validation.counts.documents
    assert sum(counts) == 150
    (source,) = json.loads((tmp_path / "c" / "train.json").read_text())["provenance"]["sources"]
    assert source["num_units"] == 2 and source["revision"].startswith("local")
    assert "licence" in source


# ---- molecules ----


def smiles_file(tmp_path, extra=()):
    from exlm_mini.data.smiles import embedded_molecules

    lines = [*list(embedded_molecules())[:400], *extra]
    (tmp_path / "a.smi").write_text("\n".join(f"{line} {i}" for i, line in enumerate(lines)))
    return str(tmp_path / "a.smi")


def test_molecules_are_cleaned_and_losses_counted(tmp_path):
    pytest.importorskip("rdkit")
    path = smiles_file(tmp_path, ["nonsense", "C1CC", "CCO.[Na+]", "C[C@H](N)O"])
    data = DataConfig(kind="smiles", block_length=40, validation_share=0.2, max_rejected=0.1)
    cleaning = Cleaning(largest_fragment=True, strip_stereo=True, canonical=True)
    lines = []
    corpus = prepare(
        wanted(path, data=data, cleaning=cleaning), tmp_path / "c", report=lines.append
    )
    (source,) = json.loads((tmp_path / "c" / "train.json").read_text())["provenance"]["sources"]
    counts = source["cleaning"]
    assert counts["read"] == 404 and counts["rejected"] >= 2
    assert counts["fragments_removed"] >= 1 and counts["stereo_removed"] >= 1
    assert any("RDKit rejects" in line and "'nonsense'" in line for line in lines)
    kept = corpus.train.counts.documents + corpus.validation.counts.documents
    assert kept == 404 - counts["rejected"]
    assert corpus.train.counts.dropped_documents > 0 and corpus.train.lengths_R.max() <= 40
    refused = replace(data, max_rejected=0.0)
    told(lambda: prepare(wanted(path, data=refused), tmp_path / "d"), "raise data.max_rejected")


# ---- the command ----


def command(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def fails(capsys, *arguments):
    """The one line a mistake gets, the last on stderr."""
    code, out, err = command(capsys, *arguments)
    assert (code, out) == (2, ""), err
    (line,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert err.endswith(f"{line}\n") and "Traceback" not in err
    return line


def test_mistakes_get_one_line(texts, tmp_path, capsys):
    output = ("--output", tmp_path / "c")
    for arguments, part in (
        ([], "name a --source"),
        (["--source", "wikipedai"], "did you mean wikipedia"),
        (["--source", texts[0], "--data.kind", "toy"], "pretrain draws it"),
        (["--source", texts[0], "--canonical"], "only molecules are cleaned"),
    ):
        assert part in fails(capsys, *arguments, *output), arguments
    assert not list(tmp_path.glob("c/.shards/s*"))


def test_a_dry_run_tells_sizes_and_writes_nothing(texts, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    code, out, _ = command(
        capsys, "--source", *texts, "--source", "wikipedia", "--dry-run", "--workers", "3"
    )
    assert code == 0
    for part in ("about 6,400,000 documents", "CC BY-SA 3.0", "20231101.en", "by 3 processes"):
        assert part in out
    assert not re.search(r"about [\d,]+\.0\b", out)
    assert "corpora/a" in out
    code, out, _ = command(capsys, "--source", "hub:some/thing", "--dry-run")
    assert code == 0 and "unknown" in out
    assert set(tmp_path.iterdir()) == before


def test_a_finished_corpus_is_opened_or_refused(texts, tmp_path):
    prepare(wanted(*texts), tmp_path / "c")
    before = contents(tmp_path / "c")
    lines = []
    prepare(wanted(*texts), tmp_path / "c", report=lines.append)
    assert "already holds this corpus" in lines[0]
    other = wanted(*texts, data=replace(TEXT, block_length=20))
    told(lambda: prepare(other, tmp_path / "c"), "data.block_length 16, not 20", "another")
    told(lambda: prepare(wanted(texts[0]), tmp_path / "c"), "sources", "another")
    assert contents(tmp_path / "c") == before
    with open(texts[0], "a") as file:
        file.write("\none more")
    told(lambda: prepare(wanted(*texts), tmp_path / "c"), texts[0], "has changed")
    os.unlink(texts[0])  # a source that is gone does no harm
    assert len(open_corpus(tmp_path / "c", TEXT).train) > 0


def test_foreign_files_are_never_overwritten(texts, tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "train.bin").write_text("mine")
    told(lambda: prepare(wanted(*texts), tmp_path / "c"), "train.bin", "another directory")
    (tmp_path / "file").write_text("x")
    told(lambda: prepare(wanted(*texts), tmp_path / "file"), tmp_path / "file", "cannot write")
    assert (tmp_path / "c" / "train.bin").read_text() == "mine"


class FullDisk(io.FileIO):
    """A file on a disk with room for so many bytes."""

    room = 0

    def write(self, content):
        type(self).room -= len(content)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(content)


@pytest.mark.reliability
@pytest.mark.parametrize("room", [0, 30_000])
def test_a_full_disk_loses_no_finished_shard(texts, tmp_path, monkeypatch, undisturbed, room):
    output = tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr(FullDisk, "room", room)
        patch.setattr(files, "open_to_write", lambda path: FullDisk(path, "wb"))
        told(lambda: prepare(wanted(*texts), output), "no space", "free", "make room")
    assert not list(output.rglob("*.partial"))
    kept = len(list(output.glob(".shards/*.npz")))
    assert (kept > 5) == (room > 5_000)
    prepare(wanted(*texts), output)
    assert contents(output) == undisturbed


def test_the_pack_of_an_old_version_still_opens(texts, tmp_path):
    """Packs without provenance and seal were written before there was this command."""
    prepare(wanted(*texts), tmp_path / "c")
    for name in ("train", "validation", "corpus"):
        path = tmp_path / "c" / f"{name}.json"
        content = json.loads(path.read_text())
        content.pop("provenance", None)
        del content["seal"]
        path.write_text(json.dumps(content))
    assert len(open_corpus(tmp_path / "c", TEXT).train) == len(
        Pack.open(tmp_path / "c/train.json")
    )
