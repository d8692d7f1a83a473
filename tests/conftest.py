"""Settings and fixtures all tests share."""

import gc
import os
import shutil
import sys
from pathlib import Path

# Set before torch and datasets are imported, which read these variables only once.
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that tries to use the hub fails at once
# One thread adds in the same order on any number of cores; tests/stress/machines.py sets more.
os.environ["OMP_NUM_THREADS"] = os.environ.get("EXLM_TEST_THREADS", "1")
# Otherwise MKL may use fewer threads than it is given, until torch.set_num_threads is called.
os.environ["MKL_DYNAMIC"] = "FALSE"
os.environ["COLUMNS"] = "80"  # the same in every terminal
# Chapters import modules from their own folder.
sys.path.append(str(Path(__file__).resolve().parents[1] / "chapters"))

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("default", deadline=None, max_examples=50)
settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_finish():
    """Spare the garbage collector all that was imported; it took an eighth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of real data sets, which are not part of the project; skips if it does not exist."""
    folder = Path(os.environ.get("EXLM_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; set EXLM_DATA to the folder of the data files")
    return folder


@pytest.fixture(scope="session")
def packs(tmp_path_factory):
    """Packs for training and validation, whose rows differ in length."""
    from workers import make_packs

    return make_packs(tmp_path_factory.mktemp("packs"))


@pytest.fixture(autouse=True)
def _own_number_of_threads():
    """Restore the number of threads, which a command run by an earlier test may have changed."""
    import torch

    number = int(os.environ["OMP_NUM_THREADS"])
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


@pytest.fixture(scope="module")
def nan_in_uninitialised_memory():
    """Fill ``torch.empty`` with NaN, so that a number that is never written shows up."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def chromium():
    """Debian's Chromium, driven by playwright; skips where either is missing.

    It is closed after each test file, because its event loop would disturb tests that run another.
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
    """Limit benchmarks to three runs, the fewest that they make."""
    from exlm_lab.benchmarks import measure

    monkeypatch.setattr(measure, "MOST_RUNS", measure.LEAST_RUNS)
