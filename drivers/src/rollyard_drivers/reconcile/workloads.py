"""Keeps a set of workloads as it should be: launch, restart with pauses, stop what is too much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from rollyard_crds.backoff import Backoff

from rollyard_drivers.reconcile.plan import Launch, ObservedWorkload, Profile, Stop, Workload


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """What to launch and stop, and what is wrong meanwhile."""

    launch: tuple[Launch, ...]
    stop: tuple[Stop, ...]
    running: frozenset[str]
    """Wanted workloads that run now, with the spec that is wanted."""
    waiting: tuple[str, ...]
    """One line for each that waits for a place, without anything being wrong."""
    troubles: tuple[str, ...]
    """One line for each wanted workload that died and waits, or died lately."""
    blocked: bool
    """There are troubles, and all of them are of workloads that the cluster has not started."""
    impaired: bool
    """There are troubles, and all of them are of workloads that run and cannot do all their work."""
    crash_looping: bool
    """One of them died more than once within the stable time."""
    requeue_after: float | None


def earliest(times: Iterable[float | None]) -> float | None:
    """The smallest of the times that are set, never below zero."""
    given = [max(0.0, time) for time in times if time is not None]
    return min(given) if given else None


def restart_delay(restarts: int, profile: Profile) -> float:
    """Seconds to wait before restart number `restarts` (from 0): doubling, bounded."""
    return Backoff(profile.backoff_seconds, profile.backoff_cap_seconds).pause(restarts + 1)


def _lived(observed: ObservedWorkload, now: datetime) -> float:
    return ((observed.exited_at or now) - observed.started_at).total_seconds()


def restarts_in_a_row(seen: ObservedWorkload, profile: Profile, now: datetime | None = None) -> int:
    """How often one was restarted without running for the stable time since.

    Args:
        now: of one that has not exited, and is to end now.
    """
    lived = ((seen.exited_at or now or seen.started_at) - seen.started_at).total_seconds()
    return seen.restarts if lived < profile.stable_seconds else 0


def exit_text(observed: ObservedWorkload) -> str:
    """A line for people that says how it ended."""
    return f"{observed.name} {_how_it_ended(observed)}"


def _how_it_ended(observed: ObservedWorkload) -> str:
    code = observed.exit_code
    how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    return how + (f" ({observed.message})" if observed.message else "")


def keep(
    wanted: Iterable[Workload],
    observed: Iterable[ObservedWorkload],
    now: datetime,
    profile: Profile,
    grace_seconds: float,
) -> WorkloadPlan:
    """The steps from `observed` to `wanted`.

    A name is launched only while nothing of that name exists or the last one has exited.
    One of another spec is stopped first; its successor follows once it is gone.
    """
    there: Mapping[str, ObservedWorkload] = {workload.name: workload for workload in observed}
    launch: list[Launch] = []
    stop: list[Stop] = []
    troubles: list[str] = []
    waits: list[float | None] = []
    running: set[str] = set()
    waiting: list[str] = []
    looping = False
    blocked = impaired = 0
    names = set()
    for workload in wanted:
        names.add(workload.name)
        seen = there.get(workload.name)
        if seen is None:
            launch.append(Launch(workload))
        elif seen.blocked and seen.spec_hash == workload.spec_hash:
            troubles.append(f"{seen.name} is not started: {seen.message}")
            blocked += 1
            if seen.state == "starting":  # the cluster keeps trying
                continue
            left = profile.blocked_seconds - (now - seen.started_at).total_seconds()
            if left > 0:
                waits.append(left)
            else:
                launch.append(Launch(workload))
        elif seen.state == "exited" and seen.spec_hash != workload.spec_hash:
            # Another spec may well start: it does not pay for the failures of the last one.
            launch.append(Launch(workload))
        elif seen.state == "exited":
            restarts = restarts_in_a_row(seen, profile)
            ended = seen.exited_at or seen.started_at
            left = restart_delay(restarts, profile) - (now - ended).total_seconds()
            looping = looping or restarts > 0
            if left > 0:
                troubles.append(f"{exit_text(seen)}; restart {restarts + 1} in {left:.0f} s")
                waits.append(left)
            else:
                troubles.append(f"{exit_text(seen)}; restart {restarts + 1} now")
                launch.append(Launch(workload, restarts=restarts + 1, last_end=_how_it_ended(seen)))
        elif seen.spec_hash != workload.spec_hash:
            if seen.state != "stopping":
                stop.append(Stop(seen.name, grace_seconds))
        elif seen.state == "stopping":
            # It is wanted again while it ends, and is launched again once it is gone.
            continue
        else:
            if seen.state == "running":
                running.add(seen.name)
            elif seen.pending and seen.message:
                waiting.append(f"{seen.name} waits: {seen.message}")
            if seen.trouble:
                troubles.append(f"{seen.name}: {seen.trouble}")
                impaired += 1
            steady = profile.stable_seconds - _lived(seen, now)
            if seen.restarts and steady > 0:
                times = "once" if seen.restarts == 1 else f"{seen.restarts} times"
                # What was wrong with it is asked long after the second in which it had ended.
                why = f"; the one before {seen.last_end}" if seen.last_end else ""
                troubles.append(f"{seen.name} was restarted {times}{why}")
                looping = looping or seen.restarts > 1
                waits.append(steady)
    for seen in there.values():
        if seen.name not in names and seen.state != "stopping":
            stop.append(Stop(seen.name, 0.0 if seen.state == "exited" else grace_seconds))
    return WorkloadPlan(
        launch=tuple(launch),
        stop=tuple(stop),
        running=frozenset(running),
        waiting=tuple(waiting),
        troubles=tuple(troubles),
        blocked=0 < blocked == len(troubles),
        impaired=0 < impaired == len(troubles),
        crash_looping=looping,
        requeue_after=earliest(waits),
    )
