"""Manifests that differ from another one in a few fields, for the cases of `tests/crds/cases.yaml`."""

from __future__ import annotations

from typing import Any


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with the fields of `patch`, at every depth; None removes a field."""
    out = dict(base)
    for key, value in patch.items():
        if value is None:
            out.pop(key, None)
        elif isinstance(value, dict):
            out[key] = merged(out.get(key) or {}, value)
        else:
            out[key] = value
    return out
