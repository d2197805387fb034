"""Names and digests of workloads: deterministic, so that doing something twice does it once."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from rollyard_crds import BackendPool, RolloutJob
from rollyard_crds.fields.pod_template import PodTemplate

from rollyard_drivers.reconcile.plan import Owner, Profile

NAME_LIMIT = 63
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a job or a pool that its pods inherit: the queue that admits them."""


def child_name(owner: Owner, role: str, index: int) -> str:
    """`<owner>-<first 8 of uid>-<role>-<index>`, a DNS label: one name, one workload."""
    tail = f"-{owner.uid[:8]}-{role}-{index}" if owner.uid else f"-{role}-{index}"
    return owner.name[: NAME_LIMIT - len(tail)].rstrip("-") + tail.lower()


def owner_of(thing: RolloutJob | BackendPool) -> Owner:
    """The object as its workloads name it."""
    meta = thing.metadata
    return Owner(thing.kind, meta.namespace, meta.name, meta.uid or "")


def child_index(owner: Owner, role: str, name: str) -> int | None:
    """The index that `child_name` made this name with; None: it is not one of theirs."""
    digits = name.rpartition("-")[2]
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 6:
        return None
    index = int(digits)
    return index if child_name(owner, role, index) == name else None


def made_of(template: PodTemplate, labels: Mapping[str, str], profile: Profile) -> str:
    """Digest of what a workload's pod is made from beside the workload; empty where there are no pods."""
    if not profile.made_of:
        return ""
    text = (
        f"{profile.made_of} {labels.get(QUEUE_LABEL, '')} {template.model_dump_json(exclude_defaults=True)}"
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
