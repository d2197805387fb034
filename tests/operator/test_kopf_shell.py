"""kopf beside the operator's loops: what it sees, what ends it, and that it is started again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from rollyard_operator.kopf_shell import run_under_kopf
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.resources import OWN_KINDS
from rollyard_process.backoff import Backoff
from rollyard_testing.operator.operatorlab import until

API = "rollyard.dev/v1alpha1"
PLURALS = {"RolloutJob": "rolloutjobs", "BackendPool": "backendpools"}


def thing(name: str, version: int) -> Object:
    meta = {"name": name, "namespace": "n", "uid": f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": API, "kind": "RolloutJob", "metadata": meta, "spec": {}}


class ApiServer:
    """An API server that answers discovery, lists nothing, and ends each watch of jobs as its script says."""

    def __init__(self, scripts: list[list[str]]) -> None:
        self.scripts = scripts
        """The lines of each watch of jobs. The connection stays open after those of the last watch."""
        self.watches = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/api":
            return web.json_response({"versions": ["v1"]})
        if request.path == "/api/v1":
            # kopf watches nothing before it has found this kind.
            kind = {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False}
            return web.json_response({"resources": [kind | {"verbs": ["get"]}]})
        if request.path == "/apis":
            version = {"version": "v1alpha1", "groupVersion": API}
            group = {"name": "rollyard.dev", "versions": [version], "preferredVersion": version}
            return web.json_response({"groups": [group]})
        if request.path == f"/apis/{API}":
            verbs = ["get", "list", "watch"]
            kinds = [
                {"name": PLURALS[kind], "singularName": "", "kind": kind, "namespaced": True, "verbs": verbs}
                for kind in OWN_KINDS
            ]
            return web.json_response({"resources": kinds})
        if "watch" not in request.query:
            return web.json_response({"metadata": {"resourceVersion": "10"}, "items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        if request.path.endswith("/rolloutjobs"):
            self.watches += 1
            for line in self.scripts.pop(0) if self.scripts else ():
                await response.write(line.encode() + b"\n")
            if self.scripts:
                return response
        await asyncio.Event().wait()
        return response


class Seen:
    """What kopf has reported."""

    def __init__(self) -> None:
        self.events: list[tuple[str | None, str]] = []
        self.broke = 0
        self.namespaces: frozenset[str | None] = frozenset({"n"})

    def watchable(self) -> frozenset[str | None]:
        return self.namespaces

    def seen(self, type: str | None, obj: Object) -> None:
        self.events.append((type, obj["metadata"]["name"]))

    def watches_broke(self) -> None:
        self.broke += 1

    def alive(self) -> bool:
        return True


def line(type: str, obj: Object) -> str:
    return json.dumps({"type": type, "object": obj})


@asynccontextmanager
async def under_kopf(server: ApiServer, seen: Seen, work: asyncio.Event) -> AsyncIterator[asyncio.Task[None]]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.handle)
    async with TestServer(app, shutdown_timeout=0.1) as listening:
        configuration = client.Configuration()
        configuration.host = str(listening.make_url("")).rstrip("/")
        kube = KubeClient(configuration)

        async def loops() -> None:
            await work.wait()

        task = asyncio.create_task(run_under_kopf(loops, seen, kube, ""))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await kube.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_operator.kopf_shell.TRY_AGAIN", Backoff(first=0.01, longest=0.01))


@pytest.mark.parametrize(
    ("ending", "restarts"),
    [
        (line("ERROR", {"code": 500, "reason": "InternalError"}), 1),
        ("<html>", 1),
        (line("ERROR", {"code": 410, "reason": "Expired"}), 0),
        ("", 0),
    ],
    ids=["error event", "no JSON", "410", "end"],
)
async def test_a_watch_that_ends_is_followed_by_another(ending: str, restarts: int) -> None:
    seen, work = Seen(), asyncio.Event()
    server = ApiServer([[line("ADDED", thing("a", 11)), ending], [line("ADDED", thing("b", 12))]])
    async with under_kopf(server, seen, work) as task:
        await until(lambda: ("ADDED", "b") in seen.events)
        assert seen.events == [("ADDED", "a"), ("ADDED", "b")]
        assert (seen.broke, server.watches, task.done()) == (restarts, 2, False)
        work.set()
        await asyncio.wait_for(task, 30)


async def test_a_cancelled_task_of_kopf_starts_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator takes it for a failure of kopf, and not for its own end."""
    spawn, runs = kopf.spawn_tasks, 0

    async def spawned(**options: Any) -> Any:
        nonlocal runs
        tasks = await spawn(**options)
        runs += 1
        if runs == 1:
            next(task for task in tasks if task.get_name() == "multidimensional multitasker").cancel()
        return tasks

    monkeypatch.setattr(kopf, "spawn_tasks", spawned)
    seen, work = Seen(), asyncio.Event()
    async with under_kopf(ApiServer([[line("ADDED", thing("a", 11))]]), seen, work) as task:
        await until(lambda: ("ADDED", "a") in seen.events)
        assert (runs, seen.broke, task.done()) == (2, 1, False)
        work.set()
        await asyncio.wait_for(task, 30)


async def test_a_namespace_is_watched_once_it_may_be_read() -> None:
    seen, work = Seen(), asyncio.Event()
    seen.namespaces = frozenset({"m"})
    server = ApiServer([[line("ADDED", thing("a", 11))]])
    async with under_kopf(server, seen, work):
        await until(lambda: ("ADDED", "a") in seen.events)
        before = server.watches
        seen.namespaces = frozenset({"m", "n"})
        await until(lambda: server.watches >= before + 2)
        assert seen.broke == 0
