"""What a person would try first, on the rows and answers of a task, for comparison.

``mean`` and ``most frequent`` read nothing. ``random forest`` reads Morgan fingerprints of
molecules, ``TF-IDF`` the words of texts, with a ridge or logistic regression.

Shapes: R rows, F features, C outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from exlm_lab.downstream.metrics import evaluate
from exlm_lab.downstream.task import Examples, Task

CONSTANT: dict[str | None, str] = {"numbers": "mean", "mixed": "mean or most frequent"}
NUM_TREES = 200
RADIUS, NUM_BITS = 2, 2048


def baselines(
    task: Task, train: Examples, test: Examples, seeds: tuple[int, ...]
) -> dict[str, list[dict[str, float]]]:
    """The metrics of each baseline on a part, by its name, for each seed where these matter."""
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    reads = _fingerprints if task.input == "smiles" else _word_weights
    features: Any = reads(train, test)
    blank = np.zeros((len(train.texts), 1)), np.zeros((len(test.texts), 1))

    def measured(models: tuple[Any, Any], features: Any) -> dict[str, float]:
        scores_RC = _scores(task, models, features, train, len(test.texts))
        return evaluate(task, scores_RC, test.labels)

    constant = measured((DummyRegressor(), DummyClassifier(strategy="prior")), blank)
    found = {CONSTANT.get(task.kind, "most frequent"): [constant]}
    if task.input != "smiles":
        linear = measured((Ridge(), LogisticRegression(max_iter=1000)), features)
        return found | {"TF-IDF": [linear]}
    options = [
        {"n_estimators": NUM_TREES, "random_state": seed, "n_jobs": -1} for seed in seeds
    ]
    forests = [(RandomForestRegressor(**one), RandomForestClassifier(**one)) for one in options]
    return found | {"random forest": [measured(pair, features) for pair in forests]}


def _scores(
    task: Task,
    models: tuple[Any, Any],
    features: tuple[Any, Any],
    train: Examples,
    num_rows: int,
) -> np.ndarray:
    """scores_RC of models of scikit-learn, of numbers and of classes, one target after the other,
    as ``evaluate`` takes them."""
    regressor, classifier = models
    if task.kind == "classes":
        scores_RC = np.zeros((num_rows, len(task.classes)))
        classifier.fit(features[0], train.labels)
        scores_RC[:, classifier.classes_] = classifier.predict_proba(features[1])
        return scores_RC
    columns = []
    for is_number, labels_R in zip(task.is_number, train.labels.T, strict=True):
        is_there_R = ~np.isnan(labels_R)
        known_R = labels_R[is_there_R]
        if len(set(known_R.tolist())) < 2:
            columns.append(np.full(num_rows, known_R[0] if len(known_R) else 0.0))
            continue
        own = regressor if is_number else classifier
        own.fit(features[0][is_there_R], known_R)
        columns.append(
            own.predict(features[1]) if is_number else own.predict_proba(features[1])[:, 1]
        )
    return np.stack(columns, axis=1)


def _fingerprints(*parts: Examples) -> tuple[np.ndarray, ...]:
    """bits_RF of the molecules; of a pair one after the other."""
    from rdkit.Chem.rdFingerprintGenerator import GetMorganGenerator

    from exlm_mini.data.molecules import read_molecule

    generator = GetMorganGenerator(radius=RADIUS, fpSize=NUM_BITS)
    return tuple(
        np.array([
            np.concatenate([generator.GetFingerprintAsNumPy(read_molecule(s)) for s in row])
            for row in part.texts
        ])
        for part in parts
    )  # fmt: skip


def _word_weights(*parts: Examples) -> tuple[Any, ...]:
    """weights_RF of the words and pairs of words; of a pair of texts one after the other."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    blocks = []
    for columns in zip(*(zip(*part.texts, strict=True) for part in parts), strict=True):
        weigh = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"\S+").fit(columns[0])
        blocks.append([weigh.transform(column) for column in columns])
    return tuple(hstack(own).tocsr() for own in zip(*blocks, strict=True))
