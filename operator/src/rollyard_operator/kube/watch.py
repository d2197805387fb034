"""A watch of the Kubernetes API: one long answer with a line per event. Each line is parsed once."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from urllib.parse import urlencode

import aiohttp
import orjson
from kubernetes.aio import client

from rollyard_operator.kube.client import FIELD_MANAGER, UNREACHABLE, KubeClient, send, unreachable
from rollyard_operator.kube.errors import KubeError, refusal
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.resources import RESOURCES

CONNECT_SECONDS = 10.0
WATCH_SECONDS = (240, 300)
"""The range, in seconds, from which the duration of a watch is chosen.

It is random to spread the starts of the watches.
"""
SILENT_SECONDS = 90.0
"""A watch without any line for this many seconds hangs, because a bookmark arrives every minute."""
LINE_BYTES = 16 * 1024 * 1024
"""The maximum length of a line in bytes. No object is that large."""
_NEEDED = ("resourceVersion", "uid", "namespace", "name")


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One line of a watch."""

    type: str
    """The type of the event: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`."""
    object: Object
    """The object. A bookmark contains only the resource version."""


class WatchError(KubeError):
    """The API server ended a watch with an event of type `ERROR`. Changes since then are unknown."""


class KubeWatch:
    """Lists and watches. Watches have their own connections, because a client's pool may be too small."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self._api = client.ApiClient(kube.configuration)
        self._api.rest_client.maxsize = 0  # There is no limit, because each namespace has a watch.
        self._api.user_agent = FIELD_MANAGER

    async def close(self) -> None:
        """Close all connections."""
        await self._api.close()

    async def snapshot(self, kind: str, namespace: str | None, selector: str) -> tuple[list[Object], str]:
        """Return all objects of one namespace or (None) of all, and the resource version to watch from.

        Raises:
            KubeError: The API server refused, or did not answer after several attempts.
        """
        return await self._kube.snapshot(kind, namespace, selector)

    async def watch(
        self, kind: str, namespace: str | None, selector: str, version: str
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield the events after a resource version until the API server ends the watch.

        Raises:
            WatchError: The API server ended the watch with an error.
            KubeError: The API server refused the watch (410: the version is too old), or the connection broke
                or hung (status 0).
        """
        seconds = random.randint(*WATCH_SECONDS)
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        } | ({"labelSelector": selector} if selector else {})
        timeout = aiohttp.ClientTimeout(
            total=seconds + SILENT_SECONDS, sock_connect=CONNECT_SECONDS, sock_read=SILENT_SECONDS
        )
        url = f"{RESOURCES[kind].path(namespace)}?{urlencode(query)}"
        try:
            answer = await send(self._api, "GET", url, timeout)
            try:
                if answer.status != 200:
                    raise refusal(answer.status, await answer.read(), answer.headers.get("Retry-After"))
                async for line in _lines(answer.response.content):
                    yield _event(line)
            finally:
                answer.response.close()
        except UNREACHABLE as error:
            raise unreachable(error) from error


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield whole lines. A line without an end was cut off and comes again in the next watch."""
    rest = b""
    async for block in content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > LINE_BYTES:
            raise WatchError(0, "BadEvent", f"a line of a watch is longer than {LINE_BYTES} bytes")


def _event(line: bytes) -> WatchEvent:
    try:
        document = orjson.loads(line)
        event = WatchEvent(str(document["type"]), document["object"])
        if event.type != "ERROR":
            meta = event.object["metadata"]
            # These fields are checked here because every reader of the object uses them.
            for name in ("resourceVersion",) if event.type == "BOOKMARK" else _NEEDED:
                str(meta[name])
            return event
        code, reason = int(event.object.get("code") or 500), str(event.object.get("reason") or "Error")
        message = str(event.object.get("message") or "the watch was ended")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WatchError(0, "BadEvent", f"a line of a watch is no event: {line[:100]!r}") from error
    raise WatchError(code, reason, message)
