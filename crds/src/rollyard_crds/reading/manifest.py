"""Reading manifests: YAML or JSON documents into checked RolloutJobs and BackendPools."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollyard_crds.backendpool import BackendPool
from rollyard_crds.base import API_VERSION, NAME_PATTERN
from rollyard_crds.errors import CrdsError
from rollyard_crds.fields.quantity import QUANTITY_PATTERN
from rollyard_crds.names import EXTENSION_NAME
from rollyard_crds.reading.yaml_text import YamlError, load_all
from rollyard_crds.rolloutjob import RolloutJob

Manifest = RolloutJob | BackendPool
_KINDS: Final[dict[str, type[RolloutJob] | type[BackendPool]]] = {
    "RolloutJob": RolloutJob,
    "BackendPool": BackendPool,
}


_WORDS: Final = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have {min_length} or more items",
    "too_long": "must have at most {max_length} items",
    "string_pattern_mismatch": "must match the pattern {pattern}",
}
"""What a manifest's author reads for each general type of Pydantic's errors."""
_PATTERNS: Final = {
    NAME_PATTERN: "must be small letters, digits and '-', and must begin and end with a letter or digit",
    EXTENSION_NAME: "must begin with a small letter, and have small letters, digits, '.', '_' and '-'",
    QUANTITY_PATTERN: "must be a number, or one with a unit, such as 500m or 2Gi",
}
"""The same for texts that must match a pattern."""


class ManifestError(CrdsError, ValueError):
    """A manifest that cannot be accepted; `problems` names each field and what would be right."""

    reason = "InvalidManifest"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model within an annotation such as `list[Task] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)


def _fields_at(model: type[BaseModel] | None, location: Sequence[int | str]) -> list[str]:
    """Return the names of the fields of the object at a location, as they are written outside.

    The list is empty where the object is not a model.
    """
    for part in location:
        if model is None or isinstance(part, int):
            continue
        model = next(
            (
                _model_in(field.annotation)
                for name, field in model.model_fields.items()
                if (field.alias or name) == part
            ),
            None,
        )
    return [] if model is None else [field.alias or name for name, field in model.model_fields.items()]


def _near(name: str, known: Sequence[str]) -> list[str]:
    """Return the known name that is nearly the same, or has the same letters; other guesses mislead."""
    letters = sorted(name)
    swapped = [each for each in known if sorted(each) == letters]
    return swapped[:1] or difflib.get_close_matches(name, known, n=1, cutoff=0.75)


def _message(item: ErrorDetails) -> str:
    """Return what would be right in place of a refused value."""
    context = item.get("ctx", {})
    words = _PATTERNS.get(context.get("pattern", "")) or _WORDS.get(item["type"])
    return item["msg"].removeprefix("Value error, ") if words is None else words.format_map(context)


def describe(
    error: ValidationError,
    prefix: str = "",
    model: type[BaseModel] | None = None,
    *,
    quote: bool = True,
    whole: str = "manifest",
) -> list[str]:
    """Return Pydantic's errors in our words, as lines `field: message`, with the field as a path.

    A path is such as `spec.tasks[0].id`.

    Args:
        error: what pydantic raised.
        prefix: the path of the document itself.
        model: the one that refused; an unknown field is shown with the nearest known one, or with all of
            them.
        quote: whether lines may show what the document holds: values, and names that `model` does not know.
        whole: what is shown instead of the path for a fault of the document as a whole.
    """
    lines = []
    for item in error.errors(include_url=False):
        path = prefix
        for index, part in enumerate(item["loc"]):
            if not quote and isinstance(part, str) and part not in _fields_at(model, item["loc"][:index]):
                part = "(not shown)"
            path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
        message = _message(item)
        if not quote:
            # A validator's own words may hold the value; those about the whole task never do.
            if item["type"] == "extra_forbidden":
                message = "unknown field"
            elif item["type"] == "value_error" and item["loc"]:
                message = "this value is not allowed"
        elif item["type"] == "extra_forbidden":
            known = _fields_at(model, item["loc"][:-1])
            near = _near(str(item["loc"][-1]), known)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}" if known else ""
            message = f"unknown field{hint}"
        elif item["type"] != "missing" and not isinstance(item.get("input"), dict | list):
            shown = repr(item.get("input"))
            message += f" (got {shown if len(shown) <= 80 else shown[:77] + '...'})"
        lines.append(f"{path or whole}: {message}")
    return lines


def parse(document: Any) -> Manifest:
    """Return one decoded document as a checked manifest.

    Raises:
        ManifestError: it is not an object, has another kind or version, or a field is wrong.
    """
    if not isinstance(document, dict):
        raise ManifestError([f"manifest: must be an object, not {type(document).__name__}"])
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ManifestError([f"kind: must be one of {', '.join(sorted(_KINDS))} (got {kind!r})"])
    if document.get("apiVersion") != API_VERSION:
        raise ManifestError([f"apiVersion: must be {API_VERSION!r} (got {document.get('apiVersion')!r})"])
    try:
        return _KINDS[kind].model_validate(document)
    except ValidationError as error:
        raise ManifestError(describe(error, model=_KINDS[kind])) from error


def load(text: str) -> list[Manifest]:
    """Return every document of a YAML (or JSON) text.

    Raises:
        ManifestError: the text is not YAML, holds no document, or a document is refused.
    """
    try:
        documents = [d for d in load_all(text) if d is not None]
    except YamlError as error:
        raise ManifestError([f"manifest: not valid YAML: {error}"]) from error
    if not documents:
        raise ManifestError(["manifest: holds no document"])
    return [parse(document) for document in documents]
