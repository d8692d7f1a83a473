"""Sources are identified by fingerprints, read in units, and refused in one line if invalid."""

import gzip
import lzma
import random
import shutil
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import datasets
import pytest
from corpus_files import write_hub_copy
from refusals import told

from exlm_mini.config import DataConfig
from exlm_mini.data import sources
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.sources import (
    NAMED,
    HubSet,
    check_sources,
    hub_set,
    kind_of,
    open_sources,
    size_of,
)


def text(*words, **more):
    return DataConfig(source=words, **more)


def opened(data):
    """The only source of some settings, and all its documents."""
    (source,) = open_sources(data)
    return source, [document for unit in source.units for document in unit.documents()]


@pytest.fixture
def hub_copy(tmp_path):
    write_hub_copy(
        tmp_path / "copy", [f"row {part}.{n}" for n in range(5) for part in range(3)]
    )
    return tmp_path / "copy"


def test_a_hub_data_set_is_streamed_file_by_file(hub_copy):
    source, documents = opened(text(f"hub:{hub_copy}"))
    assert [list(unit.documents()) for unit in source.units][1] == [
        f"row 1.{i}" for i in range(5)
    ]
    assert len(source.units) == 3 and len(set(documents)) == len(documents) == 15
    assert source.facts["revision"].startswith("local")
    moved = shutil.copytree(hub_copy, hub_copy.with_name("moved"))
    assert opened(text(f"hub:{moved}"))[0].facts == source.facts
    for path in hub_copy.iterdir():
        path.write_bytes(path.read_bytes() * 2)  # another revision
    (other,) = open_sources(text(f"hub:{hub_copy}"))
    assert len({unit.fingerprint for unit in (*source.units, *other.units)}) == 6


def test_a_local_copy_has_another_revision_once_a_file_in_it_has_changed(tmp_path):
    def change(function, *arguments):
        function(*arguments)
        return sources._revision(str(tmp_path))

    (tmp_path / "a" / "b").mkdir(parents=True)
    file = tmp_path / "a" / "b" / "c"
    first, longer = change(file.write_text, "x"), change(file.write_text, "xy")
    assert len({first, longer, change(file.rename, tmp_path / "a" / "c")}) == 3


def test_what_is_hidden_or_in_a_hidden_folder_is_no_part_of_a_local_copy(tmp_path):
    for name in ("a/b", ".cache/c", ".git/d/e", ".f"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert sources.files_of_copy(str(tmp_path)) == [tmp_path / "a" / "b"]


def test_a_corpus_of_a_local_copy_that_has_changed_is_refused(hub_copy, tmp_path):
    data = text(f"hub:{hub_copy}", block_length=4, max_unknown=1.0)
    make = partial(prepare_corpus, data, tmp_path / "corpus", 1)
    make()
    first = make().train.sha256
    (hub_copy / ".cache").write_text("of a download")
    assert make().train.sha256 == first
    path = sorted(hub_copy.glob("[!.]*"))[0]
    new = hub_copy / f"new-{path.name}"
    shutil.copy(path, new)
    told(make, new, "has changed since", "choose another directory")
    new.unlink()
    path.write_bytes(path.read_bytes().replace(b"row", b"log"))  # the size stays the same
    told(make, path, "has changed since", "choose another directory")


def test_a_data_set_that_was_saved_to_a_disk_is_read(tmp_path):
    rows = [f"row {n}" for n in range(7)]
    datasets.Dataset.from_dict({"id": range(7), "text": rows}).save_to_disk(tmp_path / "saved")
    assert opened(text(f"hub:{tmp_path / 'saved'}"))[1] == rows


def test_a_column_is_named_by_the_settings(hub_copy, tmp_path):
    data = text(f"hub:{hub_copy}", column="id")
    told(lambda: opened(data), "'id'", "is 0, which is not text")
    told(lambda: opened(replace(data, column="body")), "no column 'body'", "text, id")
    table = tmp_path / "mine.csv"
    table.write_text("SMILES,name\nC,a\n")
    told(lambda: opened(text(str(table))), "no column 'text'", "or data.kind to smiles")
    told(lambda: opened(text(f"hub:{hub_copy},,none")), hub_copy, "cannot read", "split")


def test_named_sets_ask_the_hub_for_what_they_say(monkeypatch):
    datasets = pytest.importorskip("datasets")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def info(self, id):
        return type("Info", (), {"sha": f"commit of {id}"})

    def load(id, config, *, split, revision, streaming):
        asked.append((id, config, split, revision, streaming))
        rows = {"text": ["one", "two"], "smiles": ["C", "CC"], "id": [1, 2]}
        return datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source, documents = opened(text("wikipedia"))
    commit = "commit of wikimedia/wikipedia"
    assert set(asked) == {("wikimedia/wikipedia", "20231101.en", "train", commit, True)}
    assert documents == ["one", "two"]
    assert source.facts["licence"] == "CC BY-SA 3.0 and GFDL"
    assert opened(DataConfig(kind="smiles", source=("zinc",)))[1] == ["C", "CC"]


def test_rows_that_are_pieces_become_documents(hub_copy, monkeypatch):
    pieces = HubSet(str(hub_copy), rows_per_document=2)
    assert list(sources._hub_documents(pieces, "local ", "text", 0)) == [
        "row 0.0\nrow 0.1",
        "row 0.2\nrow 0.3",
        "row 0.4",
    ]
    monkeypatch.setattr(
        sources, "_hub_rows", lambda *_: [{"text": c} for c in ("a ", " ", "b")]
    )
    few = HubSet("x", rows_per_document=3)
    assert list(sources._hub_documents(few, "", "text", 0)) == ["a\nb"]  # no blank lines


def test_a_network_that_fails_is_told_in_one_line(monkeypatch):
    class Stream:
        num_shards, column_names = 1, None

        def shard(self, num_shards, index):
            yield {"text": "one"}
            raise RuntimeError("reset\nby peer")  # libraries raise odd errors too

    monkeypatch.setattr(sources, "_stream", lambda *_: Stream())
    rows = sources._hub_documents(HubSet("x"), "a commit", "text", 0)
    assert next(rows) == "one"
    told(lambda: next(rows), "hub data set x", "reset", "run the same command again")


def test_of_the_hub_only_the_column_is_read(monkeypatch):
    stream = Mock(num_shards=1, column_names=["image", "Text"])
    stream.select_columns.return_value.shard.return_value = [{"Text": "one"}]
    stream.select_columns.return_value.num_shards = 1
    monkeypatch.setattr(sources, "_stream", lambda *_: stream)
    assert [*sources._hub_documents(HubSet("x"), "a commit", "text", 0)] == ["one"]
    stream.select_columns.assert_called_once_with(["Text"])


def test_a_hub_data_set_has_a_configuration_and_a_split():
    assert hub_set("hub:a/b") == HubSet("a/b", None, "train")
    assert hub_set("hub:a/b,en") == HubSet("a/b", "en", "train")
    assert hub_set("hub:a/b,,test") == HubSet("a/b", None, "test")


def test_a_file_is_read_as_the_settings_say(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,smiles,body\none,CO,two\n")
    assert opened(text(str(path)))[1] == ["one"]
    assert opened(DataConfig(kind="smiles", source=(str(path),)))[1] == ["CO"]
    assert opened(text(str(path), column="body"))[1] == ["two"]


def test_files_beside_each_other_are_one_source(tmp_path, hub_copy):
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.txt")]
    for name, content in zip(files, ("same\n", "same\n", "other\n"), strict=True):
        (tmp_path / name).write_text(content)
    hubs = [f"hub:{hub_copy}", f"hub:{hub_copy},,train"]
    parts = open_sources(text(*files[:2], *hubs, files[2]))
    assert [part.name for part in parts] == [", ".join(files[:2]), *hubs, files[2]]
    first, second = (unit.fingerprint for unit in parts[0].units)
    assert first == second != parts[3].units[0].fingerprint


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["wikipedai"], ["neither a named data set", "did you mean wikipedia?"]),
        (["none.txt"], ["no such file", "existing path"]),
        (["corpus.gz"], ["known suffix"]),
        (["zinc"], ["holds smiles, but data.kind is text"]),
        (["bookcorpus"], ["bookcorpus-unlicensed"]),
        (["hub:"], ["hub:ID,CONFIG,SPLIT"]),
        (["hub:a/b,en,train,x"], ["hub:ID,CONFIG,SPLIT"]),
        (["wikipedia", "books.txtt.gz"], ["did you mean .txt?"]),
    ],
)
def test_a_source_that_cannot_be_is_told(words, parts):
    told(lambda: check_sources(text(*words)), *parts)


def test_a_source_that_can_be_is_taken(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    check_sources(text("bookcorpus-unlicensed", str(tmp_path / "a.txt")))
    assert all(kind_of((w,)) == "smiles" for w in ("zinc", "x.smi.xz", "X.SMI", "a.lmdb"))
    assert kind_of(("wikipedia",)) == "text" and kind_of(("x.csv", "zinc")) == "smiles"
    assert not any(kind_of((w,)) for w in ("x.csv", "hub:a/b.smi", "x.smi.txt"))


def test_sizes_are_told_from_cards_and_files(tmp_path, monkeypatch):
    for named in NAMED.values():
        assert named.kind and named.licence and named.num_documents and named.num_text_bytes
    books = NAMED["bookcorpus-unlicensed"]
    assert books.num_documents * books.rows_per_document == pytest.approx(74_004_228, abs=999)
    few = size_of("wikipedia", text(max_documents=64_000))
    assert few.documents == 64_000 and few.text_bytes == pytest.approx(2e8)
    assert few.tokens == pytest.approx(2e8 / 4.3)
    assert size_of("zinc", DataConfig(kind="smiles", max_documents=10**9)) == (
        20_693_269, 930_000_000, pytest.approx(930_000_000 / 1.05)
    )  # fmt: skip
    (tmp_path / "a.txt").write_bytes(b"x" * 430)
    assert size_of(str(tmp_path / "a.txt"), text()) == (None, 430, pytest.approx(100))
    for name, growth in (("b.parquet", 2), ("b.lmdb", 0.01)):
        (tmp_path / name).write_bytes(b"x" * 105)
        size = size_of(str(tmp_path / name), DataConfig(kind="smiles"))
        assert size == (None, pytest.approx(105 * growth), pytest.approx(100 * growth))
    written = random.Random(1).randbytes(60_000).hex().encode()
    for name, compress in (("c.txt.gz", gzip.compress), ("C.CSV.XZ", lzma.compress)):
        (tmp_path / name).write_bytes(compress(written))
        path = str(tmp_path / name)
        assert size_of(path, text()).text_bytes == pytest.approx(len(written))
        monkeypatch.setattr(sources, "SAMPLE_BYTES", 50_000)
        assert size_of(path, text()).text_bytes == pytest.approx(len(written), rel=0.25)
        monkeypatch.undo()
    assert size_of("hub:a/b", text()) == (None, None, None)
