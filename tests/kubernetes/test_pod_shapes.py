"""A real API server takes what the operator makes, in a namespace where everything must be restricted."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from rollyard_testing.operator.podcases import objects

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.kubelab import Cluster

pytestmark = pytest.mark.kubernetes


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> str:
    return cluster.namespace(restricted=True)


def dry_run(cluster: Cluster, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what the API server would store. kubectl fails where it refuses an object or does not know a
    field.
    """
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
    flags = ("--server-side", "--dry-run=server", "--validate=strict", "--field-manager=rollyard-operator")
    answer = json.loads(cluster.kubectl("apply", *flags, "-o", "json", "-f", "-", input=text))
    stored: list[dict[str, Any]] = answer["items"]
    return stored


@pytest.mark.parametrize("part", range(4))
def test_the_api_server_takes_all_of_it(cluster: Cluster, namespace: str, part: int) -> None:
    made = [
        obj for seed in range(part * 10, part * 10 + 10) for obj in objects(random.Random(seed), namespace)
    ]
    stored = dry_run(cluster, made)
    assert len(stored) == len(made) > 80
    for sent, taken in zip(made, stored, strict=True):
        assert (taken["kind"], taken["metadata"]["name"]) == (sent["kind"], sent["metadata"]["name"])
        assert taken["metadata"]["labels"].items() >= sent["metadata"]["labels"].items()
        if sent["kind"] == "Pod":
            ours, theirs = sent["spec"]["containers"][0], taken["spec"]["containers"][0]
            assert theirs.get("command") == ours["command"]
            assert theirs.get("args") == ours.get("args")
            assert theirs["securityContext"] == ours["securityContext"]


def test_the_namespace_would_refuse_a_pod_that_is_not_restricted(cluster: Cluster, namespace: str) -> None:
    pod = next(obj for obj in objects(random.Random(0), namespace) if obj["kind"] == "Pod")
    del pod["spec"]["containers"][0]["securityContext"]["capabilities"]
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        dry_run(cluster, [pod])


def test_it_would_refuse_a_field_that_it_does_not_know(cluster: Cluster, namespace: str) -> None:
    pod = next(obj for obj in objects(random.Random(0), namespace) if obj["kind"] == "Pod")
    pod["spec"]["containers"][0]["image_pull_policy"] = "Never"
    with pytest.raises(AssertionError, match="image_pull_policy"):
        dry_run(cluster, [pod])
