"""Iterators that know their cursor, acknowledged cursors and batches, with a real control plane."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from rollyard_client import (
    AsyncClient,
    AsyncResultIterator,
    Batch,
    Client,
    Conflict,
    Invalid,
    NotFound,
    PushedTasks,
    ResultIterator,
    Retry,
    ServerUnavailable,
    TokenizerDiffers,
    WaitTimeout,
)
from rollyard_client.driver import DriverClient
from rollyard_client.errors import RollyardError
from rollyard_client.paging import Cursor, Following
from rollyard_client.requests.results import Group, Page, listed_cursors
from rollyard_client.training import library
from rollyard_client.training.batch import MODELS, ArrayBatch, BatchRequest, WeightHistory, gather
from rollyard_client.training.packed import GroupArrays, SegmentArrays, TrajectoryArrays
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobStatus
from rollyard_crds.trajectory import Trajectory
from rollyard_crds.weights import WeightUpdate
from rollyard_testing.api.control_plane import a_control_plane
from rollyard_testing.crds.conversations import harness_record
from rollyard_testing.crds.segments import reported
from rollyard_testing.manifests import job_manifest, pool_manifest
from rollyard_testing.pace import patience


@dataclass(frozen=True, slots=True)
class Plane:
    url: str
    tokens: dict[str, str]

    def client(self) -> Client:
        return Client(self.url, self.tokens["admin"])

    def work(self, job: str, versions: Callable[[str], str] = lambda _task: "v1", most: int = 999) -> int:
        """Take up to `most` rollouts of a job through all stages, and return how many have ended."""
        done = 0
        headers = {"Authorization": f"Bearer {self.tokens['worker']}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=patience(60)) as http:
            while done < most:
                free = min(16, most - done)
                ask = {"init": free, "run": free, "eval": free}
                body = {"worker": "w", "node": "n", "capacity": ask, "job": job}
                leases = http.post("/v1/leases", json=body).json()["leases"]
                if not leases:
                    break
                results = [reported(_result(lease, versions)) for lease in leases]
                http.post("/v1/leases/complete", json={"worker": "w", "results": results}).raise_for_status()
                done += sum(lease["stage"] == "eval" for lease in leases)
        return done


def _result(lease: dict[str, Any], versions: Callable[[str], str]) -> dict[str, Any]:
    """Return a result. A task's versions, separated by spaces, are those of its samples."""
    item = {"rollout": lease["rollout"], "token": lease["token"], "stage": lease["stage"]}
    if lease["stage"] == "run":
        sample = lease["sample_index"]
        version = (versions(lease["task"]["id"]).split() * 2)[sample]
        item["trajectory"] = {
            "id": lease["rollout"],
            "job": lease["job"],
            "task_id": lease["task"]["id"],
            "group_id": lease["group_id"],
            "sample_index": sample,
            "segments": [
                {
                    "prompt_ids": [1, 2, 3],
                    "response_ids": [4, 5, 6][: 2 + sample % 2],
                    "loss_mask": [1, 0, 1][: 2 + sample % 2],
                    "logprobs": [-0.5, 0.0, -1.5][: 2 + sample % 2],
                    "policy_versions": [version, "", version][: 2 + sample % 2],
                }
            ],
        }
    elif lease["stage"] == "eval":
        item["reward"] = float(lease["sample_index"])
    return item


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    folder = tmp_path_factory.mktemp("api")
    with a_control_plane(folder, ready_seconds=50, end_seconds=20) as started:
        yield Plane(started.url, started.tokens)


def stream(name: str, **spec: Any) -> dict[str, Any]:
    body = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}, "samplesPerTask": 2}
    return job_manifest(name, body | spec)


def tasks(*numbers: int) -> list[dict[str, str]]:
    return [{"id": f"t{number}", "prompt": "p"} for number in numbers]


async def test_iterators_resume_after_each_item(plane: Plane) -> None:
    with plane.client() as client:
        client.submit(stream("iterators"))
        client.push_tasks("iterators", tasks(*range(20)))
        plane.work("iterators")
        client.close_stream("iterators")
        for read in (client.groups, client.trajectories):
            every = list(read("iterators"))
            results = read("iterators")
            assert results.cursor == ""
            for number in (0, 1, 6, len(every) - 1):
                results = read("iterators", cursor=results.cursor)
                for _ in range(3):
                    next(results, None)
                again = read("iterators")
                for _ in range(number + 1):
                    next(again)
                assert list(read("iterators", cursor=again.cursor)) == every[number + 1 :], number
        groups = client.groups("iterators")
        first = [next(groups), next(groups)]
        kept = client.acknowledge("iterators", "reader", groups.cursor)
        assert (kept.consumer, kept.kind, kept.cursor) == ("reader", "groups", groups.cursor)
        assert client.acknowledged("iterators") == [kept]
        resumed = client.groups("iterators", consumer="reader")
        assert [*first, *resumed] == list(client.groups("iterators"))
        assert next(client.groups("iterators", consumer="newcomer")).group_id == first[0].group_id
        with pytest.raises(Invalid, match="not both"):
            client.groups("iterators", consumer="reader", cursor=groups.cursor)
    async with AsyncClient(plane.url, plane.tokens["admin"]) as other:
        async_groups = other.groups("iterators", consumer="reader")
        found = [await anext(async_groups), await anext(async_groups)]
        rest = [group async for group in other.groups("iterators", cursor=async_groups.cursor)]
        assert [*first, *found, *rest] == [group async for group in other.groups("iterators")]
        await other.acknowledge("iterators", "reader", async_groups.cursor, expected=kept.cursor)
        with pytest.raises(Conflict) as moved:
            await other.acknowledge("iterators", "reader", kept.cursor, expected=kept.cursor, rewind=True)
        assert moved.value.reason == "CursorMoved"
        await other.forget("iterators", "reader")
        assert await other.acknowledged("iterators") == []


def numbers(parts: Any = None, **arguments: Any) -> Cursor[int]:
    """Return an iteration over numbers; `parts` gives the call at a cursor, which is None otherwise."""
    following = Following("job", "default", follow=True, **arguments)
    return Cursor(parts or (lambda *_: "page"), int, following)


ENDED = RolloutJob.model_validate(job_manifest("job", {"tasks": {"stream": True}, "handler": "shell",
    "agent": {"type": "oracle"}}))  # fmt: skip
"""What is asked for after the last page: a job without failed rollouts."""


def test_an_iterator_keeps_its_place_when_a_call_fails() -> None:
    pages: list[Page | Exception] = [
        ServerUnavailable("gone"),
        Page([b"1", b"2"], "c2", False, ["c1", "c2"]),
        ServerUnavailable("gone"),
        Page([b"3"], "c9", True, ["c3"]),
    ]

    def send(call: Any) -> Any:
        page = pages.pop(0) if call == "page" else ENDED
        if isinstance(page, Exception):
            raise page
        return page

    results = ResultIterator(numbers(), send)
    with pytest.raises(ServerUnavailable):
        next(results)
    assert next(results) == 1
    assert results.cursor == "c1"
    assert next(results) == 2
    with pytest.raises(ServerUnavailable):
        next(results)
    assert results.cursor == "c2"
    assert next(results) == 3
    assert results.cursor == "c9", "the page's cursor is behind all that it passed over"
    assert next(results, None) is None


def test_a_page_without_results_ends_only_what_is_not_followed() -> None:
    def results(follow: bool) -> list[int]:
        pages = [Page([b"1"], "c1", False, ["c1"]), Page([], "c1", False), Page([b"2"], "c2", True, ["c2"])]
        cursor: Cursor[int] = Cursor(lambda *_: "page", int, Following("job", "default", follow))  # type: ignore[arg-type,return-value]
        return list(ResultIterator(cursor, lambda call: pages.pop(0) if call == "page" else ENDED))  # type: ignore[comparison-overlap]

    assert results(follow=True) == [1, 2], "a long poll has come to its end, and the job has not"
    assert results(follow=False) == [1]


async def test_a_result_that_cannot_be_read_stays_the_next_one() -> None:
    """A reader that mends its code, or a newer one, begins with it; nothing was passed over."""

    def page(_call: Any) -> Any:
        return Page([b"1", b"?", b"3"], "c3", True, ["c1", "c2", "c3"])

    async def sent(call: Any) -> Any:
        return page(call)

    results = ResultIterator(numbers(), page)
    assert next(results) == 1
    async_results = AsyncResultIterator(numbers(), sent)
    assert await anext(async_results) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="invalid literal"):
            next(results)
        with pytest.raises(ValueError, match="invalid literal"):
            await anext(async_results)
        assert (results.cursor, async_results.cursor) == ("c1", "c1")


async def test_an_iterator_asks_again_where_its_consumer_left_off() -> None:
    """The question failed, so that an answer to it is as good as none."""
    asked: list[Any] = []

    def send(call: Any) -> Any:
        asked.append(call if call == "c7" else call.path.rpartition("/")[2])
        if len(asked) % 4 == 1:
            raise ServerUnavailable("gone")
        if asked[-1] == "reader":
            return SimpleNamespace(cursor="c7")
        return Page([b"8"], "c8", True, ["c8"]) if call == "c7" else ENDED

    async def sent(call: Any) -> Any:
        return send(call)

    def pages() -> Cursor[int]:
        return numbers(lambda cursor, *_: cursor, consumer="reader")

    results = ResultIterator(pages(), send)
    with pytest.raises(ServerUnavailable):
        next(results)
    assert list(results) == [8]
    async_results = AsyncResultIterator(pages(), sent)
    with pytest.raises(ServerUnavailable):
        await anext(async_results)
    assert [result async for result in async_results] == [8]
    assert asked == ["reader", "reader", "c7", "job"] * 2


def test_the_cursors_of_a_page_are_listed_in_short() -> None:
    assert listed_cursors("") == []
    assert listed_cursors("v1.g.x.;5,1,3") == ["v1.g.x.5", "v1.g.x.6", "v1.g.x.9"]


async def test_a_time_out_says_what_the_job_waits_for(plane: Plane) -> None:
    said = "no task is left: 0 of 2 groups have a signal"
    expected = f"0 of 2 groups with a signal have ended within 0 s; it says: {said}; nothing was acknowl"
    with plane.client() as client:
        job = client.submit(stream("starving", dynamicSampling={"targetGroups": 2}))
        async with DriverClient(plane.url, plane.tokens["driver"]) as driver:
            await driver.put_job_status(job, RolloutJobStatus(message=said))
        for read in (client.batch, client.array_batch):
            with pytest.raises(WaitTimeout, match=expected):
                read("starving", groups=2, informative=True, timeout=0)
        with pytest.raises(WaitTimeout, match=f"0 of 0 rollouts ended; it says: {said}"):
            client.wait("starving", timeout=0.01)
    async with AsyncClient(plane.url, plane.tokens["admin"]) as other:
        for read_async in (other.batch, other.array_batch):
            with pytest.raises(WaitTimeout, match=expected):
                await read_async("starving", groups=2, informative=True, timeout=0)
        with pytest.raises(WaitTimeout, match=f"0 of 0 rollouts ended; it says: {said}"):
            await other.wait("starving", timeout=0.01)


async def test_a_trainer_that_dies_in_a_step_gets_the_same_batch_again(plane: Plane) -> None:
    with plane.client() as client:
        client.submit(stream("dying"))
        client.push_tasks("dying", tasks(*range(7)))
        plane.work("dying")
        one = client.batch("dying", groups=3, consumer="trainer")
        assert [group.group_id for group in one.groups] == ["t0", "t1", "t2"]
        assert (one.start, one.finished, one.stale_groups, one.lags) == ("", False, 0, [])
        assert len(one.trajectories) == 6
    with plane.client() as client:  # The trainer died before it acknowledged the batch.
        assert client.batch("dying", groups=3, consumer="trainer") == one
        client.acknowledge("dying", "trainer", one.cursor, expected=one.start)
        two = client.batch("dying", groups=3, consumer="trainer")
        assert [group.group_id for group in two.groups] == ["t3", "t4", "t5"]
        assert two.start == one.cursor
        # A second push of the same tasks, as after a lost answer, makes no rollouts.
        assert client.push_tasks("dying", tasks(*range(7))) == PushedTasks(0, 7)
        with pytest.raises(WaitTimeout, match=r"1 of 3 groups have ended within 0\.1 s; .*nothing was"):
            client.batch("dying", groups=3, cursor=two.cursor, timeout=0.1)
        client.close_stream("dying")
        last = client.batch("dying", groups=3, cursor=two.cursor)
        assert ([group.group_id for group in last.groups], last.finished) == (["t6"], True)
        assert client.batch("dying", groups=3, cursor=last.cursor).groups == []
    async with AsyncClient(plane.url, plane.tokens["admin"]) as other:
        assert await other.batch("dying", groups=3, consumer="trainer") == two


def test_a_batch_waits_for_its_groups(plane: Plane) -> None:
    with plane.client() as client:
        client.submit(stream("waiting"))
        client.push_tasks("waiting", tasks(*range(4)))
        later = threading.Timer(0.5, plane.work, ("waiting",))
        later.start()
        batch = client.batch("waiting", groups=4, informative=True, timeout=patience(60))
        later.join()
        assert len(batch.groups) == 4
        for wrong in ({"groups": 0}, {"groups": 1, "max_lag": -1}, {"groups": 1, "timeout": float("nan")}):
            with pytest.raises(Invalid):
                client.batch("waiting", **wrong)
        with pytest.raises(Invalid, match="backendRef"):
            client.batch("waiting", groups=1, max_lag=1)


def updates(*states: tuple[str, str]) -> list[WeightUpdate]:
    """Return updates, the newest first."""
    return [
        WeightUpdate.model_validate(
            {
                "id": len(states) - number,
                "policyVersion": version,
                "source": {"pushed": True},
                "mode": "abort",
                "inFlight": "continue",
                "state": state,
                "createdAt": "2026-01-01T00:00:00Z",
            }
        )
        for number, (version, state) in enumerate(states)
    ]


def test_lags() -> None:
    none = WeightHistory([])
    assert (none.newest, none.lag({"default"}), none.lag(set())) == ("", 0, 0)
    history = WeightHistory(
        updates(("v4", "Running"), ("bad", "Failed"), ("v3", "Superseded"), ("v2", "Succeeded"))
    )
    assert history.newest == "v4"
    assert [history.lag({version}) for version in ("v4", "v3", "v2", "default")] == [0, 1, 2, 3]
    assert history.lag({"v4", "v2"}) == 2
    twice = WeightHistory(updates(("v1", "Succeeded"), ("v2", "Succeeded"), ("v1", "Succeeded")))
    assert [twice.lag({version}) for version in ("v1", "v2", "0")] == [0, 1, 3]


def test_groups_that_are_too_old_are_left_out_and_counted(plane: Plane) -> None:
    version = {"t0": "v1 v3", "t1": "v3 v2", "t2": "v3", "t3": "v3 v1", "t4": "v3", "t5": "v2 v3"}
    with plane.client() as client:
        client.create_pool(pool_of("lagging"))
        headers = {"Authorization": f"Bearer {plane.tokens['driver']}"}
        body = {"backends": [{"url": "http://127.0.0.1:9", "ready": True}]}
        httpx.put(f"{plane.url}/v1/backendpools/lagging/backends", json=body, headers=headers)
        client.submit(stream("lagging", backendRef={"name": "lagging"}))
        client.push_tasks("lagging", tasks(*range(6)))
        plane.work("lagging", version.__getitem__)
        everything = client.batch("lagging", groups=6, max_lag=0)
        assert (everything.stale_groups, everything.lags) == (0, [0] * 6), "the pool has had no update"
        for name in ("v1", "v2", "v3"):
            client.update_weights("lagging", name, pushed=True, in_flight="restart")
        batch = client.batch("lagging", groups=3, max_lag=1)
        assert [group.group_id for group in batch.groups] == ["t1", "t2", "t4"]
        assert (batch.lags, batch.policy_version) == ([1, 0, 0], "v3")
        assert (batch.stale_groups, batch.stale_rollouts) == (2, 4)
        raw = client.array_batch("lagging", groups=3, max_lag=1)
        assert [group.group_id for group in raw.groups] == ["t1", "t2", "t4"]
        for field in (
            "lags",
            "policy_version",
            "stale_groups",
            "stale_rollouts",
            "start",
            "cursor",
            "finished",
        ):
            assert getattr(raw, field) == getattr(batch, field), field
        assert [g.group_id for g in client.batch("lagging", 1, cursor=batch.cursor).groups] == ["t5"]
        with pytest.raises(
            WaitTimeout, match=r"2 of 6 groups .* 4 more are older than max_lag; it says: the stream is open"
        ):
            client.batch("lagging", groups=6, max_lag=0, timeout=0.1)
        client.close_stream("lagging")
        fresh = client.batch("lagging", groups=6, max_lag=0)
        assert ([group.group_id for group in fresh.groups], fresh.finished) == (["t2", "t4"], True)
        assert fresh.stale_groups == 4


def one_token(prompt: list[int], token: int, logprob: float, version: str) -> dict[str, Any]:
    """Return a segment with one sampled token."""
    return {
        "prompt_ids": prompt,
        "response_ids": [token],
        "loss_mask": [1],
        "logprobs": [logprob],
        "policy_versions": [version],
    }


def test_a_batch_forgets_no_update_that_came_while_it_waited() -> None:
    """Groups that were gathered before it are too old then, and others take their places."""

    def page(*names: str, cursor: str, finished: bool = False) -> Page:
        segments = [one_token([1], 2, 0.0, version) for version in ("v1", "v2")]
        lines = []
        for name in names:
            one = segments[0 if name.startswith("old") else 1]
            member = {"id": name, "job": "j", "task_id": name, "group_id": name, "sample_index": 0}
            members = [member | {"segments": [one]}] * 2
            head = {"group_id": name, "task_id": name, "delivered": True, "informative": True, "reason": ""}
            lines.append(json.dumps(head | {"trajectories": members}).encode())
        return Page(lines, cursor, finished)

    def begun(count: int) -> Any:
        request = BatchRequest(
            job="j", groups=count, max_lag=0, cursor="c0", consumer=None, informative=False,
            timeout=patience(60), namespace="default",
        )  # fmt: skip
        return gather(MODELS, request)

    job = stream("j", backendRef={"name": "p"})
    first, second = updates(("v1", "Succeeded")), updates(("v2", "Succeeded"), ("v1", "Succeeded"))
    steps = begun(3)
    assert next(steps).path.endswith("/j")
    steps.send(RolloutJob.model_validate(job))
    asked = steps.send(first)
    assert (asked.query["cursor"], asked.query["limit"]) == ("c0", 3)
    asked = steps.send(page("old-0", cursor="c1"))
    assert (asked.query["cursor"], asked.query["limit"]) == ("c1", 2)
    assert "weights" in steps.send(page("old-1", "old-2", cursor="c3")).path
    asked = steps.send(second)
    assert (asked.query["cursor"], asked.query["limit"]) == ("c3", 3)
    steps.send(page("new-3", "new-4", "new-5", cursor="c6"))
    with pytest.raises(StopIteration) as end:
        steps.send(second)
    batch = end.value.value
    assert [group.group_id for group in batch.groups] == ["new-3", "new-4", "new-5"]
    assert (batch.start, batch.cursor, batch.finished) == ("c0", "c6", False)
    assert (batch.stale_groups, batch.stale_rollouts) == (3, 6)
    assert (batch.lags, batch.policy_version) == ([0, 0, 0], "v2")


def test_segments_of_one_trajectory_are_rows_with_one_sample_and_reward() -> None:
    pytest.importorskip("numpy")

    def trajectory(name: str, reward: float | None, *lengths: int) -> Trajectory:
        segments = [one_token([7] * length, 8, -0.5, "v1") for length in lengths]
        known = {"id": name, "job": "j", "task_id": "t", "group_id": "t", "sample_index": 0}
        return Trajectory.model_validate(known | {"reward": reward, "segments": segments})

    groups = [
        Group("a", "a", True, True, "", [trajectory("a0", 0.25, 1, 3), trajectory("a1", 0.5, 2)]),
        Group("b", "b", True, True, "", [trajectory("b0", 0.75), trajectory("b1", 1.0, 1, 1)]),
    ]
    made = Batch(groups, "", "", True).arrays(pad_id=9)
    assert made.samples.tolist() == [0, 0, 1, 3, 3]
    assert made.groups.tolist() == [0, 0, 0, 1, 1]
    assert made.rewards.tolist() == [0.25, 0.25, 0.5, 1.0, 1.0]
    assert made.prompt_lengths.tolist() == [1, 3, 2, 1, 1]
    assert made.input_ids.tolist()[:3] == [[7, 8, 9, 9], [7, 7, 7, 8], [7, 7, 8, 9]]
    assert made.attention_mask.sum(axis=1).tolist() == [2, 4, 3, 2, 2]


def test_segments_without_a_token_to_train_on_have_no_row() -> None:
    np = pytest.importorskip("numpy")
    lists = ("prompt_ids", "response_ids", "loss_mask", "logprobs")
    trajectory = Trajectory.model_validate(harness_record(reward=0.5))
    untrained = trajectory.model_copy(update={"segments": [trajectory.segments[2], trajectory.segments[3]]})
    arrays = [
        TrajectoryArrays(
            {"reward": one.reward},
            [
                SegmentArrays(*(np.asarray(getattr(segment, name)) for name in lists), [("v1", 1)])
                for segment in one.segments
            ],
        )
        for one in (trajectory, untrained)
    ]
    models = Batch([Group("t", "t", True, True, "", [trajectory, untrained])], "", "", True)
    raw = ArrayBatch([GroupArrays("t", "t", True, True, "", arrays)], "", "", True)
    for made in (models.arrays(), raw.arrays()):
        assert made.samples.tolist() == [0, 0, 0, 1]
        assert made.rewards.tolist() == [0.5] * 4
        assert made.loss_mask.sum(axis=1).tolist() == [5, 4, 3, 0]
        assert made.input_ids[:, 0].tolist() == [1] * 4


@pytest.mark.parametrize("call", ["batch", "array_batch"])
async def test_padded_arrays(plane: Plane, call: str) -> None:
    np = pytest.importorskip("numpy")
    name = f"arrays-{call.partition('_')[0]}"
    with plane.client() as client:
        client.submit(stream(name))
        client.push_tasks(name, tasks(0, 1))
        plane.work(name)
        batch = getattr(client, call)(name, groups=2)
    async with AsyncClient(plane.url, plane.tokens["admin"]) as client_too:
        again = await getattr(client_too, call)(name, groups=2)
    assert [one.reward for one in again.trajectories] == [one.reward for one in batch.trajectories]
    made = batch.arrays(pad_id=9)
    short, long = [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 6]
    assert made.input_ids.tolist() == [short, long, short, long]
    assert made.attention_mask[0].tolist() == [1, 1, 1, 1, 1, 0]
    assert (batch.arrays(pad_id=4).attention_mask == made.attention_mask).all(), "4 is a token too"
    assert made.loss_mask[1].tolist() == [0, 0, 0, 1, 0, 1]
    assert made.logprobs[1].tolist() == [0, 0, 0, -0.5, 0, -1.5]
    assert (made.input_ids.dtype, made.logprobs.dtype) == (np.int64, np.float32)
    assert made.rewards.tolist() == [0, 1, 0, 1]
    assert (made.groups.tolist(), made.samples.tolist()) == ([0, 0, 1, 1], [0, 1, 2, 3])
    assert made.prompt_lengths.tolist() == [3, 3, 3, 3]
    empty = Batch([], "", "", True).arrays()
    assert empty.input_ids.shape == (0, 0)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(library, "import_module", absent)
    with pytest.raises(RollyardError, match=r"numpy is not installed: pip install 'rollyard\[numpy\]'"):
        Batch([], "", "", True).arrays()
    with pytest.raises(
        RollyardError, match=r"torch is not installed: pip install 'rollyard\[torch\]'"
    ) as missing:
        Batch([], "", "", True).tensors()
    assert missing.value.reason == "MissingLibrary"


def test_calls_are_repeated_when_their_answer_is_lost(plane: Plane) -> None:
    """Every call of a trainer has a key of its own, so its repeat changes nothing."""

    class Lossy(httpx.HTTPTransport):
        """It lets every second change happen, and loses its answer."""

        changes = 0

        def handle_request(self, request: httpx.Request) -> httpx.Response:
            answer = super().handle_request(request)
            if request.method != "GET":
                self.changes += 1
                if self.changes % 2:
                    answer.read()
                    answer.close()
                    raise httpx.ReadError("the answer was lost")
            return answer

    lossy = Lossy()
    with (
        Client(plane.url, plane.tokens["admin"], retry=Retry(3, base=0.001)) as client,
        httpx.Client(base_url=plane.url, headers=client._transport.client.headers, transport=lossy) as http,
    ):
        client._transport.client = http
        client.submit(stream("lossy", dynamicSampling={"targetGroups": 2}))
        assert client.push_tasks("lossy", tasks(*range(4))) == PushedTasks(0, 4)
        opened = client.open_target("lossy", "step-0", 2)
        assert (opened.goal, opened.opened) == (2, False)
        assert client.job("lossy").status.counts.total == 8, "four groups of two are in flight"
        plane.work("lossy")
        batch = client.batch("lossy", groups=2, informative=True, consumer="trainer")
        kept = client.acknowledge("lossy", "trainer", batch.cursor, expected=batch.start)
        assert kept.cursor == batch.cursor
        client.create_pool(pool_of("lossy"))
        first = client.update_weights("lossy", "v1", checkpoint="/models/v1", in_flight="restart")
        assert [update.id for update in client.weight_updates("lossy")] == [first.id]
        assert client.cancel("lossy").status.counts.total == 8
        assert lossy.changes == 14, "seven calls were sent twice"


TINY = Path(__file__).parents[2] / "engine/src/rollyard_engine/models/tiny-policy"


def pool_of(name: str, **spec: Any) -> dict[str, Any]:
    return pool_manifest(name, {"model": "m", **spec})


async def test_a_trainer_with_another_tokenizer_is_told_before_the_first_step(
    plane: Plane, tmp_path: Path
) -> None:
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    with plane.client() as client:
        client.create_pool(pool_of("tokenizers", tokenizer=str(TINY)))
        for same in (TINY, str(TINY), tokenizer):
            client.check_tokenizer("tokenizers", same)
        # transformers writes the same tokenizer in another form.
        written = json.loads((TINY / "tokenizer.json").read_text())
        written |= {"padding": None, "truncation": None}
        (tmp_path / "tokenizer.json").write_text(json.dumps(written, indent=2))
        client.check_tokenizer("tokenizers", tmp_path)
        tokenizer.add_tokens(["<one-more>"])
        with pytest.raises(TokenizerDiffers, match=r"has \d+ tokens .* the pool's has \d+"):
            client.check_tokenizer("tokenizers", tokenizer)
        swapped = dict(written["model"]["vocab"])
        added = {token["content"] for token in written["added_tokens"]}
        first, second = [token for token in swapped if token not in added][:2]
        swapped[first], swapped[second] = swapped[second], swapped[first]
        written["model"]["vocab"] = swapped
        (tmp_path / "tokenizer.json").write_text(json.dumps(written))
        with pytest.raises(TokenizerDiffers):
            client.check_tokenizer("tokenizers", tmp_path)
        for wrong in (tmp_path / "none", "owner/unknown", 7, object()):
            with pytest.raises(Invalid, match="tokenizer: "):
                client.check_tokenizer("tokenizers", wrong)
        client.create_pool(pool_of("unseen", tokenizer="/nowhere/else"))
        with pytest.raises(NotFound) as unseen:
            client.check_tokenizer("unseen", TINY)
        assert unseen.value.reason == "TokenizerUnseen"
        (tmp_path / "tokenizer.json").write_text("{")
        client.create_pool(pool_of("broken", tokenizer=str(tmp_path)))
        with pytest.raises(Invalid) as broken:
            client.check_tokenizer("broken", TINY)
        assert broken.value.reason == "TokenizerInvalid"
    async with AsyncClient(plane.url, plane.tokens["admin"]) as other:
        await other.check_tokenizer("tokenizers", TINY)
