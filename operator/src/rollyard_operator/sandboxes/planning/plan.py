"""The input and the output of the reconcile of sandbox pods: claims, limits and plans, as immutable data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from rollyard_crds.claims import ClaimState

from rollyard_operator.pods.observed_sandbox import ObservedSandbox
from rollyard_operator.pods.trouble import Trouble

LOST = "SandboxLost"
"""The reason for a bound claim whose pod cannot be found."""


@dataclass(frozen=True, slots=True)
class WantedSandbox:
    """A claim as the control plane lists it."""

    id: str
    namespace: str
    state: ClaimState
    age_seconds: float = 0.0
    flavor: str = ""
    """The flavor that a pending claim wants. It is empty while the job has no object, and the claim waits."""
    address: str = ""
    """The address of the sandbox of a bound claim."""


@dataclass(frozen=True, slots=True)
class WarmNeed:
    """The number of unclaimed sandboxes of a flavor that one job wants to have ready."""

    namespace: str
    flavor: str
    count: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal of the API server to make a pod, because of quota or admission. Its key names the pod."""

    trouble: Trouble
    """The trouble. Its `since` is the first refusal; its hope is `none` if a retry would change nothing."""
    retry_at: datetime


@dataclass(frozen=True, slots=True)
class ObservedSandboxes:
    """Everything that is known about sandbox pods."""

    pods: Sequence[ObservedSandbox] = ()
    refusals: Mapping[tuple[str, str], Refusal] = field(default_factory=dict)
    numbers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """The first free number for new warm pods, by namespace and flavor. A missing entry means 0."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Limits for the rate of new pods and for the waiting times."""

    tokens: float = 20.0
    """The number of pods that may be made now."""
    per_second: float = 10.0
    """The number of further pods that may be made per second."""
    unschedulable_seconds: float = 300.0
    """How long a pod may wait for a node with room or for quota, in seconds."""
    pull_seconds: float = 60.0
    """How long the kubelet may retry an image pull or a container start that failed, in seconds."""
    warm_retry_seconds: float = 60.0
    """How long a warm pod that failed is kept before another one takes its place, in seconds."""
    stuck_seconds: float = 60.0
    """A pod that is overdue by this many seconds is removed by force, because its node is lost."""


@dataclass(frozen=True, slots=True)
class LaunchSandbox:
    """Make this pod."""

    namespace: str
    name: str
    flavor: str
    claim: str = ""
    """The claim that the pod is made for, or empty for a warm pod."""


@dataclass(frozen=True, slots=True)
class TakeSandbox:
    """Label a warm pod as the pod of this claim."""

    claim: str
    pod: ObservedSandbox


@dataclass(frozen=True, slots=True)
class BindSandbox:
    """Report to the control plane that the claim has this pod. A pod that is to be taken is taken first."""

    claim: str
    pod: ObservedSandbox


@dataclass(frozen=True, slots=True)
class FailSandbox:
    """Report to the control plane that the claim got no sandbox or lost it."""

    claim: str
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class DeleteSandbox:
    """Delete this pod if it still has this uid."""

    namespace: str
    name: str
    uid: str
    force: bool = False
    """Whether to remove the object at once because its node does not answer."""


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """The steps to carry out now."""

    launch: tuple[LaunchSandbox, ...] = ()
    take: tuple[TakeSandbox, ...] = ()
    bind: tuple[BindSandbox, ...] = ()
    fail: tuple[FailSandbox, ...] = ()
    remove: tuple[str, ...] = ()
    """The ids of claims that have ended and have no pod left."""
    delete: tuple[DeleteSandbox, ...] = ()
    requeue_after: float | None = None
    """The number of seconds after which the passing of time alone changes the plan."""
