"""A real cluster for the tests: kube-lab's, started once, with fresh namespaces per test.

`ROLLYARD_SHARED` names the folder whose `kit/kube-lab` makes the cluster. It is one for all processes of a
machine, which `shared_lab` starts and ends. It has a mount namespace of its own, because bubblewrap cannot
show a machine's files to a sandbox while mounts of pods come and go.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest
import yaml

from rollyard_testing import sharedlab
from rollyard_testing.kubernetes.podwatch import api_server
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[4]
CRDS = ROOT / "crds" / "yaml"
CHART = ROOT / "helm" / "rollyard"
IN_USE = Path("/tmp/rollyard-kube-lab.use")
START_SECONDS = patience(240)
COMMAND_SECONDS = patience(240)
IMAGES_SECONDS = patience(1500)
API_USER = 10001
"""The control plane's user in its image."""


_CORE, _APPS, _OURS = "/api/v1", "/apis/apps/v1", "/apis/rollyard.dev/v1alpha1"
_GROUPS = {
    "pods": _CORE,
    "services": _CORE,
    "secrets": _CORE,
    "events": _CORE,
    "configmaps": _CORE,
    "deployments": _APPS,
    "rolloutjobs": _OURS,
    "backendpools": _OURS,
}
"""The kinds that are read without kubectl."""
_SHORT = {"rj": "rolloutjobs", "bp": "backendpools"}


class CommandFailed(AssertionError):
    """A command ended with another status than 0; the text is its output."""

    def __init__(self, command: list[str], done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{shlex.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        self.output = done.stdout + done.stderr


@dataclass
class Cluster:
    """A cluster on which everything is permitted."""

    kubeconfig: Path
    env: dict[str, str] = field(repr=False)
    """The environment for subprocesses: KUBECONFIG, and a PATH with kubectl and helm."""
    made: list[str] = field(default_factory=list, repr=False)
    """The namespaces that end with the session."""
    http: httpx.Client | None = field(default=None, repr=False)
    """A client of the API server with all rights: a look by kubectl takes a tenth of a second of a core."""

    @property
    def server(self) -> tuple[str, str]:
        """Return the API server's address, and the file of the authority of its certificate."""
        known = yaml.safe_load(self.kubeconfig.read_text())["clusters"][0]["cluster"]
        return str(known["server"]), str(known["certificate-authority"])

    def run(
        self, *command: str, input: str | None = None, timeout: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this cluster's environment, whatever its end."""
        return subprocess.run(
            command, input=input, env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )

    def _told(self, *command: str, input: str | None) -> str:
        done = self.run(*command, input=input)
        if done.returncode != 0:
            raise CommandFailed(list(command), done)
        return done.stdout

    def kubectl(self, *args: str, input: str | None = None) -> str:
        """Return what kubectl prints.

        Raises:
            CommandFailed: Its exit status is not 0.
        """
        return self._told("kubectl", *args, input=input)

    def helm(self, *args: str, input: str | None = None) -> str:
        """Return what helm prints.

        Raises:
            CommandFailed: Its exit status is not 0.
        """
        return self._told("helm", *args, input=input)

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        """Return one object.

        Raises:
            CommandFailed: There is none, or the API server does not answer.
        """
        found = self._read(kind, namespace, f"/{name}")
        if not found:
            found = json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        return found

    def find(self, kind: str, name: str, namespace: str) -> dict[str, Any] | None:
        """Return one object, or None where there is none.

        Raises:
            CommandFailed: The API server does not answer.
        """
        found = self._read(kind, namespace, f"/{name}")
        if found is None:
            text = self.kubectl("get", kind, name, "-n", namespace, "--ignore-not-found", "-o", "json")
            found = json.loads(text) if text.strip() else {}
        return found or None

    def _read(self, kind: str, namespace: str, rest: str = "", selector: str = "") -> dict[str, Any] | None:
        """Return what kubectl prints as JSON: empty if there is none, None if only kubectl can say it."""
        kind = kind.lower()
        plural = _SHORT.get(kind, kind if kind.endswith("s") else f"{kind}s")
        if self.http is None or plural not in _GROUPS:
            return None
        path = f"{_GROUPS[plural]}/namespaces/{namespace}/{plural}{rest}"
        try:
            answer = self.http.get(path, params={"labelSelector": selector} if selector else None)
        except httpx.HTTPError:
            return None
        if answer.status_code == 404:
            return {}
        if answer.status_code != 200:
            return None
        found: dict[str, Any] = answer.json()
        for one in found.get("items", [found]):
            one["metadata"].pop("managedFields", None)
        return found

    def items(self, kind: str, namespace: str, selector: str = "") -> list[dict[str, Any]]:
        """Return objects of a namespace."""
        if listed := self._read(kind, namespace, selector=selector):
            shown: list[dict[str, Any]] = listed["items"]
            return shown
        command = ["get", kind, "-n", namespace, "-o", "json", *(["-l", selector] if selector else [])]
        found: list[dict[str, Any]] = json.loads(self.kubectl(*command))["items"]
        return found

    def namespace(self, restricted: bool = False) -> str:
        """Return a fresh namespace. With `restricted`, its pod security admission refuses all other pods."""
        prefix = os.environ.get("ROLLYARD_TEST_NAMESPACES", "test")
        name = f"{prefix}-{secrets.token_hex(4)}"
        self.kubectl("create", "namespace", name)
        self.made.append(name)
        if restricted:
            self.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
        return name

    def volume(self, namespace: str, folder: Path) -> None:
        """Make a volume of an empty folder of this machine by hand, and the claim `state` on it."""
        os.chown(folder, API_USER, API_USER)
        common = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
        size, name = {"storage": "1Gi"}, f"{namespace}-state"
        made = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {**common, "capacity": size, "hostPath": {"path": str(folder)}},
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "state", "namespace": namespace},
            "spec": {**common, "resources": {"requests": size}, "volumeName": name},
        }
        self.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([made, claim]))

    def remove_volume(self, namespace: str) -> None:
        """Remove both, without waiting for their end."""
        self.run("kubectl", "delete", "pvc", "state", "-n", namespace, "--ignore-not-found", "--wait=false")
        self.run("kubectl", "delete", "pv", f"{namespace}-state", "--ignore-not-found", "--wait=false")

    def with_rights(self, kubeconfig: Path) -> Cluster:
        """Return the same cluster with the rights of another kubeconfig."""
        env = {**self.env, "KUBECONFIG": str(kubeconfig)}
        return dataclasses.replace(self, kubeconfig=kubeconfig, env=env, http=None)


def end_left() -> None:
    """End the cluster that an interrupted run of tests has left."""
    shared = os.environ.get("ROLLYARD_SHARED")
    if shared:
        sharedlab.end_left(IN_USE, lambda: _command(Path(shared) / "kit" / "kube-lab", "wipe"))


def lab_program(missing: Callable[[str], NoReturn]) -> Path:
    """Return the path of kube-lab, or call `missing` with the reason why it cannot be used here."""
    shared = os.environ.get("ROLLYARD_SHARED")
    if not shared:
        missing("no cluster: set ROLLYARD_SHARED to the folder that holds kit/kube-lab")
    lab = Path(shared) / "kit" / "kube-lab"
    if not os.access(lab, os.X_OK):
        missing(f"no cluster: {lab} is not there")
    if os.geteuid() != 0:
        missing("no cluster: kube-lab needs root")
    return lab


@pytest.fixture(scope="session")
def cluster(missing: Callable[[str], NoReturn]) -> Iterator[Cluster]:
    """Yield kube-lab's cluster with the CRDs of this checkout."""
    lab = lab_program(missing)
    try:
        with sharedlab.shared_lab(
            IN_USE, lambda: _runs(lab), lambda: _start(lab), lambda: _command(lab, "wipe")
        ):
            yield from _cluster(lab)
    except sharedlab.NotStarted as error:
        missing(f"no cluster: kube-lab does not start: {error}")


def _command(lab: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*before, str(lab), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_SECONDS,
    )


def _runs(lab: Path) -> bool:
    return " pid " in _command(lab, "status").stdout


def _start(lab: Path) -> None:
    # What an earlier one has left would keep containerd busy while the kubelet waits for it.
    _command(lab, "wipe")
    started = _command(lab, "start", before=("unshare", "--mount", "--propagation", "private"))
    if started.returncode != 0:
        raise sharedlab.NotStarted(started.stdout)


def _cluster(lab: Path) -> Iterator[Cluster]:
    lines = subprocess.run([str(lab), "env"], capture_output=True, text=True, check=True).stdout
    given = subprocess.run(
        ["bash", "-c", f"{lines}\nenv -0"], capture_output=True, text=True, check=True
    ).stdout
    env = dict(pair.split("=", 1) for pair in given.split("\0") if "=" in pair)
    made = Cluster(Path(env["KUBECONFIG"]), env)
    made.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    made.kubectl("wait", "--for=condition=Established", "-f", str(CRDS), f"--timeout={patience(180):.0f}s")
    with api_server(made.kubeconfig) as made.http:
        yield made
    if made.made:
        # Nothing waits for their end, because the next session has namespaces of its own.
        made.kubectl("delete", "namespace", "--ignore-not-found", "--wait=false", *made.made)


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> str:
    """Return the tag of this checkout's images, `registry.local/rollyard-…`, built and loaded.

    ROLLYARD_TEST_TAG names one that is loaded already.
    """
    given = os.environ.get("ROLLYARD_TEST_TAG")
    if given:
        return given
    lab = Path(os.environ["ROLLYARD_SHARED"]) / "kit" / "kube-lab"
    env = {**cluster.env, "IMAGE_LOAD": f"{lab} load", "PYTHON": sys.executable}
    # Its mounts are no business of bubblewrap's either.
    command = ["unshare", "--mount", str(ROOT / "scripts" / "images"), "--tag", "test", "--load"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=IMAGES_SECONDS)
    if done.returncode != 0:
        raise CommandFailed(command, done)
    return "test"
