"""What a worker may begin before it has asked for its job: the sandbox that every rollout will want."""

from __future__ import annotations

import json

from rollyard_crds import RolloutJobSpec
from rollyard_crds.fields.quantity import parse_quantity


def first_sandbox(spec: RolloutJobSpec) -> str:
    """A stage worker's `--first-sandbox`, JSON; empty where the job keeps none warm. Pure."""
    sandbox = spec.sandbox
    if not sandbox.warm:
        return ""
    resources = sandbox.resources
    return json.dumps(
        {
            "handler": spec.handler,
            "image": sandbox.image,
            "cpu": parse_quantity(resources.cpu),
            "memory_bytes": int(parse_quantity(resources.memory)),
            "disk_bytes": int(parse_quantity(resources.disk)),
            "processes": resources.processes,
        },
        separators=(",", ":"),
    )
