"""What the reconcile of sandbox pods reads and what it says: claims, pods, and plans. Immutable data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from rollyard_crds.claims import ClaimState

SandboxState = Literal["starting", "ready", "failed", "stopping"]
Hope = Literal["none", "kubelet", "scheduler", "gate"]
"""Who may still mend it: nobody, the kubelet trying again, a node with room, whoever opens the gate."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a pod."""

    reason: str
    """CamelCase word for programs; a claim fails with it."""
    message: str
    """The cluster's own words."""
    since: datetime
    hope: Hope = "none"
    retryable: bool = True
    """Whether another pod may fare better."""


LOST = "SandboxLost"
"""Reason of a bound claim's trouble: nothing is seen of its pod."""


@dataclass(frozen=True, slots=True)
class ObservedSandbox:
    """A sandbox pod as the cluster shows it."""

    namespace: str
    name: str
    uid: str
    flavor: str
    """Hash of all that it was made from."""
    claim: str
    """The claim that it belongs to; empty if it is warm and nobody's."""
    state: SandboxState
    created_at: datetime
    address: str = ""
    """Ready: `tcp://host:port` of its exec server."""
    trouble: Trouble | None = None
    usable: bool = True
    """False: its secret is not known any more."""
    gone_due: datetime | None = None
    """Stopping: when it should have been gone."""


@dataclass(frozen=True, slots=True)
class WantedSandbox:
    """A claim as the control plane lists it."""

    id: str
    namespace: str
    state: ClaimState
    age_seconds: float = 0.0
    flavor: str = ""
    """Pending: what it wants; empty: not known yet (its job has no object so far), it waits."""
    address: str = ""
    """Bound: of its sandbox."""


@dataclass(frozen=True, slots=True)
class WarmNeed:
    """Unclaimed sandboxes that one job wants ready."""

    namespace: str
    flavor: str
    count: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """The API server refused to make a pod (quota, admission); by namespace and pod name."""

    trouble: Trouble
    """`since`: the first time. Hope `none`: asking again changes nothing."""
    retry_at: datetime


@dataclass(frozen=True, slots=True)
class ObservedSandboxes:
    """All that is seen of sandboxes."""

    pods: Sequence[ObservedSandbox] = ()
    refusals: Mapping[tuple[str, str], Refusal] = field(default_factory=dict)
    numbers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By namespace and flavor: where the numbers of new warm pods begin; 0 if it is not there."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """How fast, and how patient."""

    tokens: float = 20.0
    """Pods that may be made now."""
    per_second: float = 10.0
    """Further ones, each second."""
    unschedulable_seconds: float = 300.0
    """How long a pod may wait for a node with room, or for quota."""
    pull_seconds: float = 60.0
    """For the kubelet to pull an image or start a container that it could not."""
    warm_retry_seconds: float = 60.0
    """A warm pod that failed stays for so long before another takes its place."""
    stuck_seconds: float = 60.0
    """A pod that should have been gone for so long is removed by force: its node is lost."""


@dataclass(frozen=True, slots=True)
class LaunchSandbox:
    """Make this pod."""

    namespace: str
    name: str
    flavor: str
    claim: str = ""
    """Empty: a warm one."""


@dataclass(frozen=True, slots=True)
class TakeSandbox:
    """Label a warm pod as this claim's."""

    claim: str
    pod: ObservedSandbox


@dataclass(frozen=True, slots=True)
class BindSandbox:
    """Tell the control plane that the claim's sandbox is this pod; after it was taken, if it is to be."""

    claim: str
    pod: ObservedSandbox


@dataclass(frozen=True, slots=True)
class FailSandbox:
    """Tell the control plane that the claim got no sandbox, or lost it."""

    claim: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class DeleteSandbox:
    """Delete this pod, if it is still the one with this uid."""

    namespace: str
    name: str
    uid: str
    force: bool = False
    """Its node does not answer: remove the object at once."""


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """What to do now."""

    launch: tuple[LaunchSandbox, ...] = ()
    take: tuple[TakeSandbox, ...] = ()
    bind: tuple[BindSandbox, ...] = ()
    fail: tuple[FailSandbox, ...] = ()
    remove: tuple[str, ...] = ()
    """Claims of which nothing is left."""
    delete: tuple[DeleteSandbox, ...] = ()
    requeue_after: float | None = None
    """Seconds after which time alone changes the plan."""
