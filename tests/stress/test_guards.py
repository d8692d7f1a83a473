"""A damaged file gives one line with its name and a remedy; a bug of our own is not hidden."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from glue_files import write_task
from made_records import made_record
from refusals import told
from squad_files import PETS
from tiny_runs import DATA, tiny_run

from exlm_lab.downstream.catalogue import load_task
from exlm_lab.downstream.finetuning import fine_tune
from exlm_lab.downstream.prepared import make_problem
from exlm_lab.downstream.runs import TuningLedger
from exlm_lab.downstream.settings import ReadingConfig, TuneConfig
from exlm_lab.downstream.squad import load_squad
from exlm_lab.downstream.task import Examples, Splits, Task
from exlm_lab.experiments import records
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.reading.trained import load, open_checkpoint
from exlm_mini.training.trainer import Trainer


class Place(NamedTuple):
    """A place in the code where a file is read."""

    file: Path
    read: Callable[[], object]
    ours: str
    """Dotted name of a function of our own that works on what was read."""


def trainer_like(run: Path, output: Path) -> Trainer:
    """The trainer of a new run with the settings and the corpus of another run."""
    corpus = prepare_corpus(DATA["smiles"], run / "data", 1)
    return Trainer(load(run).config, corpus.train, corpus.validation, output)


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, Place]:
    """Every place where a file is read, by name; the files are undamaged."""
    home = tmp_path_factory.mktemp("places")
    run = tiny_run(home / "run", "smiles")
    pretrained = load(run)
    step = pretrained.path
    examples = Examples([("C",), ("CC",)], np.array([0, 1]))
    task = Task("which", "classes", ("no", "yes"), "accuracy", "smiles")
    problem = make_problem(task, Splits(examples, examples, None, {}), pretrained)
    quick = TuneConfig(epochs=1, batch_size=2)
    ledger = TuningLedger(home, pretrained, problem, "cpu")
    ledger.run(quick, 1)
    cell, running = ledger.path(quick, 1), home / "running"
    fine_tune(pretrained, problem, quick, 1, running, "cpu")
    for name in ("train", "dev"):
        content = json.dumps({"data": PETS["data"]})
        (home / f"{name}-v2.0.json").write_text(content)
    folder = write_task(home, "rte")
    record = made_record("s")
    (home / "s.jsonl").write_text(json.dumps(record) + "\n")
    parts, downstream = "exlm_mini.training.parts", "exlm_lab.downstream"
    return {
        "manifest": Place(
            step / "manifest.json",
            lambda: open_checkpoint(step, print),
            "exlm_mini.training.checkpoint.encode_manifest",
        ),
        "model": Place(step / "model.safetensors", lambda: load(step), f"{parts}.make_model"),
        "settings": Place(step / "manifest.json", lambda: load(step), f"{parts}.RunConfig"),
        "tokenizer": Place(
            step / "tokenizer.json", lambda: load(step), "exlm_mini.data.tokenizer._kind"
        ),
        "moments": Place(
            step / "optimizer.safetensors",
            lambda: trainer_like(run, home / "next").begin_from(open_checkpoint(step, print)),
            "exlm_mini.training.trainer.restore_optimizer",
        ),
        "squad": Place(
            home / "train-v2.0.json", lambda: load_squad(home), f"{downstream}.squad.document"
        ),
        "glue": Place(
            folder / "train-00000-of-00001.parquet",
            lambda: load_task("rte", home, ReadingConfig(), pretrained.tokenizer),
            f"{downstream}.examples.find_column",
        ),
        "cell": Place(cell, lambda: ledger.run(quick, 1), f"{downstream}.runs.check_identity"),
        "run": Place(
            running / "run.json",
            lambda: fine_tune(pretrained, problem, quick, 1, running, "cpu"),
            f"{downstream}.finetuning.check_identity",
        ),
        "line": Place(
            home / "s.jsonl",
            lambda: records.read("s", home),
            "exlm_lab.experiments.records._check_settings",
        ),
    }


PLACES = [
    "manifest", "model", "settings", "tokenizer", "moments", "squad", "glue", "cell", "run",
    "line",
]  # fmt: skip


@pytest.mark.parametrize("kind", [ValueError, KeyError])
@pytest.mark.parametrize("name", PLACES)
def test_a_bug_of_ours_is_no_damage(name, kind, places, monkeypatch):
    def broken(*values, **named):
        raise kind("our own bug")

    monkeypatch.setattr(places[name].ours, broken)
    records._read.cache_clear()
    with pytest.raises(kind, match="our own bug") as caught:
        places[name].read()
    assert caught.type is kind and caught.traceback[-1].name == "broken"


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    """Flip a bit: in the first name of a JSON object, near the end of any other file."""
    place = data.index(b'"') + 1 if data[:1] == b"{" else len(data) - 6
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [cut, flipped, lambda data: b"no JSON", lambda data: b"[]"])
@pytest.mark.parametrize("name", PLACES)
def test_a_damaged_file_is_one_line_with_its_name_and_a_remedy(name, damage, places):
    file, whole = places[name].file, places[name].file.read_bytes()
    file.write_bytes(damage(whole))
    try:
        line = told(places[name].read, file.parent if name == "glue" else file)
        assert "; " in line
    finally:
        file.write_bytes(whole)
    places[name].read()
