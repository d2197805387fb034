"""The addresses that a sandbox must not reach."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.labels import Object
from rollyard_operator.sandboxes.isolation import METADATA, Witnesses, external_checks, isolation_checks
from rollyard_operator.sandboxes.policies import egress_trouble
from rollyard_operator.settings import OperatorSettings, SettingsError
from rollyard_testing.operator.fakecluster import FakeKube

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


@pytest.mark.attack(
    "the policy asks the cluster's DNS, or the metadata address for the node's credentials",
    boundary="kubernetes",
    surface="network of sandboxes",
    stopped_by="both are tried from the sandbox",
)
async def test_in_a_pod_it_is_the_api_server_the_control_plane_dns_and_metadata(tmp_path: Path) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("search a.b\nnameserver 10.96.0.10\nnameserver fd00::a\nnameserver 127.0.0.53\n")
    found = await isolation_checks(settings(), FakeKube(), IN_POD, resolver)
    assert found == ("10.96.0.1:6443", "10.96.0.9:8765", "10.96.0.10:53", "[fd00::a]:53", METADATA)


async def test_ports_that_are_not_said_are_the_usual_ones_and_nothing_is_checked_twice(
    tmp_path: Path,
) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 10.96.0.10\nnameserver 10.96.0.10\nnameserver dns.example\nnameserver\n")
    env = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    outside = {"external": ["10.96.0.10:53", "203.0.113.1:80"]}
    found = await isolation_checks(settings("https://10.96.0.9/x", **outside), FakeKube(), env, resolver)
    assert found == ("10.96.0.1:443", "10.96.0.9:443", "10.96.0.10:53", METADATA, "203.0.113.1:80")
    found = await isolation_checks(settings("http://10.96.0.9"), FakeKube(), env, tmp_path / "absent")
    assert found == ("10.96.0.1:443", "10.96.0.9:80", METADATA)
    kube = with_service("10.96.0.1")
    kube.refuse = lambda verb, obj: KubeError(403, "Forbidden", "services is forbidden")
    found = await isolation_checks(settings(), kube, {}, resolver)
    assert found == ("10.96.0.9:8765", METADATA), "the DNS server of another machine proves nothing"


async def test_outside_a_pod_the_cluster_says_where_its_api_server_is() -> None:
    found = await isolation_checks(settings("https://127.0.0.1"), with_service("10.96.0.1", "fd00::1"), {})
    assert found == ("10.96.0.1:443", "[fd00::1]:443", METADATA), "of loopback a pod has its own"


async def test_what_the_settings_name_is_all() -> None:
    chosen = settings(checks=["192.0.2.1:80", "[2001:db8::1]:81"])
    assert await isolation_checks(chosen, FakeKube(), IN_POD) == ("192.0.2.1:80", "[2001:db8::1]:81")


async def test_what_lies_outside_of_the_cluster_is_added() -> None:
    outside = settings(external=["203.0.113.1:80"])
    found = await isolation_checks(outside, with_service("10.96.0.1"), {})
    assert found == ("10.96.0.1:443", "10.96.0.9:8765", METADATA, "203.0.113.1:80")
    assert await external_checks(outside) == ("203.0.113.1:80",)
    named = settings(checks=["192.0.2.1:80"], external=["203.0.113.1:80"])
    assert await isolation_checks(named, FakeKube(), IN_POD) == ("192.0.2.1:80", "203.0.113.1:80")
    with pytest.raises(ValueError, match=r"isolation\.external.* have no effect"):
        settings(required=False, external=["203.0.113.1:80"])


async def test_what_no_check_proves_is_said() -> None:
    assert "sandboxes.isolation.external" in Witnesses(()).doubt()
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    witnesses = Witnesses((f"127.0.0.1:{port}", "127.0.0.1:1"))
    assert witnesses.doubt() == "", "not known yet"
    await witnesses.look()
    assert witnesses.doubt() == "", "one that answers is enough"
    server.close()
    await server.wait_closed()
    await witnesses.look()
    assert f"127.0.0.1:{port}" in witnesses.doubt()


SANDBOX = {"app.kubernetes.io/component": "sandbox", "team": "a"}


def policy(name: str = "p", **spec: object) -> Object:
    return {"metadata": {"name": name}, "spec": {"podSelector": {}} | spec}


HAS = {"key": "team", "operator": "Exists"}
OURS = policy("ours", podSelector={"matchLabels": {"team": "a"}}, policyTypes=["Egress"], egress=[])


@pytest.mark.parametrize(
    ("foreign", "opens"),
    [
        (policy(policyTypes=["Egress"], egress=[{}]), True),
        (policy(policyTypes=["Ingress", "Egress"], egress=[{"ports": [{"port": 53}]}]), True),
        (policy(egress=[{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]), True),
        (policy(policyTypes=["Egress"], egress=[]), False),
        (policy(policyTypes=["Ingress"], ingress=[{}]), False),
        (policy(policyTypes=["Ingress"], ingress=[{}], egress=[{}]), False),
        (policy(podSelector={"matchLabels": {"team": "a"}}, egress=[{}]), True),
        (policy(podSelector={"matchLabels": {"team": "b"}}, egress=[{}]), False),
        (policy(podSelector={"matchLabels": {"other": "a"}}, egress=[{}]), False),
        (policy(podSelector=None, egress=[{}]), True),
        (policy(podSelector={"matchLabels": {"team": "a", "other": "a"}}, egress=[{}]), False),
        (policy(podSelector={"matchLabels": {"other": "a", "team": "a"}}, egress=[{}]), False),
        (policy(podSelector={"matchLabels": SANDBOX}, egress=[{}]), True),
        (
            policy(
                podSelector={"matchLabels": {"team": "a"}, "matchExpressions": [HAS | {"key": "other"}]},
                egress=[{}],
            ),
            False,
        ),
        (policy(podSelector={"matchExpressions": [HAS, HAS | {"key": "other"}]}, egress=[{}]), False),
        (policy(podSelector={"matchLabels": {"team": "b"}, "matchExpressions": [HAS]}, egress=[{}]), False),
    ],
)
def test_policies_add_up(foreign: Object, opens: bool) -> None:
    said = egress_trouble([OURS, foreign], SANDBOX, True)
    assert bool(said) is opens
    assert not opens or "NetworkPolicy p permits" in said


@pytest.mark.parametrize(
    ("key", "operator", "values", "selects"),
    [
        ("team", "In", ["a", "b"], True),
        ("team", "In", ["b"], False),
        ("absent", "In", ["b"], False),
        ("team", "NotIn", ["a"], False),
        ("team", "NotIn", ["b"], True),
        ("absent", "NotIn", ["b"], True),
        ("team", "Exists", None, True),
        ("absent", "Exists", None, False),
        ("team", "DoesNotExist", None, False),
        ("absent", "DoesNotExist", None, True),
        ("team", "Later", None, True),
    ],
)
def test_selectors_are_read_as_the_cluster_reads_them(
    key: str, operator: str, values: list[str] | None, selects: bool
) -> None:
    expression = {"key": key, "operator": operator, "values": values}
    foreign = policy(podSelector={"matchExpressions": [expression]}, egress=[{}])
    assert bool(egress_trouble([OURS, foreign], SANDBOX, True)) is selects


def test_each_policy_that_opens_is_looked_at_and_the_first_are_named() -> None:
    foreign = [policy(name, policyTypes=["Egress"], egress=[{}]) for name in "dcba"]
    said = egress_trouble([OURS, *foreign], SANDBOX, True)
    assert "NetworkPolicy a, b, c, … permits" in said
    assert "NetworkPolicy a, b, c permits" in egress_trouble([*foreign[1:], OURS], SANDBOX, False)


def test_without_a_policy_that_denies_a_sandbox_is_open() -> None:
    elsewhere = policy(podSelector={"matchLabels": {"team": "b"}}, policyTypes=["Egress"])
    assert "was deleted or changed" in egress_trouble([elsewhere], SANDBOX, True)
    ingress = policy(podSelector={}, policyTypes=["Ingress"])
    assert "was deleted or changed" in egress_trouble([ingress], SANDBOX, True)
    assert "was deleted or changed" in egress_trouble([], SANDBOX, True)
    assert egress_trouble([elsewhere], SANDBOX, False) == "", "policies of another kind may deny it"


async def test_nothing_where_none_is_required() -> None:
    assert await isolation_checks(settings(required=False), FakeKube(), IN_POD) == ()


async def test_nothing_to_check_against_is_an_error() -> None:
    kube = with_service("10.96.0.1")
    kube.refuse = lambda verb, obj: KubeError(403, "Forbidden", "services is forbidden")
    with pytest.raises(SettingsError, match=r"isolation\.checks: neither"):
        await isolation_checks(settings("http://localhost:1"), kube, {})
    with pytest.raises(SettingsError, match=r"no-such-host\.invalid:1: the name cannot be resolved"):
        await isolation_checks(settings(checks=["no-such-host.invalid:1"]), kube, {})
