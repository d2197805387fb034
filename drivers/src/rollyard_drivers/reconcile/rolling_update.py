"""The removal of backends, which are drained first and never leave a pool without a serving backend.

A pool of several replicas is replaced one backend at a time, and in place, because a GPU that is in use
cannot be lent to a successor first. Rollouts that a drained backend still has when its time is over continue
at another backend, from the same token ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from rollyard_crds import BackendStatus

from rollyard_drivers.reconcile.plan import ObservedWorkload, Profile, Workload
from rollyard_drivers.reconcile.workloads import earliest


@dataclass(frozen=True, slots=True)
class Retirement:
    """The backends of a pool that are being removed."""

    drain: frozenset[str]
    """The backends that take no new rollouts and may still have some."""
    waiting: frozenset[str]
    """The backends that have an old spec and serve until they are replaced."""
    requeue_after: float | None


def _serves(seen: ObservedWorkload | None, known: Mapping[str, BackendStatus]) -> bool:
    """Return whether a backend takes rollouts."""
    if seen is None or seen.state != "running" or not seen.ready or seen.draining_since is not None:
        return False
    status = known.get(seen.url)
    return status is None or status.weights == "Current"


def _left(
    seen: ObservedWorkload, known: Mapping[str, BackendStatus], now: datetime, profile: Profile
) -> float:
    """Return the seconds for which the backend may still have rollouts.

    The result is 0 if the backend has none, or if its time is over.
    """
    if seen.draining_since is None:
        return profile.drain_seconds
    left = profile.drain_seconds - (now - seen.draining_since).total_seconds()
    status = known.get(seen.url)
    # The control plane's count is meaningful only once the control plane itself reports that the backend
    # drains.
    if status is not None and status.draining and not status.active_rollouts:
        return 0.0
    return max(0.0, left)


def retire(
    wanted: Iterable[Workload],
    observed: Iterable[ObservedWorkload],
    reported: Iterable[BackendStatus],
    now: datetime,
    profile: Profile,
) -> Retirement:
    """Return the backends that drain now, and the outdated ones that still serve.

    A backend that does not serve (because it starts, or is not healthy) needs no draining. With one replica,
    there is no other backend to wait for. With more, the next one drains once all others serve.
    """
    wanted = tuple(wanted)
    there = {seen.name: seen for seen in observed}
    known = {status.url: status for status in reported}
    names = {workload.name for workload in wanted}
    drain: set[str] = set()
    waits: list[float | None] = []

    def drains(seen: ObservedWorkload) -> None:
        left = _left(seen, known, now, profile)
        if left > 0:
            drain.add(seen.name)
            waits.append(left)

    for seen in there.values():
        if seen.name not in names and seen.state == "running" and seen.ready:
            drains(seen)
    outdated = [
        there[workload.name]
        for workload in wanted
        if workload.name in there
        and there[workload.name].spec_hash != workload.spec_hash
        and there[workload.name].state == "running"
        and there[workload.name].ready
    ]
    # The backend that drains already comes first. A second one waits until the successor of the first serves.
    outdated.sort(key=lambda seen: seen.draining_since is None)
    waiting: set[str] = set()
    for place, seen in enumerate(outdated):
        others = (there.get(workload.name) for workload in wanted if workload.name != seen.name)
        if place == 0 and (seen.draining_since is not None or all(_serves(one, known) for one in others)):
            drains(seen)
        else:
            waiting.add(seen.name)
    return Retirement(frozenset(drain), frozenset(waiting), earliest(waits))
