"""Pods as the API server and the kernel list them. Nothing here imports Rollyard."""

from __future__ import annotations

import contextlib
import os
import signal
import ssl
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from rollyard_testing.pace import patience

Pod = dict[str, Any]
COMPONENT = "app.kubernetes.io/component"
INSTANCE = "rollyard.dev/instance"
STAGE, JOB, CLAIM = "rollyard.dev/stage", "rollyard.dev/job", "rollyard.dev/claim"


def access(kubeconfig: Path) -> tuple[str, ssl.SSLContext]:
    """Return the address of the API server, and the certificates with which it is called."""
    known = yaml.safe_load(kubeconfig.read_text())
    server, user = known["clusters"][0]["cluster"], known["users"][0]["user"]
    tls = ssl.create_default_context(cafile=server["certificate-authority"])
    tls.load_cert_chain(user["client-certificate"], user["client-key"])
    return str(server["server"]), tls


def api_server(kubeconfig: Path) -> httpx.Client:
    """Return a client of the API server."""
    url, tls = access(kubeconfig)
    return httpx.Client(base_url=url, verify=tls, timeout=patience(10), trust_env=False)


class ClusterReader:
    """A reader that lists pods without a process for every look."""

    def __init__(self, kubeconfig: Path) -> None:
        self._http = api_server(kubeconfig)

    def __enter__(self) -> ClusterReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def labelled(self, selector: str) -> list[Pod]:
        """Return pods of all namespaces with these labels.

        Raises:
            httpx.HTTPError: The API server does not answer.
        """
        answer = self._http.get("/api/v1/pods", params={"labelSelector": selector})
        found: list[Pod] = answer.raise_for_status().json()["items"]
        return found

    def pods(self, instance: str, component: str = "") -> list[Pod]:
        """Return pods that an installation's operator made, including those that are being deleted."""
        return self.labelled(f"{INSTANCE}={instance}" + (f",{COMPONENT}={component}" if component else ""))


class PodWatch:
    """A record of all pods seen of an installation, and of what must never be seen."""

    def __init__(self, reader: ClusterReader, instance: str) -> None:
        self._reader = reader
        self._instance = instance
        self.seen: dict[str, Pod] = {}
        """The pods by uid, as last seen."""
        self.faults: set[str] = set()

    def look(self) -> list[Pod]:
        """Return the pods now.

        Raises:
            httpx.HTTPError: The API server does not answer.
        """
        pods = self._reader.pods(self._instance)
        self.seen |= {pod["metadata"]["uid"]: pod for pod in pods}
        at_work: dict[tuple[str, ...], list[str]] = {}
        for pod in pods:
            if is_at_work(pod) and (what := _unique(pod)):
                at_work.setdefault(what, []).append(pod["metadata"]["name"])
        for what, names in at_work.items():
            if len(names) > 1:
                self.faults.add(f"{' '.join(what)}: {', '.join(sorted(names))} at once")
        return pods

    def of(self, component: str) -> list[Pod]:
        """Return the pods ever seen of a component."""
        return [pod for pod in self.seen.values() if label(pod, COMPONENT) == component]


def _unique(pod: Pod) -> tuple[str, ...]:
    """Return the key of which only one pod may exist, in jobs with one worker a stage; empty if there may be
    many.
    """
    if label(pod, COMPONENT) == "stage-worker":
        return ("stage", label(pod, JOB), label(pod, STAGE))
    claim = label(pod, CLAIM)
    return ("claim", claim) if claim else ()


def label(pod: Pod, name: str) -> str:
    """Return a label's value; empty if it does not exist."""
    return str(pod["metadata"].get("labels", {}).get(name, ""))


def is_at_work(pod: Pod) -> bool:
    """Return whether the pod is neither being deleted nor over."""
    over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return not over and "deletionTimestamp" not in pod["metadata"]


def is_ready(pod: Pod) -> bool:
    """Return whether it is at work and Ready."""
    conditions = pod.get("status", {}).get("conditions", [])
    return is_at_work(pod) and any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def processes_of(uids: set[str]) -> dict[int, str]:
    """Return live processes on this machine, the node, in control groups of these pods: pid → pod.

    Those of `pause`, which hold a pod's namespaces, are left out.
    """
    found: dict[int, str] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            groups = Path(entry.path, "cgroup").read_text()
            if "pod" not in groups or Path(entry.path, "comm").read_text().strip() == "pause":
                continue
            state = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[0]
            groups = groups.replace("_", "-")
            pod = next((uid for uid in uids if f"pod{uid}" in groups), None)
            if pod is not None and state not in "ZX":
                found[int(entry.name)] = pod
    return found


def kill_processes(pod: Pod) -> int:
    """Send kill -9 to every process in a pod's containers, and return how many there were. None survives."""
    pids = processes_of({pod["metadata"]["uid"]})
    killed = 0
    for pid in sorted(pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed
