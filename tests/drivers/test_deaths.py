"""The deaths of workers: each is reported once, and remembered while the dead worker is observed."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from rollyard_crds.workers import WorkerDeath, WorkerDied
from rollyard_drivers.loop.passes import Deaths
from rollyard_drivers.reconcile.plan import ObservedWorkload, Owner, WorkloadState

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OWNER = Owner("RolloutJob", "n", "job", "u")


def seen(worker: str, state: WorkloadState = "exited") -> ObservedWorkload:
    return ObservedWorkload("w", "hash", state, NOW, exit_code=-9, exited_at=NOW, worker=worker)


class Plane:
    """A control plane that notes reports."""

    def __init__(self, *useful: str) -> None:
        self.useful = useful
        self.down = False
        self.reports: list[WorkerDied] = []

    async def report(self, report: WorkerDied) -> WorkerDeath:
        if self.down:
            raise ConnectionError("no answer")
        self.reports.append(report)
        return WorkerDeath(returned=1, completed=report.worker in self.useful)


async def test_a_death_is_reported_once_and_says_whether_the_worker_was_useful() -> None:
    deaths, plane = Deaths(), Plane("a")
    for _ in range(3):
        alive = [seen("c", "running"), seen("d", "stopping")]  # One that drains still works on its leases.
        found = await deaths.noted(OWNER, [seen("a"), seen("b"), *alive], plane.report)
        assert [one.useful for one in found] == [True, False, False, False]
    assert plane.reports == [WorkerDied(namespace="n", job="job", worker=name) for name in ("a", "b")]
    # The successor runs, and the memory of its predecessor goes.
    await deaths.noted(OWNER, [seen("d", "running")], plane.report)
    await deaths.noted(OWNER, [seen("a")], plane.report)
    assert [report.worker for report in plane.reports] == ["a", "b", "a"]


async def test_a_report_that_fails_is_repeated_and_those_before_it_are_not() -> None:
    deaths, plane = Deaths(), Plane("a", "b")
    await deaths.noted(OWNER, [seen("a")], plane.report)
    plane.down = True
    with pytest.raises(ConnectionError):
        await deaths.noted(OWNER, [seen("a"), seen("b")], plane.report)
    plane.down = False
    found = await deaths.noted(OWNER, [seen("a"), seen("b")], plane.report)
    assert [one.useful for one in found] == [True, True]
    assert [report.worker for report in plane.reports] == ["a", "b"]


async def test_a_worker_without_a_known_name_is_not_reported() -> None:
    plane = Plane()
    found = await Deaths().noted(OWNER, [seen(""), seen("a")], plane.report)
    assert [one.useful for one in found] == [False, False]
    assert [report.worker for report in plane.reports] == ["a"]
