"""Packs return what was packed, or report damage; a corpus is either complete or absent."""

import dataclasses
import json
import os
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from corpus_files import write_text
from hypothesis import given, settings
from hypothesis import strategies as st
from packs import pack_of
from refusals import told

from exlm_mini.config import DataConfig, SpecialIds
from exlm_mini.data.corpus import open_corpus, prepare_corpus
from exlm_mini.data.packs import Rows, block_rows, molecule_rows
from exlm_mini.data.pipeline import NUM_BUCKETS, held_out_bound
from exlm_mini.data.shards import hash_of
from exlm_mini.data.toy_grammars import grammar

SPECIAL = SpecialIds()._replace(pad=5, mask=0)
BOS, EOS, SEP, PAD = SPECIAL.bos, SPECIAL.eos, SPECIAL.sep, SPECIAL.pad


def write(path, rows, row_length=None, vocab_size=1000):
    return pack_of(path, rows, vocab_size, row_length, SPECIAL)


def unpacked(pack):
    """All rows of a pack, as lists without padding."""
    rows = zip(pack.gather(range(len(pack))), pack.lengths_R, strict=True)
    return [row_N[:length].tolist() for row_N, length in rows]


DOCUMENTS = st.lists(st.lists(st.integers(6, 999), min_size=1, max_size=30), min_size=1)


# ---- rows ----


def parts_of(documents, size):
    """Yield documents as ``Rows``, ``size`` of them at a time."""
    for start in range(0, len(documents), size):
        part = documents[start : start + size]
        lengths_D = np.array([len(d) for d in part], dtype=np.int64)
        yield Rows(np.concatenate(part).astype(np.uint16), lengths_D)


def cut(make, documents, block_length, size):
    """All tokens and lengths of the rows that ``make`` cuts from documents, and its counts."""
    counts = Counter()
    rows = list(make(parts_of(documents, size), SPECIAL, block_length, counts))
    tokens = [token for part in rows for token in part.token_ids.tolist()]
    return tokens, [length for part in rows for length in part.lengths_R.tolist()], counts


@settings(max_examples=15)
@given(DOCUMENTS, st.integers(3, 20), st.integers(1, 9))
def test_blocks_hold_the_text_in_order(documents, block_length, size):
    tokens, lengths, counts = cut(block_rows, documents, block_length, size)
    stream = [token for document in documents for token in [*document, SEP]][:-1]
    blocks = np.array(tokens).reshape(-1, block_length)
    assert (blocks[:, 0] == BOS).all() and (blocks[:, -1] == EOS).all()
    inner = blocks[:, 1:-1].reshape(-1).tolist()
    assert inner == stream[: len(inner)] and lengths == [block_length] * len(blocks)
    assert counts["dropped_tokens"] == len(stream) - len(inner) < block_length - 2


@settings(max_examples=15)
@given(DOCUMENTS, st.integers(1, 9))
def test_molecules_keep_rows_of_their_own(documents, size):
    tokens, lengths, counts = cut(molecule_rows, documents, 20, size)
    kept = [[BOS, *d, EOS] for d in documents if len(d) <= 18]
    assert tokens == [token for row in kept for token in row]
    assert lengths == list(map(len, kept))
    assert counts["dropped_documents"] == len(documents) - len(kept)


# ---- round trips ----


@settings(max_examples=15)
@given(documents=DOCUMENTS, vocab_size=st.sampled_from([1000, 65536, 65537]))
def test_ragged_rows_come_back(tmp_path_factory, documents, vocab_size):
    path = tmp_path_factory.mktemp("pack") / "a.json"
    pack = write(path, documents, vocab_size=vocab_size)
    assert unpacked(pack) == documents
    assert len(pack) == len(documents)
    assert pack.lengths_R.tolist() == list(map(len, documents))
    token_ids_BN = pack.gather(range(len(pack)))
    assert (token_ids_BN == PAD).sum() == token_ids_BN.numel() - pack.num_tokens
    assert pack.num_tokens == sum(map(len, documents))
    itemsize = 2 if vocab_size <= 65536 else 4
    assert path.with_suffix(".bin").stat().st_size == itemsize * pack.num_tokens
    largest = write(path, [[0, vocab_size - 1]], vocab_size=vocab_size)
    assert unpacked(largest) == [[0, vocab_size - 1]]


@pytest.mark.parametrize("row_length", [None, 5])
def test_gather_takes_rows_in_any_order(tmp_path, row_length):
    table = np.random.default_rng(0).integers(6, 1000, (40, 5))
    pack = write(tmp_path / "a.json", list(table), row_length)
    indices = [39, 0, 7, 7]
    for asked in (indices, np.array(indices), torch.tensor(indices)):
        token_ids_BN = pack.gather(asked)
        assert token_ids_BN.dtype == torch.int64
        assert (token_ids_BN.numpy() == table[indices]).all()
    assert len(pack.gather([])) == 0
    assert pack.row_length == row_length
    assert pack.lengths_R.tolist() == [5] * 40


def test_packs_of_equal_tokens_in_other_rows_differ(tmp_path):
    first, second = (
        write(tmp_path / f"{at}.json", [[7] * at, [7] * (8 - at)]) for at in (3, 5)
    )
    assert first.sha256 != second.sha256


# ---- damage ----


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """A folder of two corpora, with rows of equal and of different lengths, and their files."""
    folder = tmp_path_factory.mktemp("corpora")
    prepare_corpus(TOY, folder / "toy", 1)
    data = DataConfig(kind="smiles", max_documents=60)
    prepare_corpus(data, folder / "smiles", 1)
    return folder, sorted(path for path in folder.rglob("*.*") if path.is_file())


@settings(max_examples=60)
@given(st.data())
def test_any_damage_to_any_file_is_told(corpora, data):
    folder, files = corpora
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 2))  # a final line break may be missing
    way = data.draw(st.sampled_from(["flip", "cut", "grow", "gone"]))
    content = {
        "flip": whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :],
        "cut": whole[:at],
        "grow": whole + b"x" * (at + 1),
    }
    try:
        path.unlink() if way == "gone" else path.write_bytes(content[way])
        kind = path.parent.name
        if content.get(way) != whole:
            told(lambda: open_corpus(folder / kind, DataConfig(kind=kind)), folder / kind)
    finally:
        path.write_bytes(whole)


# ---- a corpus ----

TOY = DataConfig(kind="toy", num_sentences=300)


def text_data(tmp_path, **more):
    path = write_text(tmp_path / "text.txt", 60)
    small = {"vocab_size": 280, "block_length": 16, "validation_share": 0.1}
    return DataConfig(source=(path,), **(small | more))


def test_a_toy_corpus_holds_its_sentences(tmp_path):
    corpus = prepare_corpus(TOY, tmp_path / "toy", seed=1)
    assert len(corpus.train) == 300 and len(corpus.validation) == 4096
    assert corpus.train.row_length == 13
    for stream, pack in enumerate((corpus.train, corpus.validation)):
        token_ids_BN = pack.gather(range(len(pack)))
        sentences = grammar("pairs").sample(len(pack), (1, stream)) + 6
        framed = np.pad(sentences, ((0, 0), (1, 1)), constant_values=((0, 0), (BOS, EOS)))
        assert (token_ids_BN.numpy() == framed).all()


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"block_length": 100_000}, ["text.txt", "train", "tokens; lower"]),
        ({"block_length": 400, "validation_share": 0.01}, ["data.validation_share"]),
        ({"kind": "smiles", "source": (), "max_documents": 50, "block_length": 3},
         ["data.block_length 3", "longer", "raise"]),
    ],
)  # fmt: skip
def test_a_pack_without_rows_is_told(tmp_path, settings, parts):
    data = dataclasses.replace(text_data(tmp_path), **settings)
    told(lambda: prepare_corpus(data, tmp_path / "c", 1), *parts)
    told(lambda: open_corpus(tmp_path / "c", data), "holds no corpus")


def test_a_packed_corpus_is_opened_without_the_libraries_that_made_it(tmp_path, monkeypatch):
    first = prepare_corpus(TOY, tmp_path / "c", 1)
    for library in ("tokenizers", "datasets", "rdkit", "pyarrow"):
        monkeypatch.setitem(sys.modules, library, None)
    data = DataConfig(kind="toy", pack=str(tmp_path / "c"))
    corpus = prepare_corpus(data, tmp_path / "unused", 5)
    assert corpus.train.sha256 == first.train.sha256
    assert not (tmp_path / "unused").exists()
    for directory, other, words in (
        (tmp_path / "c", DataConfig(), "data.kind toy, not text"),
        (
            tmp_path / "c",
            DataConfig(kind="toy", grammar="town"),
            "data.grammar pairs, not town",
        ),
        (tmp_path, TOY, "holds no corpus; make one there with python -m exlm_mini.prepare"),
    ):
        told(lambda where=directory, other=other: open_corpus(where, other), directory, words)


def test_files_of_two_corpora_do_not_mix(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        prepare_corpus(TOY, tmp_path / name, seed)
    fours = dataclasses.replace(TOY, grammar="fours")
    prepare_corpus(fours, tmp_path / "c", 1)
    for file in ("train.bin", "train.json"):
        os.replace(tmp_path / "b" / file, tmp_path / "a" / file)
    told(lambda: open_corpus(tmp_path / "a", TOY), "train.json", "do not belong to the same")
    os.replace(tmp_path / "c" / "tokenizer.json", tmp_path / "b" / "tokenizer.json")
    for name in ("train.bin", "train.json"):
        os.replace(tmp_path / "a" / name, tmp_path / "b" / name)
    told(
        lambda: open_corpus(tmp_path / "b", TOY), "tokenizer.json", "do not belong to the same"
    )
    os.unlink(tmp_path / "b" / "tokenizer.json")
    told(lambda: open_corpus(tmp_path / "b", TOY), "tokenizer.json", "No such file")


# ---- given tokenizers ----


def test_a_given_tokenizer_is_used_as_it_is(tmp_path):
    data = text_data(tmp_path)
    first = prepare_corpus(data, tmp_path / "a", 1)
    given_one = dataclasses.replace(data, tokenizer=str(first.tokenizer_path), vocab_size=9999)
    second = prepare_corpus(given_one, tmp_path / "b", 1)
    assert second.tokenizer_path.read_bytes() == first.tokenizer_path.read_bytes()
    assert second.train.sha256 == first.train.sha256


def test_a_tokenizer_of_another_kind_is_refused(tmp_path):
    toy = prepare_corpus(TOY, tmp_path / "toy", 1)
    data = dataclasses.replace(text_data(tmp_path), tokenizer=str(toy.tokenizer_path))
    told(
        lambda: prepare_corpus(data, tmp_path / "c", 1),
        toy.tokenizer_path,
        "for toy",
        "is text",
    )


def test_too_many_unknown_tokens_stop_the_run(tmp_path):
    pytest.importorskip("rdkit")
    from exlm_mini.data.tokenizer import train_smiles

    path = tmp_path / "few.json"
    train_smiles(["CCO", "c1ccccc1"]).save(path)
    data = DataConfig(kind="smiles", max_documents=100, tokenizer=str(path))
    message = told(lambda: prepare_corpus(data, tmp_path / "c", 1), "[UNK]", "data.max_unknown")
    assert "'=', " in message and "the embedded molecules" in message
    accepted = dataclasses.replace(data, max_unknown=1.0)
    path = prepare_corpus(accepted, tmp_path / "c", 1).train.path
    counts = json.loads(path.read_text())["counts"]
    assert 0 < counts["unknown_tokens"] < counts["tokens"]


# ---- the split ----


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.floats(0.01, 0.99))
def test_a_split_parts_the_documents(hashes, share):
    hash_D = np.array(hashes + hashes[:1], dtype=np.uint64)
    if len(set(hashes)) < 2:
        told(lambda: held_out_bound(hash_D, share), "at least 2")
        return
    bound = held_out_bound(hash_D, share)
    assert hash_D.min() <= bound < hash_D.max()
    assert bound == held_out_bound(hash_D[::-1], share)


def test_the_share_held_out_is_the_share_asked_for():
    hash_D = np.array([hash_of(str(n), 1) for n in range(1000)], dtype=np.uint64)
    assert (hash_D <= held_out_bound(hash_D, 0.05)).sum() == 50
    # This must never change: recorded runs and their weights depend on what is held out.
    bound = held_out_bound(hash_D[:40], 0.1)
    assert np.flatnonzero(hash_D[:40] <= bound).tolist() == [27, 30, 33, 37]
    # On each side of the split, documents are spread evenly over the buckets.
    side_D = hash_D <= held_out_bound(hash_D, 0.5)
    for is_held_out in (True, False):
        bucket_D = hash_D[side_D == is_held_out] % NUM_BUCKETS / NUM_BUCKETS
        assert abs(bucket_D.mean() - 0.5) < 4 * (len(bucket_D) * 12) ** -0.5
