"""Functions that keep a set of workloads in the wanted state.

They plan launches, restarts with pauses, and the stop of workloads that are not wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from rollyard_process.backoff import Backoff

from rollyard_drivers.reconcile.plan import (
    Launch,
    ObservedWorkload,
    Profile,
    Stop,
    Workload,
    WorkloadKind,
)


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """The workloads to launch and to stop, and what is wrong in the meantime."""

    launch: tuple[Launch, ...]
    stop: tuple[Stop, ...]
    running: frozenset[str]
    """The names of the wanted workloads that run now with the wanted spec."""
    waiting: tuple[str, ...]
    """One line for each workload that waits for a place although nothing is wrong."""
    troubles: tuple[str, ...]
    """One line for each wanted workload that has trouble, such as one that died recently or waits for its
    restart."""
    blocked: bool
    """Whether there are troubles, and all of them concern workloads that were not started."""
    impaired: bool
    """Whether there are troubles, and all of them concern workloads that run but cannot do all of their
    work."""
    crash_looping: bool
    """Whether a workload died more than once within the stable time."""
    requeue_after: float | None


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the smallest of the times that are not None, but never less than zero."""
    given = [max(0.0, time) for time in times if time is not None]
    return min(given) if given else None


def restart_delay(restarts: int, profile: Profile) -> float:
    """Return the seconds to wait before restart number `restarts`, counted from 0.

    The delay doubles with each restart and is bounded.
    """
    return Backoff(profile.backoff_seconds, profile.backoff_cap_seconds).pause(restarts + 1)


def _began_work(seen: ObservedWorkload, kind: WorkloadKind) -> datetime | None:
    """Return the time at which a workload began to do its work, or None if it never did.

    A backend that loads its model may die of that after many minutes, so only a ready one works.
    """
    return seen.ready_since if kind == "backend" else seen.started_at


def restarts_in_a_row(
    seen: ObservedWorkload, kind: WorkloadKind, profile: Profile, now: datetime | None = None
) -> int:
    """Return how often a workload was restarted without then doing useful work.

    A workload that worked for the stable time has done useful work, too.

    Args:
        seen: The workload.
        kind: What it is.
        profile: The settings of the driver.
        now: The current time, for a workload that has not exited and is about to be stopped.
    """
    began = _began_work(seen, kind)
    if began is None:
        return seen.restarts
    worked = ((seen.exited_at or now or began) - began).total_seconds()
    return 0 if seen.useful or worked >= profile.stable_seconds else seen.restarts


def restart_pause(
    seen: ObservedWorkload, kind: WorkloadKind, restarts: int, profile: Profile, now: datetime
) -> float:
    """Return the seconds that are left until a workload may be restarted.

    The pause before the restart of a backend is counted from the time at which it was ready. One that served
    for a while is therefore restarted at once.

    A worker that was killed after useful work is restarted at once. One that ended by itself with status 0
    waits, because a worker does so when its job is over, which the driver may not have seen yet.
    """
    if seen.useful and seen.exit_code != 0:
        return 0.0
    since = seen.exited_at or seen.started_at
    if kind == "backend":
        since = seen.ready_since or since
    return restart_delay(restarts, profile) - (now - since).total_seconds()


def exit_text(observed: ObservedWorkload) -> str:
    """Return a line for people that says how a workload ended."""
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
    """Return the steps from `observed` to `wanted`.

    A workload is launched only if no workload of the same name exists or the last one has exited. A workload
    with another spec is stopped first, and its successor follows once it is gone.
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
            if seen.state == "starting":  # The cluster keeps trying.
                continue
            left = profile.blocked_seconds - (now - seen.started_at).total_seconds()
            if left > 0:
                waits.append(left)
            else:
                launch.append(Launch(workload))
        elif seen.state == "exited" and seen.spec_hash != workload.spec_hash:
            # Another spec may start without failing, so the failures of the previous spec do not count.
            launch.append(Launch(workload))
        elif seen.state == "exited":
            restarts = restarts_in_a_row(seen, workload.kind, profile)
            left = restart_pause(seen, workload.kind, restarts, profile, now)
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
            # The workload is wanted again while it ends. It is launched again once it is gone.
            continue
        else:
            if seen.state == "running":
                running.add(seen.name)
            elif seen.pending and seen.message:
                waiting.append(f"{seen.name} waits: {seen.message}")
            if seen.trouble:
                troubles.append(f"{seen.name}: {seen.trouble}")
                impaired += 1
            steady = profile.stable_seconds - (now - seen.started_at).total_seconds()
            if seen.restarts and steady > 0:
                times = "once" if seen.restarts == 1 else f"{seen.restarts} times"
                # Users look for the reason long after the second in which the workload had ended.
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
