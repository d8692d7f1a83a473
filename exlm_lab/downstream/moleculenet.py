"""MoleculeNet's seven classification sets, as the paper runs them (§5.1, Appendix L, Table 9).

Every set is a table: one row per molecule, one column of yes-no answers per label, empty where
nothing was measured. Files are named as published (``bace.csv``, ``BBBP.csv``,
``toxcast_data.csv``, also ``.gz`` and ``.xz``), or come from the hub.

The split is computed on molecules as published. Only then are they cleaned like those the model was
trained on: MoleculeNet has stereo marks, the paper's vocabulary probably none.

Every label has one logit, even for BACE and BBBP, where Uni-Mol has two and a softmax. Both give
the same family of predictions; with two logits, one direction of the weights is redundant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from exlm_lab.downstream.tables import read_table
from exlm_lab.downstream.task import Task, load_hub, named_entry
from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.text import folded

SMILES_COLUMNS = ("smiles", "mol")
NOT_LABELS = {"mol_id", "name", "num", "cid", "model", "pic50", *SMILES_COLUMNS}
"""Names of columns that are no labels, in lower case."""
HUB_PREFIX = "scikit-fingerprints/MoleculeNet_"


class Benchmark(NamedTuple):
    """Facts about a data set."""

    hub: str
    num_labels: int
    sizes: tuple[int, int, int]
    """Rows for train, validation and test, from Table 9 of the paper."""
    label: str | None = None
    """The label's column if the file has other columns, such as descriptors."""


BENCHMARKS = {
    "bace": Benchmark("BACE", 1, (1210, 151, 151), "Class"),
    "bbbp": Benchmark("BBBP", 1, (1631, 204, 204), "p_np"),
    "clintox": Benchmark("ClinTox", 2, (1182, 148, 148)),
    "tox21": Benchmark("Tox21", 12, (6264, 783, 783)),
    "toxcast": Benchmark("ToxCast", 617, (6860, 858, 858)),
    "sider": Benchmark("SIDER", 27, (1141, 143, 143)),
    "muv": Benchmark("MUV", 17, (74469, 9309, 9309)),
}


def read(name: str, data: Path | None = None) -> tuple[str, dict[str, Any], Task]:
    """Read a data set from its file, a directory that has it, or, without ``data``, from the hub:
    its source, data frame and task."""
    benchmark = BENCHMARKS[name]
    if data is None:
        source = HUB_PREFIX + benchmark.hub
        hub = load_hub(source)
        with reading(source):
            frame = hub["train"].to_pandas()
    else:
        path = data if data.is_file() else named_entry(data, f"{name}.csv", f"{name}_data.csv")
        source, frame = str(path), read_table(path)
    header = {folded(own): str(own) for own in frame}
    column = next((own for own in SMILES_COLUMNS if own in header), SMILES_COLUMNS[0])
    labels = [str(own) for own in frame if folded(own) not in NOT_LABELS]
    if benchmark.label and benchmark.label.casefold() in header:
        labels = [benchmark.label]
    if len(labels) != benchmark.num_labels:
        raise UserError(
            f"{source}: {name} has {benchmark.num_labels} label column(s), but this file has "
            f"{len(labels)}: {', '.join(labels)[:300]}; give the file of {name}"
        )
    task = Task(name, "labels", (), "", "smiles", (column,), tuple(labels))
    return source, {"train": frame}, task
