"""The client of the Kubernetes API. It uses plain dicts, few verbs and a limited number of retries.

A watch is one long answer with a line per event. Each line is parsed once.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self
from urllib.parse import urlencode

import aiohttp
import orjson
from kubernetes.aio import client, config
from kubernetes.aio.client import rest
from rollyard_process.backoff import Backoff

from rollyard_operator.kube.errors import KubeError, refusal
from rollyard_operator.kube.labels import MANAGER, Object
from rollyard_operator.kube.resources import RESOURCES

TIMEOUT_SECONDS = 15.0
ATTEMPTS = 5
PAUSES: Final = Backoff(first=0.1, longest=2.0, jitter=0.5)
"""The pauses between the attempts of one request."""
TRY_AGAIN: Final = Backoff(first=0.25, longest=15.0, jitter=0.25)
"""The pauses between the tries of something that is retried without limit, such as a watch."""
PAGE = 500
GONE = 410
_JSON = "application/json"
_MERGE = "application/merge-patch+json"
_APPLY = "application/apply-patch+yaml"
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


def _again(error: KubeError) -> bool:
    if error.status == 409:
        # Two clients wrote at once. A retry does not help if a name is taken or a precondition failed.
        return error.reason == "Conflict" and "recondition" not in error.message
    return error.status in (0, 429) or error.status >= 500


UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)
"""The errors of a call that does not reach the API server or whose connection breaks."""


def unreachable(error: BaseException) -> KubeError:
    """Return such an error as a KubeError."""
    text = f"{type(error).__name__}: {error}".rstrip(": ")
    return KubeError(0, "Unreachable", f"the API server does not answer ({text})")


async def send(
    api: client.ApiClient,
    method: str,
    url: str,
    timeout: aiohttp.ClientTimeout,
    kind: str = _JSON,
    body: Any = None,
) -> rest.RESTResponse:
    """Send a request with the client's credentials, and return once the answer begins. Raises UNREACHABLE."""
    headers = {"Accept": _JSON, "Content-Type": kind, **api.default_headers}
    await api.update_params_for_auth(headers, [], ["BearerToken"], url, method, body)
    answer: rest.RESTResponse = await api.rest_client.request(
        method, api.configuration.host + url, headers=headers, body=body, _request_timeout=timeout
    )
    return answer


class KubeClient:
    """The calls to a cluster that the operator needs. All of them raise KubeError."""

    def __init__(self, configuration: client.Configuration) -> None:
        # The API server is never behind the proxy that the environment may name.
        configuration.client_session_kwargs = {"trust_env": False}
        self.configuration = configuration
        """The address and the credentials, for other clients of the same API server."""
        self._api = client.ApiClient(configuration)
        self._api.user_agent = MANAGER
        # Watches have their own connections without a limit, because each namespace has a watch.
        self._watch_api = client.ApiClient(configuration)
        self._watch_api.rest_client.maxsize = 0
        self._watch_api.user_agent = MANAGER

    @classmethod
    async def connect(cls) -> Self:
        """Connect with the pod's service account, or else with a kubeconfig ($KUBECONFIG, ~/.kube/config).

        Raises:
            KubeError: There is neither a service account nor a kubeconfig.
        """
        configuration = client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
                config.load_incluster_config(client_configuration=configuration)
            else:
                await config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError) as error:
            raise KubeError(0, "NoCluster", f"no access to a cluster: {error}") from error
        return cls(configuration)

    async def close(self) -> None:
        """Close all connections."""
        await self._watch_api.close()
        await self._api.close()

    async def _once(self, method: str, url: str, kind: str, body: Any) -> Object:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            answer = await send(self._api, method, url, timeout, kind, body)
            content: bytes = await answer.read()
        except UNREACHABLE as error:
            raise unreachable(error) from error
        if not 200 <= answer.status < 300:
            raise refusal(answer.status, content, answer.headers.get("Retry-After"))
        document: Object = orjson.loads(content)
        return document

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = _JSON,
        body: Any = None,
        again: bool = True,
    ) -> Object:
        """Send a request with retries. `again` says whether a conflict is worth another attempt."""
        url = path + (f"?{urlencode(query)}" if query else "")
        for attempt in range(ATTEMPTS):
            try:
                return await self._once(method, url, kind, body)
            except KubeError as error:
                if attempt + 1 == ATTEMPTS or not _again(error) or (error.status == 409 and not again):
                    raise
                await asyncio.sleep(PAUSES.pause(attempt + 1, error.retry_after))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def version(self) -> str:
        """Return the version of the API server as `major.minor`."""
        version = await self._call("GET", "/version")
        return f"{version['major']}.{str(version['minor']).rstrip('+')}"

    async def apply(self, obj: Object) -> Object:
        """Create or change an object by server-side apply, and return it as it is stored."""
        meta = obj["metadata"]
        path = RESOURCES[obj["kind"]].path(meta["namespace"], meta["name"])
        query = {"fieldManager": MANAGER, "force": "true"}
        return await self._call("PATCH", path, query=query, kind=_APPLY, body=obj)

    async def create(self, obj: Object) -> Object:
        """Create an object, and return it as it is stored. Raise KubeConflict if the name is taken."""
        path = RESOURCES[obj["kind"]].path(obj["metadata"]["namespace"])
        return await self._call("POST", path, query={"fieldManager": MANAGER}, body=obj)

    async def delete(
        self, kind: str, namespace: str, name: str, *, grace: int | None = None, uid: str | None = None
    ) -> None:
        """Delete an object. It is not an error if the object is gone or has another uid."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        try:
            await self._call("DELETE", RESOURCES[kind].path(namespace, name), body=body)
        except KubeError as error:
            if error.status != 404 and not (uid is not None and error.status == 409):
                raise

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """Return an object, or None if it does not exist."""
        try:
            return await self._call("GET", RESOURCES[kind].path(namespace, name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def _pages(self, kind: str, namespace: str | None, selector: str) -> tuple[list[Object], str]:
        resource = RESOURCES[kind]
        query = {"limit": str(PAGE)} | ({"labelSelector": selector} if selector else {})
        objects: list[Object] = []
        while True:
            page = await self._call("GET", resource.path(namespace), query=query)
            # The API server omits these two fields in the items of a list.
            objects += [{"apiVersion": resource.api, "kind": kind} | item for item in page["items"]]
            more = page["metadata"].get("continue")
            if not more:
                return objects, str(page["metadata"].get("resourceVersion", ""))
            query["continue"] = more

    async def snapshot(
        self, kind: str, namespace: str | None, selector: str = ""
    ) -> tuple[list[Object], str]:
        """Return all objects of one namespace or (None) of all, and the resource version to watch from."""
        for attempt in range(ATTEMPTS):
            try:
                return await self._pages(kind, namespace, selector)
            except KubeError as error:
                # Listing took so long that the cluster has forgotten the state that the next page is from.
                if error.status != GONE or attempt + 1 == ATTEMPTS:
                    raise
                await asyncio.sleep(PAUSES.pause(attempt + 1, error.retry_after))
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def list(self, kind: str, namespace: str | None, selector: str = "") -> list[Object]:
        """Return all objects of one namespace or (None) of all, or those that a selector chooses."""
        return (await self.snapshot(kind, namespace, selector))[0]

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
            answer = await send(self._watch_api, "GET", url, timeout)
            try:
                if answer.status != 200:
                    raise refusal(answer.status, await answer.read(), answer.headers.get("Retry-After"))
                async for line in _lines(answer.response.content):
                    yield _event(line)
            finally:
                answer.response.close()
        except UNREACHABLE as error:
            raise unreachable(error) from error

    async def _merge(self, path: str, body: Object, *, again: bool = True) -> Object | None:
        try:
            return await self._call(
                "PATCH", path, query={"fieldManager": MANAGER}, kind=_MERGE, body=body, again=again
            )
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    async def patch(
        self,
        kind: str,
        namespace: str,
        name: str,
        body: Object,
        *,
        uid: str | None = None,
        version: str | None = None,
    ) -> Object | None:
        """Merge into an object, and return it, or None if it does not exist or has another uid.

        Raises:
            KubeConflict: The object has another resource version than `version`.
        """
        preconditions = {"uid": uid, "resourceVersion": version}
        required = {key: value for key, value in preconditions.items() if value is not None}
        if required:
            body = body | {"metadata": {**body.get("metadata", {}), **required}}
        try:
            return await self._merge(RESOURCES[kind].path(namespace, name), body, again=version is None)
        except KubeError as error:
            if uid is not None and error.status in (409, 422) and "uid" in error.message.lower():
                return None
            raise

    async def patch_status(
        self, kind: str, namespace: str, name: str, status: Object, *, version: str
    ) -> Object | None:
        """Merge into an object's status, and return the object, or None if it does not exist.

        The API server checks no uid when it writes a status.

        Raises:
            KubeConflict: The object has another resource version than `version`.
        """
        body = {"metadata": {"resourceVersion": version}, "status": status}
        return await self._merge(RESOURCES[kind].path(namespace, name, "status"), body, again=False)

    async def event(self, obj: Object, type: str, reason: str, message: str) -> None:
        """Create an event about an object. `type` is `Normal` or `Warning`."""
        meta = obj["metadata"]
        now = datetime.now(UTC)
        stamp = now.isoformat(timespec="seconds").replace("+00:00", "Z")
        await self.create(
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {
                    "name": f"{meta['name']}.{int(now.timestamp() * 1e9):x}",
                    "namespace": meta["namespace"],
                },
                "involvedObject": {
                    "apiVersion": obj["apiVersion"],
                    "kind": obj["kind"],
                    "name": meta["name"],
                    "namespace": meta["namespace"],
                    "uid": meta["uid"],
                },
                "type": type,
                "reason": reason,
                "message": message[:1024],
                "source": {"component": MANAGER},
                "reportingComponent": MANAGER,
                "firstTimestamp": stamp,
                "lastTimestamp": stamp,
                "count": 1,
            }
        )


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
        raise WatchError(0, "BadEvent", f"a line of a watch is not an event: {line[:100]!r}") from error
    raise WatchError(code, reason, message)
