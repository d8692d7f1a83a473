"""The imitation of other machines, and a chapter on the one that differs most from this one."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch
from machines import FURTHEST, ROOT, TRAINING_CHAPTERS, environment, run
from torch.optim.optimizer import register_optimizer_step_pre_hook


def trained() -> list[float]:
    """Weights of a small trained model; the gradient of the last three was always zero."""
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(8, 8), torch.randn(4, 8)
    unused_3 = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([*layer.parameters(), unused_3], lr=0.01, weight_decay=0)
    for _ in range(9):
        optimizer.zero_grad()
        (layer(rows).square().mean() + 0 * unused_3.sum()).backward()
        optimizer.step()
    return [*layer.weight.flatten().tolist(), *unused_3.tolist()]


@pytest.fixture
def nudged(monkeypatch):
    """Function that runs ``trained`` on the imitated machine of a given number."""
    file = ROOT / "tests" / "stress" / "imitation" / "sitecustomize.py"
    spec = importlib.util.spec_from_file_location("imitation", file)
    imitation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imitation)
    assert imitation.nudged(torch.tensor([0.0, 1.0, 2.0]), 1)[0] == 0

    def weights(number: int) -> list[float]:
        monkeypatch.setenv("EXLM_NUDGE", str(number))
        handle = register_optimizer_step_pre_hook(imitation.nudge)
        try:
            return trained()
        finally:
            handle.remove()

    return weights


@pytest.mark.slow
@pytest.mark.skipif("EXLM_NUDGE" in os.environ, reason="EXLM_NUDGE is already set")
def test_a_nudge_moves_the_last_bits_the_same_way_in_every_process(nudged):
    own, one, two = trained(), nudged(1), nudged(2)
    assert len({tuple(weights) for weights in (own, one, two)}) == 3
    assert one == pytest.approx(own, rel=1e-4, abs=1e-5)
    assert one[-3:] == [1, 1, 1]  # a gradient of zero stays zero
    code = "from test_machines import trained; print(trained())"
    machine = environment({"EXLM_NUDGE": "1"})
    machine["PYTHONPATH"] += os.pathsep + str(ROOT / "tests" / "stress")
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, env=machine, capture_output=True, text=True, check=True)
    assert told.stdout == f"{one}\n"


def test_every_chapter_that_trains_is_on_the_list():
    trains = re.compile(
        r"train_live\(|\btrain\(|optimizer\.step\(\)|^from exlm_mini import .*pretrain", re.M
    )
    found = [
        f for f in sorted((ROOT / "chapters").glob("[0-9]*.py")) if trains.search(f.read_text())
    ]
    assert [f.name[:2] for f in found] == list(TRAINING_CHAPTERS)


# The quickest of these chapters; ``make test-machines`` runs the others.
@pytest.mark.slow
def test_a_chapter_that_trains_passes_on_the_furthest_machine():
    (notebook,) = (ROOT / "chapters").glob("06_*.ipynb")
    outcome = run(FURTHEST, [notebook])
    assert outcome.passed and not outcome.failed, outcome.output
