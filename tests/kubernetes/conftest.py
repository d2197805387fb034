"""Fixtures of the tests' cluster, of this checkout's images on it, and of one installation of the chart."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from rollyard_testing.hub import Hub, hub_server
from rollyard_testing.kubernetes.faultrun import TASKS
from rollyard_testing.kubernetes.installed import Release, a_release
from rollyard_testing.kubernetes.installedchart import PATIENCE_SECONDS, Installation
from rollyard_testing.kubernetes.kubelab import Cluster, cluster, images

__all__ = ["Cluster", "cluster", "images"]
ROOT = Path(__file__).resolve().parents[2]
LEASE_SECONDS = 5
"""The lease is short, so another worker soon gets what a killed stage worker held."""


@pytest.fixture(scope="session")
def hub(cluster: Cluster) -> Iterator[Hub]:
    """Yield a hub on this machine, which pods reach by the address of their node."""
    address = cluster.kubectl(
        "get", "nodes", "-o", "jsonpath={.items[0].status.addresses[?(@.type=='InternalIP')].address}"
    )
    with hub_server(address.split()[0]) as server:
        server.large = 1 << 30  # Pods cannot resolve the name of its content network.
        yield server


@pytest.fixture(scope="session")
def installation(
    cluster: Cluster, images: str, hub: Hub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installation]:
    """Yield control plane and operator for five namespaces. The tests say what each of them is for.

    The database is in a folder of this machine, so it outlives its pod.
    """
    release = cluster.namespace(restricted=True)
    namespaces = tuple(cluster.namespace(restricted=True) for _ in range(5))
    made = Installation(cluster, release, namespaces, f"registry.local/rollyard-sandbox-default:{images}")
    values = tmp_path_factory.mktemp("values") / "values.yaml"
    chosen = chart_values(namespaces, images)
    # Only pools with a model of the hub use its claim and its Secret.
    chosen["hub"] = {"endpoint": hub.url, "claim": "state", "tokenSecret": "hub-token"}
    values.write_text(yaml.safe_dump(chosen))
    cluster.volume(release, tmp_path_factory.mktemp("state"))
    try:
        cluster.helm(
            "install", release, str(ROOT / "helm" / "rollyard"), "-n", release, "--values", str(values),
            "--wait", "--timeout", f"{PATIENCE_SECONDS}s",
        )  # fmt: skip
        made.connect()
        yield made
    finally:
        # The operator must still exist here, because it takes jobs and pools out of the control plane.
        for namespace in namespaces:
            cluster.run(
                "kubectl", "delete", "rj,bp", "--all", "-n", namespace, f"--timeout={PATIENCE_SECONDS}s"
            )
        cluster.helm("uninstall", release, "-n", release, "--wait", "--ignore-not-found")
        cluster.remove_volume(release)
    nothing_left(made)


def chart_values(namespaces: tuple[str, ...], tag: str) -> dict[str, object]:
    """Return values that are small enough for two cores."""
    tiny = {"requests": {"cpu": "20m", "memory": "128Mi"}}
    return {
        "namespaces": list(namespaces),
        # The CRDs are this checkout's already, and belong to other installations, too.
        "crds": {"enabled": False},
        "images": {"tag": tag, "pullPolicy": "Never"},
        "api": {
            "persistence": {"type": "existingClaim", "existingClaim": "state"},
            "resources": tiny,
            "leaseSeconds": LEASE_SECONDS,
        },
        "operator": {"resources": tiny},
        "jobs": {
            "allow": {
                "initContainers": [f"registry.local/rollyard-sandbox-default:{tag}"],
                "users": [20000],
                "groups": ["20001-20003"],
            }
        },
        "sandboxes": {"cpuRequestFraction": 0.02, "memoryRequestFraction": 0.25},
    }


def nothing_left(made: Installation) -> None:
    """Check that no pod of the operator outlives its job, and nothing of the chart its release."""
    selectors = (f"rollyard.dev/instance={made.release}", f"app.kubernetes.io/instance={made.release}")
    kinds = "pods,services,secrets,roles,rolebindings,serviceaccounts,deployments"
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        left = [
            f"{item['kind']} {item['metadata']['namespace']}/{item['metadata']['name']}"
            for selector in selectors
            for item in json.loads(made.cluster.kubectl("get", kinds, "-A", "-l", selector, "-o", "json"))[
                "items"
            ]
        ]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


@pytest.fixture(scope="session")
def release(installation: Installation) -> Iterator[Release]:
    """Yield a namespace with a pool, for all tests that kill parts of jobs."""
    with a_release(installation, TASKS) as made:
        yield made
