"""Reading manifests: YAML or JSON documents into checked RolloutJobs and BackendPools."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from rollyard_crds.backendpool import BackendPool
from rollyard_crds.base import API_VERSION
from rollyard_crds.errors import CrdsError
from rollyard_crds.reading.yaml_text import YamlError, load_all
from rollyard_crds.rolloutjob import RolloutJob

Manifest = RolloutJob | BackendPool
_KINDS: Final[dict[str, type[RolloutJob] | type[BackendPool]]] = {
    "RolloutJob": RolloutJob,
    "BackendPool": BackendPool,
}


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


def describe(
    error: ValidationError,
    prefix: str = "",
    model: type[BaseModel] | None = None,
    *,
    quote: bool = True,
    whole: str = "manifest",
) -> list[str]:
    """Return Pydantic's errors as lines `field: message`, with the field as a path (`spec.tasks.url`).

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
        message = item["msg"].removeprefix("Value error, ")
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
