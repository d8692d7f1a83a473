"""Runs that are made once: each leaves a file, which is never taken for that of another run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from exlm_mini.config.checks import UserError

MADE_AGAIN = "delete it, and the run is made again"


class StoppedError(Exception):
    """The run was asked to stop; what is done is kept."""


def check_identity(
    where: object, record: Mapping[str, Any], identity: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a record if it is not of the run that ``identity`` describes."""
    for name, value in identity.items():
        if record.get(name) != value:
            raise UserError(
                f"{where} was made with another {name.removesuffix('_sha256')}; {remedy}"
            )
