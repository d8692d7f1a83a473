"""The embedded molecular task: exact labels, no shortcut."""

import numpy as np
import pytest

pytest.importorskip("rdkit", reason="rdkit is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")

from exlm_lab.downstream.patterns import PATTERNS, counting_baseline, labels_of, load
from exlm_lab.downstream.task import Examples, Splits


@pytest.fixture(scope="module")
def embedded():
    return load()


@pytest.mark.parametrize(
    ("smiles", "answers"),
    [
        ("CCO", (0, 0, 0)),
        ("Cc1ccc(O)cc1", (1, 1, 0)),
        ("CC1=CC=C(O)C=C1", (1, 1, 0)),  # the same molecule in Kekulé form
        ("Cc1cccc(O)c1", (0, 1, 0)),
        ("Clc1ccc(O)cc1", (1, 0, 0)),
        ("c1ccc2ccccc2c1", (0, 0, 1)),
        ("C1CC1C1CC1", (0, 0, 0)),
        ("C1CCC2(CC1)CC2", (0, 0, 1)),
    ],
)
def test_labels_by_hand(smiles, answers):
    assert labels_of([smiles]).tolist() == [list(answers)]


def test_a_molecule_rdkit_rejects_has_no_labels():
    assert np.isnan(labels_of(["C[Xx]", ""])).all()


def test_the_task_is_split_by_scaffolds_and_balanced_enough(embedded):
    task, splits = embedded
    assert task.classes == tuple(PATTERNS) and task.input == "smiles"
    parts = splits.train, splits.validation, splits.test
    num_rows = sum(splits.notes["sizes"])
    assert num_rows == splits.notes["rows"] - len(splits.notes["rejected"]) > 4900
    assert splits.notes["scaffolds"] > 1000
    for part in parts:
        assert not np.isnan(part.labels).any()
        shares = part.labels.mean(axis=0)
        assert (shares > 0.1).all() and (shares < 0.5).all()
        assert min(part.labels.sum(axis=0)) >= 50


def test_counting_finds_what_counts_tell():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 300)
    texts = [("C" * n + "O" * (n % 3),) for n in lengths.tolist()]
    labels = np.stack([lengths > 12, rng.random(300) < 0.5], axis=1).astype(np.float64)
    parts = [Examples(texts[a:b], labels[a:b]) for a, b in ((0, 200), (200, 200), (200, 300))]
    area_C = counting_baseline(Splits(*parts, {}))
    assert area_C[0] > 0.99
    assert 0.3 < area_C[1] < 0.7
