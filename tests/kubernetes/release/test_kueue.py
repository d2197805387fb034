"""With the real Kueue, a job over its queue's quota waits, says so, and runs when there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rollyard_testing.kubernetes.installedchart import PATIENCE_SECONDS, condition, is_so, job, task
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installedchart import Installation

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]
API = "kueue.x-k8s.io/v1beta1"
QUEUE = "kueue.x-k8s.io/queue-name"
WORKER = {"template": {"resources": {"requests": {"cpu": "25m", "memory": "64Mi"}}}}
STAGES = dict.fromkeys(("init", "run", "eval"), WORKER)
QUOTA = "90m"
"""There is room for a job's three workers and its sandbox (10m), and beside the workers for not one more."""


def install_kueue(installation: Installation) -> None:
    """Install Kueue. Its first pod makes a certificate, and waits until the kubelet mounts it, for minutes at
    times.

    A pod that begins once the certificate exists finds it at once, so one takes the place of the first.
    """
    cluster = installation.cluster
    lab = Path(os.environ["ROLLYARD_SHARED"]) / "kit" / "kube-lab"
    certificate = ("secret/kueue-webhook-server-cert", "-o", "jsonpath={.data}")

    def made() -> bool:
        shown = cluster.run("kubectl", "get", "-n", "kueue-system", *certificate)
        return "tls.crt" in shown.stdout or installing.poll() is not None

    with subprocess.Popen(
        [lab, "kueue"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as installing:
        try:
            installation.until(made, "Kueue makes its certificate")
            cluster.run("kubectl", "delete", "pods", "--all", "-n", "kueue-system", "--wait=false")
            said, _ = installing.communicate(timeout=patience(240))
        finally:
            installing.kill()
    assert installing.returncode == 0, said


@pytest.fixture(scope="module")
def queue(installation: Installation) -> Iterator[str]:
    """Yield a queue with room for one job's three workers and a sandbox, and for no other worker."""
    cluster, name, namespace = installation.cluster, installation.release, installation.namespaces[2]
    there = cluster.run("kubectl", "get", "deployment/kueue-controller-manager", "-n", "kueue-system")
    quotas = {"cpu": QUOTA, "memory": "100Gi", "ephemeral-storage": "100Gi"}
    documents: list[dict[str, Any]] = [
        {"kind": "ResourceFlavor", "metadata": {"name": name}},
        {
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "resourceGroups": [
                    {
                        "coveredResources": list(quotas),
                        "flavors": [
                            {
                                "name": name,
                                "resources": [
                                    {"name": key, "nominalQuota": value} for key, value in quotas.items()
                                ],
                            }
                        ],
                    }
                ],
            },
        },
        {"kind": "LocalQueue", "metadata": {"name": "team"}, "spec": {"clusterQueue": name}},
    ]
    try:
        if there.returncode:
            install_kueue(installation)
        cluster.kubectl(
            "wait", "--for=condition=Available", "deployment/kueue-controller-manager", "-n", "kueue-system",
            f"--timeout={patience(120):.0f}s",
        )  # fmt: skip
        for document in documents:
            # Its webhooks take a moment longer than its pod.
            installation.until(
                lambda document=document: installation.apply_quietly(
                    {"apiVersion": API, **document}, namespace
                ),
                f"Kueue takes a {document['kind']}",
            )
        yield namespace
    finally:
        limit = f"--timeout={PATIENCE_SECONDS}s"
        cluster.run("kubectl", "delete", "rj", "--all", "-n", namespace, limit)
        cluster.run("kubectl", "delete", "localqueue", "team", "-n", namespace, limit)
        cluster.run("kubectl", "delete", f"clusterqueue/{name}", f"resourceflavor/{name}", limit)
        if there.returncode:
            # Its webhooks see every pod of the cluster, those of other tests, too. Its pods' finalizers come
            # first.
            installation.until(lambda: not cluster.items("pods", namespace), "no pod is left of the queue")
            cluster.helm("uninstall", "kueue", "-n", "kueue-system", "--wait")


def queued(name: str, *tasks: dict[str, Any]) -> dict[str, Any]:
    made = job(name, *tasks, stages=STAGES)
    made["metadata"]["labels"] = {QUEUE: "team"}
    return made


def gated(pod: dict[str, Any]) -> bool:
    return any(one["name"].startswith("kueue") for one in pod["spec"].get("schedulingGates", ()))


def without_room(installation: Installation, namespace: str) -> set[str]:
    """Return the uids of the pods for which Kueue has found no room."""
    return {
        workload["metadata"]["ownerReferences"][0]["uid"]
        for workload in installation.cluster.items("workloads", namespace)
        if is_so(workload, "QuotaReserved", "False")
        and "insufficient unused quota for cpu" in condition(workload, "QuotaReserved")["message"]
    }


def all_wait(installation: Installation, namespace: str, name: str) -> bool:
    """Return whether a job's three workers exist and stay held back after Kueue has looked at them."""
    waiting = [one for one in installation.pods(namespace=namespace, job=name) if gated(one)]
    uids = {one["metadata"]["uid"] for one in waiting}
    return len(uids) == 3 and uids <= without_room(installation, namespace)


def test_a_job_over_quota_waits_then_runs(installation: Installation, queue: str) -> None:
    with installation.client(queue) as client:
        installation.apply(queued("first"), queue)
        installation.wait("rj", "first", "Running", queue)
        client.push_tasks("first", [task("a")])
        installation.until(
            lambda: client.job("first").status.counts.succeeded == 1, "a task", namespace=queue
        )
        for pod in installation.pods(namespace=queue):
            assert pod["metadata"]["labels"][QUEUE] == "team"
            assert pod["metadata"]["labels"]["kueue.x-k8s.io/managed"] == "true"
        # There is no room for any of its workers.
        installation.apply(queued("second", task("a")), queue)
        said = installation.until_condition(
            "rj", "second", "Running", "held back until queue 'team'", namespace=queue
        )
        assert said["reason"] == "WorkersStarting"
        installation.until(lambda: all_wait(installation, queue, "second"), "its pods wait", namespace=queue)
        # While it is suspended, it is not even in the queue.
        assert installation.patch("rj", "second", {"suspend": True}, queue) == ""
        installation.until(
            lambda: not installation.pods(namespace=queue, job="second"), "no pod", namespace=queue
        )
        assert installation.patch("rj", "second", {"suspend": False}, queue) == ""
        installation.until(
            lambda: all_wait(installation, queue, "second"), "its pods wait again", namespace=queue
        )
        client.close_stream("first")
        installation.wait("rj", "first", "Succeeded", queue)
        installation.wait("rj", "second", "Succeeded", queue)
