"""The tests' installation, as those use it that disturb jobs: a namespace with one small pool and tasks."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import yaml

from rollyard_testing.kubernetes.podwatch import ClusterReader
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installedchart import Installation
    from rollyard_testing.kubernetes.kubelab import Cluster

ROOT = Path(__file__).resolve().parents[4]
CHART = ROOT / "helm" / "rollyard"
EXAMPLES = ROOT / "examples" / "kubernetes"
TASKS = ROOT / "examples" / "quickstart" / "tasks.jsonl"


@dataclass(frozen=True)
class Release:
    """One installation, with the namespace of its jobs."""

    cluster: Cluster
    name: str
    """The name of the release, of its instance, and of the namespace that it is in."""
    jobs: str
    """The namespace of its jobs and its pool."""
    url: str
    """The control plane's address, which is its service's: the machine that runs the tests is the node."""
    token: str
    tasks: tuple[dict[str, Any], ...]
    """The contents of the ConfigMap `tasks`."""

    def http(self) -> httpx.Client:
        """Return a client of the control plane for the jobs' namespace.

        It repeats a connection that is refused for some 15 s. A service has no endpoints for a moment where
        its node could not renew its lease, as after an outage of the API server.
        """
        return httpx.Client(
            transport=httpx.HTTPTransport(retries=6, trust_env=False),
            base_url=self.url,
            headers={"Authorization": f"Bearer {self.token}"},
            params={"namespace": self.jobs},
            timeout=patience(10),
            trust_env=False,
        )

    def kubectl(self, *args: str, input: str | None = None) -> str:
        """Run kubectl in the jobs' namespace, and return its output."""
        return self.cluster.kubectl("-n", self.jobs, *args, input=input)

    def apply(self, *objects: dict[str, Any]) -> None:
        """Run kubectl apply in the jobs' namespace."""
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))

    def job(self, name: str, samples: int) -> dict[str, Any]:
        """Return the quickstart's job over the release's tasks."""
        job: dict[str, Any] = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
        job["metadata"]["name"] = name
        job["spec"]["tasks"] = {"configMapRef": {"name": "tasks"}}
        job["spec"]["samplesPerTask"] = samples
        return job

    def deployment(self, component: str) -> str:
        """Return the name of the control plane's or the operator's Deployment."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"
        (found,) = self.cluster.items("deployments", self.name, selector)
        return str(found["metadata"]["name"])

    def scale_operator(self, replicas: int) -> None:
        """Set the number of operators, and return when they are ready and no others exist any more."""
        name = self.deployment("operator")
        self.cluster.kubectl("scale", f"deployment/{name}", "-n", self.name, f"--replicas={replicas}")
        self.cluster.kubectl(
            "rollout", "status", f"deployment/{name}", "-n", self.name, f"--timeout={patience(180):.0f}s"
        )
        if replicas == 0:
            selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=operator"
            self.cluster.kubectl(
                "wait", "--for=delete", "pod", "-l", selector, "-n", self.name,
                f"--timeout={patience(180):.0f}s",
            )  # fmt: skip

    @contextlib.contextmanager
    def permitting(self, value: str) -> Iterator[None]:
        """Set a value of the chart, as in `helm --set`, while the block runs."""
        wait = ("-n", self.name, "--wait", "--timeout", f"{patience(180):.0f}s")
        self.cluster.helm("upgrade", self.name, str(CHART), "--reuse-values", "--set", value, *wait)
        try:
            yield
        finally:
            self.cluster.helm("rollback", self.name, *wait)

    def words(self) -> str:
        """Return what helps to explain a failed test."""
        told = []
        for words in (
            ("get", "rj,bp,pods", "-n", self.jobs, "-o", "wide"),
            ("get", "pods", "-n", self.name),
            ("get", "events", "-n", self.jobs, "--sort-by=.lastTimestamp"),
            ("logs", "-n", self.name, "-l", "app.kubernetes.io/component=operator", "--tail=60", "--prefix"),
            ("logs", "-n", self.name, "-l", "app.kubernetes.io/component=api", "--tail=30"),
            ("logs", "-n", self.jobs, "-l", "app.kubernetes.io/component=stage-worker", "--prefix"),
        ):
            done = self.cluster.run("kubectl", *words)
            told.append(f"$ kubectl {shlex.join(words)}\n{(done.stdout + done.stderr)[-6000:]}")
        return "\n".join(told)


@contextlib.contextmanager
def a_release(installation: Installation, tasks: int) -> Iterator[Release]:
    """Yield the installation's last namespace with one ready backend of the embedded engine, and some tasks.

    These are the quickstart's first ones. Everything but the contents of the namespace, which go with the
    session, is removed at the end.
    """
    lines = [line for line in TASKS.read_text().splitlines() if line.strip()][:tasks]
    release = Release(
        installation.cluster,
        installation.release,
        installation.namespaces[-1],
        installation.url,
        installation.tokens["admin"],
        tuple(json.loads(line) for line in lines),
    )
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tasks"}}
    release.apply({**config, "data": {"tasks.jsonl": "\n".join(lines)}})
    release.apply(yaml.safe_load((EXAMPLES / "pool.yaml").read_text()))
    release.kubectl("wait", "--for=condition=Ready", "bp/default", f"--timeout={patience(120):.0f}s")
    yield release
    _remove(release)


def _remove(release: Release) -> None:
    """Remove what kubectl applied, while there is an operator to clean up after it."""
    release.kubectl("delete", "rj,bp", "--all", f"--timeout={patience(180):.0f}s")
    with ClusterReader(release.cluster.kubeconfig) as reader:
        deadline = time.monotonic() + patience(60)
        while (left := reader.pods(release.name)) and time.monotonic() < deadline:
            time.sleep(0.2)
    names = [pod["metadata"]["name"] for pod in left]
    assert names == [], "pods outlive all jobs and pools"
