"""Leaving the symmetric start on real text: the cells, and what the report tells of them."""

from __future__ import annotations

import pytest
from tiny_runs import CELL, DATA

from exlm_lab.experiments.cells import Cell
from exlm_lab.experiments.ledger import SweepLedger
from exlm_lab.experiments.records import Group, Record, grouped, read_records
from exlm_lab.experiments.running import CURVE, Runner
from exlm_lab.experiments.study import CELLS, EXPERIMENTS, WATCHED
from exlm_lab.experiments.verdicts import escapes


def test_weights_and_helps_are_those_that_the_plan_says():
    for cell in EXPERIMENTS["escape"].cells:
        config, arm = cell.config(1), cell.name.split("-")[0]
        # As much adds up as at the paper's width: its variance times the terms of a sum.
        assert config.model.init_std**2 * config.model.width == pytest.approx(
            0.02**2 * 768, rel=0.01
        )
        assert config.model.dropout == config.model.attention_dropout == 0.1
        assert config.train.chain_warmup == (0.25 if arm in ("chains", "both") else 0)
        assert config.model.clone_embedding_std == (1 if arm in ("clones", "both") else 0)
        assert arm in CELLS[config.model.width, config.train.batch_size]


def test_a_run_on_text_tells_at_each_look_what_the_table_needs(tmp_path):
    more = {
        f"data.{name}": getattr(DATA["text"], name) for name in ("vocab_size", "max_documents")
    }
    runner = Runner(tmp_path / "work", "cpu", report=lambda line: None)
    ledger = SweepLedger(tmp_path, "tiny", "study", runner)
    for arm in ("none", "mlm"):
        settings = {**CELL, **more, "objective": "mlm" if arm == "mlm" else "exlm"}
        settings |= {"model.states_per_mask": 2, "data.block_length": 32}
        watched = dict.fromkeys(WATCHED)
        cell = Cell(arm, "english", "sweep/english", settings, seeds=(1,), watched=watched)
        _ = ledger.run(cell, 1)
        assert ledger.is_done(cell, 1)
    mlm, none = grouped(read_records("tiny", tmp_path, "study")).values()
    assert [point.keys() - CURVE for point in none.first.data["curve"]] == 2 * [
        {"step", *WATCHED}
    ]
    head, of_mlm, of_none = escapes([mlm, none])
    assert len(head) == len(of_mlm) == len(of_none)
    assert of_mlm[2:] == ("never", "–") and of_none[3] != "–"


def test_the_report_tells_since_when_runs_are_below_the_frequencies_and_links_win():
    def record(seed, bits, linked):
        curve = [
            dict(zip(("step", *WATCHED), (10 * n, b, 7.0, d, 0.0), strict=True))
            for n, (b, d) in enumerate(zip(bits, linked, strict=True), start=1)
        ]
        metrics = {"specialisation_bits": 0.25}
        return Record("none", "english", seed, "exlm", metrics, {"curve": curve})

    group = Group(
        "none",
        "english",
        (record(1, (7.1, 6.8, 6.5), (0, 0, 0.2)), record(2, (6.5, 6.95, 6.99), (0.3, 0, 0))),
    )
    assert escapes([group])[1] == ("none", "20, never", "30, never", "0.250 ± 0.000")
