"""Damaged corpora: a clear error or the rows that were written, nothing else."""

import hashlib
import json
import random
import shutil
import signal
from collections import Counter

import numpy as np
import pytest
from damage import damage_bytes, damage_json

from exlm_mini.config import DataConfig, SpecialIds
from exlm_mini.config.checks import UserError
from exlm_mini.data.corpus import FORMAT, VERSION, open_corpus
from exlm_mini.data.files import read_json, write_json
from exlm_mini.data.packs import Pack, write_pack
from exlm_mini.data.rows import Counts, Rows

NUM_MUTATIONS = 1_500  # of each kind of corpus
SECONDS_FOR_ONE = 10


def build(folder, kind):
    """A small corpus; the rows of text are of one length, those of molecules are not."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(b"any bytes: opening a corpus reads their sha256")
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    rng, packs = np.random.default_rng(0), {}
    for name in ("train", "validation"):
        lengths = np.full(12, 8) if kind == "text" else rng.integers(3, 9, 12)
        write_pack(
            folder / f"{name}.json",
            [Rows(rng.integers(6, 300, lengths.sum()), lengths)],
            row_length=8 if kind == "text" else None,
            vocab_size=300,
            special_ids=SpecialIds(),
            tokenizer_sha256=digest,
            source="a test",
            counts=Counts(documents=12),
            provenance={"sources": [{"name": "a test", "rows": [0, 12]}]},
        )
        packs[name] = Pack.open(folder / f"{name}.json").sha256
    write_json(
        folder / "corpus.json",
        {"format": FORMAT, "version": VERSION, "data": {"kind": kind}, "seed": 1, "sources": {},
         "packs": packs},
    )  # fmt: skip


def what_is_read(folder, kind):
    """Everything training takes from a corpus."""
    corpus = open_corpus(folder, DataConfig(kind=kind))
    out = []
    for pack in (corpus.train, corpus.validation):
        token_ids_BN, lengths_B = pack.gather(range(len(pack)))
        out.append(
            (token_ids_BN.tolist(), lengths_B.tolist(), pack.row_length, pack.vocab_size)
        )
        out.append((pack.special_ids, pack.tokenizer_sha256, pack.sha256, pack.num_tokens))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "smiles"])
def test_damaged_corpora_are_told_or_read(tmp_path, kind):
    build(tmp_path / "whole", kind)
    want = what_is_read(tmp_path / "whole", kind)
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    folder = tmp_path / "damaged"
    shutil.copytree(tmp_path / "whole", folder)
    rng, outcomes = random.Random(0), Counter()

    def too_long(*_):
        raise AssertionError("the reader hangs")

    previous = signal.signal(signal.SIGALRM, too_long)
    try:
        for _ in range(NUM_MUTATIONS):
            name = rng.choice(sorted(files))
            is_field = (
                name.endswith(".json") and name != "tokenizer.json" and rng.random() < 0.6
            )
            may_differ = False
            if is_field:
                seal = rng.choice(["kept", "renewed", "none"])
                may_differ = seal != "kept"
                content = damage_json(read_json(tmp_path / "whole" / name), rng)
                if seal == "kept":
                    content["seal"] = json.loads(files[name])["seal"]
                if seal == "renewed" and "\\ud800" not in json.dumps(content):
                    write_json(folder / name, content)
                else:
                    (folder / name).write_text(json.dumps(content))
            else:
                (folder / name).write_bytes(damage_bytes(files[name], rng))
            signal.alarm(SECONDS_FOR_ONE)
            try:
                got = what_is_read(folder, kind)
            except UserError as error:
                assert "\n" not in str(error), repr(str(error))
                outcomes["told"] += 1
            else:
                # A side file that was written anew, or has no seal as those of old versions,
                # may say something else that is sound in itself; its rows are as long.
                assert may_differ or got == want, (name, (folder / name).read_bytes())
                for mine, theirs in zip(got[::2], want[::2], strict=True):
                    assert mine[1:3] == theirs[1:3]
                outcomes["read"] += 1
            finally:
                signal.alarm(0)
            (folder / name).write_bytes(files[name])
    finally:
        signal.signal(signal.SIGALRM, previous)
    print(dict(outcomes))
    assert sum(outcomes.values()) == NUM_MUTATIONS
    assert outcomes["told"] > 0.6 * NUM_MUTATIONS
