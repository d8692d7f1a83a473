"""Molecules: are dependent symbols linked, and do frozen states tell more of structure (§5.1)?"""

from __future__ import annotations

from typing import Any

import numpy as np

from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.claims import Claim, Experiment
from exlm_lab.experiments.frozen import Molecules, explained
from exlm_lab.experiments.pairs import KINDS, pair_metrics
from exlm_mini.data.packs import Pack
from exlm_mini.data.tokenizer import Tokenizer
from exlm_mini.model import ExLM, MaskedLM

_EXLM = {
    "objective": "exlm", "model.states_per_mask": 2,  # Table 7
    "model.clone_embedding_std": 1.0, "train.chain_warmup": 0.25,  # as in the ladder
}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "mlm": {},
    "mlm++": {},
    "exlm": _EXLM,
    "late": {**_EXLM, "model.expand_at": 2},
    "uniform": {**_EXLM, "model.transition": "uniform"},
}
"""As in the ladder, without ``ctc``; ``late`` expands rows after half of the four layers."""


def molecules() -> Experiment:
    """The cells, and the claims they decide."""
    name, base = "molecules", "sweep/smiles"
    cells = [Cell("exlm-cost", name, base, _EXLM, seeds=(1,), is_timed=True)]
    cells += [
        Cell(
            arm, name, base, settings, seeds=tuple(range(1, 6)),
            cost_of=(name, "exlm-cost") if arm == "mlm++" else None,
        )
        for arm, settings in ARMS.items()
    ]  # fmt: skip
    groups = ("both digits of a ring", "both ends of a branch", "two aromatic atoms of a ring")
    claims = [
        Claim(
            f"ExLM wins bits of {of} at equal cost",
            f"{kind}_together_bits", "exlm", "mlm++", -1, 0.25, is_primary=kind == "rings",
        )
        for kind, of in zip(KINDS, groups, strict=True)
    ]  # fmt: skip
    claims += [
        Claim(
            "It wins more bits where symbols depend on each other than where they do not",
            "rings_gap_bits", "exlm", "mlm++", -1, 0.25,
        ),
        Claim(
            "More of the rings it fills in are molecules",
            "rings_together_valid", "exlm", "mlm++", 1, 0.05,
        ),
        Claim(
            "ExLM wins bits of both digits of a ring at equal steps",
            "rings_together_bits", "exlm", "mlm", -1, 0.25,
        ),
        Claim(
            "Links win bits that states alone do not",
            "rings_together_bits", "exlm", "uniform", -1, 0.25,
        ),
        Claim(
            "Expanding late loses bits", "rings_together_bits", "late", "exlm", 1, 0.25,
        ),
    ]  # fmt: skip
    claims += [
        Claim(
            f"ExLM's frozen states tell more of structure at equal {equal}",
            "read_structure", "exlm", arm, 1, 0.01, is_primary=arm == "mlm++",
        )
        for arm, equal in (("mlm++", "cost"), ("mlm", "steps"))
    ]  # fmt: skip
    about = "dependent symbols of molecules, and what frozen states tell of structure"
    return Experiment(name, about, tuple(cells), tuple(claims))


def measure_molecules(
    model: MaskedLM | ExLM, tokenizer: Tokenizer, pack: Pack, known: Molecules
) -> dict[str, float]:
    """What is measured of models of molecules alone: ``pair_metrics`` and ``explained``.

    Args:
        model: in evaluation mode.
        tokenizer: of the pack.
        pack: of held-out molecules.
        known: some of them; pairs are those of the test molecules.
    """
    rows = known.rows(pack)
    tested = [rows[n] for n in np.flatnonzero(known.is_test_R)]
    return pair_metrics(model, tokenizer, tested) | explained(model, rows, known)
