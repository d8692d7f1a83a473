"""Settings and fixtures all tests share."""

import os
from pathlib import Path

# Before torch or datasets are imported: they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the hub fails at once
os.environ["OMP_NUM_THREADS"] = "1"  # sums in one order: the same bits on every machine size

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
