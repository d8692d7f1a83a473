"""Directories that hold no run are named as what they are, and an export is open to its readers."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import tiny_run, write_molecules

from exlm_lab import finetune
from exlm_mini.config.checks import UserError
from exlm_mini.export import main
from exlm_mini.fill import main as fill
from exlm_mini.reading.pretrained import load_pretrained
from exlm_mini.reading.trained import load

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> Path:
    """A directory of each kind, by name."""
    folder = tmp_path_factory.mktemp("kinds")
    run = tiny_run(folder / "run", "smiles")
    write_molecules(folder)
    argv = ["--task", "bbbp", "--checkpoint", run, "--data", folder, "--train.epochs", "1"]
    argv += ["--seeds", "1", "--keep", "--output", folder / "tuned"]
    assert finetune.main([str(word) for word in argv]) == 0
    assert main([str(run), str(folder / "exported")]) == 0
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    (folder / "empty").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "x.txt").write_text("x")
    (folder / "file").write_text("x")
    (folder / "begun").mkdir()
    shutil.copytree(run / "data", folder / "corpus")
    (folder / "begun" / "config.yaml").write_text("x")
    for name in ("mlm", "exlm"):
        shutil.copytree(run, folder / "both" / name)
    return folder


KINDS = [
    ("exported", "a model for transformers", "exlm_mini.hf"),
    ("bert", "a model of transformers (bert)", "pre-training run"),
    ("corpus", "a prepared corpus", "--data.pack"),
    ("tuned", "the output of fine-tuning", "pre-training run"),
    ("tuned/running/bbbp/*/seed-1", "a run of fine-tuning", "pre-training run"),
    ("tuned/running/bbbp/*/seed-1/checkpoint-*", "a model for transformers", "the run"),
    ("run/checkpoints", "the checkpoints of a run", "one of them"),
    ("empty", "which is empty", "pre-training run"),
    ("notes", "there is no checkpoint in", "pre-training run"),
    ("file", "a file", "pre-training run"),
    ("begun", "a run that has not saved one yet", "another"),
    ("nowhere", "there is no checkpoint in", "pre-training run"),
]


@pytest.mark.parametrize(("name", "kind", "remedy"), KINDS)
def test_another_kind_of_directory_is_named(name, kind, remedy, kinds, tmp_path, capsys):
    path = next(iter(sorted(kinds.glob(name))), kinds / name)
    for door in (lambda: load_pretrained(path, print), lambda: load(path)):
        with pytest.raises(UserError) as refused:
            door()
        line = str(refused.value)
        assert str(path) in line and kind in line and remedy in line and "damaged" not in line
    assert main([str(path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
    assert fill(["C[MASK]", "--run", str(path)]) == 2
    assert kind in capsys.readouterr().err


def test_a_directory_of_two_runs_is_told_apart_where_one_must_be_chosen(
    kinds, capsys, tmp_path
):
    assert main([str(kinds / "both"), str(tmp_path / "out")]) == 2
    assert "a directory of runs; give one of them" in capsys.readouterr().err
    assert load(kinds / "both").run == kinds / "both" / "exlm"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_an_export_have_one_mode(umask, mode, kinds, tmp_path):
    before = os.umask(umask)
    try:
        assert main([str(kinds / "run"), str(tmp_path / "out")]) == 0
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert "model.safetensors" in modes and set(modes.values()) == {mode}, modes


def test_an_export_says_what_the_model_takes(kinds, monkeypatch):
    from transformers import AutoModel, AutoTokenizer

    import exlm_mini.hf

    path, pretrained = kinds / "exported", load_pretrained(kinds / "run", print)
    tokenizer, model = (
        AutoTokenizer.from_pretrained(path),
        AutoModel.from_pretrained(path).eval(),
    )
    assert tokenizer.model_max_length == pretrained.max_length
    assert model.config.max_position_embeddings == pretrained.config.model.max_positions
    row = tokenizer("C" * 999, truncation=True, return_tensors="pt")
    assert row.input_ids.shape[1] == pretrained.max_length
    said: list[str] = []
    monkeypatch.setattr(exlm_mini.hf.models.LOGGER, "warning_once", said.append)
    model(**tokenizer("CCO", return_tensors="pt"))
    assert not said
    assert model(**row).last_hidden_state.isfinite().all()
    assert str(model.config.learned_length) in said[0]
    assert (
        model.config.learned_length
        == pretrained.config.data.block_length
        < row.input_ids.shape[1]
    )
    longest = torch.full((1, pretrained.layout.room(1) + 3), 9)
    longest[0, 0], longest[0, -1] = tokenizer.bos_token_id, tokenizer.eos_token_id
    with pytest.raises(ValueError, match="max_positions"):
        model(longest)
