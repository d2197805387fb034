"""The reconcile of sandbox pods: it compares claims and warm wants with pods. This module is pure.

A waiting claim takes a warm pod of its flavor, or else gets a pod of its own. Once the pod accepts
connections, the claim is bound to it. Pods that no claim and no warm want needs are deleted. Everything is
computed from claims and pods alone, so carrying out a plan in part or twice does no harm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

from rollyard_drivers.reconcile.workloads import earliest

from rollyard_operator.pods.observed_sandbox import ObservedSandbox
from rollyard_operator.pods.trouble import Trouble
from rollyard_operator.sandboxes.planning.plan import (
    LOST,
    BindSandbox,
    DeleteSandbox,
    FailSandbox,
    LaunchSandbox,
    ObservedSandboxes,
    SandboxLimits,
    SandboxPlan,
    TakeSandbox,
    WantedSandbox,
    WarmNeed,
)
from rollyard_operator.sandboxes.planning.warm_names import warm_name


def cold_name(claim: str) -> str:
    """Return the name of the pod that is made for one claim."""
    return f"sb-{claim}"


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


def _lost(claim: WantedSandbox, now: datetime) -> Trouble:
    return Trouble(LOST, f"the pod of sandbox {claim.id} is gone", now)


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
        found = self._best_warm(claim.namespace, claim.flavor)
        if found is not None:
            self._warm[claim.namespace, claim.flavor].remove(found)
            self._take.append(TakeSandbox(claim.id, found))
            if found.state == "ready":
                self._bind.append(BindSandbox(claim.id, found))
            return
        name = cold_name(claim.id)
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
        ended = [pod.trouble for pod in over if pod.trouble is not None]
        self._fail.append(FailSandbox(claim.id, ended[0] if ended else _lost(claim, self._now)))

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
        wanted: dict[tuple[str, str], int] = defaultdict(int)
        for need in warm:
            wanted[need.namespace, need.flavor] += need.count
        for key in sorted(self._warm.keys() | wanted.keys()):
            self._keep_flavor(key, wanted.get(key, 0))

    def _keep_flavor(self, key: tuple[str, str], count: int) -> None:
        held: list[ObservedSandbox] = []
        for pod in self._warm.get(key, []):
            if pod.state == "stopping" or not pod.usable or self._spent(pod):
                self._remove_pods([pod])
            else:
                held.append(pod)
        # Failed pods are removed first, and then the youngest of the pods that are not ready.
        rank = {"ready": 0, "starting": 1, "failed": 2}
        held.sort(key=lambda pod: (rank[pod.state], pod.created_at, pod.name))
        self._remove_pods(held[count:])
        missing, number = count - len(held), self._numbers.get(key, 0)
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
