"""The watch of pods: what the API server and the connection may do to it, and what is known afterwards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from rollyard_operator.kube import reflector
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import PodCache
from rollyard_operator.kube.reflector import Reflector
from rollyard_process.backoff import Backoff
from rollyard_testing.operator.operatorlab import PATIENCE_SECONDS, until

Answer = Callable[["Stream"], Awaitable[None]]


def pod(name: str, version: int, uid: str = "") -> Object:
    meta = {"name": name, "namespace": "n", "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta}


def listed(version: int, *pods: Object) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(pods)}


def status(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "code": code, "reason": reason, "message": "no"}


class Stream:
    """The answer to one watch."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response
        self.begins = request.query["resourceVersion"]

    async def tell(self, kind: str, obj: Object) -> None:
        await self.write(json.dumps({"type": kind, "object": obj}) + "\n")

    async def write(self, text: str) -> None:
        await self._response.write(text.encode())

    async def bookmark(self, version: int) -> None:
        await self.tell("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": str(version)}})

    def cut(self) -> None:
        """Break the connection without the answer's end."""
        assert self._request.transport is not None
        self._request.transport.close()

    async def hang(self) -> None:
        """Send nothing more."""
        await asyncio.Event().wait()


class Server:
    """An API server with scripted lists and watches, which hangs after the last watch."""

    def __init__(self) -> None:
        self.lists: list[dict[str, Any]] = []
        """The answers to lists, of which the last one is repeated."""
        self.watches: list[Answer | dict[str, Any]] = []
        """The answers to watches."""
        self.asked: list[str] = []
        """The calls: `list`, or `watch` with its version."""
        self.queries: list[dict[str, str]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if "watch" not in request.query:
            self.asked.append("list")
            answer = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
            return web.json_response(answer, status=answer.get("code", 200))
        self.asked.append(f"watch {request.query['resourceVersion']}")
        play = self.watches.pop(0) if self.watches else Stream.hang
        if isinstance(play, dict):
            return web.json_response(play, status=play["code"])
        response = web.StreamResponse()
        await response.prepare(request)
        await play(Stream(request, response))
        return response


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr("rollyard_operator.kube.reflector.TRY_AGAIN", Backoff(first=0.01, longest=0.01))
    monkeypatch.setattr("rollyard_operator.kube.client.PAUSES", Backoff(first=0.0, longest=0.0))
    monkeypatch.setattr("rollyard_operator.kube.client.TIMEOUT_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr("rollyard_operator.kube.client.CONNECT_SECONDS", PATIENCE_SECONDS)
    return Server()


@asynccontextmanager
async def reflecting(
    server: Server, cache: PodCache, namespace: str | None = "n"
) -> AsyncIterator[asyncio.Task[None]]:
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.handle)
    async with TestServer(app, shutdown_timeout=0.1) as listening:
        configuration = client.Configuration()
        configuration.host = str(listening.make_url("")).rstrip("/")
        kube = KubeClient(configuration)
        task = asyncio.create_task(Reflector(kube, "Pod", namespace, "a=b", cache).run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await kube.close()


def names(cache: PodCache) -> dict[str, str]:
    """Return names and resource versions."""
    return {one["metadata"]["name"]: one["metadata"]["resourceVersion"] for one in cache}


async def test_what_is_told_is_kept_and_a_watch_that_ends_goes_on_where_it_was(server: Server) -> None:
    async def first(stream: Stream) -> None:
        await stream.tell("ADDED", pod("b", 11))
        await stream.tell("MODIFIED", pod("a", 12))
        await stream.tell("DELETED", pod("b", 13))
        await stream.bookmark(20)

    async def second(stream: Stream) -> None:
        await stream.tell("ADDED", pod("c", 21))
        await stream.hang()

    server.lists, server.watches = [listed(10, pod("a", 5))], [first, second]
    cache = PodCache()
    async with reflecting(server, cache):
        await until(lambda: "c" in names(cache))
        assert names(cache) == {"a": "12", "c": "21"}
        assert server.asked == ["list", "watch 10", "watch 20"]
    query = server.queries[-1]
    assert (query["labelSelector"], query["allowWatchBookmarks"]) == ("a=b", "true")
    assert int(query["timeoutSeconds"]) > 0


@pytest.mark.parametrize("whole", [True, False], ids=["in a line", "between lines"])
async def test_a_connection_that_breaks_loses_nothing(server: Server, whole: bool) -> None:
    async def broken(stream: Stream) -> None:
        await stream.tell("ADDED", pod("b", 11))
        if not whole:
            await stream.write('{"type":"ADDED","object":{"metadata":{"na')
        stream.cut()

    async def after(stream: Stream) -> None:
        await stream.tell("ADDED", pod("c", 12))
        await stream.hang()

    server.lists, server.watches = [listed(10)], [broken, after]
    cache = PodCache()
    async with reflecting(server, cache):
        await until(lambda: "c" in names(cache))
        assert names(cache) == {"b": "11", "c": "12"}
        assert server.asked == ["list", "watch 10", "watch 11"]


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"type": "ERROR", "object": status(410, "Expired")}),
        json.dumps({"type": "ERROR", "object": status(500, "InternalError")}),
        json.dumps({"type": "ADDED", "object": {"metadata": {"name": "no version"}}}),
        "<html>",
    ],
    ids=["410", "500", "no event", "no JSON"],
)
async def test_after_an_error_in_a_watch_a_list_tells_what_was_deleted_meanwhile(
    server: Server, line: str
) -> None:
    async def ends(stream: Stream) -> None:
        await stream.tell("ADDED", pod("b", 11))
        await stream.write(line + "\n")

    server.lists = [listed(10, pod("a", 5)), listed(20, pod("b", 11), pod("c", 15))]
    server.watches = [ends]
    gone: list[str] = []
    cache = PodCache(lambda one: gone.append(one["metadata"]["name"]))
    async with reflecting(server, cache):
        await until(lambda: "watch 20" in server.asked)
        assert names(cache) == {"b": "11", "c": "15"}
        assert gone[-1] == "a", "its job is woken"
        assert server.asked == ["list", "watch 10", "list", "watch 20"]


async def test_a_version_that_is_too_old_for_a_watch_is_followed_by_a_list(server: Server) -> None:
    server.lists = [listed(10, pod("a", 5)), status(503, "ServiceUnavailable"), listed(20)]
    server.watches = [status(410, "Expired")]
    cache = PodCache()
    async with reflecting(server, cache):
        await until(lambda: "watch 20" in server.asked)
        assert names(cache) == {}
        assert server.asked == ["list", "watch 10", "list", "list", "watch 20"]


async def test_what_was_seen_later_than_a_list_is_not_taken_for_gone() -> None:
    cache = PodCache()
    cache.put(pod("old", 5))
    cache.put(pod("new", 25))  # This is the answer to a call of our own, while the list was on its way.
    elsewhere = pod("elsewhere", 5)
    elsewhere["metadata"]["namespace"] = "m"
    cache.put(elsewhere)
    cache.take([pod("other", 8)], 20, "n")
    assert names(cache) == {"new": "25", "elsewhere": "5", "other": "8"}
    cache.take([], 30)
    assert names(cache) == {}


async def test_a_watch_that_hangs_is_begun_anew(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_operator.kube.client.SILENT_SECONDS", 0.2)

    async def hangs(stream: Stream) -> None:
        # One that seems silent because this machine stands still is asked for again.
        await stream.tell("ADDED", pod("b", 11) if stream.begins == "10" else pod("c", 12))
        await stream.hang()

    server.lists, server.watches = [listed(10)], [hangs] * 1000
    cache = PodCache()
    async with reflecting(server, cache):
        await until(lambda: "c" in names(cache))
        assert names(cache) == {"b": "11", "c": "12"}
        assert list(dict.fromkeys(server.asked))[:3] == ["list", "watch 10", "watch 11"]
        assert server.asked.count("list") == 1


@pytest.mark.parametrize(
    ("code", "namespace"), [(401, "n"), (401, None), (403, None)], ids=["401", "401, all", "403, all"]
)
async def test_who_is_refused_for_good_ends(
    server: Server, monkeypatch: pytest.MonkeyPatch, code: int, namespace: str | None
) -> None:
    monkeypatch.setattr(reflector, "REFUSED_SECONDS", 0.1)
    server.lists = [status(code, "No")]
    async with reflecting(server, PodCache(), namespace) as task:
        with pytest.raises(KubeError) as refused:
            await asyncio.wait_for(task, PATIENCE_SECONDS)
        assert refused.value.status == code
    assert len(server.asked) > 1, "not at the first refusal"


async def test_a_refusal_between_answers_is_not_one_for_good(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "REFUSED_SECONDS", 0.0)

    async def goes_on(stream: Stream) -> None:
        await stream.bookmark(11)

    server.lists = [listed(10)]
    server.watches = [status(401, "Unauthorized"), goes_on, status(401, "Unauthorized"), goes_on]
    async with reflecting(server, PodCache()) as task:
        await until(lambda: server.asked.count("watch 11") == 2)
        assert not task.done()


async def test_a_namespace_without_rights_is_watched_once_they_are_there(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "REFUSED_SECONDS", 0.0)
    server.lists = [*[status(403, "Forbidden")] * 4, listed(10, pod("a", 5))]
    cache = PodCache()
    async with reflecting(server, cache):
        await until(lambda: "watch 10" in server.asked)
        assert names(cache) == {"a": "5"}
        assert server.asked.count("list") == 5


async def test_an_api_server_that_ends_each_watch_at_once_is_given_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    class Noted:
        def pause(self, failed: int) -> float:
            failures.append(failed)
            return 0.0

    monkeypatch.setattr(reflector, "TRY_AGAIN", Noted())

    async def nothing(stream: Stream) -> None:
        return

    async def something(stream: Stream) -> None:
        await stream.bookmark(11)

    server.lists, server.watches = [listed(10)], [nothing, nothing, nothing, something, nothing]
    async with reflecting(server, PodCache()):
        await until(lambda: server.asked[-1:] == ["watch 11"] and len(server.asked) == 7)
    assert failures == [1, 2, 3, 1, 2]
