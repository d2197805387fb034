"""A real cluster for measurements, with an installation of Rollyard that serves one namespace of it.

The cluster is observed from outside with a few calls, and with watches that note the time. Control plane and
operator are processes of this machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import httpx
import orjson
import yaml
from rollyard_pipeline.control_plane.rest import RestControlPlane
from rollyard_testing.kubernetes.kubelab import CRDS, lab_program
from rollyard_testing.kubernetes.podwatch import access
from rollyard_testing.waiting import eventually

from rollyard_bench.harness import manifest
from rollyard_bench.processes import (
    ROOT,
    ControlPlane,
    Missing,
    Program,
    ProgramFailed,
    control_plane,
    output,
    program,
)

LOCK = "/tmp/kube-lab.lock"
START_SECONDS = 120.0
IMAGES_SECONDS = 300.0
PODS = "/api/v1/namespaces/{}/pods"
JOBS = "/apis/rollyard.dev/v1alpha1/namespaces/{}/rolloutjobs"
INSTANCE = "rollyard.dev/instance"
JOB = "rollyard.dev/job"
FAKE_TAINT = "kwok.x-k8s.io/node"
"""The key of the taint that keeps ordinary pods away from fake nodes."""
NOWHERE = {"nodeSelector": {"rollyard.dev/bench": "no-node"}}
"""The placement of pods that are made but must not run."""
NO_IMAGE = "registry.local/none:1"
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

    async def call(self, method: str, path: str, **request: Any) -> bytes:
        """Return the content of an answer. What is to be deleted need not exist.

        Raises:
            ProgramFailed: The answer was not 2xx; the text holds what the API server said.
        """
        answer = await self._http.request(method, path, **request)
        if not answer.is_success and (method, answer.status_code) != ("DELETE", 404):
            raise ProgramFailed(f"{method} {path} answered {answer.status_code}: {answer.text[:600]}")
        return answer.content

    async def get(self, path: str, **query: str) -> Object:
        """Return an object or a list."""
        document: Object = orjson.loads(await self.call("GET", path, params=query))
        return document

    async def create(self, path: str, obj: Object) -> None:
        """Make an object in a collection."""
        await self.call("POST", path, content=orjson.dumps(obj))

    async def merge(self, path: str, change: Object) -> None:
        """Change an object."""
        await self.call("PATCH", path, content=orjson.dumps(change), headers=_MERGE)

    async def delete(self, path: str, **options: Any) -> None:
        """Delete an object or a whole collection."""
        body = {"propagationPolicy": "Background", **options}
        await self.call("DELETE", path, content=orjson.dumps(body))

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
        listed = await self.get(path, **query, limit="1")
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
        command = (str(ROOT / "scripts" / "images"), "--only", "sandbox,sandbox-default", "--load")
        printed = await output(*command, seconds=IMAGES_SECONDS, environment=environment)
        names = [line.split()[0] for line in printed.splitlines() if "rollyard-sandbox" in line]
        images = {"sandboxDefault" if "sandbox-default:" in name else "sandbox": name for name in names}
        if len(images) != 2:
            raise ProgramFailed(f"scripts/images printed no names of sandbox images: {printed[-300:]}")
        return images


def _missing(reason: str) -> NoReturn:
    raise Missing(reason)


@asynccontextmanager
async def _cluster() -> AsyncIterator[Cluster]:
    """Yield kube-lab's cluster with the CRDs of this checkout. It is started if necessary, and left running.

    Raises:
        Missing: No cluster can be had.
    """
    lab = lab_program(_missing)
    # The option --close is needed because the cluster's processes must not inherit the lock.
    await output("flock", "--close", "--wait", "60", LOCK, str(lab), "start", seconds=START_SECONDS)
    lines = await output(
        "bash", "-c", f'eval "$({lab} env)"; printf "%s\\n" "$KUBECONFIG" "$PATH"', seconds=10
    )
    kubeconfig, path = lines.split("\n")[:2]
    environment = {"KUBECONFIG": kubeconfig, "PATH": path}
    apply = ("kubectl", "apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    await output(*apply, seconds=START_SECONDS, environment=environment)
    url, tls = access(Path(kubeconfig))
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(
        base_url=url, verify=tls, trust_env=False, timeout=60.0, limits=limits
    ) as http:
        yield Cluster(lab, environment, http)


async def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until a condition holds that a watch makes true.

    Raises:
        ProgramFailed: It did not become true in time.
    """
    try:
        await eventually(holds, seconds, 0.01)
    except TimeoutError as error:
        raise ProgramFailed(f"{what}: not within {seconds:.0f} s") from error


@dataclass(frozen=True, slots=True)
class Installation:
    """A running installation and its addresses."""

    cluster: Cluster
    namespace: str
    instance: str
    plane: ControlPlane
    operator: Program

    @property
    def jobs(self) -> str:
        """Return the path of the namespace's RolloutJobs."""
        return JOBS.format(self.namespace)

    @property
    def pods(self) -> str:
        """Return the path of the pods."""
        return PODS.format(self.namespace)

    @property
    def selector(self) -> str:
        """Return the label selector of the installation's own pods."""
        return f"{INSTANCE}={self.instance}"

    def worker(self) -> RestControlPlane:
        """Return a stage worker's connection to the control plane."""
        return RestControlPlane(self.plane.url, self.plane.tokens["worker"])

    def check(self) -> None:
        """Raise ProgramFailed if the operator or the control plane has ended."""
        self.operator.check("rollyard_operator")
        self.plane.program.check("rollyard_api")


def job_object(name: str, rollouts: int, **spec: Any) -> Object:
    """Return a RolloutJob that asks for no model, nor for warm sandboxes unless `spec` does."""
    tasks = [{"id": f"t{number}", "prompt": "Write 1 into answer.txt."} for number in range(rollouts)]
    usual = {"handler": "shell", "agent": {"type": "oracle"}, "sandbox": {"warm": 0}}
    return manifest(name, tasks={"inline": tasks}, **(usual | spec))


@asynccontextmanager
async def installation(*, sandboxes: bool = False) -> AsyncIterator[Installation]:
    """Yield both programs in a new namespace, once the operator has reacted to a first object.

    Args:
        sandboxes: Whether sandboxes are started, which need images.

    Raises:
        Missing: No cluster can be had.
        ProgramFailed: One of the programs did not come up.
    """
    async with _cluster() as cluster:
        images = {"worker": NO_IMAGE, "engine": NO_IMAGE, "sandbox": NO_IMAGE, "sandboxDefault": NO_IMAGE}
        if sandboxes:
            images |= await cluster.sandbox_images()
        with tempfile.TemporaryDirectory(prefix="ryb-") as name:
            folder = Path(name)
            async with cluster.namespace() as namespace, control_plane(folder) as plane:
                instance = f"bench-{secrets.token_hex(4)}"
                config = _operator_config(folder, namespace, instance, plane, images)
                command = [sys.executable, "-m", "rollyard_operator", "--config", str(config)]
                command += ["--liveness", ""]
                async with program(command, folder / "operator.log", cluster.environment) as operator:
                    installed = Installation(cluster, namespace, instance, plane, operator)
                    await _first_answer(installed)
                    yield installed


def _operator_config(
    folder: Path, namespace: str, instance: str, plane: ControlPlane, images: Mapping[str, str]
) -> Path:
    """Write the operator's settings and the tokens, and return the file of the settings."""
    for role in ("driver", "worker"):
        (folder / role).write_text(plane.tokens[role])
    settings = {
        "instance": instance,
        "controlPlaneUrl": plane.url,
        "tokenFile": str(folder / "driver"),
        "workerTokenFile": str(folder / "worker"),
        "releaseNamespace": namespace,
        "namespaces": [namespace],
        "imagePullPolicy": "IfNotPresent",
        "allow": {"tolerations": [FAKE_TAINT]},
        "images": dict(images),
    }
    config = folder / "operator.yaml"
    config.write_text(yaml.safe_dump(settings))
    return config


async def _first_answer(installed: Installation) -> None:
    """Wait until a job's object has its first pod, and delete the job again."""
    names: set[str] = set()

    def seen(at: float, kind: str, pod: Object) -> None:
        (names.discard if kind == "DELETED" else names.add)(pod["metadata"]["name"])

    cluster = installed.cluster
    async with cluster.watching(installed.pods, seen, installed.selector, whole=False):
        stages = {stage: {"template": NOWHERE} for stage in ("init", "run", "eval")}
        await cluster.create(installed.jobs, job_object("first", 1, stages=stages))
        await until(lambda: installed.check() or len(names) == 3, "the operator's first answer")
        await cluster.delete(f"{installed.jobs}/first")
        await until(lambda: not names, "the end of the first job's pods")
