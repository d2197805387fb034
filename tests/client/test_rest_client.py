"""The client with a real control plane process, and with servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rollyard_client import (
    AsyncClient,
    Client,
    Conflict,
    ContextError,
    DriverClient,
    Invalid,
    NotFound,
    OpenedTarget,
    PushedTasks,
    Retry,
    Reward,
    RewardsTaken,
    RollyardError,
    ServerUnavailable,
    StorageFull,
    TooMany,
    Unauthorized,
    WaitTimeout,
)
from rollyard_client._async.transport import AsyncTransport
from rollyard_client._sync.transport import SyncTransport
from rollyard_client.call import Call, as_json, check
from rollyard_client.context import DEFAULT_URL, Context, context_path, read_token, resolve
from rollyard_client.errors import JobReplaced
from rollyard_client.paging import Files
from rollyard_client.sse import Parser
from rollyard_crds.backendpool import BackendPool, BackendStatus
from rollyard_crds.base import Condition
from rollyard_crds.claims import ClaimRequest, ClaimStatus, SandboxShape
from rollyard_crds.lease import CompleteRequest, LeaseRequest, StageResult
from rollyard_crds.rolloutjob import RolloutJob, RolloutJobStatus
from rollyard_crds.task import Task
from rollyard_crds.trajectory import RunRecord
from rollyard_pipeline.control_plane.rest import RestControlPlane
from rollyard_pipeline.errors import ControlPlaneRefused, NotThere
from rollyard_testing.api.control_plane import StartedControlPlane, a_control_plane
from rollyard_testing.manifests import job_manifest, pool_manifest
from rollyard_testing.pace import patience


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedControlPlane]:
    folder = tmp_path_factory.mktemp("api")
    with a_control_plane(folder, ready_seconds=50, end_seconds=20) as started:
        yield started


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    tasks = {"inline": [{"id": "t/0", "prompt": "p"}, {"id": "t/1", "prompt": "p"}]}
    body = {"tasks": tasks, "handler": "shell", "agent": {"type": "oracle"}, "samplesPerTask": 2, **spec}
    return job_manifest(name, body)


async def work(server: StartedControlPlane, job: str) -> None:
    """Take a job's rollouts through all stages with the worker's client."""
    async with RestControlPlane(server.url, server.tokens["worker"]) as worker:
        ask = LeaseRequest(worker="w", node="n", capacity={"init": 16, "run": 16, "eval": 16}, job=job)
        while leases := (await worker.lease(ask)).leases:
            handler = (await worker.job_spec("default", job, leases[0].job_uid)).handler
            assert handler in ("shell", "unscored")
            assert await worker.waiting_images("default", job, leases[0].job_uid) == []
            results = []
            for lease in leases:
                result = StageResult(rollout=lease.rollout, token=lease.token, stage=lease.stage)
                if lease.stage == "run":
                    result.trajectory = RunRecord(
                        id=lease.rollout,
                        job=lease.job,
                        task_id=lease.task.id,
                        group_id=lease.group_id,
                        sample_index=lease.sample_index,
                    )
                elif lease.stage == "eval":
                    result.reward = float(lease.sample_index)
                results.append(result)
            told = await worker.complete(CompleteRequest(worker="w", results=results))
            assert {item.outcome for item in told.outcomes} == {"accepted"}


async def finish(server: StartedControlPlane, job: str) -> None:
    """Report what a driver reports at the end."""
    async with DriverClient(server.url, server.tokens["driver"]) as driver:
        (found,) = [one for one in await driver.jobs() if one.metadata.name == job]
        assert found.metadata.annotations["rollyard.dev/closed"] == "true"
        done = Condition(
            type="Finished",
            status="True",
            reason="Done",
            last_transition_time=found.metadata.creation_timestamp,
        )
        await driver.put_job_status(found, RolloutJobStatus(phase="Succeeded", conditions=[done]))


async def test_sync_and_async_say_the_same(server: StartedControlPlane) -> None:
    with Client(server.url, server.tokens["admin"]) as client:
        client.ready()
        job = client.submit(manifest("both"))
        assert client.submit(job).metadata.uid == job.metadata.uid
        with pytest.raises(WaitTimeout, match="0 of 4 rollouts ended"):
            client.wait("both", timeout=0.01)
        await work(server, "both")
        await finish(server, "both")
        assert client.wait("both", timeout=patience(5)).status.phase == "Succeeded"
        trajectories = list(client.trajectories("both", follow=True))
        assert len(trajectories) == 4
        assert client.trajectory("both", trajectories[0].id) == trajectories[0]
        groups = list(client.groups("both", informative=True, follow=True))
        assert {group.group_id for group in groups} == {"t/0", "t/1"}
        summaries = list(client.rollouts("both", status="succeeded"))
        assert len(summaries) == 4
        assert [event.name for event in client.events("both")][-1] == "end"
        files = list(client.parquet("both"))
        assert len(files) == 1
        assert files[0][:4] == b"PAR1"
        assert [one.metadata.name for one in client.jobs("default")].count("both") == 1
    async with AsyncClient(server.url, server.tokens["admin"]) as other:
        await other.ready()
        assert (await other.wait("both", timeout=patience(5))).status.phase == "Succeeded"
        assert [t async for t in other.trajectories("both", follow=True)] == trajectories
        assert [g async for g in other.groups("both", informative=True)] == groups
        assert [r async for r in other.rollouts("both", status="succeeded")] == summaries
        assert [f async for f in other.parquet("both")] == files
        assert [event.name async for event in other.events("both")][-1] == "end"
        assert await other.trajectory("both", trajectories[0].id) == trajectories[0]
        await other.delete("both")
        with pytest.raises(NotFound) as missing:
            await other.job("both")
        assert missing.value.reason == "JobNotFound"


async def test_streams_cancel_and_update(server: StartedControlPlane) -> None:
    async with AsyncClient(server.url, server.tokens["admin"]) as client:
        await client.submit(manifest("stream", tasks={"stream": True}))
        two = [{"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p"}]
        assert await client.push_tasks("stream", two) == PushedTasks(accepted=2, repeated=0)
        with pytest.raises(Invalid) as wrong:
            await client.push_tasks("stream", [{"id": "c"}])
        assert wrong.value.errors
        assert (await client.update("stream", suspend=True, priority=3)).spec.priority == 3
        assert (await client.cancel("stream", group="a")).status.counts.cancelled == 2
        await client.close_stream("stream")
        with pytest.raises(Conflict) as late:
            await client.push_tasks("stream", [{"id": "d", "prompt": "p"}])
        assert late.value.reason == "JobClosed"
        assert (await client.cancel("stream")).status.counts.cancelled == 4


async def test_steps_of_dynamic_sampling(server: StartedControlPlane) -> None:
    spec = {"tasks": {"stream": True}, "samplesPerTask": 2, "dynamicSampling": {"targetGroups": 3}}
    async with AsyncClient(server.url, server.tokens["admin"]) as client:
        await client.submit(manifest("steps", **spec))
        opened = await client.open_target("steps", "step-0", 2)
        assert opened == OpenedTarget(id="step-0", groups=2, goal=2, met=False, opened=True)
        with pytest.raises(Conflict) as differs:
            await client.open_target("steps", "step-0", 3)
        assert differs.value.reason == "TargetDiffers"
    with Client(server.url, server.tokens["admin"]) as client:
        assert client.open_target("steps", "step-0", 2).opened is False
        assert client.open_target("steps", "step-1").goal == 5
        found = client.job("steps").status.dynamic_sampling
        assert found is not None
        assert found.target_groups == 5


async def test_rewards_from_the_trainer(server: StartedControlPlane) -> None:
    async with AsyncClient(server.url, server.tokens["admin"]) as client:
        await client.submit(manifest("own", tasks={"stream": True}, handler="unscored"))
        await client.push_tasks("own", [{"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p"}])
        assert [one async for one in client.unscored("own")] == []
        waiting = client.unscored("own", wait=30)
        first = asyncio.ensure_future(anext(waiting))
        await work(server, "own")
        assert (await first).status == "unscored"
        one, *others = [await first, *[item async for item in waiting]]
        assert {trajectory.group_id for trajectory in (one, *others)} == {"a", "b"}
        assert all(trajectory.reward is None and trajectory.fence > 0 for trajectory in others)
        full = Reward(np.float32(0.5), components={"style": -1}, reason="JudgeAgreed", fence=one.fence)
        assert await client.rewards("own", {one.id: full, others[0].id: 1}) == RewardsTaken(2, 0, {})
        assert await client.rewards("own", {one.id: full}) == RewardsTaken(0, 1, {})
        with pytest.raises(Conflict) as differs:
            await client.rewards("own", {one.id: 0.5, others[1].id: 1.0})
        assert (differs.value.reason, len(differs.value.errors)) == ("RewardDiffers", 1)
        for number in (math.nan, math.inf):
            with pytest.raises(Invalid, match=f"the 'style' of rollout '{one.id}' must be a finite number"):
                await client.rewards("own", {one.id: Reward(1.0, {"style": number})})
        for wrong in ("good", None, 10**400):
            with pytest.raises(Invalid, match=f"the 'reward' of rollout '{one.id}' must be a finite number"):
                await client.rewards("own", {one.id: wrong})  # type: ignore[dict-item]
        with pytest.raises(NotFound, match=r"rewards\.nobody: "):
            await client.rewards("own", {"nobody": 1.0})
        await client.cancel("own", rollout=others[1].id)
        late = await client.rewards("own", {others[1].id: 1.0})
        assert late.late == {others[1].id: "Cancelled"}
    with Client(server.url, server.tokens["admin"]) as client:
        assert [trajectory.id for trajectory in client.unscored("own")] == [others[2].id]
        after = client.unscored("own", cursor=waiting.cursor)
        assert (list(after), after.cursor) == ([], waiting.cursor)
        assert client.rewards("own", {others[2].id: 0.25}).accepted == 1
        client.close_stream("own")
        assert list(client.unscored("own", follow=True)) == [], "it ends with the job"
        rewards = {trajectory.id: trajectory.reward for trajectory in client.trajectories("own")}
        assert rewards[one.id] == 0.5
        assert rewards[others[2].id] == 0.25


async def test_pools(server: StartedControlPlane) -> None:
    document = pool_manifest("pool", {"model": "m"})
    with Client(server.url, server.tokens["admin"]) as client:
        client.create_pool(document)
        assert client.create_pool(BackendPool.model_validate(document)).spec.model == "m"
        async with DriverClient(server.url, server.tokens["driver"]) as driver:
            (pool,) = await driver.pools()
            told = await driver.put_backends(pool, [BackendStatus(url="http://b", ready=True)])
            assert told.status.ready_replicas == 1
            assert (await driver.put_pool_status(pool, told.status)).status.replicas == 1
        assert client.pool("pool").status.backends[0].ready
        client.delete_pool("pool")
        assert client.pools("default") == []


async def test_claims(server: StartedControlPlane) -> None:
    shape = SandboxShape(cpu=1, memory_bytes=1 << 30, disk_bytes=1 << 30, processes=64)
    with Client(server.url, server.tokens["admin"]) as client:
        client.submit(manifest("claims"))
    async with (
        RestControlPlane(server.url, server.tokens["worker"]) as worker,
        DriverClient(server.url, server.tokens["driver"]) as driver,
    ):
        ask = LeaseRequest(worker="w", node="kubernetes", capacity={"init": 1}, job="claims")
        (lease,) = (await worker.lease(ask)).leases
        before = await driver.claims()
        assert (before.claims, before.warm) == ([], [])
        wish = ClaimRequest(rollout=lease.rollout, token=lease.token, shape=shape, wait=20)
        filing = asyncio.create_task(worker.claim(wish))
        (pending,) = (await driver.claims(before.revision, wait=20)).claims
        assert (pending.state, pending.shape) == ("Pending", shape)
        status = ClaimStatus(state="Bound", address="tcp://10.0.0.7:7411", secret="s")
        bound = await driver.put_claim_status(pending.id, status)
        assert bound is not None
        assert (await filing).model_copy(update={"age_seconds": bound.age_seconds}) == bound
        assert (await worker.claim_status(pending.id, wait=20)).secret == "s"
        assert (await driver.claims(namespace="elsewhere")).claims == []
        with pytest.raises(ControlPlaneRefused):
            await worker.claim(wish.model_copy(update={"token": lease.token + 1}))
        for _ in range(2):
            await worker.release_claim(pending.id)
        (released,) = (await driver.claims()).claims
        assert released.state == "Released"
        for _ in range(2):
            assert await driver.put_claim_status(pending.id, ClaimStatus(state="Removed")) is None
        with pytest.raises(NotThere):
            await worker.claim_status(pending.id, wait=0)
        with pytest.raises(Unauthorized):
            async with DriverClient(server.url, server.tokens["worker"]) as other:
                await other.claims()


async def test_registering(server: StartedControlPlane) -> None:
    async with DriverClient(server.url, server.tokens["driver"]) as driver:
        job = RolloutJob.model_validate(manifest("mapped", tasks={"configMapRef": {"name": "tasks"}}))
        job.metadata.annotations["rollyard.dev/object-uid"] = "u1"
        with pytest.raises(Invalid, match="tasks: is required"):
            await driver.register_job(job)
        made = await driver.register_job(job, [Task(id="a", prompt="p"), {"id": "b", "prompt": "p"}])
        assert made.status.counts.total == 4
        job.spec.priority = 3
        changed = await driver.register_job(job)
        assert (changed.metadata.uid, changed.spec.priority) == (made.metadata.uid, 3)
        assert await driver.register_job(changed) == changed, "what came back may be sent again"
        assert "mapped" in {one.metadata.name for one in await driver.unfinished_jobs()}
        assert (await driver.job("default", "mapped")).metadata.generation == 2
        await driver.cancel(changed)
        assert "mapped" not in {one.metadata.name for one in await driver.unfinished_jobs()}
        assert "mapped" in {one.metadata.name for one in await driver.jobs()}
        await driver.delete_job("default", "mapped")
        with pytest.raises(NotFound):
            await driver.job("default", "mapped")
        document = {"apiVersion": job.api_version, "kind": "BackendPool", "metadata": {"name": "registered"}}
        pool = BackendPool.model_validate(document | {"spec": {"model": "m"}})
        assert (await driver.register_pool(pool)).metadata.generation == 1
        pool.spec.replicas = 2
        assert (await driver.register_pool(pool)).metadata.generation == 2
        pool.spec.model = "other"
        with pytest.raises(Conflict, match=r"spec\.model"):
            await driver.register_pool(pool)
        await driver.delete_pool("default", "registered")


def test_problems_become_exceptions(server: StartedControlPlane) -> None:
    with Client(server.url, server.tokens["admin"]) as client:
        with pytest.raises(Invalid, match=r"spec\.handler") as wrong:
            client.submit(manifest("x", handler="nobody"))
        assert wrong.value.errors[0] in str(wrong.value)
        client.submit(manifest("conflict"))
        with pytest.raises(Conflict) as conflict:
            client.submit(manifest("conflict", samplesPerTask=3))
        assert conflict.value.reason == "AlreadyExists"
        client.cancel("conflict")
    with Client(server.url, "nobody") as client, pytest.raises(Unauthorized):
        client.jobs()


def test_no_server() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    retry = Retry(attempts=2, base=0.001)
    with (
        Client(f"http://127.0.0.1:{port}", "t", retry=retry) as client,
        pytest.raises(ServerUnavailable) as gone,
    ):
        client.jobs()
    assert str(gone.value).startswith(f"no server at http://127.0.0.1:{port}; start one with `rollyard up`")


class Flaky:
    """A transport that breaks the first calls, and then answers."""

    def __init__(self, failures: list[Exception | httpx.Response]) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self, _request: httpx.Request) -> httpx.Response:
        self.calls += 1
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        return httpx.Response(200, json={"ok": True})


def _sync(flaky: Flaky, attempts: int = 4) -> SyncTransport:
    made = SyncTransport(Context("http://x", "t"), retry=Retry(attempts, base=0.001), timeout=1)
    made.client.close()
    made.client = httpx.Client(base_url="http://x", transport=httpx.MockTransport(flaky))
    return made


def test_broken_connections_are_retried_where_that_is_harmless() -> None:
    again: Call[Any] = Call("GET", "/", as_json)
    once: Call[Any] = Call("POST", "/", as_json, idempotent=False)
    flaky = Flaky([httpx.ReadError("reset"), httpx.Response(503), httpx.ConnectError("refused")])
    assert _sync(flaky).send(again) == {"ok": True}
    assert flaky.calls == 4
    flaky = Flaky([httpx.ReadError("reset")])
    with pytest.raises(ServerUnavailable):
        _sync(flaky).send(once)
    assert flaky.calls == 1
    flaky = Flaky([httpx.ConnectError("refused")])
    assert _sync(flaky).send(once) == {"ok": True}, "what never arrived may be sent again"
    flaky = Flaky([httpx.ReadError("reset")] * 9)
    with pytest.raises(ServerUnavailable):
        _sync(flaky, attempts=3).send(again)
    assert flaky.calls == 3


async def test_full_queues_are_waited_for_within_bounds() -> None:
    problem = {"reason": "QueueFull", "detail": "full", "status": 429}
    flaky = Flaky([httpx.Response(429, json=problem, headers={"Retry-After": "0"})])
    made = AsyncTransport(Context("http://x", "t"), retry=Retry(3, base=0.001), timeout=1)
    await made.client.aclose()
    made.client = httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(flaky))
    assert await made.send(Call("GET", "/", as_json)) == {"ok": True}
    flaky.failures = [httpx.Response(429, json=problem, headers={"Retry-After": "10"})]
    with pytest.raises(TooMany) as full:
        await made.send(Call("GET", "/", as_json))
    assert (full.value.retry_after, full.value.reason) == (10.0, "QueueFull")
    await made.close()


def test_context(tmp_path: Path) -> None:
    assert resolve("http://a/", "t", {}) == Context("http://a", "t")
    assert resolve(None, None, {"ROLLYARD_URL": "http://b", "ROLLYARD_TOKEN": "u"}) == Context(
        "http://b", "u"
    )
    env = {"ROLLYARD_HOME": str(tmp_path)}
    with pytest.raises(ContextError, match=f"no server at {DEFAULT_URL} is known here; start one"):
        resolve(None, None, env)
    with pytest.raises(ContextError, match="no token for http://b: set ROLLYARD_TOKEN"):
        resolve("http://b", None, env)
    (tmp_path / "tokens.json").write_text('{"admin": "secret", "worker": "w"}')
    file = tmp_path / "context.json"
    file.write_text(json.dumps({"url": "http://c", "token_file": str(tmp_path / "tokens.json")}))
    assert resolve(None, None, env) == Context("http://c", "secret")
    file.write_text(json.dumps({"url": "http://c", "token": "direct"}))
    assert resolve(None, None, env) == Context("http://c", "direct")
    with pytest.raises(ContextError):
        resolve("http://elsewhere", None, env)
    file.write_text("[")
    with pytest.raises(ContextError, match="remove it"):
        resolve(None, None, env)


def uploaded(number: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return a task file larger than a piece of an upload, and the manifest of a job that is to use it."""
    path = folder / f"tasks-{number}.jsonl"
    lines = [json.dumps({"id": f"{number}/{i}", "prompt": "p" * 2000}) for i in range(700)]
    path.write_text("\n".join(lines) + "\n")
    return path, manifest(f"uploaded-{number}", suspend=True)


def test_upload(server: StartedControlPlane, tmp_path: Path) -> None:
    path, job = uploaded(1, tmp_path)
    with Client(server.url, server.tokens["admin"]) as client:
        url = client.upload(path)
        assert client.upload(str(path)) == url, "a repeat is harmless"
        job["spec"]["tasks"] = {"url": url}
        assert client.submit(job).status.counts.total == 1400
        with pytest.raises(Invalid, match="has no upload") as missing:
            client.submit({**job, "metadata": {"name": "uploaded-1", "namespace": "other"}})
        assert missing.value.reason == "BlobNotFound"
        client.upload(path, namespace="other")
        client.submit({**job, "metadata": {"name": "uploaded-1", "namespace": "other"}})
        with pytest.raises(FileNotFoundError):
            client.upload(tmp_path / "none")
        for namespace in ("default", "other"):
            client.delete("uploaded-1", namespace)


async def test_upload_async(server: StartedControlPlane, tmp_path: Path) -> None:
    path, job = uploaded(2, tmp_path)
    async with AsyncClient(server.url, server.tokens["admin"]) as client:
        job["spec"]["tasks"] = {"url": await client.upload(path)}
        assert (await client.submit(job)).status.counts.total == 1400
        await client.delete("uploaded-2")


@pytest.mark.parametrize(
    ("status", "problem", "kind", "reason"),
    [
        (400, {}, Invalid, "Invalid"),
        (401, {}, Unauthorized, "Unauthorized"),
        (403, {"reason": "RoleMissing"}, Unauthorized, "RoleMissing"),
        (404, {}, NotFound, "NotFound"),
        (409, {"reason": "LeaseLost"}, Conflict, "LeaseLost"),
        (409, {"reason": "CursorBeyondEnd"}, JobReplaced, "CursorBeyondEnd"),
        (410, {"reason": "CursorGone"}, JobReplaced, "CursorGone"),
        (413, {}, Invalid, "Invalid"),
        (422, {"errors": ["spec.a: b", "spec.c: d"]}, Invalid, "Invalid"),
        (429, {}, TooMany, "QueueFull"),
        (500, {}, RollyardError, "Error"),
        (502, {}, ServerUnavailable, "ServerUnavailable"),
        (503, {}, ServerUnavailable, "ServerUnavailable"),
        (504, {}, ServerUnavailable, "ServerUnavailable"),
        (507, {}, StorageFull, "StorageFull"),
        (502, "<html>bad gateway</html>", ServerUnavailable, "ServerUnavailable"),
        (418, "", RollyardError, "Error"),
    ],
)
def test_what_an_answer_raises(status: int, problem: Any, kind: type[RollyardError], reason: str) -> None:
    if isinstance(problem, dict):
        answer = httpx.Response(status, json={"detail": "because", **problem}, headers={"Retry-After": "7"})
    else:
        headers = {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}
        answer = httpx.Response(status, text=problem, headers=headers)
    with pytest.raises(RollyardError) as caught:
        check(answer)
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.reason) == (status, reason)
    if isinstance(problem, dict):
        assert (str(caught.value), caught.value.retry_after) == ("because", 7.0)
        assert caught.value.errors == problem.get("errors", [])
    else:
        assert str(caught.value) == (problem or f"the server answered {status}")
        assert caught.value.retry_after is None


@pytest.mark.parametrize(
    ("attempt", "error", "least", "most"),
    [
        (0, ServerUnavailable("x"), 0.5, 1.0),
        (1, TooMany("x"), 1.0, 2.0),
        (2, ServerUnavailable("x"), 1.5, 3.0),
        (0, TooMany("x", retry_after=2.5), 2.5, 2.5),
        (0, TooMany("x", retry_after=3.0), 3.0, 3.0),
        (0, TooMany("x", retry_after=3.5), None, None),
        (3, ServerUnavailable("x"), None, None),
        (0, Conflict("x"), None, None),
        (0, StorageFull("x"), None, None),
        (0, RollyardError("x"), None, None),
    ],
)
def test_what_is_tried_again_and_after_how_long(
    attempt: int, error: RollyardError, least: float | None, most: float | None
) -> None:
    pause = Retry(attempts=4, base=1.0, longest=3.0).pause(attempt, error)
    if least is None or most is None:
        assert pause is None
    else:
        assert pause is not None
        assert least <= pause <= most


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (httpx.ConnectError("x"), True),
        (httpx.ConnectTimeout("x"), True),
        (httpx.PoolTimeout("x"), True),
        (httpx.ReadTimeout("x"), False),
        (httpx.ReadError("x"), False),
        (httpx.WriteError("x"), False),
        (httpx.RemoteProtocolError("x"), False),
    ],
)
async def test_what_may_have_arrived_is_sent_once_by_both_clients(error: Exception, again: bool) -> None:
    once: Call[Any] = Call("POST", "/", as_json, idempotent=False)
    for idempotent, sent in ((False, again), (True, True)):
        call = replace(once, idempotent=idempotent)
        flaky = Flaky([error])
        made = AsyncTransport(Context("http://x", "t"), retry=Retry(3, base=0.001), timeout=1)
        await made.client.aclose()
        made.client = httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(flaky))
        other = Flaky([error])
        if sent:
            assert await made.send(call) == _sync(other).send(call) == {"ok": True}
        else:
            with pytest.raises(ServerUnavailable):
                await made.send(call)
            with pytest.raises(ServerUnavailable):
                _sync(other).send(call)
        assert flaky.calls == other.calls == 1 + sent
        await made.close()


def test_a_long_poll_may_take_its_wait_beside_the_usual_time() -> None:
    seen: list[Any] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.extensions["timeout"], dict(request.url.params), request.headers))
        return httpx.Response(200, json={})

    made = _sync(Flaky([]))
    made.client = httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))
    made.send(Call("GET", "/", as_json, query={"a": None, "b": "", "c": 0, "d": False}, wait=20.0))
    made.send(Call("POST", "/", as_json, body=b"{}", accept="text/x", content_type="text/y"))
    (polled, query, _), (usual, _, headers) = seen
    assert (polled["read"], polled["connect"], usual["read"]) == (21.0, 5.0, 1.0)
    assert query == {"b": "", "c": "0", "d": "false"}
    assert (headers["accept"], headers["content-type"]) == ("text/x", "text/y")


def test_events_are_read_line_by_line() -> None:
    parser = Parser()
    text = 'id: 3\nevent: counts\ndata: {"a":\ndata:1}\n: a comment\n\n'
    text += "retry: 5\n\ndata: {}\n\nid: 9\n\ndata: [2]\n\n"
    events = [event for line in text.split("\n") for event in parser.feed(line)]
    named = [("counts", {"a": 1}), ("message", {}), ("message", [2])]
    assert [(event.name, event.data) for event in events] == named
    assert events[0].id == "3"


def test_files_end_where_the_cursor_stays() -> None:
    pages = Files(lambda cursor: cursor)  # type: ignore[arg-type,return-value]
    assert pages.next() == ""  # type: ignore[comparison-overlap]
    assert pages.take((b"1", "c1", False)) == [b"1"]
    assert (pages.next(), pages.done) == ("c1", False)  # type: ignore[comparison-overlap]
    assert pages.take((b"2", "c2", True)) == [b"2"]
    assert pages.done
    pages = Files(lambda cursor: cursor, "c2")  # type: ignore[arg-type,return-value]
    assert pages.take((b"head", "c2", False)) == []
    assert pages.done


def test_a_token_is_that_of_the_role_and_the_first_of_several(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text('{"worker": "w", "admin": ["new", "old"], "none": []}')
    assert (read_token(path), read_token(path, "worker")) == ("new", "w")
    for role in ("driver", "none"):
        with pytest.raises(ContextError, match=f"no token for the role '{role}'"):
            read_token(path, role)
    path.write_text("just-it\n")
    assert read_token(path, "worker") == "just-it"
    path.write_text(" \n")
    with pytest.raises(ContextError, match="is empty"):
        read_token(path)
    with pytest.raises(ContextError, match="cannot be read"):
        read_token(tmp_path / "none")


def test_a_token_of_the_context_goes_to_its_own_server_only(tmp_path: Path) -> None:
    env = {"ROLLYARD_HOME": str(tmp_path)}
    (tmp_path / "context.json").write_text(json.dumps({"url": "http://c/", "token": "direct"}))
    assert resolve("http://c", None, env) == Context("http://c", "direct")
    assert resolve("http://c/", None, env) == Context("http://c", "direct")
    for url in ("http://elsewhere", "http://c.elsewhere", "https://c", "http://c:80/x"):
        with pytest.raises(ContextError, match="no token"):
            resolve(url, None, env)
        with pytest.raises(ContextError, match="no token"):
            resolve(None, None, {**env, "ROLLYARD_URL": url})
    assert resolve(None, "mine", env) == Context("http://c", "mine")
    assert resolve(None, None, {**env, "ROLLYARD_TOKEN": "of-env"}) == Context("http://c", "of-env")
    assert resolve("http://a", None, {**env, "ROLLYARD_TOKEN": "of-env"}) == Context("http://a", "of-env")
    assert resolve(None, "given", {"ROLLYARD_URL": "http://b", "ROLLYARD_TOKEN": "u"}).token == "given"
    assert context_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/rollyard/context.json")
    assert context_path({"XDG_CONFIG_HOME": "/x", "ROLLYARD_HOME": "/h"}) == Path("/h/context.json")
