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


def _folder(variable: str, name: str) -> Path:
    """The folder a variable names, or its default beside the checkout; skips when absent."""
    folder = Path(os.environ.get(variable, ROOT.parent / "shared" / name))
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; set {variable} to the folder of the {name} files")
    return folder


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data sets that are not part of the project."""
    return _folder("EXLM_DATA", "data")


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """Reference numbers computed with the released code."""
    return _folder("EXLM_GOLDEN", "golden")
