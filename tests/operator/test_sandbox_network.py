"""The network of sandbox pods is closed before they start and before they are handed out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.sandboxes.isolation import Witnesses
from rollyard_operator.sandboxes.loop import SandboxLoop
from rollyard_operator.sandboxes.policies import Guard, Namespaces
from rollyard_testing.operator.sandboxworld import SETTINGS, World, ended


async def test_the_network_is_closed_before_the_first_sandbox(world: World) -> None:
    world.plane.file()
    await world.turn()
    order = [(verb, kind) for verb, kind, _ in world.kube.calls if verb in ("apply", "create")]
    assert order == [("apply", "NetworkPolicy"), ("create", "Pod")]
    world.plane.file()
    await world.turn()
    verbs = [verb for verb, kind, _ in world.kube.calls if kind == "NetworkPolicy"]
    assert (verbs.count("apply"), verbs.count("list")) == (1, 1), "once in a while"


def opening(**spec: Any) -> dict[str, Any]:
    """Return a policy of somebody else."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "mine", "namespace": "team"},
        "spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{}]} | spec,
    }


async def test_a_policy_that_opens_sandboxes_keeps_them_from_being_made(world: World) -> None:
    world.kube.put(opening(egress=[{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}]))
    claim = world.plane.file()
    await world.turn(2)
    failed = world.plane.claims_[claim]
    assert (failed.state, failed.reason, failed.retryable) == ("Failed", "NotIsolated", True)
    assert "NetworkPolicy mine permits sandboxes to send" in failed.message
    assert world.kube.of("Pod") == []
    assert ("RolloutJob/job", "Warning", "SandboxFailed") in [one[:3] for one in world.kube.events]


@pytest.mark.attack(
    "a tenant's NetworkPolicy opens it towards addresses that no check tries",
    boundary="kubernetes",
    surface="network of sandboxes",
    stopped_by="policies are read before a sandbox is made and before it is handed out",
)
async def test_a_warm_sandbox_that_was_opened_meanwhile_is_not_handed_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_operator.sandboxes.policies.SEEN_SECONDS", 0.0)
    world.plane.want(1)
    await world.turn()
    world.start()
    (warm,) = world.kube.names("Pod")
    world.kube.put(opening())
    claim = world.plane.file()
    await world.turn()
    assert world.state(claim) != "Bound"
    assert "deletionTimestamp" in world.pod(warm)["metadata"]
    world.reap()
    world.kube.remove("NetworkPolicy", "team", "mine")
    later = world.plane.file()
    world.now += timedelta(seconds=120)
    await world.turn(2)
    world.start()
    await world.turn(2)
    assert world.state(later) == "Bound", "with a proper policy it is"


@pytest.mark.attack(
    "a policy that is added later opens them",
    boundary="kubernetes",
    surface="network of sandboxes in use",
    stopped_by="not prevented: who writes policies in a namespace decides; the job tells it "
    "(`SandboxesOpened`)",
)
async def test_a_job_is_told_once_when_its_sandboxes_in_use_are_opened(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn(2)
    assert world.state(claim) == "Bound"

    async def looked() -> list[str]:
        """Return messages of the events after one more check, which knows nothing of policies so far."""
        guard._namespaces.forget("team")
        await guard.look(world.kube.of("Pod"), lambda *key: world.kube.objects.get(("RolloutJob", *key)))
        return [message for _, _, reason, message in world.kube.events if reason == "SandboxesOpened"]

    guard = Guard(world.kube, Namespaces(world.kube, SETTINGS), lambda: "")
    assert await looked() == []
    world.kube.put(opening())
    (told,) = await looked()
    assert "NetworkPolicy mine permits" in told
    assert len(await looked()) == 1
    world.kube.remove("NetworkPolicy", "team", "mine")
    assert len(await looked()) == 1
    world.kube.put(opening())
    assert len(await looked()) == 2, "opened once more"
    assert world.state(claim) == "Bound"


async def test_our_own_policy_is_put_back_before_a_sandbox_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_operator.sandboxes.policies.SEEN_SECONDS", 0.0)
    world.plane.file()
    await world.turn()
    world.kube.remove("NetworkPolicy", "team", "rollyard-test-sandboxes")
    world.plane.file()
    await world.turn()
    assert world.kube.names("NetworkPolicy") == ["rollyard-test-sandboxes"]
    assert len(world.kube.of("Pod")) == 2


async def test_where_policies_cannot_be_listed_the_sandboxes_own_checks_decide(world: World) -> None:
    forbidden = KubeError(403, "Forbidden", "networkpolicies is forbidden")
    world.kube.refuse = lambda verb, obj: (
        forbidden if (verb, obj["kind"]) == ("list", "NetworkPolicy") else None
    )
    world.plane.file()
    await world.turn()
    assert len(world.kube.of("Pod")) == 1


async def test_a_job_is_told_once_what_is_not_proven(world: World) -> None:
    world.loop = SandboxLoop(
        world.kube,
        world.pods,
        world.plane,
        lambda namespace, name: world.kube.objects.get(("RolloutJob", namespace, name)),
        SETTINGS,
        "driver token",
        (),
        now=lambda: world.now,
        doubt=Witnesses(()).doubt,
    )
    for _ in range(2):
        world.plane.file()
        await world.turn()
    told = [one for one in world.kube.events if one[2] == "IsolationPartlyProven"]
    assert [(name, kind) for name, kind, _, _ in told] == [("RolloutJob/job", "Normal")]
    assert "sandboxes.isolation.external" in told[0][3]


async def test_without_its_network_policy_no_sandbox_is_made(world: World) -> None:
    forbidden = KubeError(403, "Forbidden", "networkpolicies is forbidden")
    world.kube.refuse = lambda verb, obj: forbidden if obj["kind"] == "NetworkPolicy" else None
    claim = world.plane.file()
    await world.turn(2)
    assert world.kube.of("Pod") == []
    assert world.plane.claims_[claim].reason == "PodRefused"


async def test_a_network_policy_that_somebody_deleted_is_back_before_the_next_sandbox(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    (policy,) = world.kube.names("NetworkPolicy")
    world.kube.remove("NetworkPolicy", "team", policy)
    world.status(world.pod(f"sb-{claim}"), **ended(78, message="NotIsolated: 10.0.0.1:443 answers"))
    await world.turn()
    assert world.state(claim) == "Failed"
    again = world.plane.file()
    await world.turn()
    assert f"sb-{again}" in world.kube.names("Pod")
    assert world.kube.names("NetworkPolicy") == [policy]
