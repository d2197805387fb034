"""Open waits: long polls and event streams of one namespace leave room and speed to the others."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from rollyard_api.rollouts import leasing
from rollyard_api.storage.database import Transaction
from rollyard_testing.adversary.restplane import Yard, control_plane
from rollyard_testing.adversary.tenants import a_process, finish, outcome, read
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

pytestmark = pytest.mark.attack(boundary="tenants")


POLLS = 1000
WORKERS = 300


async def submit(yard: Yard, namespace: str, name: str, **spec: Any) -> None:
    """Submit a stream in a namespace."""
    body = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}, **spec}
    manifest = job_manifest(name, body, namespace=namespace)
    answer = await yard.admin.post("/v1/rolloutjobs", json=manifest)
    assert answer.status_code == 201, answer.text


async def ended(tasks: list[asyncio.Task[httpx.Response]]) -> list[httpx.Response]:
    for task in tasks:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    return [one for one in found if isinstance(one, httpx.Response)]


MANY_POLLS = pytest.mark.attack(
    "a thousand of one namespace leave another one's poll no room or no speed",
    surface="long polls",
    stopped_by="they are counted by namespace, and look at the database a few at a time",
)


@MANY_POLLS
async def test_a_thousand_polls_of_one_namespace_leave_another_ones_poll_alone(tmp_path: Path) -> None:
    async with control_plane(tmp_path, max_polls_per_namespace=POLLS) as yard:
        await submit(yard, "greedy", "job")
        await yard.submit("job", tasks=1)
        admin = yard.admin
        query = {"namespace": "greedy", "wait": 60}
        greedy = [
            asyncio.create_task(admin.get("/v1/rolloutjobs/job/trajectories", params=query))
            for _ in range(POLLS)
        ]

        async def all_wait() -> bool:
            return yard.plane.polls.open("greedy") == POLLS

        await eventually(all_wait)
        refused = await admin.get("/v1/rolloutjobs/job/groups", params=query)
        assert (refused.status_code, refused.json()["reason"]) == (429, "TooManyWaits")
        assert refused.headers["retry-after"]
        at_once = await admin.get("/v1/rolloutjobs/job/groups", params={"namespace": "greedy"})
        assert at_once.status_code == 200, "what does not wait is answered"

        mine = asyncio.create_task(read(admin, "job", wait=60))

        async def waits() -> bool:
            return yard.plane.polls.open("default") == 1

        await eventually(waits)
        assert await finish(yard, "job") == 1
        answer = await mine
        assert len(answer.content.splitlines()) == 1
        assert not any(task.done() for task in greedy)
        await ended(greedy)

        async def none() -> bool:
            return yard.plane.polls.open("greedy") == 0

        await eventually(none)


@pytest.mark.attack(
    "hundreds of idle workers of one job make every change of the queues costly",
    surface="leases",
    stopped_by="those that ask for the same look once",
)
async def test_many_idle_workers_of_one_job_cost_few_looks_at_the_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_plane(tmp_path) as yard:
        await submit(yard, "greedy", "idle")
        await yard.submit("job", tasks=1)
        asked: list[str | None] = []
        grant = leasing.grant

        def counted(tx: Transaction, ask: Any, *args: Any, **options: Any) -> Any:
            asked.append(ask.namespace)
            return grant(tx, ask, *args, **options)

        monkeypatch.setattr(leasing, "grant", counted)
        monkeypatch.setattr("rollyard_api.core.wakeups.IDLE_SECONDS", 3600.0)
        worker = yard.worker
        place = {"job": "idle", "namespace": "greedy", "wait": 60}
        body = {"worker": "w", "node": "n", "capacity": {"init": 1}, **place}
        idle = [asyncio.create_task(worker.post("/v1/leases", json=body)) for _ in range(WORKERS)]

        async def all_wait() -> bool:
            return yard.plane.worker_polls.open("greedy") == WORKERS

        await eventually(all_wait)
        asked.clear()
        assert await finish(yard, "job") == 1
        assert (await yard.client(None).get("/readyz")).status_code == 200
        # Each change of the queues wakes them all. Those that read at the same moment do so once together.
        assert asked.count("greedy") <= 20 * len([one for one in asked if one != "greedy"])
        push = await yard.admin.post(
            "/v1/rolloutjobs/idle/tasks",
            params={"namespace": "greedy"},
            json={"tasks": [{"id": "t", "prompt": "p"}]},
        )
        assert push.status_code == 200, push.text
        done, _ = await asyncio.wait(idle, return_when=asyncio.FIRST_COMPLETED, timeout=patience(60))
        leases = [one for task in done for one in task.result().json()["leases"]]
        assert len(leases) == 1, "and none of them is passed over"
        await ended(idle)


@MANY_POLLS
async def test_polls_of_workers_are_bounded_for_each_namespace(tmp_path: Path) -> None:
    async with control_plane(tmp_path, max_worker_polls_per_namespace=3) as yard:
        await submit(yard, "greedy", "job")
        await submit(yard, "modest", "job")
        worker = yard.worker

        def ask(namespace: str, wait: float) -> dict[str, Any]:
            capacity = {"init": 1}
            return {"worker": "w", "node": "n", "capacity": capacity, "namespace": namespace, "wait": wait}

        tasks = [asyncio.create_task(worker.post("/v1/leases", json=ask("greedy", 60))) for _ in range(3)]

        async def all_wait() -> bool:
            return yard.plane.worker_polls.open("greedy") == 3

        await eventually(all_wait)
        refused = await worker.post("/v1/leases", json=ask("greedy", 1))
        assert (refused.status_code, refused.json()["reason"]) == (429, "TooManyWaits")
        assert (await worker.post("/v1/leases", json=ask("greedy", 0))).status_code == 200
        assert (await worker.post("/v1/leases", json=ask("modest", 0.1))).status_code == 200
        await ended(tasks)


@pytest.mark.attack(
    "a client asks for much and reads nothing, or opens event streams without end",
    surface="connections",
    stopped_by="pages on their way and streams are counted by namespace, and the kernel closes "
    "connections that stall",
)
async def test_a_reader_that_stalls_is_cut_off_and_streams_are_bounded(tmp_path: Path) -> None:
    """One page may be on its way at a time, and a reader asks for it and takes nothing of it."""
    options = ("--max-pages-per-namespace", "1", "--max-streams-per-namespace", "2", "--stall-seconds", "1")
    async with a_process(tmp_path, *options) as (url, tokens):
        admin = httpx.AsyncClient(
            base_url=url, headers=bearer(tokens["admin"]), timeout=patience(60), trust_env=False
        )
        worker = httpx.AsyncClient(
            base_url=url, headers=bearer(tokens["worker"]), timeout=patience(60), trust_env=False
        )
        async with admin, worker:
            inline = [{"id": f"t{i}", "prompt": "p"} for i in range(4)]
            manifest = job_manifest(
                "job", {"tasks": {"inline": inline}, "handler": "shell", "agent": {"type": "oracle"}}
            )
            assert (await admin.post("/v1/rolloutjobs", json=manifest)).status_code == 201
            for stage in ("init", "run", "eval"):
                ask = {"worker": "w", "node": "n-job", "capacity": {stage: 4}, "job": "job"}
                leases = (await worker.post("/v1/leases", json=ask)).json()["leases"]
                results = [outcome(one, notes="x" * 3_000_000) for one in leases]
                done = await worker.post("/v1/leases/complete", json={"worker": "w", "results": results})
                assert [one["outcome"] for one in done.json()["outcomes"]] == ["accepted"] * 4

            with stalled(url, "/v1/rolloutjobs/job/trajectories", tokens["admin"]) as first:
                assert first.startswith(b"HTTP/1.1 200"), "its answer has begun"
                page = await admin.get("/v1/rolloutjobs/job/trajectories")
                assert page.status_code == 200, "the place of the reader that stalls is free again"
                assert len(page.content.splitlines()) == 4

            async with AsyncExitStack() as streams:
                events = "/v1/rolloutjobs/job/events"
                await admin.post("/v1/rolloutjobs", json={**manifest, "metadata": {"name": "other"}})
                events = "/v1/rolloutjobs/other/events"
                for _ in range(2):
                    opened = await streams.enter_async_context(admin.stream("GET", events))
                    assert opened.status_code == 200
                refused = await admin.get(events)
                assert (refused.status_code, refused.json()["reason"]) == (429, "TooManyWaits")

            async def room() -> bool:
                async with admin.stream("GET", events) as again:
                    return again.status_code == 200

            await eventually(room)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@contextmanager
def stalled(url: str, path: str, token: str) -> Iterator[bytes]:
    """Yield the beginning of an answer to a client that takes no more of it."""
    parts = urlsplit(url)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(patience(60))
        client.connect((parts.hostname or "", parts.port or 0))
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        yield client.recv(64)
