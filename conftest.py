"""Gives nbval the full path of its patterns, so that pytest can be started in any folder."""

from pathlib import Path

PATTERNS = Path(__file__).parent / "tests" / "nbval_sanitize.cfg"


def pytest_configure(config):
    if getattr(config.option, "nbval_sanitize_with", "absent") is None:
        config.option.nbval_sanitize_with = str(PATTERNS)
