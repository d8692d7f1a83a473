"""Whether a parsed file is of the kind that it should be."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from exlm_mini.config.checks import UserError
from exlm_mini.data.files import ANOTHER

T = TypeVar("T", bound=BaseModel)


class Shape(BaseModel, strict=True):
    """Fields that a file must have, with their types; it may have more."""


def parsed(kind: type[T], content: Any, where: object, remedy: str = ANOTHER) -> T:
    """The fields of JSON as bytes, or of parsed content, if it is of this kind.

    Args:
        kind: a ``Shape``.
        content: of the file.
        where: its name in messages.
        remedy: end of the message.
    """
    is_raw = isinstance(content, bytes)
    try:
        return kind.model_validate_json(content) if is_raw else kind.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise UserError(f"{where} is damaged or of another kind ({reason}); {remedy}") from None
