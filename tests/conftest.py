"""Settings and fixtures all tests share."""

import os
import shutil
import sys
from pathlib import Path

# Before torch or datasets are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the hub fails at once
# Sums in one order, whatever the number of cores. tests/stress/machines.py asks for more threads.
os.environ["OMP_NUM_THREADS"] = os.environ.get("EXLM_TEST_THREADS", "1")
# MKL may take fewer than it is given, until a process calls torch.set_num_threads.
os.environ["MKL_DYNAMIC"] = "FALSE"
os.environ["COLUMNS"] = "80"  # however wide the terminal is
# What the chapters import from beside them.
sys.path.append(str(Path(__file__).resolve().parents[1] / "chapters"))

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data sets that are not part of the project; skips where ``EXLM_DATA`` is absent."""
    folder = Path(os.environ.get("EXLM_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; set EXLM_DATA to the folder of the data files")
    return folder


@pytest.fixture(scope="session")
def packs(tmp_path_factory):
    """Rows of different length, to learn from and to validate with."""
    from workers import make_packs

    return make_packs(tmp_path_factory.mktemp("packs"))


@pytest.fixture(autouse=True)
def _own_number_of_threads():
    """A command that an earlier test ran in this process may have set another."""
    import torch

    number = int(os.environ["OMP_NUM_THREADS"])
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


@pytest.fixture(scope="module")
def nan_in_uninitialised_memory():
    """torch.empty gives NaN, so that a number never written is seen."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def chromium():
    """Debian's Chromium, driven by playwright; skips where either is missing.

    Closed after each file: its event loop would be in the way of other tests that run one.
    """
    api = pytest.importorskip("playwright.sync_api")
    executable = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if executable is None:
        pytest.skip("no chromium; install it with apt-get, or set CHROMIUM to its path")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def three_runs(monkeypatch):
    """No more runs than a median needs."""
    from exlm_lab.benchmarks import measure

    monkeypatch.setattr(measure, "MOST_RUNS", measure.LEAST_RUNS)
