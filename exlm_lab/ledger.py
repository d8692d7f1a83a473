"""What runs leave, and what others made: read only if it is of the right kind and run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from exlm_mini.config.checks import UserError, mistake_in
from exlm_mini.data.files import ANOTHER

MADE_AGAIN = "delete it, and the run is made again"
T = TypeVar("T", bound=BaseModel)


class StoppedError(Exception):
    """The run was asked to stop; what is done is kept."""


class Shape(BaseModel, strict=True):
    """Fields that a file must have, with their types; it may have more."""


def parsed(kind: type[T], content: Any, where: object, remedy: str = ANOTHER) -> T:
    """The fields of parsed content, if it is of this kind, a ``Shape``.

    ``where`` names it in messages, which end with ``remedy``.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        reason = mistake_in(error)
        raise UserError(f"{where} is damaged or of another kind ({reason}); {remedy}") from None


def check_identity(
    where: object, record: Mapping[str, Any], identity: Mapping[str, Any], remedy: str
) -> None:
    """Refuse a record if it is not of the run that ``identity`` describes."""
    for name, value in identity.items():
        if record.get(name) != value:
            raise UserError(
                f"{where} was made with another {name.removesuffix('_sha256')}; {remedy}"
            )
