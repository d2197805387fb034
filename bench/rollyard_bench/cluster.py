"""A real cluster for measurements, observed from outside with a few calls, and with watches that note the
time.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import orjson
from kubernetes.aio import client, config

from rollyard_bench.processes import ROOT, Missing, ProgramFailed, output

LOCK = "/tmp/kube-lab.lock"
START_SECONDS = 120.0
IMAGES_SECONDS = 300.0
PODS = "/api/v1/namespaces/{}/pods"
JOBS = "/apis/rollyard.dev/v1alpha1/namespaces/{}/rolloutjobs"
_APPLY = {"Content-Type": "application/apply-patch+yaml"}
_MERGE = {"Content-Type": "application/merge-patch+json"}
_ONLY_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"

Object = dict[str, Any]
Seen = Callable[[float, str, Object], None]
"""A function that is called with the time (`time.perf_counter`), ADDED, MODIFIED or DELETED, and the object.
"""


class Cluster:
    """The calls to an API server as its administrator."""

    def __init__(self, lab: Path, environment: Mapping[str, str], http: httpx.AsyncClient) -> None:
        self.lab = lab
        self.environment = environment
        """The environment for subprocesses: KUBECONFIG and PATH."""
        self._http = http

    async def call(self, method: str, path: str, **request: Any) -> Object:
        """Return the decoded answer of a call.

        Raises:
            ProgramFailed: The answer was not 2xx; the text holds what the API server said.
        """
        answer = await self._http.request(method, path, **request)
        if answer.status_code // 100 != 2:
            raise ProgramFailed(f"{method} {path} answered {answer.status_code}: {answer.text[:600]}")
        found: Object = orjson.loads(answer.content)
        return found

    async def create(self, path: str, obj: Object) -> Object:
        """Make an object in a collection."""
        return await self.call("POST", path, content=orjson.dumps(obj))

    async def merge(self, path: str, change: Object) -> Object:
        """Change an object."""
        return await self.call("PATCH", path, content=orjson.dumps(change), headers=_MERGE)

    async def delete(self, path: str, **options: Any) -> None:
        """Delete an object or a whole collection. It need not exist."""
        body = {"propagationPolicy": "Background", **options}
        answer = await self._http.request("DELETE", path, content=orjson.dumps(body))
        if answer.status_code // 100 != 2 and answer.status_code != 404:
            raise ProgramFailed(f"DELETE {path} answered {answer.status_code}: {answer.text[:600]}")

    async def text(self, path: str) -> str:
        """Return an answer that is not JSON, such as a log."""
        answer = await self._http.get(path)
        if answer.status_code != 200:
            raise ProgramFailed(f"GET {path} answered {answer.status_code}: {answer.text[:600]}")
        return answer.text

    async def install_crds(self) -> None:
        """Install the custom resources of this checkout."""
        for path in sorted((ROOT / "crds" / "yaml").glob("*.yaml")):
            where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            names = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("  name: ")]
            query = {"fieldManager": "rollyard-bench", "force": "true"}
            content = path.read_bytes()
            await self.call("PATCH", f"{where}/{names[0]}", params=query, content=content, headers=_APPLY)

    @asynccontextmanager
    async def namespace(self) -> AsyncIterator[str]:
        """Yield the name of a new namespace, which is deleted at the end."""
        name = f"{os.environ.get('ROLLYARD_BENCH_NAMESPACES', 'bench')}-{secrets.token_hex(4)}"
        await self.create("/api/v1/namespaces", {"metadata": {"name": name}})
        try:
            yield name
        finally:
            await self.delete(f"/api/v1/namespaces/{name}")

    @asynccontextmanager
    async def watching(
        self, path: str, seen: Seen, selector: str = "", *, whole: bool = True
    ) -> AsyncIterator[None]:
        """Call `seen` with every change in a collection until the block is left.

        Args:
            whole: Whether objects come with spec and status; otherwise only their metadata is sent.

        Raises:
            ProgramFailed: The API server refused to continue the watch, so later changes are unknown.
        """
        query = {"labelSelector": selector} if selector else {}
        listed = await self.call("GET", path, params={**query, "limit": "1"})
        query |= {"watch": "true", "resourceVersion": listed["metadata"]["resourceVersion"]}
        query |= {"timeoutSeconds": "3600"}
        headers = {} if whole else {"Accept": _ONLY_METADATA}
        begun = asyncio.Event()

        async def look() -> None:
            timeout = httpx.Timeout(30.0, read=None)
            # The API server may end a watch at any time. It is then continued from the last version.
            while True:
                async with self._http.stream(
                    "GET", path, params=query, headers=headers, timeout=timeout
                ) as answer:
                    if answer.status_code != 200:
                        text = (await answer.aread()).decode(errors="replace")[:600]
                        raise ProgramFailed(f"watch of {path} answered {answer.status_code}: {text}")
                    begun.set()
                    rest = b""
                    async for block in answer.aiter_raw():
                        now = time.perf_counter()
                        *lines, rest = (rest + block).split(b"\n")
                        for line in lines:
                            event = orjson.loads(line)
                            if event["type"] == "ERROR":
                                raise ProgramFailed(f"watch of {path}: {event['object'].get('message')}")
                            query["resourceVersion"] = event["object"]["metadata"]["resourceVersion"]
                            seen(now, event["type"], event["object"])

        async with asyncio.TaskGroup() as group:
            task = group.create_task(look())
            waiting = group.create_task(begun.wait())
            await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if not task.done():
                yield
            task.cancel()

    async def sandbox_images(self) -> dict[str, str]:
        """Build and load the sandbox's images `sandbox` and `sandboxDefault`, as far as they have changed."""
        environment = {**self.environment, "IMAGE_LOAD": f"{self.lab} load"}
        script = str(ROOT / "scripts" / "images")
        names = ("--only", "sandbox,sandbox-default", "--load")
        printed = await output(script, *names, seconds=IMAGES_SECONDS, environment=environment)
        found = [line.split()[0] for line in printed.splitlines() if "rollyard-sandbox" in line]
        default = [name for name in found if "sandbox-default:" in name]
        plain = [name for name in found if name not in default]
        if not plain or not default:
            raise ProgramFailed(f"scripts/images printed no names of sandbox images: {printed[-300:]}")
        return {"sandbox": plain[0], "sandboxDefault": default[0]}


def _lab() -> Path:
    shared = os.environ.get("ROLLYARD_SHARED")
    if not shared:
        raise Missing("no cluster: set ROLLYARD_SHARED to the folder that holds kit/kube-lab")
    lab = Path(shared) / "kit" / "kube-lab"
    if not os.access(lab, os.X_OK):
        raise Missing(f"no cluster: {lab} is not there")
    if os.geteuid() != 0:
        raise Missing("no cluster: kube-lab needs root")
    return lab


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    """Yield kube-lab's cluster with the CRDs of this checkout. It is started if necessary, and left running.

    Raises:
        Missing: No cluster can be had.
    """
    lab = _lab()
    # The option --close is needed because the cluster's processes must not inherit the lock.
    await output("flock", "--close", "--wait", "60", LOCK, str(lab), "start", seconds=START_SECONDS)
    lines = await output(
        "bash", "-c", f'eval "$({lab} env)"; printf "%s\\n" "$KUBECONFIG" "$PATH"', seconds=10
    )
    kubeconfig, path = lines.split("\n")[:2]
    access = client.Configuration()
    await config.load_kube_config(config_file=kubeconfig, client_configuration=access)
    context = ssl.create_default_context(cafile=access.ssl_ca_cert)
    context.load_cert_chain(access.cert_file, access.key_file)
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=access.host, verify=context, trust_env=False, timeout=60.0, limits=limits
    ) as http:
        found = Cluster(lab, {"KUBECONFIG": kubeconfig, "PATH": path}, http)
        await found.install_crds()
        yield found


async def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until a condition holds that a watch makes true.

    Raises:
        ProgramFailed: It did not become true in time.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - the condition depends on several events
                await asyncio.sleep(0.01)
            return
    raise ProgramFailed(f"{what}: not within {seconds:.0f} s")
