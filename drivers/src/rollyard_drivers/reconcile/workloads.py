"""Functions that keep a set of workloads in the wanted state.

They plan launches, restarts with pauses, and the stop of workloads that are not wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

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
    remaining = [max(0.0, time) for time in times if time is not None]
    return min(remaining) if remaining else None


def restart_delay(restarts: int, profile: Profile) -> float:
    """Return the seconds to wait before restart number `restarts`, counted from 0.

    The delay doubles with each restart and is bounded.
    """
    return Backoff(profile.backoff_seconds, profile.backoff_cap_seconds).pause(restarts + 1)


def _began_work(workload: ObservedWorkload, kind: WorkloadKind) -> datetime | None:
    """Return the time at which a workload began to do its work, or None if it never did.

    Loading the model may kill a backend after many minutes, so only a ready one counts as working.
    """
    return workload.ready_since if kind == "backend" else workload.started_at


def restarts_in_a_row(
    workload: ObservedWorkload, kind: WorkloadKind, profile: Profile, now: datetime | None = None
) -> int:
    """Return how often a workload was restarted without then doing useful work.

    A workload that worked for the stable time has done useful work, too.

    Args:
        workload: The workload.
        kind: What it is.
        profile: The settings of the driver.
        now: The current time, for a workload that has not exited and is about to be stopped.
    """
    began = _began_work(workload, kind)
    if began is None:
        return workload.restarts
    worked = ((workload.exited_at or now or began) - began).total_seconds()
    return 0 if workload.useful or worked >= profile.stable_seconds else workload.restarts


def restart_pause(
    workload: ObservedWorkload, kind: WorkloadKind, restarts: int, profile: Profile, now: datetime
) -> float:
    """Return the seconds that are left until a workload may be restarted.

    The pause before the restart of a backend is counted from the time at which it was ready. One that served
    for a while is therefore restarted at once.

    A worker that was killed after useful work is restarted at once. One that ended by itself with status 0
    waits, because a worker does so when its job is over, which the driver may not have seen yet.
    """
    if workload.useful and workload.exit_code != 0:
        return 0.0
    since = workload.exited_at or workload.started_at
    if kind == "backend":
        since = workload.ready_since or since
    return restart_delay(restarts, profile) - (now - since).total_seconds()


def exit_text(observed: ObservedWorkload) -> str:
    """Return a line for people that says how a workload ended."""
    return f"{observed.name} {_how_it_ended(observed)}"


def _how_it_ended(observed: ObservedWorkload) -> str:
    code = observed.exit_code
    how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
    return how + (f" ({observed.message})" if observed.message else "")


def keep(
    desired: Iterable[Workload],
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
    for workload in desired:
        names.add(workload.name)
        current = there.get(workload.name)
        if current is None:
            launch.append(Launch(workload))
        elif current.blocked and current.spec_hash == workload.spec_hash:
            troubles.append(f"{current.name} is not started: {current.message}")
            blocked += 1
            if current.state == "starting":  # The cluster keeps trying.
                continue
            left = profile.blocked_seconds - (now - current.started_at).total_seconds()
            if left > 0:
                waits.append(left)
            else:
                launch.append(Launch(workload))
        elif current.state == "exited" and current.spec_hash != workload.spec_hash:
            # Another spec may start without failing, so the failures of the previous spec do not count.
            launch.append(Launch(workload))
        elif current.state == "exited":
            restarts = restarts_in_a_row(current, workload.kind, profile)
            left = restart_pause(current, workload.kind, restarts, profile, now)
            looping = looping or restarts > 0
            if left > 0:
                troubles.append(f"{exit_text(current)}; restart {restarts + 1} in {left:.0f} s")
                waits.append(left)
            else:
                troubles.append(f"{exit_text(current)}; restart {restarts + 1} now")
                launch.append(Launch(workload, restarts=restarts + 1, last_end=_how_it_ended(current)))
        elif current.spec_hash != workload.spec_hash:
            if current.state != "stopping":
                stop.append(Stop(current.name, grace_seconds))
        elif current.state == "stopping":
            # The workload is wanted again while it ends. It is launched again once it is gone.
            continue
        else:
            if current.state == "running":
                running.add(current.name)
            elif current.pending and current.message:
                waiting.append(f"{current.name} waits: {current.message}")
            if current.trouble:
                troubles.append(f"{current.name}: {current.trouble}")
                impaired += 1
            steady = profile.stable_seconds - (now - current.started_at).total_seconds()
            if current.restarts and steady > 0:
                times = "once" if current.restarts == 1 else f"{current.restarts} times"
                # Users look for the reason long after the second in which the workload had ended.
                why = f"; the one before {current.last_end}" if current.last_end else ""
                troubles.append(f"{current.name} was restarted {times}{why}")
                looping = looping or current.restarts > 1
                waits.append(steady)
    for current in there.values():
        if current.name not in names and current.state != "stopping":
            stop.append(Stop(current.name, 0.0 if current.state == "exited" else grace_seconds))
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


REMEMBERED: Final = 1024
"""The number of stopped workloads whose restarts are remembered."""


class Replacements:
    """A record that keeps the counts of restarts while workloads are stopped.

    A workload that has ended by itself is still observed when it is launched again. Nothing is left at that
    time of a workload that was stopped because it did not answer. The record is in memory only, so a driver
    that is restarted in the meantime counts from 0 again.
    """

    def __init__(self) -> None:
        self._launches: dict[str, Launch] = {}

    def note(self, stop: Stop) -> None:
        """Note that a workload is being stopped.

        It is stopped either for good or to be launched again, as the stop says.
        """
        self._launches.pop(stop.name, None)
        if stop.again is not None:
            self._launches[stop.name] = stop.again
        while len(self._launches) > REMEMBERED:
            self._launches.pop(next(iter(self._launches)))

    def counted(self, launch: Launch) -> Launch:
        """Return the launch of a plan, completed with what was noted when its predecessor was stopped."""
        noted = self._launches.get(launch.workload.name)
        # Another spec may run without failing, so the failures of the previous spec do not count.
        if noted is None or launch.restarts or noted.workload.spec_hash != launch.workload.spec_hash:
            return launch
        return Launch(launch.workload, noted.restarts, noted.last_end)

    def launched(self, name: str) -> None:
        """Discard what was noted, because it is now kept with the new workload."""
        self._launches.pop(name, None)
