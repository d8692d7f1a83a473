"""Checks that a file has the fields it must have, and that a record belongs to the expected run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from exlm_mini.config.checks import UserError, mistake_in
from exlm_mini.data.files import ANOTHER

MADE_AGAIN = "delete it and the run will be repeated"
T = TypeVar("T", bound=BaseModel)


class StoppedError(Exception):
    """Raised when a run was asked to stop; the work done so far is kept."""


class Shape(BaseModel, strict=True):
    """Base class for the fields that a file must have, with their types; it may have more."""


def parsed(kind: type[T], content: Any, where: object, remedy: str = ANOTHER) -> T:
    """``content`` as an object of ``kind``, a ``Shape``; ``UserError`` if it does not fit.

    The message names the content by ``where`` and ends with ``remedy``.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        reason = mistake_in(error)
        raise UserError(
            f"{where} is damaged or not in the expected format ({reason}); {remedy}"
        ) from None


def check_identity(
    where: object, record: Mapping[str, Any], identity: Mapping[str, Any], remedy: str
) -> None:
    """Raise ``UserError`` if a record does not belong to the run that ``identity`` describes."""
    for name, value in identity.items():
        if record.get(name) != value:
            raise UserError(
                f"{where} was made with another {name.removesuffix('_sha256')}; {remedy}"
            )
