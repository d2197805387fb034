"""Names of workloads: deterministic, so that doing something twice does it once."""

from __future__ import annotations

from rollyard_crds import BackendPool, RolloutJob

from rollyard_operator.plan import Owner

NAME_LIMIT = 63


def child_name(owner: Owner, role: str, index: int) -> str:
    """`<owner>-<first 8 of uid>-<role>-<index>`, a DNS label: one name, one workload."""
    tail = f"-{owner.uid[:8]}-{role}-{index}" if owner.uid else f"-{role}-{index}"
    return owner.name[: NAME_LIMIT - len(tail)].rstrip("-") + tail.lower()


def owner_of(thing: RolloutJob | BackendPool) -> Owner:
    """The object as its workloads name it."""
    meta = thing.metadata
    return Owner(thing.kind, meta.namespace, meta.name, meta.uid or "")
