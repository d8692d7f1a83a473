"""Reports and figures show the numbers of the records beside those of the paper."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import made_record, write
from refusals import told

from exlm_lab.experiments import correlations, paper, records, tables
from exlm_lab.experiments.catalogue import EXPERIMENTS
from exlm_lab.experiments.grids import SWEEPS
from exlm_lab.experiments.records import by_seed, grid, leaving, measured, runs, since

RESULTS = Path(__file__).resolve().parents[2] / "book" / "results"
FIGURE_4 = list(paper.printed_grid("Figure 4", "lost tokens, %"))
"""(p, k) of the 14 cells."""


def grid_record(p, k, seed, downstream, entropy):
    """A record of one Repeated MLM cell with these results."""
    return made_record(
        cell=f"toy-p{p}-k{k}", seed=seed,
        config={
            "objective": "repeated-mlm", "masking": {"mask_ratio": p, "num_copies": k},
            "model": {"states_per_mask": 4},
        },
        metrics={"entropy_bits": entropy, "accuracy": 0.5, "perplexity": 2.0},
        downstream={"task": "toy-inference", "metric": "accuracy", "test": downstream},
    )  # fmt: skip


def whole_grid():
    """Records of 14 cells, in which the lost share alone lowers accuracy and raises entropy."""
    shares = {cell: correlations.lost_share(*cell) for cell in FIGURE_4}
    return [
        grid_record(*cell, seed, 0.8 - 0.4 * share, 3 * share)
        for cell, share in shares.items()
        for seed in (1, 2, 3)
    ]


# ---- one number for a grid ----


def test_the_lost_share_of_every_cell_is_that_of_figure_4():
    figure = paper.printed_grid("Figure 4", "lost tokens, %")
    assert len(figure) == 14
    for (p, k), percent in figure.items():
        assert correlations.lost_share(p, k) == pytest.approx(percent / 100)
    assert correlations.lost_share(0.5, 2) == 0.25, "a cell of another grid keeps its p^k"


def test_the_papers_accuracy_falls_with_the_share_and_less_with_the_mask_ratio():
    figure = paper.printed_grid("Figure 3", "mnli")
    assert -0.7 < correlations.rank_correlation(figure) < -0.65
    two = {(0.15, 1): 3.0, (0.387, 1): 2.0}
    assert math.isnan(correlations.rank_correlation(two)), "of too few cells"
    # By hand from Figure 3: the change at p = 38.7, 62.2 and 78.9% from a lost share of 15% to
    # k = 1, and at lost shares of 15, 38.7 and 62.2% from the smallest p to 78.9%.
    assert correlations.effect_of_share(figure) == pytest.approx(
        np.mean([83.3 - 83.1, 81.3 - 83.2, 79.6 - 82.8])
    )
    assert correlations.effect_of_mask_ratio(figure) == pytest.approx(
        np.mean([82.8 - 83.6, 82.6 - 83.3, 81.3 - 81.3])
    )
    assert correlations.drop_at_low_share(figure) == pytest.approx(
        np.mean([81.4 - 83.6, 81.0 - 83.1, 79.2 - 83.2])
    )


def test_at_fixed_share_only_cells_of_one_share_are_compared():
    # Accuracy jumps from share to share; within each share it rises with p.
    grid = {(0.15, 1): 5, (0.387, 2): 6, (0.622, 4): 7, (0.387, 1): 1, (0.622, 2): 2}
    assert correlations.rank_correlation_at_fixed_share(grid) == pytest.approx(1)
    assert correlations.rank_correlation(grid) < 0
    # By hand, with centred ranks -1 0 1 and -1/2 1/2: the first share rises, the second falls.
    grid[0.622, 2] = 0
    assert correlations.rank_correlation_at_fixed_share(grid) == pytest.approx(1.5 / 2.5)


@pytest.mark.parametrize("statistic", [s.of for s in correlations.STATISTICS.values()])
def test_a_grid_that_cannot_tell_gives_nan_and_no_seed_counts(statistic):
    assert correlations.over_seeds(statistic, pd.DataFrame([{(0.15, 1): 0.5}], [1])).empty


def test_printed_averages_are_those_of_the_printed_tasks():
    for table in ("Table 2", "Table 4", "Table 13"):
        for row, found in paper.printed(table).items():
            mean = np.mean([found[task] for task in paper.TASKS])
            # The paper prints 80.7 for a mean of 80.625.
            assert paper.printed_average(table, row) == pytest.approx(mean, abs=0.0751)
    assert paper.printed_average("Figure 8", "p=15%, k=1") == pytest.approx(
        np.mean([84.1, 90.0, 90.3, 54.7])
    )
    assert paper.printed_average("Figure 3", "p=15%, k=1") is None


def test_cells_have_the_settings_of_the_papers_rows_beside_them():
    for cell in (cell for sweep in SWEEPS for cell in sweep.cells if cell.paper):
        config, (table, row) = cell.config(1), cell.paper
        is_exlm = config.objective == "exlm"
        states, copies = config.model.states_per_mask, config.masking.num_copies
        assert ("ExLM" in row) == is_exlm, cell.name
        if percent := re.search(r"([\d.]+)%", row):
            assert float(percent[1]) == pytest.approx(100 * config.masking.mask_ratio)
        named = re.search(r"k=(\d)", row)
        assert not named or int(named[1]) == (states if is_exlm else copies)
        assert table != "Table 12" or (config.data.kind, states) == ("text", 4)
        model, words = config.model, ("w/o 2D RoPE", "w/o Transitions", "w/ Sparse DAG")
        variant = model.rope == "1d", model.transition == "ctc", model.sparse
        assert not is_exlm or variant == tuple(word in row for word in words), cell.name


# ---- records ----


NUMBER = st.floats(-1e6, 1e6)
PLACES = st.sampled_from([(f"toy-p{p}-k{k}", p, k) for p, k in FIGURE_4])


@settings(max_examples=20)
@given(
    made=st.dictionaries(
        st.tuples(PLACES, st.integers(1, 12)), st.tuples(NUMBER, st.none() | NUMBER), min_size=1
    )
)
def test_runs_are_read_as_they_were_made(made, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for ((cell, p, k), seed), (bits, score) in made.items():
        record = grid_record(p, k, seed, score, bits)
        record["curve"] = curve_of(0.0, bits)
        write(folder, record | {"cell": cell})
    table = runs("repeated-mlm", folder)
    assert set(table.index) == {(cell, seed) for (cell, _, _), seed in made}
    last, values = table["validation_bits_per_row"], grid(table, "entropy_bits")
    for ((cell, p, k), seed), (bits, score) in made.items():
        assert bits == last[cell, seed] == by_seed(table, cell, "entropy_bits")[seed]
        assert values[p, k][seed] == bits
        scores = dict(measured(table, records.DOWNSTREAM))
        assert scores.get((cell, seed)) == (None if score is None else 100 * score)
    assert measured(table, "captured_bits").empty


def test_a_record_of_another_sweep_or_recorded_twice_is_refused(tmp_path):
    write(tmp_path, made_record("ablations"), made_record("ablations", curve=curve_of(1.0)))
    told(lambda: tables.report("ablations", tmp_path), "line 2", "toy-exlm seed 1", "already")
    write(tmp_path, made_record("saddle")).joinpath("saddle.jsonl").rename(
        tmp_path / "cost.jsonl"
    )
    told(lambda: tables.report("cost", tmp_path), "cost.jsonl line 1", "sweep saddle")


# ---- reports ----


def test_what_the_grid_asks_for_and_no_record_has_is_named(tmp_path, monkeypatch):
    sweep = EXPERIMENTS["repeated-mlm"]
    cells = tuple(cell for cell in sweep.cells if cell.input == "toy")
    monkeypatch.setitem(EXPERIMENTS, "repeated-mlm", replace(sweep, cells=cells))
    write(tmp_path, *whole_grid()[1:])
    text = tables.report("repeated-mlm", tmp_path)
    assert "1 of 42 records missing: toy-p0.0225-k1 seed 1." in text
    assert text.endswith("41 records, made on cpu at commit 0123456 in 41 min.")


def test_cells_stand_beside_the_papers_rows_and_are_compared_seed_by_seed(tmp_path):
    for seed, shift in ((1, 0.0), (2, 0.1), (3, 0.2)):
        for name, bits, accuracy in (("exlm", 1.0, 0.6), ("rope-1d", 0.5, 0.55)):
            made = made_record(
                "ablations", f"toy-{name}", seed, metrics={"captured_bits": bits + shift},
                downstream={"test": accuracy + shift},
            )  # fmt: skip
            write(tmp_path, made)
    lines = [line for line in tables.report("ablations", tmp_path).splitlines() if "|" in line]
    head, _, exlm, rope = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines
    )
    exlm, rope = (dict(zip(head, row, strict=True)) for row in (exlm, rope))
    # In brackets are the numbers of Table 2.
    assert (
        exlm["downstream, %"] == "70.0 ± 10.0 (81.4)"
        and exlm["points above ExLM ± standard error"] == "–"
    )
    assert rope["downstream, %"] == "65.0 ± 10.0 (80.9)"
    assert rope["points above ExLM ± standard error"] == "-5.00 ± 0.00"
    assert rope["captured bits above ExLM ± standard error"] == "-0.50 ± 0.00"
    assert rope["captured bits per row"] == "0.600 ± 0.100"


def test_the_grid_of_repeated_mlm_is_summed_up_beside_the_papers(tmp_path):
    text = tables.report("repeated-mlm", write(tmp_path, *whole_grid()))
    # Accuracy 80 - 40 * 0.15 beside Figure 3's, and entropy 3 * 0.15 beside Figure 5's.
    assert re.search(r"p0.622-k4 .* 74.0 ± 0.0 \(83.2\) .* 0.450 ± 0.000 \(1.770\)", text)
    # 40 points per unit of share: from 15% to 38.7, 62.2 and 78.9%.
    fall = -40 * (np.mean([0.387, 0.622, 0.789]) - 0.15)
    assert re.search(rf"largest share, p fixed +\| {fall:.2f} ± 0.00", text)
    assert re.search(r"2.25%, p fixed +\| \+5.10 ± 0.00", text)


def curve_of(*bits):
    return [{"step": 50 * n, "validation_bits_per_row": b} for n, b in enumerate(bits, start=1)]


@pytest.mark.parametrize(
    ("holds", "step"),
    [("", None), ("0", None), ("1", 1), ("011", 2), ("101", 3), ("110", None)],
)
def test_something_holds_since_the_step_after_which_it_always_does(holds, step):
    assert since((n, mark == "1") for n, mark in enumerate(holds, start=1)) == step


@pytest.mark.parametrize(
    ("joint", "bits", "step"),
    [
        (1.0, (2.0, 1.95, 1.7, 1.0), 150),
        (1.0, (2.0, 1.99, 1.95), None),
        (1.9, (2.0, 1.95, 1.93), 100),  # threshold: a tenth of what can be won
    ],
)
def test_a_run_has_left_the_floor_when_it_stays_below(tmp_path, joint, bits, step):
    metrics = {"floor_bits_per_row": 2.0, "joint_bits_per_row": joint}
    write(tmp_path, made_record("saddle", metrics=metrics, curve=curve_of(*bits)))
    ((_, run),) = runs("saddle", tmp_path).iterrows()
    assert leaving(run) == (step or math.inf)
    unknown = made_record("saddle", seed=2, metrics={}, curve=curve_of(*bits))
    (_, (_, run)) = runs("saddle", write(tmp_path, unknown)).iterrows()
    assert leaving(run) is None


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_a_report_of_the_records_has_their_cells_and_no_empty_number(sweep):
    text = tables.report(sweep.name, RESULTS)
    assert not re.search(r"\bnan\b|\binf\b", text)
    for (cell, _), run in runs(sweep.name, RESULTS).iterrows():
        name = cell.removeprefix(f"{run['input']}-")
        by_place = sweep.name in ("repeated-mlm", "k-and-p")
        assert by_place or f"| {name} " in text, cell
