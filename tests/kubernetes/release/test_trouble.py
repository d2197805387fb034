"""Jobs and pools that cannot be what they ask for give the reason, and notice changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from rollyard_testing.kubernetes.installedchart import condition, in_namespace, is_so, job, pool, task
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installedchart import Installation

pytestmark = pytest.mark.kubernetes


def test_a_job_that_names_no_pool(installation: Installation) -> None:
    lonely = job(
        "lonely", task("a"), backendRef={"name": "nowhere"}, agent={"type": "tools", "tools": ["bash"]}
    )
    with installation.made(lonely):
        said = installation.until_condition("rj", "lonely", "Running", "BackendPoolNotFound")
        assert "nowhere" in said["message"]
        assert installation.jobs in said["message"]
        assert not installation.pods(job="lonely")
        # One that comes later is noticed.
        with installation.made(pool("nowhere", replicas=0)):
            installation.until_condition("rj", "lonely", "Running", "BackendPoolNotReady")
            assert len(installation.pods("stage-worker", job="lonely")) == 3


def test_a_pool_with_an_impossible_image_and_its_scale(installation: Installation) -> None:
    template = {
        "image": "registry.local/absent:1",
        "resources": {"requests": {"cpu": "5m", "memory": "32Mi"}},
    }
    with installation.made(pool("imageless", template=template)):
        said = installation.until_condition("bp", "imageless", "Ready", "registry.local/absent:1")
        (pod,) = installation.pods("backend")
        waiting = pod["status"]["containerStatuses"][0]["state"]["waiting"]
        assert waiting["reason"] in said["message"]
        assert waiting["reason"] in ("ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff")
        found = installation.get("bp", "imageless") or {}
        assert is_so(found, "Degraded")
        assert waiting["reason"] in condition(found, "Degraded")["message"]
        # This is the scale subresource, as `kubectl scale` and autoscalers use it.
        kubectl = installation.cluster.kubectl
        kubectl("scale", "bp/imageless", "-n", installation.jobs, "--replicas=2")
        installation.until(lambda: len(installation.pods("backend")) == 2, "two backends")
        installation.until(lambda: status(installation, "imageless").get("replicas") == 2, "status.replicas")
        scale = kubectl(
            "get", "bp", "imageless", "-n", installation.jobs, "--subresource=scale",
            "-o", "jsonpath={.spec.replicas} {.status.replicas} {.status.selector}",
        )  # fmt: skip
        wanted, there, selector = scale.split()
        assert (wanted, there) == ("2", "2")
        chosen = installation.cluster.items("pods", installation.jobs, selector)
        assert {pod["metadata"]["name"] for pod in chosen} == {
            pod["metadata"]["name"] for pod in installation.pods("backend")
        }
        kubectl("scale", "bp/imageless", "-n", installation.jobs, "--replicas=0")
        installation.until(lambda: not installation.pods("backend"), "no backend")
        installation.until_condition("bp", "imageless", "Ready", "NoBackends")


def status(installation: Installation, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (installation.get("bp", name) or {}).get("status") or {}
    return found


def test_a_pool_with_an_impossible_number_of_gpus(installation: Installation) -> None:
    gpus = {"resources": {"requests": {"cpu": "5m", "memory": "32Mi"}, "limits": {"nvidia.com/gpu": "64"}}}
    with installation.made(pool("greedy", template=gpus)):
        said = installation.until_condition("bp", "greedy", "Ready", "Insufficient nvidia.com/gpu")
        (pod,) = installation.pods("backend")
        (scheduled,) = [one for one in pod["status"]["conditions"] if one["type"] == "PodScheduled"]
        assert scheduled["reason"] in said["message"]
        assert "Insufficient nvidia.com/gpu" in scheduled["message"]


@contextmanager
def quota(installation: Installation, namespace: str, pods: int) -> Iterator[None]:
    document = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "pods"},
        "spec": {"hard": {"pods": str(pods)}},
    }
    with installation.made(document, namespace):
        yield


def raise_quota(installation: Installation, namespace: str, pods: int) -> None:
    assert installation.patch("resourcequota", "pods", {"hard": {"pods": str(pods)}}, namespace) == ""


def refused_sandboxes(installation: Installation, name: str, namespace: str) -> list[str]:
    """Return what events of a job say about sandboxes that a quota refused."""
    said = [
        one["message"] for one in installation.events(name, namespace) if one["reason"] == "SandboxFailed"
    ]
    return [text for text in said if "exceeded quota" in text]


def test_a_quota_that_refuses_pods(installation: Installation) -> None:
    namespace = installation.namespaces[1]
    with quota(installation, namespace, 0), installation.made(job("squeezed", task("a")), namespace):
        said = installation.until_condition(
            "rj", "squeezed", "Running", "exceeded quota: pods", namespace=namespace
        )
        assert said["reason"] == "WorkersStarting"
        assert (
            condition(installation.get("rj", "squeezed", namespace) or {}, "Degraded")["reason"]
            == "WorkersBlocked"
        )
        assert not installation.pods(namespace=namespace)
        # There is room for the workers, and none for a sandbox.
        raise_quota(installation, namespace, 3)
        installation.wait("rj", "squeezed", "Running", namespace)
        installation.until(
            lambda: refused_sandboxes(installation, "squeezed", namespace),
            "an event about the sandbox",
            namespace=namespace,
        )
        raise_quota(installation, namespace, 10)
        installation.wait("rj", "squeezed", "Succeeded", namespace)


@pytest.mark.nightly
def test_a_namespace_without_rights_is_no_trouble_for_the_others(installation: Installation) -> None:
    cluster, locked = installation.cluster, installation.namespaces[3]
    binding = f"{installation.release}-rollyard-operator"
    rights = cluster.get("rolebinding", binding, locked)
    for field in ("resourceVersion", "uid", "creationTimestamp", "managedFields"):
        rights["metadata"].pop(field, None)
    operator = ["-n", installation.release, f"deployment/{installation.release}-rollyard-operator"]
    cluster.kubectl("delete", "rolebinding", binding, "-n", locked)
    try:
        # Even one that starts now sees the others.
        cluster.kubectl("rollout", "restart", *operator)
        cluster.kubectl("rollout", "status", *operator, f"--timeout={patience(90):.0f}s")
        installation.apply(job("shut-out", task("a")), locked)
        with installation.made(job("unharmed", task("a"))):
            installation.wait("rj", "unharmed", "Succeeded")
        assert "status" not in (installation.get("rj", "shut-out", locked) or {})
        # A client of REST learns what stands in the way.
        with installation.client(locked) as client:
            client.submit(in_namespace(job("posted-there", suspend=True), locked))
            installation.until(
                lambda: any(
                    (one.type, one.status, one.reason) == ("Admitted", "False", "Forbidden")
                    for one in client.job("posted-there").status.conditions
                ),
                "REST says why there is no object",
            )
        said = cluster.kubectl("logs", *operator, "--tail=200")
        assert locked in said
        assert "forbidden" in said
    finally:
        installation.apply(rights, locked)
    installation.wait("rj", "shut-out", "Succeeded", locked)
    installation.wait("rj", "posted-there", "Suspended", locked)
    (pod,) = cluster.items("pods", installation.release, "app.kubernetes.io/component=operator")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
