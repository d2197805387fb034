"""The client of the Kubernetes API. It uses plain dicts, few verbs and a limited number of retries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
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

FIELD_MANAGER = MANAGER
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


def _again(error: KubeError) -> bool:
    if error.status == 409:
        # Two clients wrote at once. A retry does not help if a name is taken or a precondition failed.
        return error.reason == "Conflict" and "recondition" not in error.message
    return error.status in (0, 429) or error.status >= 500


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The address and the credentials of an API server, for other clients of the same server."""

    server: str
    ca_file: str | None
    insecure: bool
    scheme: str | None
    token: str | None
    cert_file: str | None
    key_file: str | None
    proxy: str | None


UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)
"""The errors of a call that does not reach the API server or whose connection breaks."""


def unreachable(error: BaseException) -> KubeError:
    """Return such an error as a KubeError."""
    told = f"{type(error).__name__}: {error}".rstrip(": ")
    return KubeError(0, "Unreachable", f"the API server does not answer ({told})")


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
    """The implementation of Kube for a real API server, with `kubernetes.aio`."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._configuration = configuration
        # The API server is never behind the proxy that the environment may name.
        configuration.client_session_kwargs = {"trust_env": False}
        self._api = client.ApiClient(configuration)
        self._api.user_agent = FIELD_MANAGER

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
        await self._api.close()

    @property
    def configuration(self) -> client.Configuration:
        """The configuration of this client, for other clients that share its credentials."""
        return self._configuration

    async def _once(self, method: str, url: str, kind: str, body: Any) -> Object:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        try:
            answer = await send(self._api, method, url, timeout, kind, body)
            content: bytes = await answer.read()
        except UNREACHABLE as error:
            raise unreachable(error) from error
        if not 200 <= answer.status < 300:
            raise refusal(answer.status, content, answer.headers.get("Retry-After"))
        found: Object = orjson.loads(content)
        return found

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

    async def access(self) -> ClusterAccess:
        """Return what this client uses to connect. A token that is replaced regularly is read again."""
        own = self._configuration
        header = await own.get_api_key_with_prefix("BearerToken") or ""
        scheme, _, token = header.rpartition(" ")
        return ClusterAccess(
            server=own.host,
            ca_file=own.ssl_ca_cert,
            insecure=not own.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            cert_file=own.cert_file,
            key_file=own.key_file,
            proxy=own.proxy,
        )

    async def version(self) -> str:
        """Return the version of the API server as `major.minor`."""
        found = await self._call("GET", "/version")
        return f"{found['major']}.{str(found['minor']).rstrip('+')}"

    async def apply(self, obj: Object, *, force: bool = True) -> Object:
        """Apply an object at the server, and return it as it is stored."""
        meta = obj["metadata"]
        path = RESOURCES[obj["kind"]].path(meta["namespace"], meta["name"])
        query = {"fieldManager": FIELD_MANAGER, "force": "true" if force else "false"}
        return await self._call("PATCH", path, query=query, kind=_APPLY, body=obj)

    async def create(self, obj: Object) -> Object:
        """Create an object, and return it as it is stored."""
        path = RESOURCES[obj["kind"]].path(obj["metadata"]["namespace"])
        return await self._call("POST", path, query={"fieldManager": FIELD_MANAGER}, body=obj)

    async def delete(
        self, kind: str, namespace: str, name: str, *, grace: int | None = None, uid: str | None = None
    ) -> None:
        """Delete an object. It need not exist."""
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
        found: list[Object] = []
        while True:
            page = await self._call("GET", resource.path(namespace), query=query)
            # The API server omits these two fields in the items of a list.
            found += [{"apiVersion": resource.api, "kind": kind} | item for item in page["items"]]
            more = page["metadata"].get("continue")
            if not more:
                return found, str(page["metadata"].get("resourceVersion", ""))
            query["continue"] = more

    async def snapshot(
        self, kind: str, namespace: str | None, selector: str = ""
    ) -> tuple[list[Object], str]:
        """Return the same as `list`, and the resource version of the list, where a watch continues."""
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
        """Return the objects of a namespace, or those that a selector chooses."""
        return (await self.snapshot(kind, namespace, selector))[0]

    async def _merge(self, path: str, body: Object, *, again: bool = True) -> Object | None:
        try:
            return await self._call(
                "PATCH", path, query={"fieldManager": FIELD_MANAGER}, kind=_MERGE, body=body, again=again
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
        """Merge into an object, and return it, or None if it does not exist or is another one."""
        conditions = {"uid": uid, "resourceVersion": version}
        given = {key: value for key, value in conditions.items() if value is not None}
        if given:
            body = body | {"metadata": {**body.get("metadata", {}), **given}}
        try:
            return await self._merge(RESOURCES[kind].path(namespace, name), body, again=version is None)
        except KubeError as error:
            if uid is not None and error.status in (409, 422) and "uid" in error.message.lower():
                return None
            raise

    async def patch_status(
        self, kind: str, namespace: str, name: str, status: Object, *, version: str | None = None
    ) -> Object | None:
        """Merge into an object's status, and return the object, or None if it does not exist."""
        path = RESOURCES[kind].path(namespace, name, "status")
        if version is None:
            return await self._merge(path, {"status": status})
        body = {"metadata": {"resourceVersion": version}, "status": status}
        return await self._merge(path, body, again=False)

    async def event(self, obj: Object, type: str, reason: str, message: str) -> None:
        """Record an event about an object."""
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
                "source": {"component": FIELD_MANAGER},
                "reportingComponent": FIELD_MANAGER,
                "firstTimestamp": stamp,
                "lastTimestamp": stamp,
                "count": 1,
            }
        )
