"""Request bodies are checked by their pydantic models."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from rollyard_crds.reading.manifest import describe

from rollyard_api.core.problems import Invalid

M = TypeVar("M", bound=BaseModel)

MAX_PROBLEMS = 20
"""The largest number of wrong fields that an answer names."""


def validated(kind: type[M], document: Any, name: str = "", *, strict: bool = False) -> M:
    """Return a body as an instance of its model.

    Args:
        kind: The model.
        document: The decoded body, or a part of it.
        name: The name of the part, which precedes the fields in messages.
        strict: Whether a value of another type is refused even if it could be converted, such as "1" for 1.

    Raises:
        Invalid: A field is wrong; `errors` names each wrong field.
    """
    try:
        return kind.model_validate(document, strict=strict or None)
    except ValidationError as error:
        problems = describe(error, name)[:MAX_PROBLEMS]
        raise Invalid(problems[0], errors=problems) from error
