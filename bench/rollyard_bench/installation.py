"""A control plane and an operator, as processes, that serve one namespace of a cluster."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rollyard_pipeline.control_plane.rest import RestControlPlane

from rollyard_bench.cluster import JOBS, PODS, Cluster, Object, until
from rollyard_bench.harness import manifest
from rollyard_bench.processes import ControlPlane, Program, control_plane, program

INSTANCE = "rollyard.dev/instance"
JOB = "rollyard.dev/job"
FAKE_TAINT = "kwok.x-k8s.io/node"
"""The key of the taint that keeps ordinary pods away from fake nodes."""
NOWHERE = {"nodeSelector": {"rollyard.dev/bench": "no-node"}}
"""The placement of pods that are made but must not run."""


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
async def installation(
    cluster: Cluster, namespace: str, folder: Path, images: Mapping[str, str]
) -> AsyncIterator[Installation]:
    """Yield both programs once the operator has reacted to a first object.

    Raises:
        ProgramFailed: One of the programs did not come up.
    """
    async with control_plane(folder) as plane:
        instance = f"bench-{secrets.token_hex(4)}"
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
            "images": {"worker": "registry.local/none:1", "engine": "registry.local/none:1", **images},
        }
        config = folder / "operator.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "rollyard_operator", "--config", str(config), "--liveness", ""]
        async with program(command, folder / "operator.log", cluster.environment) as operator:
            found = Installation(cluster, namespace, instance, plane, operator)
            await _first_answer(found)
            yield found


async def _first_answer(found: Installation) -> None:
    """Wait until a job's object has its first pod, and delete the job again."""
    names: set[str] = set()

    def seen(at: float, kind: str, pod: Object) -> None:
        (names.discard if kind == "DELETED" else names.add)(pod["metadata"]["name"])

    async with found.cluster.watching(found.pods, seen, found.selector, whole=False):
        stages = {stage: {"template": NOWHERE} for stage in ("init", "run", "eval")}
        await found.cluster.create(found.jobs, job_object("first", 1, stages=stages))
        await until(lambda: found.check() or len(names) == 3, "the operator's first answer")
        await found.cluster.delete(f"{found.jobs}/first")
        await until(lambda: not names, "the end of the first job's pods")
