"""Frozen features: both sides share no scaffold; ridge regression reads what states hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from packs import pack_of
from rdkit.Chem.rdMolDescriptors import CalcNumAromaticRings
from tiny_runs import DATA
from torch import nn

from exlm_lab.downstream.scaffolds import scaffold
from exlm_lab.experiments import frozen
from exlm_lab.experiments.frozen import QUANTITIES, explained, features, held_out
from exlm_mini.config import ModelConfig
from exlm_mini.data.corpus import prepare_corpus
from exlm_mini.data.molecules import read_molecule
from exlm_mini.data.tokenizer import Tokenizer, train_smiles
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.exlm import token_states

SMALL = ModelConfig(width=16, num_heads=2, ffn_width=16, states_per_mask=2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    half = replace(DATA["smiles"], validation_share=0.5)
    return prepare_corpus(half, tmp_path_factory.mktemp("corpus"), 1)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return Tokenizer.load(corpus.tokenizer_path)


@pytest.fixture(scope="module")
def found(corpus, tokenizer):
    return held_out(corpus.validation, tokenizer)


def test_molecules_to_learn_from_share_no_scaffold_with_those_to_test(found, corpus, tokenizer):
    frames: dict[bool, set[str]] = {False: set(), True: set()}
    rows = found.rows(corpus.validation)
    for row, is_test, quantities in zip(rows, found.is_test_R, found.quantity_RC, strict=True):
        molecule = read_molecule(tokenizer.decode(row[1:-1]))
        frames[bool(is_test)].add(scaffold(molecule, is_chiral=False))
        rings = quantities[QUANTITIES.index("NumAromaticRings")]
        assert rings == CalcNumAromaticRings(molecule)
    assert frames[False] and frames[True] and not frames[False] & frames[True]
    assert len(set(found.number_R)) == len(rows) > 0.9 * len(corpus.validation)


def test_stereo_marks_make_no_other_scaffold(tmp_path):
    mirrored = ["O=C1N[C@H]2CCC[C@H]2C1", "O=C1N[C@@H]2CCC[C@H]2C1"]
    tokenizer = train_smiles(mirrored)
    rows = [[1, *tokenizer.encode(smiles), 2] for smiles in mirrored * 4]
    pack = pack_of(tmp_path / "pack.json", rows, tokenizer.vocab_size)
    assert len(set(held_out(pack, tokenizer).is_test_R)) == 1


def test_no_more_molecules_than_asked_for_are_drawn_by_the_toss_of_a_coin(
    found, corpus, tokenizer, monkeypatch
):
    rng = np.random.default_rng(0)
    first = rng.permutation(len(corpus.validation))[0]
    assert (found.number_R[0], found.is_test_R[0]) == (first, rng.integers(2) == 1)
    sides = [found.number_R[found.is_test_R == is_test] for is_test in (False, True)]
    num = min(map(len, sides))
    assert num < max(map(len, sides))
    monkeypatch.setattr(frozen, "NUM_EACH", num)
    some = held_out(corpus.validation, tokenizer)
    for is_test, number_R in enumerate(sides):
        assert some.number_R[some.is_test_R == is_test].tolist() == number_R[:num].tolist()


@pytest.mark.parametrize(
    ("kind", "expand_at", "num_copies"),
    [(MaskedLM, 0, 1), (MaskedLM, 0, 3), (ExLM, 0, 1), (ExLM, 1, 1)],
)
def test_features_are_the_mean_states_of_the_symbols_alone(kind, expand_at, num_copies, corpus):
    model = kind(replace(SMALL, expand_at=expand_at), corpus.train.vocab_size).eval()
    model.encoder.final_norm = nn.Identity()  # so that the last layer comes out
    pack = corpus.validation
    padded = zip(pack.gather(range(3)), pack.lengths_R, strict=False)
    rows = [row_N[:length].numpy() for row_N, length in padded]
    found_RD = features(model, rows, num_copies)
    assert found_RD.shape == (3, 2 * 16)
    for feature_D, row_N in zip(found_RD, rows, strict=True):
        with torch.no_grad():
            alone_1N = torch.from_numpy(row_N)[None]
            hidden_ND = token_states(model, alone_1N, num_copies).double()[0]
        np.testing.assert_allclose(feature_D[16:], hidden_ND[1:-1].mean(dim=0), atol=1e-5)
        np.testing.assert_allclose(
            features(model, [row_N], num_copies)[0], feature_D, atol=1e-5
        )


def test_ridge_regression_shrinks_by_its_penalty(monkeypatch):
    # The only feature tells the quantity exactly; at variance 1 its weight is 1 / (1 + penalty).
    x_R1 = np.random.default_rng(0).normal(size=(50, 1))
    twice_RC = np.tile(x_R1, (2, len(QUANTITIES))) * np.arange(1, 6) + 7
    known = frozen.Molecules(np.arange(100), np.arange(100) >= 50, twice_RC)
    monkeypatch.setattr(frozen, "features", lambda *arguments: np.tile(3 * x_R1 - 1, (2, 1)))
    for penalty in (0.01, 1.0):
        found = explained(None, [], known)
        assert set(found) == {f"read_{name}" for name in (*QUANTITIES, "structure")}
        want = 1 - (penalty / (1 + penalty)) ** 2
        assert found == {name: pytest.approx(want, abs=1e-9) for name in found}
        monkeypatch.setattr(frozen, "PENALTY", 1.0)


def test_states_that_tell_the_structure_explain_it_and_noise_does_not(found, monkeypatch):
    monkeypatch.setattr(frozen, "features", lambda *arguments: found.quantity_RC)
    assert explained(None, [], found)["read_structure"] > 0.99
    noise_RD = np.random.default_rng(0).normal(size=(len(found.number_R), 2))
    monkeypatch.setattr(frozen, "features", lambda *arguments: noise_RD)
    assert explained(None, [], found)["read_structure"] < 0.2
