"""Where the benchmarks' examples come from: files as they are published, or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import reading
from exlm_mini.data.text import COMPRESSIONS


@overload
def find_file(directory: Path, *names: str) -> Path: ...


@overload
def find_file(directory: Path, *names: str, is_optional: Literal[True]) -> Path | None: ...


def find_file(directory: Path, *names: str, is_optional: bool = False) -> Path | None:
    """The first file of these names in a directory, plain or compressed, in any case.

    Args:
        directory: where to look.
        names: without the suffix of a compression.
        is_optional: return none where there is no such file.

    Raises:
        UserError: if there is none; the files that are there are named.
    """
    with reading(directory):
        there = {path.name.lower(): path for path in sorted(directory.iterdir())}
    for name in names:
        for suffix in ("", *COMPRESSIONS):
            if path := there.get((name + suffix).lower()):
                return path
    if is_optional:
        return None
    found = ", ".join(path.name for path in [*there.values()][:20]) or "nothing"
    raise UserError(
        f"{directory} holds no {' or '.join(names)} (plain, {' or '.join(COMPRESSIONS)}); it "
        f"holds: {found}"
    )


def load_hub(name: str, *config: str) -> Any:
    """All splits of a data set of the hub.

    Raises:
        UserError: if it cannot be had.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, *config)
    except Exception as error:  # the library raises a dozen unrelated types here
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"cannot load the hub data set {name} ({reason}); check the network, or give the "
            "benchmark's files with --data"
        ) from error
