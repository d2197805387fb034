"""The stream: groups that are too old are replaced, and a job that ends is an error. The client is a fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rollyard import Client, Group
from rollyard.errors import Conflict, JobFailed, NotFound

from tinygrpo.errors import CheckpointLost, RolloutsEnded, RunTaken
from tinygrpo.rollouts import CONSUMER, RolloutStream, StreamPlace, StreamSettings
from tinygrpo.tasks import OwnJob
from tinygrpo.versions import PolicyVersions

MakeGroup = Callable[..., Group]


class FakeGroups(Iterator[Group]):
    """It yields groups behind a cursor, which is the number of groups before it."""

    def __init__(self, groups: list[Group], cursor: str) -> None:
        self._groups = groups
        self.cursor = cursor

    def __next__(self) -> Group:
        place = int(self.cursor or 0)
        if place == len(self._groups):
            raise JobFailed("RolloutJob 'run' has failed: the deadline has passed")
        self.cursor = str(place + 1)
        return self._groups[place]


class FakeClient:
    """It delivers given groups, and notes which targets were opened and which tasks were pushed."""

    namespace = "ml"

    def __init__(self, groups: list[Group]) -> None:
        self.delivered = groups
        self.targets: list[tuple[str, int | None]] = []
        self.tasks: list[str] = []
        self.manifest: dict[str, Any] = {}
        self.kept = ""
        self.gone = False

    def submit(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest

    def acknowledged(self, name: str) -> list[Any]:
        return [SimpleNamespace(consumer=CONSUMER, cursor=self.kept)] if self.kept else []

    def acknowledge(self, name: str, consumer: str, cursor: str, expected: str | None = None) -> None:
        if cursor != self.kept and expected is not None and expected != self.kept:
            raise Conflict("another reader has moved it", reason="CursorMoved")
        if int(cursor) < int(self.kept or 0):
            raise Conflict("would move back", reason="CursorBehind")
        self.kept = cursor

    def push_tasks(self, name: str, tasks: list[dict[str, Any]]) -> None:
        self.tasks += [task["id"] for task in tasks]

    def open_target(self, name: str, step: str, groups: int | None = None) -> None:
        self.targets.append((step, groups))

    def groups(self, name: str, *, cursor: str, **options: bool) -> Iterator[Group]:
        return FakeGroups(self.delivered, cursor)

    def job(self, name: str) -> Any:
        if self.gone:
            raise NotFound("there is no such job")
        return SimpleNamespace()


def stream_of(groups: list[Group], wanted: int, max_lag: int = 0) -> tuple[RolloutStream, FakeClient]:
    client = FakeClient(groups)
    settings = StreamSettings(groups=wanted, samples=2, in_flight=4, max_lag=max_lag)
    stream = RolloutStream(cast(Client, client), "run", "default", 0, settings, PolicyVersions("run"))
    return stream, client


def test_a_step_reads_until_it_has_its_groups(group: MakeGroup) -> None:
    even = group("even", rewards=(1.0, 1.0))
    stream, client = stream_of([group("a"), even, group("b"), group("c")], 2)
    stream.submit()
    found = stream.collect(1, 0)
    assert [one.group_id for one in found.trained] == ["a", "b"]
    assert (found.uninformative, found.rollouts, found.rewards) == (1, 6, [0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    assert (stream.place.groups, stream.place.cursor) == (3, "3")
    assert [(one.use, one.group, one.rollouts) for one in found.used] == [
        ("trained", "a", ["a-0", "a-1"]),
        ("uninformative", "even", ["even-0", "even-1"]),
        ("trained", "b", ["b-0", "b-1"]),
    ]
    assert client.targets == []


def test_a_group_that_is_too_old_is_replaced(group: MakeGroup) -> None:
    stream, client = stream_of([group("old", labels=["run-3", "run-4"]), group("new", labels=["run-4"])], 1)
    stream.submit()
    found = stream.collect(5, 4)
    assert [one.group_id for one in found.trained] == ["new"]
    assert (found.stale, found.rollouts, len(found.rewards)) == (1, 4, 2)
    assert client.targets == [("step-5-for-old", 1)]
    assert [(one.step, one.use) for one in found.used] == [(5, "stale"), (5, "trained")]


def test_a_lag_that_is_allowed_is_trained_on(group: MakeGroup) -> None:
    stream, client = stream_of([group("old", labels=["run-3", "run-4"])], 1, max_lag=1)
    stream.submit()
    assert [one.group_id for one in stream.collect(5, 4).trained] == ["old"]
    assert client.targets == []
    assert client.manifest["spec"]["maxPolicyLag"] == 1
    assert client.manifest["metadata"] == {"name": "run", "namespace": "ml"}


def test_groups_that_were_dropped_and_rollouts_that_failed_are_counted(group: MakeGroup) -> None:
    lost = group("lost", rewards=(None, 1.0), delivered=False)
    stream, _ = stream_of([lost, group("a", rewards=(None, 1.0, 0.0))], 1)
    stream.submit()
    found = stream.collect(1, 0)
    assert (found.failed, found.rollouts, found.rewards) == (2, 5, [1.0, 0.0])
    assert [one.use for one in found.used] == ["dropped", "trained"]


def test_a_job_that_ends_is_an_error_that_says_why(group: MakeGroup) -> None:
    stream, _ = stream_of([group("a")], 2)
    stream.submit()
    with pytest.raises(RolloutsEnded, match="has failed: the deadline has passed"):
        stream.collect(1, 0)


def test_a_resumed_run_reads_on_at_its_place_and_pushes_the_tasks_that_follow(group: MakeGroup) -> None:
    groups = [group(str(number)) for number in range(80)]
    first, before = stream_of(groups, 40)
    first.submit()
    first.collect(1, 0)
    stream, client = stream_of(groups, 40)
    stream.submit(first.place)
    assert [one.group_id for one in stream.collect(2, 0).trained] == [str(number) for number in range(40, 80)]
    assert client.tasks[0] == f"train-{len(before.tasks):06d}"


def test_a_step_that_was_cut_off_reads_the_same_groups_and_pushes_the_same_tasks(group: MakeGroup) -> None:
    groups = [group(str(number)) for number in range(8)]
    asked = []
    for _ in range(2):
        stream, client = stream_of(groups, 4)
        stream.submit()
        asked.append((stream.collect(1, 0).used, client.tasks))
    assert asked[0] == asked[1]


def test_the_cursor_is_acknowledged_step_by_step(group: MakeGroup) -> None:
    stream, client = stream_of([group("a"), group("b")], 1)
    stream.submit()
    for step in (1, 2):
        stream.collect(step, 0)
        stream.acknowledge()
        assert client.kept == str(step)


def test_a_trainer_that_was_killed_before_it_acknowledged_does_so_when_it_returns(group: MakeGroup) -> None:
    stream, client = stream_of([group("a"), group("b")], 1)
    client.kept = "1"
    stream.submit(StreamPlace("2", 2, 64))
    assert client.kept == "2"


@pytest.mark.parametrize("place", [StreamPlace(), StreamPlace("1", 1, 32)])
def test_a_checkpoint_that_is_older_than_what_was_used_is_refused(
    group: MakeGroup, place: StreamPlace
) -> None:
    stream, client = stream_of([group("a"), group("b")], 1)
    client.kept = "2"
    with pytest.raises(CheckpointLost, match=r"up to the cursor 2.*used twice"):
        stream.submit(place)
    assert client.kept == "2"


def test_a_second_trainer_of_a_run_ends(group: MakeGroup) -> None:
    stream, client = stream_of([group("a"), group("b")], 2)
    stream.submit()
    stream.collect(1, 0)
    client.kept = "1"
    with pytest.raises(RunTaken, match="another trainer works on the run"):
        stream.acknowledge()
    assert client.kept == "1"


def test_a_job_that_was_removed_is_not_begun_again(group: MakeGroup) -> None:
    stream, client = stream_of([group("a")], 1)
    client.gone = True
    with pytest.raises(RolloutsEnded, match="was removed with its rollouts"):
        stream.submit(StreamPlace("1", 1, 32))
    assert client.manifest == {}


def test_tasks_are_pushed_ahead_and_never_twice(group: MakeGroup) -> None:
    stream, client = stream_of([group(str(number)) for number in range(40)], 40)
    stream.submit()
    stream.collect(1, 0)
    assert len(client.tasks) >= stream.place.groups + 4 + 2 * 40
    assert len(set(client.tasks)) == len(client.tasks)


def test_a_job_of_ones_own_says_how_a_rollout_is_played_and_scored(group: MakeGroup) -> None:
    client = FakeClient([group("a")])
    agent = {"type": "tools", "tools": ["bash"]}
    spec = {
        "tasks": {"url": "tasks.jsonl"}, "handler": "math", "agent": agent, "samplesPerTask": 16,
        "reward": {"function": {"name": "near"}}, "sampling": {"temperature": 0.5, "maxTokens": 9},
    }  # fmt: skip
    stream = RolloutStream(
        cast(Client, client), "run", "default", 7, StreamSettings(groups=1, samples=2),
        PolicyVersions("run"), OwnJob(spec, [{"id": "one"}]),
    )  # fmt: skip
    stream.submit()
    made = client.manifest["spec"]
    assert (made["handler"], made["agent"], made["reward"]) == ("math", agent, spec["reward"])
    # What the trainer decides stays its own.
    assert (made["tasks"], made["samplesPerTask"]) == ({"stream": True}, 2)
    assert made["sampling"] == {"temperature": 1.0, "topP": 1.0, "maxTokens": 9, "seed": 7}
    assert client.tasks[:2] == ["000000-one", "000001-one"]
