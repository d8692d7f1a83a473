"""Every source is told by its fingerprint, read in units, and refused in one line."""

import json

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


def test_settings_of_a_run_name_a_hub_data_set(hub_copy):
    data = DataConfig(hub=str(hub_copy), column="id")
    told(lambda: documents(open_source((), data)), "'id' holds int, not text")
    assert len(documents(open_source((), DataConfig(hub=str(hub_copy))))) == 15
    missing = DataConfig(hub=str(hub_copy), hub_split="none")
    told(lambda: open_source((), missing), hub_copy, "cannot open", "split")


def test_a_column_may_be_named_in_the_source(hub_copy):
    source = open_source((f"hub:{hub_copy},,train,id",), TEXT)
    told(lambda: documents(source), "'id' holds int, not text")
    source = open_source((f"hub:{hub_copy},,,body",), TEXT)
    told(lambda: documents(source), "no column 'body'", "text, id")


def test_named_sets_ask_the_hub_for_what_they_say(monkeypatch):
    datasets = pytest.importorskip("datasets")
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def info(self, id, revision=None):
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
    asked.clear()
    assert documents(open_source(("zinc",), SMILES)) == ["C", "CC"]
    assert asked[0][:3] == ("sagawa/ZINC-canonicalized", None, "train")


def test_rows_that_are_pieces_become_documents():
    rows = [f"sentence {i} ." for i in range(5)]
    pieces = HubSet("x", rows_per_document=2)
    assert list(sources._grouped(iter(rows), pieces)) == [
        "sentence 0 .\nsentence 1 .",
        "sentence 2 .\nsentence 3 .",
        "sentence 4 .",
    ]
    assert NAMED["bookcorpus"].rows_per_document
    lines = ["", " = Ada = \n", "", " A life . \n", " = = Youth = = \n", " B . \n"]
    lines += [" = X = \n", " C = D . \n"]
    articles = [" = Ada =\n A life .\n = = Youth = =\n B .", " = X =\n C = D ."]
    assert list(sources._grouped(iter(lines), NAMED["wikitext-2"])) == articles


def test_a_network_that_fails_is_told_in_one_line(hub_copy, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    told(lambda: open_source(("wikipedia",), TEXT), "wikimedia/wikipedia", "cannot open")

    class Broken:
        def iter(self, batch_size):
            yield {"text": ["one"]}
            raise ConnectionError("reset\nby peer")

    rows = sources._texts(Broken(), "hub data set x", "text")
    assert next(rows) == "one"
    told(lambda: next(rows), "hub data set x", "reset", "the same command goes on")
    missing = f"hub:{hub_copy},,nosplit"
    told(lambda: open_source((missing,), TEXT), hub_copy, "cannot open", "split")


# ---- files, names and what is wrong with them ----


def test_a_file_is_a_unit_named_by_its_content(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("same\n")
    words = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    source = open_source(words, TEXT)
    first, second = (unit.fingerprint() for unit in source.units)
    assert first == second and documents(source) == ["same", "same"]
    (tmp_path / "b.txt").write_text("other\n")
    assert source.units[1].fingerprint() != first


def test_a_source_that_cannot_be_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    good = str(tmp_path / "a.txt")

    def check(*words, kind="text", accepted=()):
        return lambda: check_source(words, kind, accepted)

    told(check("wikipedai"), "no named data set", "wikipedia")
    told(check(str(tmp_path / "b.txt")), "no such file", "--source")
    told(check(good + ".bz2"), "no known suffix")
    told(check("corpus.gz"), "no known suffix")
    told(check("wikipedia", good), "mixes", "its own --source")
    told(check("zinc"), "holds smiles, data.kind is text")
    told(check("bookcorpus"), "no licence", "--accept bookcorpus")
    told(check("hub:"), "hub:ID,CONFIG,SPLIT,COLUMN")
    told(check("hub:a,b,c,d,e"), "hub:ID,CONFIG,SPLIT,COLUMN")
    check("bookcorpus", accepted=("bookcorpus",))()
    check(good)()


def test_the_kind_of_a_source_is_known_by_name_or_suffix():
    assert kind_of(("zinc",)) == kind_of(("x.smi.xz",)) == kind_of(("a.lmdb",)) == "smiles"
    assert kind_of(("wikipedia",)) == "text"
    assert kind_of(("x.csv",)) is kind_of(("hub:a/b.smi",)) is None


def test_every_named_set_states_licence_and_size():
    for named in NAMED.values():
        assert named.kind and named.licence and named.num_documents and named.num_text_bytes


# ---- sizes ----


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".csv", ".txt.gz", ".txt.xz", ".parquet"])
def test_sizes_are_told_from_the_head(tmp_path, suffix):
    import gzip
    import lzma

    texts = [
        f"document number {i} of a few thousand, told over and over" for i in range(40_000)
    ]
    path = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        import pyarrow

        parquet.write_table(pyarrow.table({"text": texts}), path)
    else:
        lines = {
            ".jsonl": [json.dumps({"id": 1, "text": text}) for text in texts],
            ".csv": ["id,text", *(f'1,"{text}"' for text in texts)],
        }.get(suffix, texts)
        content = "\n".join(lines).encode()
        compress = {".txt.gz": gzip.compress, ".txt.xz": lzma.compress}.get(suffix, bytes)
        path.write_bytes(compress(content))
    size = size_of((str(path),), TEXT)
    assert size.documents == pytest.approx(len(texts), rel=0.05)
    assert size.text_bytes == pytest.approx(sum(map(len, texts)), rel=0.15)
    limited = size_of((str(path),), DataConfig(max_documents=400))
    assert limited.documents == pytest.approx(400)


def test_a_size_nobody_knows_stands_in_nobodys_way(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\x00\xff")
    (tmp_path / "b.txt.gz").write_bytes(b"junk")
    for word in ("a.txt", "b.txt.gz", "none.lmdb"):
        assert size_of((str(tmp_path / word),), TEXT) == (None, None, None)
    assert size_of(("hub:a/b",), TEXT) == (None, None, None)
    assert size_of(("zinc",), SMILES).documents == 20_693_269
