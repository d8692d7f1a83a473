"""Ridge regression of molecular structure on a frozen model's states.

Held-out molecules are encoded unmasked and their states averaged in every layer. Ridge regression
learns to predict quantities that RDKit computes, and is tested on molecules with other scaffolds
than those it was trained on.

Shapes: R molecules, D features, C quantities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from exlm_lab.downstream.inputs import evaluation_batches, padded
from exlm_lab.downstream.scaffolds import scaffold
from exlm_lab.experiments.pairs import pair_metrics
from exlm_mini.data.masking import is_inner
from exlm_mini.data.molecules import read_molecule
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.model import ExLM, MaskedLM
from exlm_mini.model.exlm import token_states

QUANTITIES = (
    "qed", "BertzCT", "NumAromaticRings", "NumAtomStereoCenters", "NumRotatableBonds"
)  # fmt: skip
"""The quantities to predict, by their names in RDKit."""
NUM_EACH = 20_000
"""Number of molecules for training, and the same number for testing."""
PENALTY = 1e-2
"""Penalty of ridge regression per training molecule, for features scaled to variance 1."""
BATCH_ROWS = 128


class Molecules(NamedTuple):
    """Molecules of a pack, with their quantities."""

    number_R: np.ndarray
    """Row numbers in the pack."""
    is_test_R: np.ndarray
    quantity_RC: np.ndarray

    def rows(self, pack: Pack) -> list[np.ndarray]:
        """Token ids of each molecule, between [BOS] and [EOS]."""
        return [pack.gather([n])[0].numpy() for n in self.number_R]


def held_out(pack: Pack, tokenizer: Tokenizer) -> Molecules:
    """Choose up to ``NUM_EACH`` molecules each for training and test, with no scaffold in both."""
    from rdkit.Chem import Descriptors

    functions = [dict(Descriptors.descList)[name] for name in QUANTITIES]
    rng = np.random.default_rng(0)
    sides: dict[str, int] = {}
    rows, counts = [], [0, 0]
    for n in rng.permutation(len(pack)).tolist():
        row_N = pack.gather([n])[0]
        molecule = read_molecule("".join(map(tokenizer.token, row_N[1:-1].tolist())))
        if molecule is None:  # a symbol was unknown
            continue
        side = sides.setdefault(scaffold(molecule, is_chiral=False), int(rng.integers(2)))
        if counts[side] < NUM_EACH:
            counts[side] += 1
            rows.append((n, side == 1, [quantity(molecule) for quantity in functions]))
        if min(counts) == NUM_EACH:
            break
    return Molecules(*map(np.array, zip(*rows, strict=True)))


def measure_molecules(
    model: MaskedLM | ExLM,
    tokenizer: Tokenizer,
    pack: Pack,
    known: Molecules,
    num_copies: int | None = None,
) -> dict[str, float]:
    """Metrics of ``explained`` on all molecules and of ``pair_metrics`` on the test molecules.

    For Repeated MLM, which reads ``num_copies`` of every symbol, ``pair_metrics`` is left out.
    """
    rows = known.rows(pack)
    if num_copies is not None:
        return explained(model, rows, known, num_copies)
    tested = [rows[n] for n in np.flatnonzero(known.is_test_R)]
    return pair_metrics(model, tokenizer, tested) | explained(model, rows, known)


def explained(
    model: MaskedLM | ExLM, rows: list[np.ndarray], molecules: Molecules, num_copies: int = 1
) -> dict[str, float]:
    """How well ridge regression reads the quantities from the model's states.

    Returns:
        ``read_qed`` and so on, the share of a quantity's variance on the test molecules that is
        explained (R²); and ``read_structure``, the mean of these shares.
    """
    from sklearn.linear_model import Ridge
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    feature_RD, is_test_R = features(model, rows, num_copies), molecules.is_test_R
    learned_RC, true_RC = molecules.quantity_RC[~is_test_R], molecules.quantity_RC[is_test_R]
    reader = make_pipeline(
        StandardScaler(), Ridge(PENALTY * len(learned_RC), solver="cholesky")
    )
    guess_RC = reader.fit(feature_RD[~is_test_R], learned_RC).predict(feature_RD[is_test_R])
    share_C = 1 - ((guess_RC - true_RC) ** 2).mean(axis=0) / true_RC.var(axis=0)
    shares = dict(zip(QUANTITIES, share_C.tolist(), strict=True))
    return {f"read_{n}": v for n, v in {**shares, "structure": float(share_C.mean())}.items()}


@torch.no_grad()
def features(model: MaskedLM | ExLM, rows: list[np.ndarray], num_copies: int = 1) -> np.ndarray:
    """Mean state of each molecule's symbols after every layer, concatenated; (R, D), float64.

    The state of a symbol is that of its first clone or copy, as in fine-tuning.
    """
    device, special = next(model.parameters()).device, model.special_ids
    layers: list[Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda *call: layers.append(call[2]))
        for layer in model.encoder.layers
    ]
    of_row: list[np.ndarray] = [np.empty(0)] * len(rows)
    for batch in evaluation_batches(np.array([len(row) for row in rows]), BATCH_ROWS):
        token_ids_BN = padded([rows[n] for n in batch], special.pad).to(device)
        layers.clear()
        token_states(model, token_ids_BN, num_copies)
        is_symbol_BN1 = is_inner(token_ids_BN, special).unsqueeze(2)
        means = []
        for hidden_BTD in layers:
            hidden_BTD = hidden_BTD[:, ::num_copies]
            # [EOS] has as many clones as [BOS]; a layer below ``expand_at`` sees none of them.
            num_clones = (hidden_BTD.shape[1] - token_ids_BN.shape[1]) // 2
            hidden_BND = hidden_BTD[:, num_clones:][:, : token_ids_BN.shape[1]].double()
            means.append((hidden_BND * is_symbol_BN1).sum(dim=1) / is_symbol_BN1.sum(dim=1))
        for n, feature_D in zip(batch, torch.cat(means, dim=1).cpu().numpy(), strict=True):
            of_row[n] = feature_D
    for hook in hooks:
        hook.remove()
    return np.stack(of_row)
