"""Every source is told by its fingerprint, read in units, and refused in one line."""

import pytest
from refusals import told

from exlm_mini.config import DataConfig
from exlm_mini.data import sources
from exlm_mini.data.sizes import size_of
from exlm_mini.data.sources import NAMED, HubSet, check_source, kind_of, open_source

TEXT, SMILES = DataConfig(kind="text"), DataConfig(kind="smiles")


def documents(source):
    return [text for unit in source.units for text in unit.documents()]


@pytest.fixture
def hub_copy(tmp_path):
    """A data set of three Parquet files, as the hub would give it."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "copy"
    folder.mkdir()
    for part in range(3):
        rows = [f"row {part}.{i}" for i in range(5)]
        table = pyarrow.table({"text": rows, "id": list(range(5))})
        parquet.write_table(table, folder / f"train-{part:05d}-of-00003.parquet")
    return folder


# ---- the hub, through the streaming code of datasets ----


def test_a_hub_data_set_is_streamed_file_by_file(hub_copy):
    source = open_source((f"hub:{hub_copy}",), TEXT)
    assert len(source.units) == 3
    assert list(source.units[1].documents()) == [f"row 1.{i}" for i in range(5)]
    assert len(documents(source)) == len(set(documents(source))) == 15
    assert len({unit.fingerprint() for unit in source.units}) == 3
    assert source.facts["num_units"] == 3 and source.facts["revision"].startswith("local")
    for path in hub_copy.iterdir():
        path.write_bytes(path.read_bytes() * 2)  # another revision
    assert sources._revision(str(hub_copy)) != source.facts["revision"]
    other = source.facts | {"revision": "another"}
    assert sources._fingerprint(other, 0) != sources._fingerprint(source.facts, 0)


def test_settings_and_sources_name_the_same_column(hub_copy):
    assert len(documents(open_source((), DataConfig(hub=str(hub_copy))))) == 15
    by_settings = open_source((), DataConfig(hub=str(hub_copy), column="id"))
    by_words = open_source((f"hub:{hub_copy},,train,id",), TEXT)
    for source in (by_settings, by_words):
        told(lambda source=source: documents(source), "'id'", "int, not text")
    other = open_source((f"hub:{hub_copy},,,body",), TEXT)
    told(lambda: documents(other), "no column 'body'", "text, id")
    missing = DataConfig(hub=str(hub_copy), hub_split="none")
    told(lambda: open_source((), missing), hub_copy, "cannot read", "split")


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
    source = open_source(("wikipedia",), TEXT)
    commit = "commit of wikimedia/wikipedia"
    assert set(asked) == {("wikimedia/wikipedia", "20231101.en", "train", commit, True)}
    assert documents(source) == ["one", "two"]
    assert source.facts["licence"] == "CC BY-SA 3.0 and GFDL"
    assert documents(open_source(("zinc",), SMILES)) == ["C", "CC"]


def test_rows_that_are_pieces_become_documents():
    rows = [f"sentence {i} ." for i in range(5)]
    pieces = HubSet("x", rows_per_document=2)
    assert list(sources._grouped(iter(rows), pieces)) == [
        "sentence 0 .\nsentence 1 .",
        "sentence 2 .\nsentence 3 .",
        "sentence 4 .",
    ]
    lines = ["", " = Ada = \n", "", " A life . \n", " = = Youth = = \n", " B . \n"]
    lines += [" = X = \n", " C = D . \n"]
    articles = [" = Ada =\n A life .\n = = Youth = =\n B .", " = X =\n C = D ."]
    assert list(sources._grouped(iter(lines), NAMED["wikitext-2"])) == articles


def test_a_network_that_fails_is_told_in_one_line():
    def broken():
        yield {"text": ["one"]}
        raise ConnectionError("reset\nby peer")

    rows = sources._texts(broken(), "x", "text")
    assert next(rows) == "one"
    told(lambda: next(rows), "hub data set x", "reset", "the same command goes on")


# ---- files, names and what is wrong with them ----


def test_a_file_is_a_unit_named_by_its_content(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same\n")
    source = open_source((str(tmp_path / "a.txt"), str(tmp_path / "b.txt")), TEXT)
    first, second = (unit.fingerprint() for unit in source.units)
    assert first == second and documents(source) == ["same", "same"]
    (tmp_path / "b.txt").write_text("other\n")
    assert source.units[1].fingerprint() != first


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["wikipedai"], ["no named data set", "wikipedia"]),
        (["none.txt"], ["no such file", "--source"]),
        (["corpus.gz"], ["no known suffix"]),
        (["wikipedia", "a.txt"], ["mixes", "its own --source"]),
        (["zinc"], ["holds smiles, data.kind is text"]),
        (["bookcorpus"], ["no licence", "--accept bookcorpus"]),
        (["hub:"], ["hub:ID,CONFIG,SPLIT,COLUMN"]),
    ],
)
def test_a_source_that_cannot_be_is_told(words, parts):
    told(lambda: check_source(tuple(words), "text", ()), *parts)


def test_a_source_that_can_be_is_taken(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    check_source(("bookcorpus",), "text", ("bookcorpus",))
    check_source((str(tmp_path / "a.txt"),), "text", ())
    assert kind_of(("zinc",)) == kind_of(("x.smi.xz",)) == kind_of(("a.lmdb",)) == "smiles"
    assert kind_of(("wikipedia",)) == "text"
    assert kind_of(("x.csv",)) is kind_of(("hub:a/b.smi",)) is None


def test_sizes_are_told_from_cards_and_files(tmp_path):
    for named in NAMED.values():
        assert named.kind and named.licence and named.num_documents and named.num_text_bytes
    assert size_of(("zinc",), SMILES).documents == 20_693_269
    few = size_of(("wikipedia",), DataConfig(max_documents=64_000))
    assert few.documents == 64_000 and few.text_bytes == pytest.approx(2e8)
    (tmp_path / "a.txt").write_bytes(b"x" * 430)
    (tmp_path / "b.txt.gz").write_bytes(b"x" * 100)
    both = size_of((str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")), TEXT)
    assert both == (None, 730, pytest.approx(730 / 4.3))
    assert both + size_of(("hub:a/b",), TEXT) == (None, None, None)
