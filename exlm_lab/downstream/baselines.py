"""Simple baselines, trained on the rows of a task, to compare a fine-tuned model with.

``mean`` and ``most frequent`` ignore the inputs. ``random forest`` reads Morgan fingerprints of
molecules; ``TF-IDF`` reads the words of texts, with a ridge or logistic regression.

Shapes: R rows, F features, C outputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from exlm_lab.downstream.metrics import evaluate
from exlm_lab.downstream.task import Examples, Task

NUM_TREES = 200
RADIUS, NUM_BITS = 2, 2048
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Letters of scripts without spaces between words: Thai to Burmese, Khmer, Japanese, Chinese."""
_WORD = rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+"


def baselines(
    task: Task, train: Examples, test: Examples, seeds: tuple[int, ...]
) -> dict[str, list[dict[str, float]]]:
    """Metrics of each baseline on ``test``, by its name: one dict per seed, or a single one if the
    baseline does not depend on the seed."""
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    def measured(regressor: Any, classifier: Any, features: Any) -> dict[str, float]:
        scores_RC = _scores(task, regressor, classifier, features, train.labels)
        return evaluate(task, scores_RC, test.labels)

    blank = [np.zeros((len(part.texts), 1)) for part in (train, test)]
    names = ["mean"] * bool(task.is_number.any())
    names += ["most frequent"] * (not task.is_number.all())
    constant = measured(DummyRegressor(), DummyClassifier(strategy="prior"), blank)
    if task.input != "smiles":
        features = _word_weights(train, test)
        linear = measured(Ridge(), LogisticRegression(max_iter=1000), features)
        return {" or ".join(names): [constant], "TF-IDF": [linear]}
    features, each = _fingerprints(train, test), []
    for seed in seeds:
        options: Any = {
            "n_estimators": NUM_TREES, "random_state": seed, "n_jobs": torch.get_num_threads(),
        }  # fmt: skip
        forests = RandomForestRegressor(**options), RandomForestClassifier(**options)
        each.append(measured(*forests, features))
    return {" or ".join(names): [constant], "random forest": each}


def _scores(
    task: Task, regressor: Any, classifier: Any, features: Any, labels: np.ndarray
) -> np.ndarray:
    """scores_RC of scikit-learn models, one fitted per target, in the form ``evaluate`` takes."""
    learned_RF, asked_RF = features
    num_rows = asked_RF.shape[0]
    if task.kind == "classes":
        scores_RC, seen = np.zeros((num_rows, len(task.classes))), np.unique(labels)
        scores_RC[:, seen] = 1.0
        if len(seen) > 1:  # a logistic regression cannot be fitted to one class
            scores_RC[:, seen] = classifier.fit(learned_RF, labels).predict_proba(asked_RF)
        return scores_RC
    columns = []
    for is_number, labels_R in zip(task.is_number, labels.T, strict=True):
        is_there_R = ~np.isnan(labels_R)
        known_R, learned = labels_R[is_there_R], learned_RF[is_there_R]
        if len(set(known_R.tolist())) < 2:
            columns.append(np.full(num_rows, known_R[0] if len(known_R) else 0.0))
        elif is_number:
            columns.append(regressor.fit(learned, known_R).predict(asked_RF))
        else:
            columns.append(classifier.fit(learned, known_R).predict_proba(asked_RF)[:, 1])
    return np.stack(columns, axis=1)


def _fingerprints(*parts: Examples) -> tuple[np.ndarray, ...]:
    """bits_RF of the molecules in each part; the fingerprints of a pair are concatenated."""
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
    """TF-IDF weights_RF of words and pairs of words (of letters, in scripts without spaces between
    words); the weights of a pair of texts are concatenated."""
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    blocks = []
    for columns in zip(*(zip(*part.texts, strict=True) for part in parts), strict=True):
        weigh = TfidfVectorizer(ngram_range=(1, 2), token_pattern=_WORD).fit(columns[0])
        blocks.append([weigh.transform(column) for column in columns])
    return tuple(hstack(own).tocsr() for own in zip(*blocks, strict=True))
