"""Manifests of jobs and pools, as users write them."""

from __future__ import annotations

from typing import Any

Manifest = dict[str, Any]


def job_manifest(name: str, spec: dict[str, Any], **metadata: Any) -> Manifest:
    """Return the manifest of a RolloutJob."""
    return _manifest("RolloutJob", name, spec, metadata)


def pool_manifest(name: str, spec: dict[str, Any], **metadata: Any) -> Manifest:
    """Return the manifest of a BackendPool."""
    return _manifest("BackendPool", name, spec, metadata)


def _manifest(kind: str, name: str, spec: dict[str, Any], metadata: dict[str, Any]) -> Manifest:
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name, **metadata},
        "spec": spec,
    }
