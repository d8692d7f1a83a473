"""A trained model used from Python: its vectors, losses and fillings, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from refusals import told
from tiny_runs import DATA, tiny_run

import exlm_mini
from exlm_mini.config import DataConfig
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.molecules import Cleaning
from exlm_mini.data.tokenizer import visible
from exlm_mini.model.exlm import token_states
from exlm_mini.reading.decoding import top_tokens
from exlm_mini.reading.entries import listed, readable, tell

SMILES = ["CC(=O)N", "CCO", "C1CCCCC1"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for objective in ("exlm", "mlm", "repeated-mlm"):
        tiny_run(folder / objective, "smiles", objective)
    return folder


@pytest.mark.parametrize("objective", ["exlm", "mlm", "repeated-mlm"])
def test_a_vector_is_the_mean_of_the_tokens_of_its_text(objective, runs):
    model = exlm_mini.load(str(runs / objective))
    together_BD = model.embed(SMILES, batch_size=2)
    told(lambda: model.embed(SMILES, batch_size=-1), "batch_size is -1", "at least 1")
    assert model.embed([]).shape == (0, together_BD.shape[1])
    copies = model.config.masking.num_copies if objective == "repeated-mlm" else 1
    for vector_D, text in zip(together_BD, SMILES, strict=True):
        states_ND = token_states(model.model, model.rows(text), copies)[0]
        torch.testing.assert_close(vector_D, states_ND[1:-1].mean(dim=0), atol=1e-5, rtol=1e-4)


def test_loading_a_model_leaves_the_draws_of_the_caller_alone(runs):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    exlm_mini.load(runs / "exlm")
    assert torch.equal(torch.rand(3), expected)


def test_a_text_that_just_fits_is_taken_and_a_longer_one_refused(runs):
    model = exlm_mini.load(runs / "exlm")
    just = model.config.expanded_length(len("CCO") + 2)
    config = replace(model.config, model=replace(model.config.model, max_positions=just))
    narrow = replace(model, config=config)
    assert narrow.rows(["CCO"]).shape == (1, 5)
    told(lambda: narrow.rows(["CCOC"]), f"{just + 1} after expansion", f"max_positions {just}")


def test_a_mask_counts_as_a_token_of_its_text():
    model, text = exlm_mini.load("english"), "The [MASK] of the house."
    states_ND = token_states(model.model, model.rows(text))[0]
    torch.testing.assert_close(model.embed([text])[0], states_ND[1:-1].mean(dim=0))


def test_a_loss_hides_other_tokens_in_each_text_and_has_the_chains_of_its_step(
    runs, monkeypatch
):
    seen, model = [], exlm_mini.load(runs / "exlm")
    monkeypatch.setattr(model.model, "answer", lambda *args: seen.append(args) or Mock())
    warming_up = replace(model.config.train, steps=100, chain_warmup=0.5)
    model = replace(model, config=replace(model.config, train=warming_up))
    model.loss(["CC(=O)Nc1ccc(O)cc1"] * 8)
    ((batch, share),) = seen
    assert len({tuple(row) for row in batch.is_masked_BN.tolist()}) > 1
    assert share == model.config.chain_share(model.step) > 0


def test_a_loss_has_gradients_and_masks_of_its_seed(runs):
    model = exlm_mini.load(runs / "exlm")
    loss = model.loss(SMILES)
    assert loss.item() == model.loss(SMILES).item()
    assert len({model.loss(SMILES, seed).item() for seed in range(5)}) > 1
    loss.backward()
    assert all(p.grad is not None for p in model.model.encoder.parameters())


def test_what_is_around_a_molecule_changes_nothing(runs):
    model = exlm_mini.load(runs / "exlm")
    texts = [f"\t{smiles} paracetamol\r\n" for smiles in SMILES]
    assert torch.equal(model.embed(texts), model.embed(SMILES))
    assert torch.equal(model.loss(texts), model.loss(SMILES))
    masked = "CC(=O)N[MASK]"
    assert model.fill(f"\t{masked} paracetamol\r\n").text == model.fill(masked).text


def test_an_explorer_has_a_dozen_words_for_a_mask_and_the_three_likeliest_of_each_state():
    model, text = exlm_mini.load("english"), "The [MASK] of the [MASK] house."
    scene, reading = model.explore(text).scene, model.fill(text).reading
    tokenizer, special_ids = model.tokenizer, model.tokenizer.special_ids
    offered = top_tokens(reading.log_token_SV, 12, special_ids)[0].tolist()
    of_states = top_tokens(reading.states.log_token_LV, 3, special_ids)[0].tolist()
    shown = [[visible(tokenizer, i) for i in row] for row in offered + of_states]
    assert [[scene.words[w] for w in row] for row in scene.offered] == shown[:2]
    assert set(scene.words) == {word for row in shown for word in row}
    assert scene.text == ["The", "of the", "house."]
    assert all(p == float(f"{p:.4g}") for row_W in scene.token_LW for p in row_W)


def test_an_mlm_has_one_state_for_each_mask(runs):
    scene = exlm_mini.load(runs / "mlm").explore("C[MASK]C[MASK]").scene
    assert scene.text == ["C", "C", ""] and scene.labels == ["BOS", "1", "2", "EOS"]


def test_blanks_within_a_text_count():
    english = exlm_mini.load("english")
    plain, *others = ("The [MASK]\nof it.", "The \n[MASK] of it.", "The  [MASK] of it.")
    assert len({tuple(english.rows(text)[0].tolist()) for text in (plain, *others)}) == 3
    assert english.rows(f" {plain}\n").shape != english.rows(plain).shape


def test_a_model_knows_how_long_the_rows_were_that_it_learned(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    prepare_corpus(DATA["text"], corpus, seed=1)
    other = DataConfig(kind="text", pack=str(corpus), vocab_size=900, block_length=64)
    model = exlm_mini.load(tiny_run(tmp_path / "run", "text", data=other))
    data = model.config.data
    assert (data.block_length, data.vocab_size) == (32, model.tokenizer.vocab_size)
    short = "the if statement"
    assert model.rows(short).shape[1] <= 32 and not capsys.readouterr().err
    model.embed([short, short * 20])
    assert "1 of 2 texts are longer than the rows of up to 32 tokens" in capsys.readouterr().err


def test_stereo_marks_that_a_model_lacks_are_left_out_and_other_unknowns_told(capsys):
    model = exlm_mini.load("molecules")
    flat, marked = model.embed(["CC(N)C(=O)O", "C[C@H](N)C(=O)O"])
    assert torch.allclose(flat, marked, atol=1e-6) and capsys.readouterr().err == ""
    model.embed(["CCO", "CCCCO[Na]CCCC"])
    assert "1 of 2 texts contain something" in (said := capsys.readouterr().err)
    assert "[Na]" in said
    half, more = model.embed(["C[Na]", "CC[Na][Na][Na]"]).isnan().all(dim=1).tolist()
    assert not half and more


def test_what_cannot_be_read_is_told(runs, capsys):
    model = exlm_mini.load(runs / "exlm")
    strange = (None, float("nan"), 3, "C\udc80", "CC\nCN", "CC |^1:0|")
    for entry in (*strange, " ", "C" * 600, "C1CC(", "hello world"):
        vectors_BD = model.embed(["CC", entry, "CO"])
        assert vectors_BD.isnan().any(dim=1).tolist() == [False, True, False]
        assert "texts[1]: " in capsys.readouterr().err
    for entry in (*strange, "C1CC(", "hello world"):
        told(lambda entry=entry: model.loss(["CC", entry]), "texts[1]")
    for entry in strange:
        told(lambda entry=entry: model.fill(entry), "the text")
    told(lambda: model.loss(["[#6;R]"]), "'[#6;R]' as a molecule; leave it out")
    told(lambda: model.loss(["C;C\nN"]), "by a name; leave it out")
    told(lambda: model.loss(3), "texts[0]: it is not text")
    told(lambda: model.loss(["CC", "C[MASK]"]), "texts[1]", "without masks")
    told(lambda: model.loss([]), "at least one")


@pytest.mark.parametrize("num_unreadable", [0, 10, 11, 1234])
def test_ten_unreadable_entries_are_named_in_order_and_the_others_counted(num_unreadable):
    lines: list[str] = []
    reasons = {place: f"reason {place}" for place in reversed(range(num_unreadable))}
    tell(reasons, "row {}", "left out", lines.append, first=5)
    named = [f"row {5 + place}: reason {place}; left out" for place in range(num_unreadable)]
    others = [f"{num_unreadable - 10:,} more are unreadable"]
    assert lines == named[:10] + others * (num_unreadable > 10)


def test_entries_are_read_as_what_they_are():
    values = ["OCC ethanol", "[Xx]", " ", None]
    assert readable(values[:1], "text", Cleaning(canonical=True))[0] == ["OCC ethanol"]
    assert readable(values[:2], "smiles")[0] == ["OCC", "[Xx]"]
    texts, reasons = readable(values, "smiles", Cleaning(canonical=True))
    assert texts == ["CCO", "", "", ""] and list(reasons) == [1, 2, 3]
    assert [reasons[2], reasons[3]] == ["it is empty", "it is not text"]
    assert listed("CO") == ["CO"] and listed(3) == [3] and listed(iter("CO")) == ["C", "O"]
