"""The reconcile of sandbox pods: it compares claims and warm wants with pods. This module is pure.

A waiting claim takes a warm pod of its flavor, or else gets a pod of its own. Once the pod accepts
connections, the claim is bound to it. Pods that no claim and no warm want needs are deleted. Everything is
computed from claims and pods alone, so carrying out a plan in part or twice does no harm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Final

from rollyard_crds.claims import ClaimState
from rollyard_drivers.reconcile.workloads import earliest
from rollyard_process.backoff import Backoff

from rollyard_operator.kube.errors import KubeError
from rollyard_operator.pods.observed_sandbox import ObservedSandbox, Trouble

LOST = "SandboxLost"
"""The reason for a bound claim whose pod cannot be found."""
_PAUSES: Final = Backoff(first=1.0, longest=30.0)
FINAL_PAUSE_SECONDS = 60.0
FORGET_SECONDS = 600.0
NOT_ISOLATED = "NotIsolated"
"""The reason of the error when a foreign policy opens the network of sandboxes."""
Key = tuple[str, str]
REMEMBERED = 4096
"""The number of flavors whose numbers are remembered. A forgotten flavor starts at 0 again."""


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
    tries: int = 1


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


def trouble_of(error: KubeError, now: datetime) -> Trouble:
    """Return what a refusal means for the claim or the warm want that waits for the pod."""
    message = error.message[:512]
    if error.status == 403 and "exceeded quota" in error.message:
        return Trouble("QuotaExceeded", message, now, "scheduler")
    if error.reason == NOT_ISOLATED:
        # The policy may be corrected before the next try, but a claim does not wait for that.
        return Trouble(NOT_ISOLATED, message, now, "none")
    if error.status in (0, 429) or error.status >= 500:
        return Trouble("ApiServerBusy", message, now, "scheduler")
    # A schema, a policy or a missing right refused the pod, and would refuse it again.
    return Trouble("PodRefused", f"{error.reason}: {message}", now, "none", retryable=False)


class Refusals:
    """The refusals by namespace and name of the pod. The pause doubles with each try."""

    def __init__(self) -> None:
        self._refusals: dict[Key, Refusal] = {}

    def add(self, key: Key, error: KubeError, now: datetime) -> Trouble:
        """Record one more refusal and return what it means."""
        trouble, before = trouble_of(error, now), self._refusals.get(key)
        tries = 1
        if before is not None and before.trouble.hope == trouble.hope:
            tries = before.tries + 1
            trouble = replace(trouble, since=before.trouble.since)
        pause = FINAL_PAUSE_SECONDS if trouble.hope == "none" else _PAUSES.pause(tries)
        pause = max(pause, error.retry_after or 0.0)
        self._refusals[key] = Refusal(trouble, now + timedelta(seconds=pause), tries)
        return trouble

    def clear(self, key: Key) -> None:
        """Forget the refusals of a pod that has been made."""
        self._refusals.pop(key, None)

    def current(self, now: datetime) -> Mapping[Key, Refusal]:
        """Return the refusals whose next try is due or was due less than FORGET_SECONDS ago."""
        limit = timedelta(seconds=FORGET_SECONDS)
        self._refusals = {key: one for key, one in self._refusals.items() if now - one.retry_at < limit}
        return dict(self._refusals)


def warm_name(flavor: str, number: int) -> str:
    """Return the name of a warm pod, which any claim of this flavor may take."""
    return f"sbw-{flavor}-{number}"


class WarmNumbers:
    """The first number above all numbers seen, for each namespace and flavor.

    A client that lists pods after a gap in its watch mistakes a new pod with an old name for a change of the
    old pod. kube-scheduler 1.36 was seen to exit for that reason ("scheduler cache is corrupted") after the
    API server had been away. Nothing else depends on these numbers: operators that remember different
    numbers, or none, still work correctly.
    """

    def __init__(self) -> None:
        self._next: dict[tuple[str, str], int] = {}

    def see(self, pods: Iterable[ObservedSandbox]) -> Mapping[tuple[str, str], int]:
        """Remember the numbers of these pods and return all numbers known after that."""
        for pod in pods:
            digits = pod.name.rpartition("-")[2]
            if not (digits.isascii() and digits.isdecimal()):
                continue
            number = int(digits)
            key = pod.namespace, pod.flavor
            if warm_name(pod.flavor, number) == pod.name and number >= self._next.get(key, 0):
                self._next[key] = number + 1
        while len(self._next) > REMEMBERED:
            self._next.pop(next(iter(self._next)))
        return self._next


def patience_left(trouble: Trouble, waited: float, limits: SandboxLimits) -> float | None:
    """Return the seconds until a trouble that has lasted for `waited` seconds counts as final.

    A result of 0 or less means that it is final now; None means that it never becomes final.
    """
    if trouble.hope == "none":
        return 0.0
    if trouble.hope == "gate":
        return None
    allowed = limits.pull_seconds if trouble.hope == "kubelet" else limits.unschedulable_seconds
    return allowed - waited


class _Reconcile:
    """A single reconcile. It decides about claims first, then about warm sandboxes, then about the rest."""

    def __init__(self, observed: ObservedSandboxes, now: datetime, limits: SandboxLimits) -> None:
        self._now = now
        self._limits = limits
        self._refusals = observed.refusals
        self._numbers = observed.numbers
        self._tokens = max(0, math.floor(limits.tokens + 1e-9))
        self._names = {(pod.namespace, pod.name) for pod in observed.pods}
        self._of_claim: dict[str, list[ObservedSandbox]] = defaultdict(list)
        self._warm: dict[tuple[str, str], list[ObservedSandbox]] = defaultdict(list)
        for pod in observed.pods:
            if pod.claim:
                self._of_claim[pod.claim].append(pod)
            else:
                self._warm[pod.namespace, pod.flavor].append(pod)
        self._waits: list[float | None] = []
        self._throttled = False
        self._launch: list[LaunchSandbox] = []
        self._take: list[TakeSandbox] = []
        self._bind: list[BindSandbox] = []
        self._fail: list[FailSandbox] = []
        self._remove: list[str] = []
        self._delete: dict[tuple[str, str, str], DeleteSandbox] = {}

    def run(self, claims: Iterable[WantedSandbox], warm: Iterable[WarmNeed]) -> SandboxPlan:
        claims = sorted(claims, key=lambda claim: (-claim.age_seconds, claim.id))
        for claim in claims:
            if claim.state == "Pending":
                self._pending(claim)
            elif claim.state == "Bound":
                self._bound(claim)
            else:
                self._over(claim)
        for claim_id in self._of_claim.keys() - {claim.id for claim in claims}:
            self._remove_pods(self._of_claim[claim_id])
        self._keep_warm(warm)
        if self._throttled:
            missing = 1.0 - (self._limits.tokens - math.floor(self._limits.tokens))
            self._waits.append(missing / self._limits.per_second)
        return SandboxPlan(
            launch=tuple(self._launch),
            take=tuple(self._take),
            bind=tuple(self._bind),
            fail=tuple(self._fail),
            remove=tuple(self._remove),
            delete=tuple(self._delete.values()),
            requeue_after=earliest(self._waits),
        )

    # Claims

    def _pending(self, claim: WantedSandbox) -> None:
        own = self._of_claim.get(claim.id, [])
        alive = [pod for pod in own if pod.state != "stopping" and pod.usable]
        self._remove_pods(pod for pod in own if pod not in alive)
        alive.sort(key=lambda pod: (pod.state != "ready", pod.created_at, pod.name))
        if not alive:
            self._find_pod(claim)
            return
        # A second pod is removed only after the claim is bound, because another operator may be binding that
        # pod.
        pod = alive[0]
        if pod.state == "ready":
            self._bind.append(BindSandbox(claim.id, pod))
        elif pod.trouble is not None and self._has_ready(claim):
            # On a full node, the claim's own pod waits for room that a ready warm pod already has.
            self._remove_pods([pod])
            self._find_pod(claim)
        elif pod.trouble is not None:
            self._gives_up(claim, pod.trouble)

    def _has_ready(self, claim: WantedSandbox) -> bool:
        warm = self._warm.get((claim.namespace, claim.flavor), ())
        return bool(claim.flavor) and any(pod.usable and pod.state == "ready" for pod in warm)

    def _gives_up(self, claim: WantedSandbox, trouble: Trouble) -> bool:
        """Fail the claim if its trouble is final, and return whether it did.

        The time before the claim was made does not count.
        """
        waited = min(claim.age_seconds, (self._now - trouble.since).total_seconds())
        left = patience_left(trouble, waited, self._limits)
        if left is not None and left <= 0:
            self._fail.append(FailSandbox(claim.id, trouble))
            return True
        self._waits.append(left)
        return False

    def _find_pod(self, claim: WantedSandbox) -> None:
        if not claim.flavor:
            return
        warm = self._best_warm(claim.namespace, claim.flavor)
        if warm is not None:
            self._warm[claim.namespace, claim.flavor].remove(warm)
            self._take.append(TakeSandbox(claim.id, warm))
            if warm.state == "ready":
                self._bind.append(BindSandbox(claim.id, warm))
            return
        name = f"sb-{claim.id}"
        refusal = self._refusals.get((claim.namespace, name))
        if refusal is not None and self._gives_up(claim, refusal.trouble):
            return
        self._make(LaunchSandbox(claim.namespace, name, claim.flavor, claim.id))

    def _best_warm(self, namespace: str, flavor: str) -> ObservedSandbox | None:
        """Return a ready pod or else the one closest to ready, but none whose image or start fails."""

        def rank(pod: ObservedSandbox) -> tuple[int, datetime, str]:
            return (0 if pod.state == "ready" else 1 if pod.trouble is None else 2, pod.created_at, pod.name)

        fit = [
            pod
            for pod in self._warm.get((namespace, flavor), ())
            if pod.usable
            and pod.state in ("ready", "starting")
            and (pod.trouble is None or pod.trouble.hope in ("scheduler", "gate"))
        ]
        return min(fit, key=rank, default=None)

    def _make(self, launch: LaunchSandbox) -> bool:
        """Launch the pod if its name is free, no retry pause is running and the rate allows it.

        Returns:
            Whether the pod is launched.
        """
        key = launch.namespace, launch.name
        if key in self._names:
            return False  # The predecessor is still stopping. Its end starts another pass.
        refusal = self._refusals.get(key)
        if refusal is not None and refusal.retry_at > self._now:
            self._waits.append((refusal.retry_at - self._now).total_seconds())
            return False
        if not self._tokens:
            self._throttled = True
            return False
        self._tokens -= 1
        self._names.add(key)
        self._launch.append(launch)
        return True

    def _bound(self, claim: WantedSandbox) -> None:
        own = self._of_claim.get(claim.id, [])
        its = [pod for pod in own if pod.address == claim.address and pod.state in ("ready", "starting")]
        if its:
            self._remove_pods(pod for pod in own if pod not in its)
            return
        over = [pod for pod in own if pod.state in ("failed", "stopping")]
        lost = Trouble(LOST, f"the pod of sandbox {claim.id} is gone", self._now)
        troubles = [pod.trouble for pod in over if pod.trouble is not None]
        self._fail.append(FailSandbox(claim.id, troubles[0] if troubles else lost))

    def _over(self, claim: WantedSandbox) -> None:
        own = self._of_claim.get(claim.id, [])
        self._remove_pods(own)
        if not own:
            self._remove.append(claim.id)

    # Pods

    def _remove_pods(self, pods: Iterable[ObservedSandbox]) -> None:
        for pod in pods:
            force = False
            if pod.state == "stopping":
                if pod.gone_due is None:
                    continue
                left = self._limits.stuck_seconds - (self._now - pod.gone_due).total_seconds()
                if left > 0:
                    self._waits.append(left)
                    continue
                force = True
            self._delete[pod.namespace, pod.name, pod.uid] = DeleteSandbox(
                pod.namespace, pod.name, pod.uid, force
            )

    def _keep_warm(self, warm: Iterable[WarmNeed]) -> None:
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for need in warm:
            counts[need.namespace, need.flavor] += need.count
        for key in sorted(self._warm.keys() | counts.keys()):
            self._keep_flavor(key, counts.get(key, 0))

    def _keep_flavor(self, key: tuple[str, str], count: int) -> None:
        kept: list[ObservedSandbox] = []
        for pod in self._warm.get(key, []):
            if pod.state == "stopping" or not pod.usable or self._spent(pod):
                self._remove_pods([pod])
            else:
                kept.append(pod)
        # Failed pods are removed first, and then the youngest of the pods that are not ready.
        rank = {"ready": 0, "starting": 1, "failed": 2}
        kept.sort(key=lambda pod: (rank[pod.state], pod.created_at, pod.name))
        self._remove_pods(kept[count:])
        missing, number = count - len(kept), self._numbers.get(key, 0)
        while missing > 0:
            name = warm_name(key[1], number)
            number += 1
            if (key[0], name) in self._names:
                continue
            if not self._make(LaunchSandbox(key[0], name, key[1])):
                return
            missing -= 1

    def _spent(self, pod: ObservedSandbox) -> bool:
        """Return whether a failed warm pod has been kept long enough to be replaced by another one."""
        if pod.trouble is None or pod.trouble.hope != "none":
            return False
        failed_for = (self._now - max(pod.trouble.since, pod.created_at)).total_seconds()
        left = self._limits.warm_retry_seconds - failed_for
        if left <= 0:
            return True
        self._waits.append(left)
        return False


def reconcile_sandboxes(
    claims: Iterable[WantedSandbox],
    warm: Iterable[WarmNeed],
    observed: ObservedSandboxes,
    now: datetime,
    limits: SandboxLimits,
) -> SandboxPlan:
    """Return what to do about sandboxes now. Claims come first, the oldest of them first, then warm pods."""
    return _Reconcile(observed, now, limits).run(claims, warm)


@dataclass(frozen=True, slots=True)
class Doubts:
    """The parts of a plan that rely on something being missing."""

    lost: frozenset[str] = frozenset()
    """The ids of claims that are bound but have no pod."""
    orphans: frozenset[str] = frozenset()
    """The uids of pods that are to be deleted because their claims are unknown."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.orphans)

    def __sub__(self, other: Doubts) -> Doubts:
        return Doubts(self.lost - other.lost, self.orphans - other.orphans)


def doubts_of(plan: SandboxPlan, claims: Collection[str], pods: Iterable[ObservedSandbox]) -> Doubts:
    """Return the parts of a plan that need a second look. This function is pure.

    Args:
        claims: The ids of the known claims.
        pods: The pods from which the plan was made.
    """
    strangers = {pod.uid for pod in pods if pod.claim and pod.claim not in claims}
    return Doubts(
        frozenset(fail.claim for fail in plan.fail if fail.trouble.reason == LOST),
        frozenset(delete.uid for delete in plan.delete if delete.uid in strangers),
    )


def without(plan: SandboxPlan, doubts: Doubts) -> SandboxPlan:
    """Return the plan without its doubtful parts. The next pass plans them again. This function is pure."""
    if not doubts:
        return plan
    return replace(
        plan,
        fail=tuple(fail for fail in plan.fail if fail.claim not in doubts.lost),
        delete=tuple(delete for delete in plan.delete if delete.uid not in doubts.orphans),
    )
