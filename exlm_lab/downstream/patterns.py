"""A molecular task without a download: RDKit's 5,000 molecules, labelled by RDKit.

The task asks three questions about the structure of a molecule: whether it contains each of three
patterns of atoms and bonds. RDKit's labels are exact, so a perfect model answers all questions. The
answers depend on symbols that may be far apart in the string, so counting symbols gets only some of
them right. ``counting_baseline`` measures how many: a model that does no better has not learned to
read molecules.

Shapes: R molecules, C labels, S different symbols.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from exlm_lab.downstream.examples import load_table
from exlm_lab.downstream.metrics import mean_roc_auc
from exlm_lab.downstream.settings import ReadingConfig
from exlm_lab.downstream.task import Splits, Task
from exlm_mini.data.molecules import embedded_molecules, read_molecule
from exlm_mini.data.tokenizer import SMILES_SYMBOL

NAME = "embedded-molecules"
PATTERNS = {
    "para": "[!#1;!R]-c1ccc(-[!#1;!R])cc1",
    "benzyl": "c-[CX4]",
    "fused rings": "[R2]",
}
"""Labels and their SMARTS patterns. para: a benzene ring with two side chains opposite each other.
benzyl: a saturated carbon attached to an aromatic ring. fused rings: an atom in at least two
rings."""
L2_PENALTY = 1e-3


def read(*_: Any) -> tuple[str, dict[str, Any], Task]:
    """The source, data frame and task, in the form ``load_table`` takes."""
    import pandas

    smiles = list(embedded_molecules())
    frame = pandas.DataFrame(labels_of(smiles), columns=list(PATTERNS)).assign(smiles=smiles)
    task = Task(NAME, "labels", (), "", "smiles", ("smiles",), tuple(PATTERNS))
    return "the embedded molecules", {"train": frame}, task


def load() -> tuple[Task, Splits]:
    """The task, split by scaffolds like the sets of MoleculeNet."""
    return load_table(*read(), ReadingConfig())


def labels_of(smiles: Sequence[str]) -> np.ndarray:
    """The answers to the questions: float64 (R, C), nan in rows that RDKit cannot read."""
    from rdkit import Chem

    queries = [Chem.MolFromSmarts(smarts) for smarts in PATTERNS.values()]
    nothing = [float("nan")] * len(queries)
    return np.array(
        [nothing if m is None else [m.HasSubstructMatch(query) for query in queries]
         for m in map(read_molecule, smiles)],
        dtype=np.float64,
    )  # fmt: skip


def counting_baseline(splits: Splits) -> np.ndarray:
    """How well the labels can be predicted by counting symbols, without their order.

    A logistic regression on log(1 + count) of every symbol of the training molecules, and of all
    symbols together; trained on the training part, scored on the test part.

    Returns:
        The area under the ROC curve of each label (C,), float64; 0.5 is chance.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    assert splits.test is not None
    train, test = (
        [Counter(re.findall(SMILES_SYMBOL, text)) for (text,) in part.texts]
        for part in (splits.train, splits.test)
    )
    symbols = sorted({symbol for count in train for symbol in count})
    train_RS, test_RS = (
        np.log1p([[*(count[s] for s in symbols), count.total()] for count in part])
        for part in (train, test)
    )
    scaler = StandardScaler().fit(train_RS)
    # Scikit-learn weighs the summed loss against half the squared weights.
    model = LogisticRegression(C=1 / (2 * L2_PENALTY * len(train)), max_iter=1000)
    areas = []
    for train_R, test_R in zip(splits.train.labels.T, splits.test.labels.T, strict=True):
        scores_R = model.fit(scaler.transform(train_RS), train_R).decision_function(
            scaler.transform(test_RS)
        )
        areas.append(mean_roc_auc(scores_R[:, None], test_R[:, None])[0])
    return np.array(areas)
