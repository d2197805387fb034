"""An operator over a cluster and a control plane in memory, and what tests do with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_drivers.reconcile.plan import Profile
from rollyard_operator.installation import Operator
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.resources import OWN_KINDS
from rollyard_operator.settings import OperatorSettings
from rollyard_process.backoff import Backoff

from rollyard_testing.inference.in_memory import completion
from rollyard_testing.operator.fakecluster import FakeControlPlane, FakeKube, stamp
from rollyard_testing.pace import patience

NAMESPACE = "team"
KEY = (NAMESPACE, "math")
PATIENCE_SECONDS = patience(50.0)
"""The longest wait.

It bounds a hang and says nothing of speed; pytest's limit, which ends a test less gently, is longer.
"""


def settings_in(folder: Path, **more: Any) -> OperatorSettings:
    (folder / "worker").write_text("worker-token\n")
    (folder / "driver").write_text("driver-token\n")
    return OperatorSettings.model_validate(
        {
            "instance": "test",
            "controlPlaneUrl": "http://plane:8765",
            "tokenFile": str(folder / "driver"),
            "workerTokenFile": str(folder / "worker"),
            "releaseNamespace": "rollyard",
            "images": {"worker": "w:1", "engine": "e:1", "sandbox": "s:1", "sandboxDefault": "d:1"},
        }
        | more
    )


def job(name: str = "math", **spec: Any) -> Object:
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "tasks": {"inline": [{"id": "a", "prompt": "?"}, {"id": "b", "prompt": "?"}]},
            "handler": "math",
            "agent": {"type": "oracle"},
        }
        | spec,
    }


def pool(**spec: Any) -> Object:
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "BackendPool",
        "metadata": {"name": "qwen", "namespace": NAMESPACE},
        "spec": {"model": "/models/tiny", "replicas": 2} | spec,
    }


class Lab:
    """One operator with its surroundings."""

    def __init__(self, settings: OperatorSettings, kube: FakeKube, control: FakeControlPlane) -> None:
        self.kube = kube
        self.control = control
        self.sick: set[str] = set()
        """The hosts of backends that do not answer."""
        self.http = httpx.AsyncClient(transport=httpx.MockTransport(self._backend))
        profile = Profile(backoff_seconds=0.01, blocked_seconds=0.05, max_active_jobs=2, drain_seconds=3600.0)
        self.operator = Operator(settings, profile, kube, control, self.http)

    def _backend(self, request: httpx.Request) -> httpx.Response:
        if request.url.host in self.sick:
            return httpx.Response(503)
        if request.method == "GET":
            return httpx.Response(200, json={"weight_version": "base"})
        return completion(request, logprob=-0.5)

    def status(self, name: str = "math", of: str = "RolloutJob") -> Object:
        status: Object = self.kube.objects[(of, NAMESPACE, name)].get("status") or {}
        return status

    def condition(self, kind: str, name: str = "math", of: str = "RolloutJob") -> Object:
        found = [one for one in self.status(name, of).get("conditions", ()) if one["type"] == kind]
        return found[0] if found else {}

    def holds(self, kind: str, name: str = "math", of: str = "RolloutJob") -> bool:
        return self.condition(kind, name, of).get("status") == "True"

    async def with_workers(self, obj: Object | None = None, *, count: int = 3) -> None:
        """Apply an object, by default the job of the tests, and wait for its pods."""
        self.kube.put(job() if obj is None else obj)
        await until(lambda: len(self.kube.of("Pod")) == count)

    async def with_running_workers(self) -> None:
        """Apply the job of the tests, let its pods run, and wait until the job says so."""
        await self.with_workers()
        self.start_pods()
        await until(lambda: self.holds("Running"))

    async def stopped(self) -> None:
        """Wait until every pod is to be deleted, and remove them as the kubelet does."""
        await until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in self.kube.of("Pod")))
        for name in self.kube.names("Pod"):
            self.kube.remove("Pod", NAMESPACE, name)

    def pod(self, name: str) -> Object:
        """Return a pod, or an empty object if there is none of this name."""
        pod: Object = self.kube.objects.get(("Pod", NAMESPACE, name), {})
        return pod

    def start_pods(self) -> None:
        for pod in self.kube.of("Pod"):
            if not pod.get("status"):
                self.run_pod(pod["metadata"]["name"])

    def run_pod(self, name: str) -> None:
        pod = self.kube.objects[("Pod", NAMESPACE, name)]
        running = {"name": "worker", "state": {"running": {"startedAt": stamp()}}}
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "backend":
            running["name"] = "backend"
        address = {"podIP": f"10.0.0.{int(pod['metadata']['uid'][:8], 16)}"}
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        status = {"phase": "Running", "containerStatuses": [running], **address, **ready}
        self.kube.pod_status(NAMESPACE, name, status)

    def end_pod(self, name: str, code: int) -> None:
        over = {"exitCode": code, "finishedAt": stamp(), "message": "boom"}
        ended = {"name": "worker", "state": {"terminated": over}}
        phase = "Failed" if code else "Succeeded"
        self.kube.pod_status(NAMESPACE, name, {"phase": phase, "containerStatuses": [ended]})


async def until(true: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - the condition depends on other code
            await asyncio.sleep(0.01)


async def some_passes(control: FakeControlPlane) -> None:
    """Wait until the operator has gone over the store some times more."""
    passed = control.passes
    await until(lambda: control.passes > passed + 4)


async def at_rest(kube: FakeKube) -> None:
    """Wait until the operators call the API server no more."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while kube.calls:
            kube.calls.clear()
            await asyncio.sleep(0.3)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pauses short, for tests."""
    monkeypatch.setattr("rollyard_operator.installation.POLL_SECONDS", 0.02)
    monkeypatch.setattr("rollyard_operator.installation.WORKERS_SECONDS", 0.01)
    for user in ("job", "object_loop"):
        monkeypatch.setattr(f"rollyard_operator.controllers.{user}.POLL_SECONDS", 0.02)
    monkeypatch.setattr("rollyard_operator.controllers.object_loop.REFUSED_SECONDS", 0.05)
    monkeypatch.setattr("rollyard_operator.controllers.job.JobLoop.counts_seconds", 0.0)
    monkeypatch.setattr("rollyard_operator.controllers.pool.PoolLoop.counts_seconds", 0.02)
    monkeypatch.setattr("rollyard_operator.controllers.object_loop.LEFTOVER_SECONDS", 0.02)
    monkeypatch.setattr("rollyard_drivers.health.FIRST_CHECK_SECONDS", 0.01)
    monkeypatch.setattr("rollyard_drivers.health.CHECK_SECONDS", 0.02)
    for user in ("controllers.object_loop", "controllers.rest_sync", "kube.reflector"):
        monkeypatch.setattr(f"rollyard_operator.{user}.TRY_AGAIN", Backoff(first=0.05, longest=0.05))


async def watch_as_kopf_does(lab: Lab, kind: str, namespace: str | None) -> None:
    """Tell the operator the events of one kind, and after an error what `run_under_kopf` does."""
    await until(lambda: namespace in lab.operator.watchable(), seconds=3600.0)
    while True:
        try:
            listed, version = await lab.kube.snapshot(kind, namespace, "")
            for obj in listed:
                lab.operator.seen(None, obj)
            async for event in lab.kube.watch(kind, namespace, "", version):
                lab.operator.seen(event.type, event.object)
        except KubeError:
            lab.operator.watches_broke()
            await asyncio.sleep(0.05)


@asynccontextmanager
async def running(lab: Lab) -> AsyncIterator[Lab]:
    tasks = [asyncio.create_task(lab.operator.run())]
    for namespace in lab.operator.context.settings.namespaces or (None,):
        tasks += [asyncio.create_task(watch_as_kopf_does(lab, kind, namespace)) for kind in OWN_KINDS]
    try:
        yield lab
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await lab.http.aclose()
