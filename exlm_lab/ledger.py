"""Records of finished runs: a JSON file each, there whole or not at all, and never of another run.

A finished run is not run again, so what makes runs looks here first; a record says what it was made
with, and one of other settings is refused, never overwritten.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import write_atomically
from exlm_mini.training.console import Progress

MADE_AGAIN = "delete it, and the run is made again"


class StoppedError(Exception):
    """The run was asked to stop; what is done is kept."""


class Ledger(ABC):
    """The records of a directory, and the way to add one.

    A subclass says what a cell is, of which there is a record for each seed: a ``Cell`` of a sweep,
    or the settings that a task is fine-tuned with.
    """

    @abstractmethod
    def path(self, cell: Any, seed: int) -> Path:
        """Where the record of a cell lies."""

    @abstractmethod
    def read(self, cell: Any, seed: int) -> dict[str, Any]:
        """The record of a cell that is there; ``UserError`` if damaged, or of other settings."""

    @abstractmethod
    def make(
        self, cell: Any, seed: int, on_progress: Callable[[Progress], None]
    ) -> dict[str, Any]:
        """Run a cell; its record. ``StoppedError`` if stopped: the next call goes on from there."""

    def write(self, path: Path, record: Mapping[str, Any]) -> None:
        """Put a record under its name."""
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())

    def is_done(self, cell: Any, seed: int) -> bool:
        """Whether the record is there; raises as ``read`` does."""
        return self.path(cell, seed).exists() and bool(self.read(cell, seed))

    def run(
        self,
        cell: Any,
        seed: int,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> dict[str, Any]:
        """The record of a cell; it is made if it is not there. Raises as ``read`` and ``make``."""
        if not self.is_done(cell, seed):
            path = self.path(cell, seed)
            path.parent.mkdir(parents=True, exist_ok=True)  # a long run is not made in vain
            self.write(path, self.make(cell, seed, on_progress))
        return self.read(cell, seed)


def check_identity(
    where: object, record: Mapping[str, Any], identity: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a record if it is not of the run that ``identity`` describes."""
    for name, value in identity.items():
        if record.get(name) != value:
            raise UserError(
                f"{where} was made with another {name.removesuffix('_sha256')}; {remedy}"
            )
