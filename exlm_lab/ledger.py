"""Records of finished runs: a JSON file each, there whole or not at all, and never of another run.

A finished run is not run again, so what makes runs looks here first; a record says what it was made
with, and one of other settings is refused, not overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from exlm_mini.config import UserError
from exlm_mini.data.files import write_atomically


def check_identity(
    path: Path, found: Mapping[str, Any], identity: Mapping[str, Any], remedy: str
) -> None:
    """Refuse the record of another run.

    Args:
        path: of the record.
        found: what it says.
        identity: what it must say.
        remedy: how the line ends.

    Raises:
        UserError: naming the first difference.
    """
    for name, value in identity.items():
        if found.get(name) != value:
            raise UserError(
                f"{path} was made with another {name.removesuffix('_sha256')}; {remedy}"
            )


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Put a record under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
