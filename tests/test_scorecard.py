"""The scorecard says of each claim what the records say, and every page says the same."""

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from exlm_lab.experiments import drawings, scorecard, tables
from exlm_lab.experiments.cells import Claim
from exlm_lab.experiments.correlations import lost_share
from exlm_lab.experiments.grids import cells_of
from exlm_lab.experiments.metric_names import PROBE
from exlm_lab.experiments.paper import ENTROPY, printed_grid
from exlm_lab.experiments.records import DOWNSTREAM
from exlm_lab.experiments.scorecard import SCORECARD, Entry, Score
from exlm_lab.experiments.study import EXPERIMENTS
from exlm_lab.experiments.verdicts import Verdict

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The records that are committed: a study that runs beside the tests leaves more."""
    listed = subprocess.run(
        ["git", "ls-files", "book/results"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:  # no checkout: an archive of one
        return ROOT / "book" / "results"
    folder = tmp_path_factory.mktemp("committed")
    for name in filter(None, listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder / "book" / "results"


ACCURACY = printed_grid("Figure 3", "mnli")
PRINTED = {
    DOWNSTREAM: ACCURACY,
    "entropy_bits": printed_grid("Figure 5", ENTROPY),
    "validation_mask_accuracy": {
        cell: 1 - lost_share(*cell) for cell in ACCURACY
    },  # drawn only
}
"""Grids by metric that have the paper's effects."""


@pytest.mark.parametrize("entry", SCORECARD, ids=lambda entry: entry.text)
def test_every_contrast_is_between_cells_that_are_trained(entry: Entry):
    if isinstance(entry.claim, str):
        assert entry.claim in {claim.text for claim in EXPERIMENTS[entry.source].claims}
        return
    claim = entry.claim
    assert claim.smallest > 0
    cells = cells_of(entry.source, "study" if entry.source in EXPERIMENTS else "mini")
    if entry.statistic:
        assert claim.sign * entry.statistic(PRINTED[claim.metric]) > 0
    else:
        assert {cell.name for cell in cells} >= {*(claim.weights or (claim.cell, claim.base))}
        assert claim.sign == (1 if claim.metric in (PROBE, DOWNSTREAM) else -1)  # or bits
    if entry.claim.weights:
        assert sum(entry.claim.weights.values()) == pytest.approx(0)


@pytest.mark.parametrize(("by_share", "by_ratio", "more"), [(2.0, 0.0, 2), (0.0, 3.0, -3)])
def test_the_larger_of_two_effects_has_the_sign(by_share, by_ratio, more):
    """A made-up grid that is linear in the rank of the share, and in p."""
    places = {0.15: 0.0, 0.387: 0.5, 0.622: 0.75, 0.789: 1.0}
    grid = {
        (p, k): by_share * places[lost_share(p, k)] + by_ratio * (p > 0.5)
        for p, k in [(0.15, 1), (0.387, 1), (0.387, 2), (0.789, 1), (0.789, 8), (0.789, 4)]
    }
    assert more * scorecard._share_does_more(grid) > 0


@pytest.mark.parametrize(
    ("metric", "differences", "shown", "word"),
    [
        ("probe_accuracy", (0.02, 0.04), "+3.0 ± 12.7", "undecided, so far"),
        ("entropy_bits", (0.5, 0.5, 0.5), "+0.50 ± 0.00", "for"),
        ("entropy_bits", (), "–", "undecided"),
    ],
)
def test_shares_are_told_in_points_and_missing_seeds_are_said(metric, differences, shown, word):
    claim = Claim("", metric, "a", "b", 1, 0.1)
    p = {0: None, 2: 0.2, 3: 0.0}[len(differences)]
    score = Score(SCORECARD[0], Verdict(claim, differences, 3, p, p))
    assert (score.shown, score.word) == (shown, word)
    assert score.seeds == f"{len(differences)} of 3"


def test_as_many_seeds_are_planned_as_the_cells_compared_have(tmp_path):
    planned = {s.entry.source: s.verdict.planned for s in scorecard.scorecard(tmp_path)}
    assert planned == {
        "repeated-mlm": 3, "competence": 10, "ladder": 10, "molecules": 5, "parts": 10,
        "k-and-p": 3, "ablations": 3, "saddle": 2,
    }  # fmt: skip


def test_the_readme_counts_the_verdicts_of_the_records(results):
    found = Counter(score.verdict.word for score in scorecard.scorecard(results))
    told = ", ".join(
        f"{found[word]} {verb}"
        for word, verb in (
            ("for", "hold"),
            ("against", "do not"),
            ("undecided", "are undecided"),
        )
    )
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"Of the scorecard's {len(SCORECARD)} claims {told} so far." in text


def test_the_picture_on_the_front_page_is_that_of_the_records(results, tmp_path):
    name = "ladder-study-slots.svg"
    records = tables.read_sweep("ladder", "study", results)
    groups = tables.by_input(records, cells_of("ladder", "study"))["slots"]
    drawings.save_figure(drawings.sweep_figure("ladder", groups), tmp_path / name)
    assert (tmp_path / name).read_bytes() == (ROOT / "book" / "_static" / name).read_bytes()
