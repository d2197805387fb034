"""Reading manifests: YAML or JSON documents into checked RolloutJobs and BackendPools."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import ValidationError

from rollyard_crds.backendpool import BackendPool
from rollyard_crds.base import API_VERSION
from rollyard_crds.rolloutjob import RolloutJob

Manifest = RolloutJob | BackendPool
_KINDS: dict[str, type[RolloutJob] | type[BackendPool]] = {
    "RolloutJob": RolloutJob,
    "BackendPool": BackendPool,
}


class ManifestError(ValueError):
    """A manifest that cannot be accepted; `problems` names each field and what would be right."""

    reason = "InvalidManifest"

    def __init__(self, problems: list[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


def describe(error: ValidationError, prefix: str = "") -> list[str]:
    """Pydantic's errors as `field: message` lines, a field written as a path (`spec.tasks.url`)."""
    lines = []
    for item in error.errors(include_url=False):
        path = prefix
        for part in item["loc"]:
            path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "unknown field"
        elif item["type"] != "missing" and not isinstance(item.get("input"), dict | list):
            shown = repr(item.get("input"))
            message += f" (got {shown if len(shown) <= 80 else shown[:77] + '...'})"
        lines.append(f"{path or 'manifest'}: {message}")
    return lines


def parse(document: Any) -> Manifest:
    """One decoded document as a checked manifest.

    Raises:
        ManifestError: not an object, another kind or version, or a field is wrong.
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
        raise ManifestError(describe(error)) from error


def load(text: str) -> list[Manifest]:
    """Every document of a YAML (or JSON) text.

    Raises:
        ManifestError: the text is no YAML, holds no document, or a document is refused.
    """
    try:
        documents = [d for d in yaml.safe_load_all(text) if d is not None]
    except yaml.YAMLError as error:
        raise ManifestError([f"manifest: not valid YAML: {error}"]) from error
    if not documents:
        raise ManifestError(["manifest: holds no document"])
    return [parse(document) for document in documents]
