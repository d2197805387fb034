"""The operator as a process beside a control plane and a real API server, as kubectl and REST see it.

The workers' image does not exist, so their pods are made and never run: nothing here depends on them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rollyard_testing.pace import patience

pytestmark = pytest.mark.kubernetes

TOKENS = {"admin": "admin-token", "worker": "worker-token", "driver": "driver-token"}


def eventually(true: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Return what `true` returns once it is true."""
    seconds = patience(seconds)
    end = time.monotonic() + seconds
    while True:
        found = true()
        if found:
            return found
        assert time.monotonic() < end, f"not so after {seconds} s"
        time.sleep(0.1)


class Installation:
    """A control plane and an operator for one namespace."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.namespace: str = cluster.namespace()
        (folder / "tokens.json").write_text(json.dumps(TOKENS))
        for role in ("worker", "driver"):
            (folder / role).write_text(TOKENS[role])
        self.processes: list[subprocess.Popen[bytes]] = []

    def open(self) -> None:
        """Wait until the control plane answers, and write the operator's settings."""
        folder = self.folder
        self._process(
            ("rollyard_api", "--state-dir", str(folder / "state"), "--tokens", str(folder / "tokens.json")),
            *("--port", "0", "--port-file", str(folder / "port")),
        )
        port = eventually(lambda: (folder / "port").exists() and (folder / "port").read_text())
        self.url = f"http://127.0.0.1:{port.strip()}"
        images = dict.fromkeys(("worker", "engine", "sandbox", "sandboxDefault"), "registry.local/none:1")
        settings = {
            "instance": self.namespace,
            "controlPlaneUrl": self.url,
            "tokenFile": str(folder / "driver"),
            "workerTokenFile": str(folder / "worker"),
            "releaseNamespace": "rollyard-elsewhere",
            "namespaces": [self.namespace],
            "images": images,
            "imagePullPolicy": "Never",
        }
        (folder / "operator.yaml").write_text(yaml.safe_dump(settings))

    def _process(self, command: tuple[str, ...], *more: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-m", *command, *more]
        with (self.folder / f"{command[0]}.log").open("ab") as log:
            self.processes.append(subprocess.Popen(line, env=self.cluster.env, stdout=log, stderr=log))
        return self.processes[-1]

    def start(self) -> subprocess.Popen[bytes]:
        """Start an operator that watches."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            liveness = f"http://127.0.0.1:{probe.getsockname()[1]}/healthz"
        config = str(self.folder / "operator.yaml")
        started = self._process(("rollyard_operator", "--config", config, "--liveness", liveness))

        def lives() -> bool:
            assert started.poll() is None, self.log()
            try:
                return httpx.get(liveness, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        eventually(lives)
        return started

    def log(self) -> str:
        return (self.folder / "rollyard_operator.log").read_text()

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(patience(10))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(patience(10))

    def rest(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {TOKENS['admin']}"}
        where = {"namespace": self.namespace}
        answer = httpx.request(
            method, f"{self.url}/v1{path}", headers=headers, params=where, json=body, trust_env=False
        )
        assert answer.status_code < 500, answer.text
        return answer.json() if answer.is_success else None

    def kubectl(self, *args: str, input: str | None = None) -> str:
        told: str = self.cluster.kubectl(*args, "-n", self.namespace, input=input)
        return told

    def manifest(self, name: str, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "tasks": {"inline": [{"id": "a", "prompt": "1+1?", "answer": "2"}]},
                "handler": "math",
                "agent": {"type": "oracle"},
                "sandbox": {"warm": 0},
            }
            | spec,
        }

    def apply(self, name: str, **spec: Any) -> None:
        self.kubectl("apply", "-f", "-", input=json.dumps(self.manifest(name, **spec)))

    def pods(self, job: str) -> dict[str, str]:
        """Return names and uids of a job's worker pods that are not being deleted."""
        found = self.cluster.items("pods", self.namespace, f"rollyard.dev/job={job}")
        meta = [pod["metadata"] for pod in found]
        return {one["name"]: one["uid"] for one in meta if "deletionTimestamp" not in one}

    def told(self, job: str) -> list[str]:
        """Return the reasons of the events about a job, the oldest first."""
        found = self.cluster.items("events", self.namespace)
        about = [one for one in found if one["involvedObject"]["name"] == job]
        return [one["reason"] for one in sorted(about, key=lambda one: one["metadata"]["creationTimestamp"])]


@pytest.fixture
def yard(cluster: Any, tmp_path: Path) -> Iterator[Installation]:
    made = Installation(cluster, tmp_path)
    try:
        made.open()
        yield made
    finally:
        made.close()


def test_from_kubectl_apply_to_delete(yard: Installation) -> None:
    operator = yard.start()
    yard.apply("first")
    yard.kubectl("wait", "--for=condition=Admitted", "rolloutjob/first", f"--timeout={patience(120):.0f}s")
    assert len(eventually(lambda: len(yard.pods("first")) == 3 and yard.pods("first"))) == 3
    made = yard.cluster.get("rolloutjob", "first", yard.namespace)
    assert "finalizers" not in made["metadata"]
    assert set(made["metadata"]["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
    assert made["status"]["observedGeneration"] == 1
    assert made["status"]["counts"]["total"] == 1
    (secret,) = yard.cluster.items("secrets", yard.namespace, "rollyard.dev/job=first")
    assert set(secret["data"]) == {"token"}

    yard.kubectl("patch", "rj", "first", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    yard.kubectl("wait", "--for=condition=Suspended", "rolloutjob/first", f"--timeout={patience(120):.0f}s")
    eventually(lambda: not yard.pods("first"))
    assert yard.rest("GET", "/rolloutjobs/first")["spec"]["suspend"]
    yard.rest("PATCH", "/rolloutjobs/first", {"suspend": False})
    eventually(lambda: len(yard.pods("first")) == 3)
    assert yard.cluster.get("rolloutjob", "first", yard.namespace)["spec"]["suspend"] is False

    yard.rest("POST", "/rolloutjobs/first/cancel", {})
    yard.kubectl("wait", "--for=condition=Finished", "rolloutjob/first", f"--timeout={patience(120):.0f}s")
    ended = yard.cluster.get("rolloutjob", "first", yard.namespace)["status"]
    assert ended["phase"] == "Cancelled"
    eventually(lambda: not yard.pods("first"))
    # Events come after the status that they are about, in order.
    told = eventually(lambda: "Cancelled" in yard.told("first") and yard.told("first"))
    assert [told.count(reason) for reason in ("Suspended", "Resumed", "Cancelled")] == [1, 1, 1]

    yard.kubectl("delete", "rj", "first")
    eventually(lambda: yard.rest("GET", "/rolloutjobs/first") is None)
    operator.send_signal(signal.SIGTERM)
    assert operator.wait(patience(60)) == 0
    assert "Traceback" not in yard.log()


def test_a_job_of_rest_is_an_object_until_rest_deletes_it(yard: Installation) -> None:
    yard.start()
    yard.rest("POST", "/rolloutjobs", yard.manifest("byrest"))
    eventually(lambda: len(yard.pods("byrest")) == 3)
    made = yard.cluster.get("rolloutjob", "byrest", yard.namespace)
    assert made["metadata"]["annotations"] == {"rollyard.dev/origin": "rest"}
    yard.rest("DELETE", "/rolloutjobs/byrest")
    eventually(lambda: not yard.cluster.items("rolloutjobs", yard.namespace))
    eventually(lambda: yard.rest("GET", "/rolloutjobs/byrest") is None)
    eventually(lambda: not yard.pods("byrest"))


def test_what_happened_while_the_operator_was_dead_is_made_good(yard: Installation) -> None:
    operator = yard.start()
    yard.apply("orphaned")
    yard.apply("stays")
    for name in ("orphaned", "stays"):
        eventually(lambda name=name: len(yard.pods(name)) == 3)
    before = yard.pods("stays")
    os.kill(operator.pid, signal.SIGKILL)
    operator.wait(patience(10))
    yard.kubectl("delete", "rj", "orphaned", "--cascade=orphan")
    assert len(yard.pods("orphaned")) == 3
    yard.start()
    eventually(lambda: yard.rest("GET", "/rolloutjobs/orphaned") is None)
    eventually(lambda: not yard.pods("orphaned"))
    assert yard.pods("stays") == before


def test_two_operators_make_everything_once(yard: Installation) -> None:
    yard.start()
    yard.start()
    yard.apply("twice")
    pods = eventually(lambda: len(yard.pods("twice")) == 3 and yard.pods("twice"))
    # ErrImageNeverPull of each pod is the last change; after it there is no reason to write.
    eventually(lambda: _degraded(yard, "twice").count("ErrImageNeverPull") == 3)
    version = yard.cluster.get("rolloutjob", "twice", yard.namespace)["metadata"]["resourceVersion"]
    time.sleep(3.0)  # Several passes of both: nothing tells that none of them writes.
    assert yard.cluster.get("rolloutjob", "twice", yard.namespace)["metadata"]["resourceVersion"] == version
    assert yard.pods("twice") == pods
    assert yard.told("twice").count("Admitted") == 1


def _degraded(yard: Installation, name: str) -> str:
    """Return what is wrong with a job."""
    status = yard.cluster.get("rolloutjob", name, yard.namespace).get("status") or {}
    said = [one for one in status.get("conditions", ()) if one["type"] == "Degraded"]
    return said[0]["message"] if said else ""
