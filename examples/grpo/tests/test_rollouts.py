"""The stream: groups that are too old are replaced, and a job that ends is an error. The client is a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rollyard_client import Client
from rollyard_client.requests.results import Group

from tinygrpo.errors import RolloutsEnded
from tinygrpo.rollouts import RolloutStream, StreamSettings
from tinygrpo.versions import PolicyVersions

MakeGroup = Callable[..., Group]


class FakeClient:
    """It delivers given groups, and notes which targets were opened and which tasks were pushed."""

    def __init__(self, groups: list[Group]) -> None:
        self.delivered = groups
        self.targets: list[tuple[str, int | None]] = []
        self.tasks: list[str] = []
        self.manifest: dict[str, Any] = {}

    def submit(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest

    def push_tasks(self, name: str, tasks: list[dict[str, Any]]) -> None:
        self.tasks += [task["id"] for task in tasks]

    def open_target(self, name: str, step: str, groups: int | None = None) -> None:
        self.targets.append((step, groups))

    def groups(self, name: str, **options: bool) -> Iterator[Group]:
        return iter(self.delivered)

    def job(self, name: str) -> Any:
        ended = SimpleNamespace(type="Finished", message="the deadline has passed")
        return SimpleNamespace(status=SimpleNamespace(phase="Failed", conditions=[ended]))


def stream_of(groups: list[Group], wanted: int, max_lag: int = 0) -> tuple[RolloutStream, FakeClient]:
    client = FakeClient(groups)
    settings = StreamSettings(groups=wanted, samples=2, in_flight=4, max_lag=max_lag)
    stream = RolloutStream(cast(Client, client), "run", "default", 0, settings, PolicyVersions("run"))
    return stream, client


def test_a_step_reads_until_it_has_its_groups(group: MakeGroup) -> None:
    even = group("even", rewards=(1.0, 1.0))
    stream, client = stream_of([group("a"), even, group("b"), group("c")], 2)
    stream.submit()
    found = stream.collect("step-1", 0)
    assert [one.group_id for one in found.trained] == ["a", "b"]
    assert (found.uninformative, found.rollouts, found.rewards) == (1, 6, [0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    assert stream.read == 3
    assert client.targets == []


def test_a_group_that_is_too_old_is_replaced(group: MakeGroup) -> None:
    stream, client = stream_of([group("old", labels=["run-3", "run-4"]), group("new", labels=["run-4"])], 1)
    stream.submit()
    found = stream.collect("step-5", 4)
    assert [one.group_id for one in found.trained] == ["new"]
    assert (found.stale, found.rollouts, len(found.rewards)) == (1, 4, 2)
    assert client.targets == [("step-5-for-old", 1)]


def test_a_lag_that_is_allowed_is_trained_on(group: MakeGroup) -> None:
    stream, client = stream_of([group("old", labels=["run-3", "run-4"])], 1, max_lag=1)
    stream.submit()
    assert [one.group_id for one in stream.collect("step-5", 4).trained] == ["old"]
    assert client.targets == []
    assert client.manifest["spec"]["maxPolicyLag"] == 1


def test_groups_that_were_dropped_and_rollouts_that_failed_are_counted(group: MakeGroup) -> None:
    lost = group("lost", rewards=(None, 1.0), delivered=False)
    stream, _ = stream_of([lost, group("a", rewards=(None, 1.0, 0.0))], 1)
    stream.submit()
    found = stream.collect("step-1", 0)
    assert (found.failed, found.rollouts, found.rewards) == (2, 5, [1.0, 0.0])


def test_a_job_that_ends_is_an_error_that_says_why(group: MakeGroup) -> None:
    stream, _ = stream_of([group("a")], 2)
    stream.submit()
    with pytest.raises(RolloutsEnded, match=r"Failed.*the deadline has passed"):
        stream.collect("step-1", 0)


def test_a_resumed_run_reads_behind_what_it_has_read(group: MakeGroup) -> None:
    stream, _ = stream_of([group("a"), group("b"), group("c")], 1)
    stream.submit(read=2)
    assert [one.group_id for one in stream.collect("step-3", 0).trained] == ["c"]


def test_tasks_are_pushed_ahead_and_never_twice(group: MakeGroup) -> None:
    stream, client = stream_of([group(str(number)) for number in range(40)], 40)
    stream.submit()
    stream.collect("step-1", 0)
    assert len(client.tasks) >= stream.read + 4 + 2 * 40
    assert len(set(client.tasks)) == len(client.tasks)
