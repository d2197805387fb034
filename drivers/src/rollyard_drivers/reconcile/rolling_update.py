"""Backends that are removed: they are drained first, and never so many at once that a pool serves nobody.

A pool of several replicas is replaced one backend at a time, in place: a GPU that is taken
cannot be lent to a successor first. Rollouts that a drained backend still has when its time
is over go on at another one, from the same token ids.
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
    """They take no new rollouts, and still have some."""
    waiting: frozenset[str]
    """They have an old spec and serve until it is their turn."""
    requeue_after: float | None


def serves(seen: ObservedWorkload | None, spec_hash: str | None = None) -> bool:
    """Whether it takes rollouts (and has this spec)."""
    return (
        seen is not None
        and seen.state == "running"
        and seen.ready
        and seen.draining_since is None
        and spec_hash in (None, seen.spec_hash)
    )


def _left(
    seen: ObservedWorkload, known: Mapping[str, BackendStatus], now: datetime, profile: Profile
) -> float:
    """Seconds for which the backend may still have rollouts; 0: none, or its time is over."""
    if seen.draining_since is None:
        return profile.drain_seconds
    left = profile.drain_seconds - (now - seen.draining_since).total_seconds()
    status = known.get(seen.url)
    # Only once the control plane says itself that it gives it no more does its count say anything.
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
    """Which backends drain now, and which outdated ones still serve.

    One that does not serve (it starts, or is not healthy) needs no draining. With one replica
    there is no other backend to wait for; with more, the next one drains once all others serve.
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
    # The one that drains already comes first; a second one waits until its successor serves.
    outdated.sort(key=lambda seen: seen.draining_since is None)
    waiting: set[str] = set()
    for place, seen in enumerate(outdated):
        others = (workload.name for workload in wanted if workload.name != seen.name)
        if place == 0 and (seen.draining_since is not None or all(serves(there.get(one)) for one in others)):
            drains(seen)
        else:
            waiting.add(seen.name)
    return Retirement(frozenset(drain), frozenset(waiting), earliest(waits))
