"""Parts of manifests, times and conditions in the form that Kubernetes uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import orjson
from rollyard_crds.base import ObjectMeta

from rollyard_api.core.problems import Conflict

_OWN_METADATA: Final = {"name", "namespace", "uid", "generation", "creation_timestamp", "deletion_timestamp"}


def stored_metadata(meta: ObjectMeta) -> bytes:
    """Return the part of a manifest's metadata that is stored as it is; the rest has its own columns."""
    return orjson.dumps(meta.model_dump(mode="json", by_alias=True, exclude_none=True, exclude=_OWN_METADATA))


def stored_spec(spec: Mapping[str, Any]) -> bytes:
    """Return a spec as it is stored. Equal specs have the same form."""
    return orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)


def differs(kind: str, namespace: str, name: str, why: Sequence[str] = ()) -> Conflict:
    """Return the refusal of an object that exists with another spec; `why` names the known fields."""
    return Conflict(
        f"{kind} {name!r} exists in namespace {namespace!r} with another spec"
        f"{f' ({why[0]})' if why else ''}; delete it first or choose another name",
        reason="AlreadyExists",
        errors=why,
    )


def timestamp(seconds: float | None) -> str | None:
    """Return a time, in seconds since the epoch, in the form of RFC 3339 in UTC."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def merge_status(
    before: Mapping[str, Any], reported: Mapping[str, Any], fields: Collection[str]
) -> dict[str, Any]:
    """Return these fields of a reported status, with `conditions`, which may be empty.

    Each condition keeps its old lastTransitionTime while its status stays the same.
    """
    old = {c["type"]: c for c in before.get("conditions", [])}
    conditions = [
        c | {"lastTransitionTime": old[c["type"]]["lastTransitionTime"]}
        if c["type"] in old and old[c["type"]]["status"] == c["status"]
        else c
        for c in reported.get("conditions", [])
    ]
    return {k: reported[k] for k in fields if k in reported} | {"conditions": conditions}
