"""What pytest needs wherever it is started: nbval looks for its patterns in the current folder."""

from pathlib import Path

PATTERNS = Path(__file__).parent / "tests" / "nbval_sanitize.cfg"


def pytest_configure(config):
    if getattr(config.option, "nbval_sanitize_with", "absent") is None:
        config.option.nbval_sanitize_with = str(PATTERNS)
