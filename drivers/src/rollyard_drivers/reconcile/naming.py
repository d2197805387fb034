"""The names and digests of workloads.

They are deterministic, which makes it harmless to carry out the same step twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from rollyard_crds import BackendPool, RolloutJob
from rollyard_crds.fields.pod_template import PodTemplate

from rollyard_drivers.reconcile.plan import Owner, Profile

NAME_LIMIT: Final = 63
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
"""The label of a job or a pool that its pods inherit. It names the queue that admits them."""


def child_name(owner: Owner, role: str, index: int) -> str:
    """Return the name of a workload: `<owner>-<first 8 of uid>-<role>-<index>`, a DNS label.

    Each name belongs to one workload only.
    """
    tail = f"-{owner.uid[:8]}-{role}-{index}" if owner.uid else f"-{role}-{index}"
    return owner.name[: NAME_LIMIT - len(tail)].rstrip("-") + tail.lower()


def owner_of(thing: RolloutJob | BackendPool) -> Owner:
    """Return the identity of an object, as its workloads refer to it."""
    meta = thing.metadata
    return Owner(thing.kind, meta.namespace, meta.name, meta.uid or "")


def child_index(owner: Owner, role: str, name: str) -> int | None:
    """Return the index that `child_name` made this name with, or None if it did not make the name."""
    digits = name.rpartition("-")[2]
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 6:
        return None
    index = int(digits)
    return index if child_name(owner, role, index) == name else None


def made_of(template: PodTemplate, labels: Mapping[str, str], profile: Profile) -> str:
    """Return a digest of what a workload's pod is made from in addition to the workload itself.

    The result is empty for drivers that have no pods.
    """
    if not profile.made_of:
        return ""
    text = (
        f"{profile.made_of} {labels.get(QUEUE_LABEL, '')} {template.model_dump_json(exclude_defaults=True)}"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
