"""Which addresses a sandbox must not reach."""

from __future__ import annotations

import pytest
from fakecluster import FakeKube
from rollyard_operator.isolation import isolation_checks
from rollyard_operator.kube import KubeError
from rollyard_operator.settings import OperatorSettings, SettingsError

IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}


def settings(url: str = "http://10.96.0.9:8765", **isolation: object) -> OperatorSettings:
    return OperatorSettings.model_validate(
        {
            "instance": "test",
            "controlPlaneUrl": url,
            "tokenFile": "/t",
            "workerTokenFile": "/w",
            "releaseNamespace": "rollyard",
            "images": {"worker": "w:1", "engine": "e:1", "sandbox": "s:1", "sandboxDefault": "d:1"},
            "isolation": isolation,
        }
    )


def with_service(*addresses: str) -> FakeKube:
    kube = FakeKube()
    kube.put(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kubernetes", "namespace": "default"},
            "spec": {"clusterIPs": list(addresses), "ports": [{"port": 443}]},
        }
    )
    return kube


async def test_in_a_pod_it_is_the_api_server_and_the_control_plane() -> None:
    found = await isolation_checks(settings(), FakeKube(), IN_POD)
    assert found == ("10.96.0.1:6443", "10.96.0.9:8765")


async def test_outside_a_pod_the_cluster_says_where_its_api_server_is() -> None:
    found = await isolation_checks(settings("https://127.0.0.1"), with_service("10.96.0.1", "fd00::1"), {})
    assert found == ("10.96.0.1:443", "[fd00::1]:443"), "of loopback a pod has its own"


async def test_what_the_settings_name_is_all() -> None:
    chosen = settings(checks=["192.0.2.1:80", "[2001:db8::1]:81"])
    assert await isolation_checks(chosen, FakeKube(), IN_POD) == ("192.0.2.1:80", "[2001:db8::1]:81")


async def test_nothing_where_none_is_required() -> None:
    assert await isolation_checks(settings(required=False), FakeKube(), IN_POD) == ()


async def test_nothing_to_check_against_is_an_error() -> None:
    kube = with_service("10.96.0.1")
    kube.refuse = lambda verb, obj: KubeError(403, "Forbidden", "services is forbidden")
    with pytest.raises(SettingsError, match=r"isolation\.checks: neither"):
        await isolation_checks(settings("http://localhost:1"), kube, {})
    with pytest.raises(SettingsError, match=r"no-such-host\.invalid:1: the name cannot be resolved"):
        await isolation_checks(settings(checks=["no-such-host.invalid:1"]), kube, {})
