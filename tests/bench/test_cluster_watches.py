"""What the benchmark makes of a watch's events, without a cluster."""

from __future__ import annotations

import pytest
from rollyard_bench.kubernetes import Pods, running
from rollyard_bench.kubernetes_fleet import Watched
from rollyard_bench.processes import ProgramFailed

JOB = "rollyard.dev/job"


def pod(name: str, job: str = "j", **status: object) -> dict[str, object]:
    return {"metadata": {"name": name, "labels": {JOB: job}}, "status": status}


def test_the_first_sight_of_a_pod_and_of_its_container_counts() -> None:
    pods = Pods()
    works = pod("a", containerStatuses=[{"state": {"running": {}}}])
    pods.seen(1.0, "ADDED", pod("a"))
    pods.seen(2.0, "MODIFIED", works)
    pods.seen(3.0, "MODIFIED", works | {"metadata": {"name": "a", "labels": {JOB: "j"}}})
    assert (pods.first["job j", "created"], pods.first["a", "running"]) == (1.0, 2.0)
    assert (running(pod("a")), running(works)) == (False, True)
    pods.seen(4.0, "DELETED", works)
    assert pods.of(JOB, "j") == []


async def test_lag_is_taken_from_the_watch_and_pods_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_bench.kubernetes_fleet.LONGEST_SECONDS", 0.01)
    watched = Watched()
    for number in range(10):
        watched.pod(1.0 + number, "ADDED", pod(f"p{number}"))
    assert await watched.since(0.5, "j", "pod") == pytest.approx(500)
    assert await watched.since(9.0, "j", "ten pods") == pytest.approx(1000)
    for number in range(10):
        ending = pod(f"p{number}")
        ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        watched.pod(20.0 + number, "MODIFIED" if number else "DELETED", ending)
    assert await watched.since(0.0, "j", "pods asked to end") == pytest.approx(29_000)
    assert watched.there == 9, "who is told to end is there until it has ended"
    for number in range(1, 10):
        watched.pod(40.0, "DELETED", pod(f"p{number}"))
    assert (watched.all_pods, watched.most_pods, watched.there) == (10, 10, 0)
    watched.job(30.0, "MODIFIED", {"metadata": {"name": "j"}})
    with pytest.raises(ProgramFailed, match="j: finished was not seen"):
        await watched.since(0.0, "j", "finished")
    done = {"conditions": [{"type": "Succeeded", "status": "True"}]}
    watched.job(31.0, "MODIFIED", {"metadata": {"name": "j"}, "status": done})
    assert await watched.since(30.0, "j", "finished") == pytest.approx(1000)
