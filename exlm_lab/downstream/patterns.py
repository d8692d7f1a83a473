"""A molecular task that needs no download: RDKit's own 5,000 molecules, labels by RDKit.

Three questions about the structure of a molecule, each a pattern of atoms and bonds that RDKit
looks for. They are exact, so a perfect model would answer all of them; and they ask how symbols
belong together that may stand far apart in the string, so counting symbols answers them only in
part. ``counting_baseline`` says how far counting gets: a model that is not above it has not read
the molecules.

Shapes: R molecules, C labels, S different symbols.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from exlm_lab.downstream.metrics import mean_roc_auc
from exlm_lab.downstream.moleculenet import METRIC, Table, splits_of
from exlm_lab.downstream.scaffolds import Rule, molecules, split
from exlm_lab.downstream.task import Splits, Task
from exlm_mini.data.cleaning import Cleaning
from exlm_mini.data.smiles import embedded_molecules
from exlm_mini.data.tokenizer import SMILES_SYMBOL

NAME = "embedded-molecules"

PATTERNS = {
    "para": "[!#1;!R]-c1ccc(-[!#1;!R])cc1",
    "benzyl": "c-[CX4]",
    "fused rings": "[R2]",
}
"""Labels and what makes them yes, as SMARTS. para: a benzene ring with two side chains that face
each other. benzyl: a side chain begins at an aromatic ring with a saturated carbon. fused rings:
an atom belongs to two rings at least."""

L2_PENALTY = 1e-3
NUM_ITERATIONS = 100


def load(
    rule: Rule = "unimol", seed: int = 0, cleaning: Cleaning | None = None
) -> tuple[Task, Splits]:
    """The embedded task, split and cleaned as the sets of MoleculeNet are.

    Args:
        rule: see ``scaffolds``.
        seed: of the rule ``random``.
        cleaning: what is done to each molecule after the split; none: nothing.

    Raises:
        UserError: if RDKit or its data directory is missing, or the rule is unknown.
    """
    smiles = list(embedded_molecules())
    rows = split(smiles, rule, seed)
    table = Table("the embedded molecules", smiles, tuple(PATTERNS), labels_of(smiles))
    splits = splits_of(table, rows, rule, cleaning or Cleaning())
    return Task(NAME, "labels", table.names, METRIC, "smiles"), splits


def labels_of(smiles: Sequence[str]) -> np.ndarray:
    """The answers: float64 (R, C), nan in the rows RDKit does not read."""
    from rdkit import Chem

    queries = [Chem.MolFromSmarts(smarts) for smarts in PATTERNS.values()]
    return np.array(
        [
            [float("nan") if molecule is None else molecule.HasSubstructMatch(query)
             for query in queries]
            for molecule in molecules(smiles)
        ],
        dtype=np.float64,
    )  # fmt: skip


def counting_baseline(splits: Splits) -> np.ndarray:
    """What can be answered by counting symbols, without their order.

    A logistic regression on log(1 + count) of every symbol of the training molecules, and of all
    symbols together; trained on the training part, scored on the test part.

    Args:
        splits: of a task of yes-no answers about one SMILES each, with a test part and no
            missing labels.

    Returns:
        The area under the ROC curve of each label (C,), float64; 0.5 is chance.
    """
    symbols = sorted(
        {s for (text,) in splits.train.texts for s in re.findall(SMILES_SYMBOL, text)}
    )
    train_RS, test_RS = (
        _counts([text for (text,) in part.texts], symbols)
        for part in (splits.train, splits.test)
    )
    mean_S, spread_S = train_RS.mean(dim=0), train_RS.std(dim=0).clamp_min(1e-6)
    train_RS, test_RS = (train_RS - mean_S) / spread_S, (test_RS - mean_S) / spread_S
    weight_SC = _fit(train_RS, torch.from_numpy(splits.train.labels))
    scores_RC = (test_RS @ weight_SC).numpy()
    labels_RC = splits.test.labels
    return np.array(
        [
            mean_roc_auc(scores_RC[:, c : c + 1], labels_RC[:, c : c + 1])[0]
            for c in range(labels_RC.shape[1])
        ]
    )


def _counts(smiles: Sequence[str], symbols: Sequence[str]) -> Tensor:
    """log(1 + count) of each symbol and of all, float64 (R, S + 1)."""
    rows = []
    for text in smiles:
        count = Counter(re.findall(SMILES_SYMBOL, text))
        rows.append([*(count[symbol] for symbol in symbols), count.total()])
    return torch.tensor(rows, dtype=torch.float64).log1p()


def _fit(features_RS: Tensor, labels_RC: Tensor) -> Tensor:
    """Weights of one logistic regression per label, float64 (S, C); the constant is left out,
    since it moves no score past another."""
    weight_SC = torch.zeros(features_RS.shape[1], labels_RC.shape[1], dtype=torch.float64)
    constant_C = torch.zeros(labels_RC.shape[1], dtype=torch.float64)
    for tensor in (weight_SC, constant_C):
        tensor.requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight_SC, constant_C], max_iter=NUM_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits_RC = features_RS @ weight_SC + constant_C
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            logits_RC, labels_RC, reduction="sum"
        ) / len(labels_RC)
        loss = loss + L2_PENALTY * weight_SC.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weight_SC.detach()
