"""The scorecard judges each claim by the records, and every page agrees with it."""

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from exlm_lab.experiments import drawings, scorecard
from exlm_lab.experiments.catalogue import EXPERIMENTS
from exlm_lab.experiments.cells import Claim
from exlm_lab.experiments.correlations import lost_share
from exlm_lab.experiments.metric_names import PROBE
from exlm_lab.experiments.paper import ENTROPY, printed_grid
from exlm_lab.experiments.records import DOWNSTREAM, runs
from exlm_lab.experiments.scorecard import SCORECARD, Row, Score
from exlm_lab.experiments.verdicts import Verdict, judge, verdicts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    """The committed records alone: a study that is running may have added others."""
    listed = subprocess.run(
        ["git", "ls-files", "book/results"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:  # an archive, not a checkout
        return ROOT / "book" / "results"
    folder = tmp_path_factory.mktemp("committed")
    for name in filter(None, listed.stdout.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder / "book" / "results"


def test_a_statistic_of_a_grid_needs_every_cell_of_the_plan(results):
    experiment, table = EXPERIMENTS["repeated-mlm"], runs("repeated-mlm", results)
    some = table.drop("toy-p0.789-k8", level="cell")
    for claim in experiment.claims:
        needed = 0 if claim.statistic else len(judge(claim, experiment, table).differences)
        assert len(judge(claim, experiment, some).differences) == needed


@pytest.fixture(scope="module")
def scores(results):
    return scorecard.scorecard(results)


@pytest.fixture(scope="module")
def judged(results):
    """The verdicts of each experiment of the study."""
    return verdicts(results)


ACCURACY = printed_grid("Figure 3", "mnli")
PRINTED = {
    DOWNSTREAM: ACCURACY,
    "entropy_bits": printed_grid("Figure 5", ENTROPY),
    "validation_mask_accuracy": {
        cell: 1 - lost_share(*cell) for cell in ACCURACY
    },  # drawn in the paper, not printed
}
"""Grids by metric, with the effects that the paper reports."""


CLAIMS = [claim for experiment in EXPERIMENTS.values() for claim in experiment.claims]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_contrast_is_between_cells_that_are_trained(name):
    ids = [claim.id for claim in CLAIMS if claim.id]
    assert len(set(ids)) == len(ids) and set(SCORECARD) <= set(ids)
    experiment = EXPERIMENTS[name]
    known = {cell.name for cell in experiment.cells}
    if experiment.plan:
        known |= {"floor_bits_per_row", "frequency_bits"}
    for claim in experiment.claims:
        assert claim.smallest > 0
        if claim.statistic:
            assert claim.sign * claim.statistic(PRINTED[claim.metric]) > 0
            continue
        assert set(claim.cells) <= known
        assert sum((claim.weights or {}).values()) == pytest.approx(0)
        larger_is_better = claim.metric in (PROBE, DOWNSTREAM)  # the other metrics are bits
        assert experiment.plan or claim.sign == (1 if larger_is_better else -1)


@pytest.mark.parametrize(("by_share", "by_ratio", "more"), [(2.0, 0.0, 2), (0.0, 3.0, -3)])
def test_the_larger_of_two_effects_has_the_sign(by_share, by_ratio, more):
    """The grid is made up: its values depend on the lost share and on whether p exceeds 0.5."""
    places = {0.15: 0.0, 0.387: 0.5, 0.622: 0.75, 0.789: 1.0}
    grid = {
        (p, k): by_share * places[lost_share(p, k)] + by_ratio * (p > 0.5)
        for p, k in [(0.15, 1), (0.387, 1), (0.387, 2), (0.789, 1), (0.789, 8), (0.789, 4)]
    }
    (claim,) = (claim for claim in CLAIMS if claim.id == "uncertainty")
    assert more * claim.statistic(grid) > 0


@pytest.mark.parametrize(
    ("metric", "differences", "shown", "word"),
    [
        ("probe_accuracy", (0.02, 0.04), "+3.0 ± 12.7", "undecided, so far"),
        ("entropy_bits", (0.5, 0.5, 0.5), "+0.50 ± 0.00", "for"),
        ("entropy_bits", (0.04, 0.04, 0.04), "+0.04 ± 0.00", "for, too small to matter"),
        ("entropy_bits", (), "–", "undecided"),
    ],
)
def test_shares_are_told_in_points_and_missing_seeds_are_said(metric, differences, shown, word):
    claim = Claim("", metric, "a", "b", 1, 0.1)
    p = {0: None, 2: 0.2, 3: 0.0}[len(differences)]
    verdict = Verdict(claim, differences, 3, p, p, origin="planned, primary")
    score = Score(Row("", ""), verdict)
    assert (score.shown, verdict.word_so_far) == (shown, word)
    assert score.evidence == f"planned, primary; {len(differences)} of 3 seeds"


def test_a_row_says_whether_it_was_planned_its_seeds_and_the_aids(scores):
    evidence = {s.text: s.evidence for s in scores}
    assert {
        "Lost words cost more than [MASK] does": "planned, primary; 10 of 10 seeds",
        "ExLM's transitions do this": "planned, primary; 10 of 10 seeds; both aids",
        "ExLM is ahead on molecules": "planned; 5 of 5 seeds; both aids",
        "ExLM's states alone beat an MLM": "unplanned; 5 of 5 seeds; both aids",
        "ExLM is ahead at equal cost on Python's manual": "sweep; 3 of 3 seeds; both aids",
        "Uncertainty rises with the lost words": "sweep; 3 of 3 seeds",
        "2D RoPE matters": "planned, primary; 10 of 10 seeds; chains alone",
        "ExLM needs no start-up aids":
            "planned, primary; 5 of 5 seeds; no aids against both aids",
    }.items() <= evidence.items()  # fmt: skip


def test_a_claim_that_the_study_denies_is_judged_the_other_way_round(scores, judged):
    (score,) = (s for s in scores if s.row.is_denied)
    (study,) = (v for v in judged["escape"] if v.claim.id == score.verdict.claim.id)
    assert study.word == "for" and score.verdict.word == "against"
    assert study.differences == score.verdict.differences


def test_no_interval_of_the_ladder_holds_more_bits_than_there_are(judged):
    found = [v for v in judged["ladder"] if v.claim.base == "floor_bits_per_row"]
    assert len(found) == 4
    for verdict in found:
        shared = int(verdict.claim.cell.rpartition("-")[2])
        low, high = verdict.interval
        assert -shared <= low + 1e-9 < verdict.mean < high
        # These runs end at one of two levels, so an uncut t-interval would go beyond the limit.
        is_cut = verdict.mean - verdict.half_width < -shared
        assert is_cut == (shared > 1) and is_cut == (" to " in verdict.shown(2))


def test_the_readme_counts_the_verdicts_of_the_records_planned_and_others_apart(scores, judged):
    text = " ".join((ROOT / "README.md").read_text().split())
    told = []
    for is_planned in (True, False):
        chosen = [s for s in scores if s.verdict.is_planned == is_planned]
        count = Counter(s.verdict.word.partition(",")[0] for s in chosen)
        words = (("for", "hold"), ("against", "do not"), ("undecided", "are undecided"))
        ends = ", ".join(f"{count[word]} {verb}" for word, verb in words)
        told.append((len(chosen), f"{ends}."))
    (planned, of_planned), (others, of_others) = told
    assert f"{len(scores)} claims. Of these {planned} were planned: {of_planned}" in text
    assert re.search(rf"Of the {others} others, hints [^.]+ {re.escape(of_others)}", text)
    primary = [v for own in judged.values() for v in own if v.claim.is_primary]
    assert all(len(verdict.differences) == verdict.planned for verdict in primary)
    count = Counter(verdict.word.partition(",")[0] for verdict in primary)
    ends = f"{count['for']} hold, {count['against']} do not, {count['undecided']} are undecided"
    assert f"{len(primary)} of them primary: {ends}." in text
    (tuned,) = judged["links-tasks"]
    assert f"{-tuned.mean:.1f} ± {tuned.half_width:.1f} points less than an MLM" in text


def test_the_pictures_of_the_readme_are_those_of_the_records(results, tmp_path):
    drawings.pictures(results, tmp_path)
    for picture in tmp_path.iterdir():
        assert picture.read_bytes() == (ROOT / "book" / "_static" / picture.name).read_bytes()
