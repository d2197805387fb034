"""One job on a real cluster that is disturbed, followed from outside, and judged.

The judges are a ledger that reads the REST API, the API server's listing of pods, and the node's processes.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx

from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.invariants import invariant
from rollyard_testing.kubernetes.installed import Release
from rollyard_testing.kubernetes.podwatch import (
    CLAIM,
    COMPONENT,
    ClusterReader,
    Pod,
    PodWatch,
    is_at_work,
    is_ready,
    kill_processes,
    label,
    processes_of,
)
from rollyard_testing.pace import patience

TASKS = 12
SAMPLES = 3
END = patience(150.0)  # seconds for a disturbed run to end; an undisturbed one takes about 20
GONE = patience(180.0)
"""The time for unwanted things to be gone, in seconds: killing a pod takes the kubelet some.

Where the watch was restarted with an empty list just as a job was deleted, the operator's next full check
sees it (120 s).
"""
LOOK_SECONDS = 0.4
STAGES = {"init", "run", "eval"}


class Run:
    """One job of the installation, followed from outside."""

    def __init__(self, release: Release, reader: ClusterReader, name: str) -> None:
        self.release = release
        self.reader = reader
        self.name = name
        self.ledger = Ledger()
        self.watch = PodWatch(reader, release.name)
        self.struck: set[str] = set()
        """The pods, or containers that are started again, that were killed or deleted."""
        self.fed = 0
        """The number of the release's tasks that the job has."""

    @property
    def expected(self) -> set[tuple[str, int]]:
        """Return the rollouts of the job's tasks so far."""
        return {(task["id"], sample) for task in self.release.tasks[: self.fed] for sample in range(SAMPLES)}

    def feed(self, tasks: int | None = None) -> None:
        """Add so many more tasks, or all that are left and no more, after which the job may end."""
        end = len(self.release.tasks) if tasks is None else self.fed + tasks
        lines = [json.dumps(task) for task in self.release.tasks[self.fed : end]]
        if lines:
            self._post("tasks", "\n".join(lines), "application/x-ndjson")
        self.fed = end
        if tasks is None:
            self._post("close", "{}", "application/json")

    def _post(self, what: str, body: str, kind: str) -> None:
        """Send it to the job, once the control plane, which may have been killed, answers."""
        deadline = time.monotonic() + END
        while True:
            try:
                with self.release.http() as http:
                    answer = http.post(
                        f"/v1/rolloutjobs/{self.name}/{what}", content=body, headers={"Content-Type": kind}
                    )
                # 404 means that its object is not registered yet.
                if answer.status_code not in (404, 502, 503):
                    answer.raise_for_status()
                    return
            except httpx.TransportError:
                pass  # A repeat is harmless.
            assert time.monotonic() < deadline, self.release.words()
            time.sleep(LOOK_SECONDS)

    @property
    def unfinished(self) -> int:
        """Return the number of rollouts whose end was not yet seen."""
        return len(self.expected) - len(self.ledger.seen)

    def reach(self, ended: int, further: float) -> None:
        """Wait until so many rollouts have ended, or all, and so many seconds more."""
        ended = min(ended, len(self.expected))
        assert self.ledger.wait_for(ended, END), f"only {len(self.ledger.seen)} ended\n{self.release.words()}"
        time.sleep(further)

    def status(self) -> dict[str, Any]:
        """Return the object's status."""
        return dict(self.release.cluster.get("rj", self.name, self.release.jobs)["status"])

    def wait_finished(self) -> dict[str, Any]:
        """Return the object's status once it says that the job succeeded."""
        waited = self.release.cluster.run(
            "kubectl", "wait", "-n", self.release.jobs, "--for=condition=Finished", f"rj/{self.name}",
            f"--timeout={END:.0f}s", timeout=END + 30,
        )  # fmt: skip
        assert waited.returncode == 0, f"{waited.stdout}{waited.stderr}\n{self.release.words()}"
        status = self.status()
        assert status["phase"] == "Succeeded", f"{json.dumps(status, indent=1)}\n{self.release.words()}"
        return status

    def judge(self, *, operators: int = 1) -> dict[str, int]:
        """Check that every rollout is once in the ledger, for a second reader and in the counts, and that
        nothing leaked.

        Args:
            operators: Where there are two, each may have found a pod for one claim. One of them is bound, and
                the attempts show that it was not lost; the other goes.
        """
        status = self.wait_finished()
        whole = Ledger()
        with self.release.http() as http:
            whole.read(http, self.name)
            self.ledger.read(http, self.name)
        with invariant():
            assert whole.judge(self.expected) == []
            assert self.ledger.judge(self.expected) == []
            assert self.ledger.seen == whole.seen
        counts: dict[str, int] = status["counts"]
        assert counts["total"] == len(self.expected)
        for outcome in ("succeeded", "failed", "cancelled"):
            there = sum(record["status"] == outcome for record in whole.seen.values())
            assert counts.get(outcome, 0) == there, outcome

        # A listing that could not see these would prove nothing by being empty.
        assert {label(pod, "rollyard.dev/stage") for pod in self.watch.of("stage-worker")} == STAGES
        assert len([pod for pod in self.watch.of("sandbox") if label(pod, CLAIM)]) >= TASKS
        allowed = ("claim ",) if operators > 1 else ()
        assert {fault for fault in self.watch.faults if not fault.startswith(allowed)} == set()
        left = self.settled(lambda pod: label(pod, COMPONENT) != "backend")
        assert left == [], f"pods outlive their job\n{self.release.words()}"
        assert self.claims() == []
        backends = [pod for pod in self.watch.look() if label(pod, COMPONENT) == "backend"]
        assert len(backends) == 1, "the pool has as many pods as it wants"
        return counts

    def claims(self) -> list[Any]:
        """Return claims that the control plane still has, once there are none or after a while."""
        deadline = time.monotonic() + GONE
        while True:
            with self.release.http() as http:
                found: list[Any] = http.get("/v1/claims").raise_for_status().json()["claims"]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(LOOK_SECONDS)

    def in_use(self) -> set[str]:
        """Return the claims whose sandbox a rollout has, as the control plane says."""
        with self.release.http() as http:
            found = http.get("/v1/claims").raise_for_status().json()["claims"]
        return {claim["id"] for claim in found if claim["state"] == "Bound"}

    def settled(self, unwanted: Any) -> list[str]:
        """Return unwanted pods, and processes that outlive theirs, once there are none or after a while."""
        deadline = time.monotonic() + GONE
        while True:
            pods = self.watch.look()
            gone = set(self.watch.seen) - {pod["metadata"]["uid"] for pod in pods}
            left = [pod["metadata"]["name"] for pod in pods if unwanted(pod)]
            left += [f"process {pid} of pod {uid}" for pid, uid in processes_of(gone).items()]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(LOOK_SECONDS)

    def delete(self) -> None:
        """Delete the object, and with it all that the control plane and the cluster knew of it."""
        self.release.kubectl("delete", "rj", self.name, f"--timeout={patience(180):.0f}s")
        deadline = time.monotonic() + GONE
        with self.release.http() as http:
            while (code := http.get(f"/v1/rolloutjobs/{self.name}").status_code) == 200:
                assert time.monotonic() < deadline, "the control plane still has the job"
                time.sleep(LOOK_SECONDS)
        assert code == 404
        assert self.settled(lambda pod: label(pod, "rollyard.dev/job") == self.name) == []

    def victim(self, component: str, rng: random.Random) -> Pod | None:
        """Return a ready pod of a component, or a sandbox that a rollout has, and none twice.

        None means that all the job's work so far ended before there was one.
        """
        if component in ("api", "operator"):
            labels = f"app.kubernetes.io/instance={self.release.name},{COMPONENT}={component}"
        else:
            labels = f"rollyard.dev/instance={self.release.name},{COMPONENT}={component}"
        labels += f",{CLAIM}" if component == "sandbox" else ""
        deadline = time.monotonic() + patience(30)
        while time.monotonic() < deadline:
            there = self.reader.labelled(labels)
            if component == "sandbox":
                # It is in use before the kubelet has found it ready.
                in_use = self.in_use()
                there = [pod for pod in there if is_at_work(pod) and label(pod, CLAIM) in in_use]
            else:
                there = [pod for pod in there if is_ready(pod)]
            there = [pod for pod in there if _which(pod, component) not in self.struck]
            if there:
                return rng.choice(sorted(there, key=lambda pod: str(pod["metadata"]["name"])))
            if self.unfinished == 0:
                return None
            time.sleep(0.05)
        raise AssertionError(f"no ready {component} within 30 s\n{self.release.words()}")

    def strike(self, component: str, how: str, rng: random.Random) -> str:
        """Kill a pod's processes or delete the pod, and return which; empty if nothing was left to hit."""
        pod = self.victim(component, rng)
        if pod is None:
            return ""
        meta = pod["metadata"]
        self.struck.add(_which(pod, component))
        if how == "kill -9":
            killed = kill_processes(pod)
            if component == "sandbox" and killed == 0:
                return ""  # Its rollout ended first.
            assert killed > 0, f"no process of {meta['name']}"
        else:
            self.release.cluster.kubectl(
                "delete", "pod", meta["name"], "-n", meta["namespace"], "--now", "--wait=false",
                "--ignore-not-found",
            )  # fmt: skip
        return f"{how} {meta['name']}"


def _which(pod: Pod, component: str) -> str:
    """Return what may be hit once: a pod, or a container that its pod starts again when it ends.

    The API server calls a killed container ready until the kubelet has noticed.
    """
    if component in ("api", "operator"):
        return str(pod["status"]["containerStatuses"][0]["containerID"])
    return str(pod["metadata"]["uid"])


@contextlib.contextmanager
def a_run(release: Release, name: str) -> Iterator[Run]:
    """Apply a job, follow it while the block runs, and delete it at the end with nothing left.

    Its tasks are those that the block feeds it, so it does not end before its last fault.
    """
    with ClusterReader(release.cluster.kubeconfig) as reader:
        run = Run(release, reader, name)
        assert run.settled(lambda pod: label(pod, COMPONENT) != "backend") == [], "of an earlier test"
        done = threading.Event()

        def follow() -> None:
            while not done.wait(LOOK_SECONDS):
                with contextlib.suppress(OSError, httpx.HTTPError):
                    run.watch.look()
                with (
                    contextlib.suppress(OSError, KeyError, ValueError, httpx.HTTPError),
                    release.http() as http,
                ):
                    run.ledger.read(http, name)

        job = release.job(name, SAMPLES)
        job["spec"]["tasks"] = {"stream": True}
        job["spec"]["sandbox"]["warm"] = 2
        release.apply(job)
        thread = threading.Thread(target=follow, name="follow")
        thread.start()
        try:
            yield run
        except BaseException:
            done.set()
            release.cluster.run(
                "kubectl", "delete", "rj", name, "-n", release.jobs, f"--timeout={patience(180):.0f}s"
            )
            raise
        finally:
            done.set()
            thread.join(patience(60))
        run.delete()
