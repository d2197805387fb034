"""A cluster and a control plane in memory, with a loop of sandbox pods that a test drives pass by pass."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

from rollyard_client import RollyardError
from rollyard_crds.claims import SandboxShape
from rollyard_operator.kube import labels
from rollyard_operator.kube.object_cache import PodCache, key_of, uid_of
from rollyard_operator.sandboxes.loop import SandboxLoop
from rollyard_operator.settings import OperatorSettings, parse_settings

from rollyard_testing.operator.fakeclaims import SHAPE, ClaimDesk
from rollyard_testing.operator.fakecluster import FakeKube

SETTINGS = parse_settings(
    """
    instance: test
    controlPlaneUrl: http://api:8765
    tokenFile: /t
    workerTokenFile: /w
    releaseNamespace: rollyard
    apiServerVersion: "1.36"
    images: {worker: w:1, engine: e:1, sandbox: s:1, sandboxDefault: d:1}
    allow: {runtimeClasses: [gvisor]}
    """
)


class World:
    """One namespace with a job, the kubelet's part, and an operator that may be replaced."""

    def __init__(self, settings: OperatorSettings = SETTINGS) -> None:
        self.settings = settings
        self.now = datetime.now(UTC)
        self.kube, self.plane = FakeKube(), ClaimDesk(lambda: self.now)
        self.started = 0
        self.deaf = False
        """If true, the watch is lost and reports nothing."""
        self.pods = PodCache()
        self.kube.watchers.append(self._told)
        self.add_job("job")
        self.loop = self.operator()

    def add_job(self, name: str, namespace: str = "team", **spec: Any) -> None:
        """Create a job whose sandboxes have this spec."""
        self.kube.put(
            {
                "apiVersion": "rollyard.dev/v1alpha1",
                "kind": "RolloutJob",
                "metadata": {"name": name, "namespace": namespace, "labels": {labels.QUEUE: "queue"}},
                "spec": {"sandbox": spec},
            }
        )

    def operator(self, key: str = "driver token") -> SandboxLoop:
        """Return a new process, which knows only what the cluster and the control plane say."""
        self.pods = PodCache()
        self.resync()
        return SandboxLoop(
            self.kube,
            self.pods,
            self.plane,
            lambda namespace, name: self.kube.objects.get(("RolloutJob", namespace, name)),
            self.settings,
            key,
            ("10.0.0.1:443",),
            now=lambda: self.now,
        )

    def _told(self, verb: str, obj: Any) -> None:
        if self.deaf or obj["kind"] != "Pod":
            return
        if verb == "DELETED":
            self.pods.remove(key_of(obj), uid_of(obj))
        else:
            self.pods.put(obj)

    def resync(self) -> None:
        """Do what a new watch begins with."""
        there = {uid_of(pod) for pod in self.kube.of("Pod")}
        for pod in self.pods:
            if uid_of(pod) not in there:
                self.pods.remove(key_of(pod), uid_of(pod))
        for pod in self.kube.of("Pod"):
            self.pods.put(pod)

    async def turn(self, times: int = 1) -> float | None:
        """Let the loop read the claims and make passes, and return when it wants the next one, in seconds."""
        after = None
        for _ in range(times):
            with contextlib.suppress(RollyardError):
                self.loop.claims.learn(await self.plane.claims())
            after = await self.loop.run_pass()
        return after

    # The kubelet.

    def start(self, name: str | None = None) -> None:
        """Let pods that were made get an address and take connections."""
        for pod in self.kube.of("Pod"):
            if name not in (None, pod["metadata"]["name"]) or pod["metadata"].get("deletionTimestamp"):
                continue
            if "status" not in pod:
                self.started += 1
                self.status(pod, **running(f"10.1.{self.started // 250}.{self.started % 250}"))

    def status(self, pod: Any, **status: Any) -> None:
        """Set the status of a pod."""
        self.kube.pod_status(*key_of(pod), status)

    def reap(self) -> None:
        """Let pods that are being deleted go."""
        for pod in self.kube.of("Pod"):
            if pod["metadata"].get("deletionTimestamp"):
                self.kube.remove("Pod", *key_of(pod))

    def pod(self, name: str) -> Any:
        """Return a pod of the namespace `team`."""
        return self.kube.objects["Pod", "team", name]

    def state(self, claim: str) -> str:
        """Return the state of a claim."""
        return self.plane.claims_[claim].state


def running(ip: str) -> dict[str, Any]:
    """Return the status of a pod that is ready at an address."""
    return {
        "phase": "Running",
        "podIP": ip,
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [{"name": "sandbox", "state": {"running": {}}}],
    }


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    """Return the status of a pod whose container has ended."""
    state = {"terminated": {"exitCode": code, "reason": reason, "message": message}}
    return {"phase": "Failed", "containerStatuses": [{"name": "sandbox", "state": state}]}


def sandbox_shape(cpu: float) -> SandboxShape:
    """Return the usual shape with this number of cores."""
    return SHAPE.model_copy(update={"cpu": cpu})
