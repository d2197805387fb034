"""The example's trainer as a Job beside an installation, whose pods are killed.

Its image is the engine's, into which volumes bring what a trainer's own image would hold: the checkout, and
torch from the environment of `scripts/train-env`. The node is this machine, and the cluster makes no volumes,
so all of them are made by hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rollyard_testing.kubernetes.installed import ROOT, Release
from rollyard_testing.kubernetes.kubelab import API_USER
from rollyard_testing.kubernetes.podwatch import kill_processes
from rollyard_testing.pace import patience
from rollyard_testing.trainer.used import acknowledged, delivered, ledger_of

MANIFEST = ROOT / "examples" / "kubernetes-trainer" / "trainer.yaml"
NAME = "grpo-trainer"
CLAIM = "grpo"
RUN = "grpo-0"
CHECKOUT = "/mnt/rollyard"
PACKAGES = "/mnt/packages"
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = patience(240.0)
"""The time for a step of the trainer, which takes some seconds on a machine with nothing else to do."""

Groups = list[tuple[dict[str, Any], str]]


class TrainerJob:
    """The Job, its volume, and what another process sees of its training."""

    def __init__(self, release: Release, folder: Path) -> None:
        self.release = release
        self.checkpoints = folder / "run-0" / "checkpoints"
        self.pods: set[str] = set()
        """The pods of the trainer that were ever seen."""

    def step(self) -> int:
        """Return the step of the newest checkpoint, or -1 before the first."""
        return max((int(path.name[5:]) for path in self.checkpoints.glob("step-????")), default=-1)

    def ledger(self) -> list[dict[str, Any]]:
        """Return the ledger of the run."""
        return ledger_of(self.checkpoints)

    def groups(self) -> Groups:
        """Return what the control plane has delivered."""
        with self.release.http() as http:
            return delivered(http, RUN, self.release.jobs)

    def cursor(self) -> str:
        """Return the cursor that the trainer acknowledged last."""
        with self.release.http() as http:
            return acknowledged(http, RUN, self.release.jobs)

    def pod(self) -> dict[str, Any] | None:
        """Return the pod of the trainer that runs now, if one does."""
        found = self.release.cluster.items("pods", self.release.jobs, f"app={NAME}")
        self.pods |= {pod["metadata"]["uid"] for pod in found}
        running = [
            pod
            for pod in found
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]
        return running[0] if running else None

    def in_the_middle_of(self, step: int) -> dict[str, Any]:
        """Return the trainer's pod once it works on a step, and has groups that no checkpoint has.

        Raises:
            AssertionError: This never came, or the step was over too soon.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            assert self.step() < step, f"step {step} is over already"
            self.ended()
            pod = self.pod()
            if pod is not None and self.step() == step - 1 and len(self.groups()) > len(self.ledger()):
                return pod
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"the trainer is not in the middle of step {step}\n{self.words()}")

    def delete_by_force(self, pod: dict[str, Any]) -> None:
        """Delete a pod without waiting for its process. The Job makes another one at once."""
        self.release.kubectl(
            "delete", "pod", str(pod["metadata"]["name"]), "--grace-period=0", "--force", "--wait=false"
        )

    def kill(self, pod: dict[str, Any]) -> None:
        """Send kill -9 to the processes of a pod."""
        assert kill_processes(pod) > 0, "the trainer had ended already"

    def who_sees_the_volume(self) -> dict[str, bool]:
        """Return the pods that mount the claim or the token's Secret, and whether each may only read."""
        found: dict[str, bool] = {}
        for pod in self.release.cluster.items("pods", self.release.jobs):
            volumes = {
                one["name"]
                for one in pod["spec"]["volumes"]
                if one.get("persistentVolumeClaim", {}).get("claimName") == CLAIM
            }
            containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
            mounts = [one for each in containers for one in each["volumeMounts"] if one["name"] in volumes]
            secrets = json.dumps([pod["spec"]["volumes"], [each.get("env") for each in containers]])
            if mounts or f'"{NAME}"' in secrets:
                labels = pod["metadata"]["labels"]
                who = labels.get("app") or labels["app.kubernetes.io/component"]
                found[who] = all(one.get("readOnly", False) for one in mounts)
        return found

    def ended(self) -> bool:
        """Return whether the Job is complete.

        Raises:
            AssertionError: It failed.
        """
        status = self.release.cluster.get("job", NAME, self.release.jobs).get("status", {})
        conditions = {one["type"] for one in status.get("conditions", []) if one["status"] == "True"}
        assert not conditions & {"Failed", "FailureTarget"}, self.words()
        return "Complete" in conditions

    def finish(self) -> None:
        """Wait until the Job is complete.

        Raises:
            AssertionError: It failed, or took too long.
        """
        deadline = time.monotonic() + 2 * PATIENCE_SECONDS
        while time.monotonic() < deadline:
            self.pod()
            if self.ended():
                return
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"the trainer does not end\n{self.words()}")

    def words(self) -> str:
        """Return what helps to explain a failed test."""
        said = []
        for words in (("describe", f"job/{NAME}"), ("logs", "-l", f"app={NAME}", "--tail=40", "--prefix")):
            done = self.release.cluster.run("kubectl", "-n", self.release.jobs, *words)
            said.append(f"$ kubectl {' '.join(words)}\n{(done.stdout + done.stderr)[-4000:]}")
        return "\n".join([*said, self.release.words()])


@contextlib.contextmanager
def a_trainer(release: Release, images: str, python: Path, *arguments: str) -> Iterator[TrainerJob]:
    """Yield the trainer's Job, which has just been applied with its pool, and remove everything afterwards.

    Args:
        release: The installation, which must permit volumes of claims.
        images: The tag of the images on the node.
        python: The Python of `scripts/train-env`.
        arguments: Further options of the trainer.
    """
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [python, "-c", asked], capture_output=True, text=True, check=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="rollyard-trainer-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        os.chown(folder, API_USER, API_USER)
        folders = {CLAIM: str(folder), "packages": packages, "checkout": str(ROOT)}
        try:
            for claim, path in folders.items():
                release.apply(*host_volume(f"{release.name}-{claim}", release.jobs, claim, path))
            release.apply(token_secret(release), *manifests(release, images, arguments))
            yield TrainerJob(release, folder)
        finally:
            release.cluster.run(
                "kubectl", "delete", "-n", release.jobs, f"job/{NAME}", f"rj/{RUN}", f"bp/{CLAIM}",
                "--ignore-not-found", "--cascade=foreground", f"--timeout={patience(120):.0f}s",
            )  # fmt: skip
            for claim in folders:
                release.cluster.run(
                    "kubectl", "delete", "-n", release.jobs, f"pvc/{claim}", f"pv/{release.name}-{claim}",
                    "--ignore-not-found", "--wait=false",
                )  # fmt: skip


def token_secret(release: Release) -> dict[str, Any]:
    """Return the Secret with the token that the trainer uses, as docs/kubernetes.md makes it."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME},
        "stringData": {"token": release.token},
    }


def manifests(release: Release, images: str, arguments: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the example's pool and Job, with what differs on the tests' cluster."""
    _, pool, job = yaml.safe_load_all(MANIFEST.read_text())
    spec = job["spec"]["template"]["spec"]
    (trainer,) = spec["containers"]
    trainer["image"] = f"registry.local/rollyard-engine:{images}"
    trainer["imagePullPolicy"] = "Never"
    trainer["command"] = ["python", f"{CHECKOUT}/examples/grpo/train.py"]
    trainer["args"] += arguments
    trainer["resources"] = {"requests": {"cpu": "100m", "memory": "512Mi"}}
    for one in trainer["env"]:
        if one["name"] == "ROLLYARD_URL":
            one["value"] = f"http://{release.name}-rollyard-api.{release.name}.svc.cluster.local:8765"
    ours = ("cli/src", "client/src", "crds/src", "drivers/src", "process/src")
    path = ":".join([*(f"{CHECKOUT}/{folder}" for folder in ours), PACKAGES])
    trainer["env"].append({"name": "PYTHONPATH", "value": path})
    for name, where in (("packages", PACKAGES), ("checkout", CHECKOUT)):
        claim = {"claimName": name, "readOnly": True}
        spec["volumes"].append({"name": name, "persistentVolumeClaim": claim})
        trainer["volumeMounts"].append({"name": name, "mountPath": where, "readOnly": True})
    return [pool, job]


def host_volume(volume: str, namespace: str, claim: str, folder: str) -> list[dict[str, Any]]:
    """Return a volume of a folder of the node, and the claim that it is bound to."""
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": modes,
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": folder, "type": "Directory"},
                "claimRef": {"namespace": namespace, "name": claim},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace},
            "spec": {
                "accessModes": modes,
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        },
    ]
