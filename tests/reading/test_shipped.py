"""The shipped models match their model cards, and ``fill`` uses them where there is no run."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from refusals import told
from transformers import AutoModelForMaskedLM

import exlm_mini
import exlm_mini.hf
from exlm_mini import fill
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.export import card as export_card
from exlm_mini.reading.prize import measure_prize
from exlm_mini.reading.runs import SHIPPED, shipped_for
from exlm_mini.training.parts import make_masker

LARGEST = 3 * 2**20
"""Limit on the size of a shipped model, in bytes."""


@pytest.fixture(scope="module", params=SHIPPED)
def name(request):
    return request.param


def test_it_is_small_and_its_card_names_licence_and_measurement(name):
    folder = SHIPPED[name]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LARGEST
    card = (folder / "README.md").read_text()
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"{last['validation_bits_per_mask']:.3f} bits per masked" in card
    assert f"{100 * last['validation_mask_accuracy']:.1f}%" in card
    trained = exlm_mini.load(name)
    assert f"{sum(p.numel() for p in trained.model.parameters()):,} parameters" in card
    assert re.search(r"\((MIT|CC0)\)", card)
    exported = export_card(trained)  # says what the model was trained on, as its own card does
    assert card.partition("\n")[2] in exported and "embedded" not in exported


def test_transformers_opens_it_in_float32(name):
    """One of the models is stored in float16, in which it would not train."""
    model = AutoModelForMaskedLM.from_pretrained(exlm_mini.load(name).path)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_nothing_in_it_names_the_machine_it_was_made_on(name):
    for path in SHIPPED[name].rglob("*.json*"):
        assert not re.search(r"/(home|tmp|work|Users)/", path.read_text()), path


def test_the_molecules_are_aromatic_and_remain_molecules():
    chem = pytest.importorskip("rdkit.Chem")
    molecules = exlm_mini.load("molecules")
    for text in ("c1cc[MASK]cc1O", "CC(=O)Nc1cc[MASK]cc1", "O=C(O)c1ccccc1[MASK]"):
        assert chem.MolFromSmiles(molecules.fill(text).text) is not None, text


@pytest.mark.parametrize("name", ["molecules-spans", "english"])
def test_its_links_are_in_use(name, tmp_path):
    """Measured on other molecules, or another kind of English, than it was trained on."""
    trained = exlm_mini.load(name)
    data = replace(
        trained.config.data, pack=None, max_documents=400, max_unknown=1.0,
        tokenizer=str(trained.path / "tokenizer.json"),
    )  # fmt: skip
    pack = prepare_corpus(data, tmp_path / "data", 1).validation
    prize = measure_prize(trained.model, pack, make_masker(trained.config, pack.special_ids), 8)
    assert prize.clones_used > 2 and prize.links_win > 0.1


def test_a_text_with_few_masks_has_paths_that_fit():
    english = exlm_mini.load("english")
    for text in ("She was a very [MASK] woman.", "This is [MASK], and I'm very [MASK]."):
        assert english.fill(text).reading.graph.log_fit > -0.1, text


def test_words_are_english_and_symbols_are_a_molecule():
    assert shipped_for(" [MASK]CC\n") == "molecules"
    assert shipped_for("[MASK] the") == "english"


def test_fill_reads_it_where_there_is_no_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert fill.main(["c1cc[MASK]cc1O"]) == 0
    out, err = capsys.readouterr()
    assert "no run below runs/: reading the small shipped model 'molecules'" in err
    assert "filled  c1ccccc1O" in out


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("molecules").mkdir()
    told(lambda: exlm_mini.load("molecules"), "no checkpoint in molecules", "hides the shipped")
