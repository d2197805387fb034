"""Sandbox pods that cannot be made, end or get lost, and everything at once in random order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from rollyard_crds.claims import ClaimStatus
from rollyard_operator.kube import labels
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.object_cache import key_of, uid_of
from rollyard_testing.operator.sandboxworld import SETTINGS, World, ended, sandbox_shape


async def test_a_conflict_that_is_no_taken_name_is_tried_again_soon(world: World) -> None:
    conflict = KubeConflict(409, "Conflict", 'Operation cannot be fulfilled on resourcequotas "q"')
    world.kube.refuse = lambda verb, obj: conflict if verb == "create" else None
    claim = world.plane.file()
    after = await world.turn()
    assert after is not None
    assert after <= 1.0
    world.kube.refuse = lambda verb, obj: None
    await world.turn()
    assert world.kube.names("Pod") == [f"sb-{claim}"]


async def test_quota_is_waited_for_and_told_in_the_end(world: World) -> None:
    quota = KubeError(403, "Forbidden", 'pods "x" is forbidden: exceeded quota: team, requested: pods=1')
    world.kube.refuse = lambda verb, obj: quota if (verb, obj["kind"]) == ("create", "Pod") else None
    claim = world.plane.file()
    await world.turn()
    after = await world.turn()
    assert world.state(claim) == "Pending"
    assert after == pytest.approx(1.0)
    tries = sum(verb == "create" for verb, _, _ in world.kube.calls)
    await world.turn(5)
    assert sum(verb == "create" for verb, _, _ in world.kube.calls) == tries, "not before the pause is over"
    for _ in range(40):
        world.now += timedelta(seconds=8)
        await world.turn()
    failed = world.plane.claims_[claim]
    assert (failed.state, failed.reason, failed.retryable) == ("Failed", "QuotaExceeded", True)
    assert "exceeded quota: team" in failed.message
    assert [event[2] for event in world.kube.events] == ["SandboxFailed"]


async def test_quota_that_frees_up_is_used(world: World) -> None:
    quota = KubeError(403, "Forbidden", "exceeded quota: team")
    world.kube.refuse = lambda verb, obj: quota if (verb, obj["kind"]) == ("create", "Pod") else None
    claim = world.plane.file()
    await world.turn()
    world.kube.refuse = lambda verb, obj: None
    world.now += timedelta(seconds=2)
    await world.turn()
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


@pytest.mark.parametrize("status", [429, 503, 0])
async def test_a_busy_api_server_fails_no_claim(world: World, status: int) -> None:
    busy = KubeError(status, "TooManyRequests", "try again later", retry_after=5.0)
    world.kube.refuse = lambda verb, obj: busy
    claim = world.plane.file()
    await world.turn()
    assert await world.turn() == pytest.approx(5.0), "as long as it asked for"
    world.kube.refuse = lambda verb, obj: None
    world.now += timedelta(seconds=5)
    await world.turn()
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


async def test_what_the_api_server_will_never_take_fails_at_once(world: World) -> None:
    invalid = KubeError(422, "Invalid", 'Pod "x" is invalid: spec.tolerations[0].operator: Unsupported value')
    world.kube.refuse = lambda verb, obj: invalid if verb == "create" else None
    claim = world.plane.file()
    await world.turn(2)
    failed = world.plane.claims_[claim]
    assert (failed.reason, failed.retryable) == ("PodRefused", False)
    assert "spec.tolerations[0].operator" in failed.message


def evicted(message: str) -> dict[str, Any]:
    """Return the status of a pod that the kubelet evicted, in its words."""
    return {"phase": "Failed", "reason": "Evicted", "message": message}


@pytest.mark.attack(
    "a pod is evicted because the policy filled its disk, so that the rollout begins again",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="the kubelet's message tells this from a node without room; it is scored as for memory",
)
@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (ended(137, "OOMKilled"), "OutOfMemory", True),
        (ended(78, message="NotIsolated: 10.0.0.1:443 answers"), "NotIsolated", True),
        (ended(128, "StartError", "exec: no such file"), "StartFailed", False),
        ({"phase": "Failed", "reason": "Evicted", "message": "ephemeral-storage"}, "Evicted", True),
        (evicted("The node was low on resource: ephemeral-storage. "), "Evicted", True),
        (evicted('Usage of EmptyDir volume "rollyard-work" exceeds the limit "64Mi". '), "OutOfDisk", True),
        (evicted('Container main exceeded its local ephemeral storage limit "64Mi". '), "OutOfDisk", True),
        (
            evicted("Pod ephemeral local storage usage exceeds the total limit of containers 64Mi. "),
            "OutOfDisk",
            True,
        ),
    ],
)
@pytest.mark.parametrize("bound", [True, False])
async def test_a_pod_that_ends_fails_its_claim_with_its_own_reason(
    world: World, status: dict[str, Any], reason: str, retryable: bool, bound: bool
) -> None:
    claim = world.plane.file()
    await world.turn()
    if bound:
        world.start()
        await world.turn()
    world.status(world.pod(f"sb-{claim}"), **status)
    await world.turn()
    failed = world.plane.claims_[claim]
    assert (failed.state, failed.reason, failed.retryable) == ("Failed", reason, retryable)
    await world.turn()
    world.reap()
    await world.turn()
    assert world.kube.of("Pod") == []
    assert (claim, ClaimStatus(state="Removed")) in world.plane.told


async def test_a_sandbox_that_somebody_deleted_is_lost(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    await world.kube.delete("Pod", "team", f"sb-{claim}")
    await world.turn()
    assert world.plane.claims_[claim].reason == "SandboxLost"


async def test_a_pod_on_a_lost_node_is_removed_by_force(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    world.plane.release(claim)
    await world.turn()  # Nothing confirms it.
    assert world.kube.of("Pod")
    world.now += timedelta(seconds=120)
    await world.turn()
    assert world.kube.of("Pod") == []
    await world.turn()
    assert world.plane.claims_ == {}


async def test_a_name_that_is_somebody_elses_fails_the_claim(world: World) -> None:
    claim = world.plane.file()
    world.kube.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"sb-{claim}", "namespace": "team"},
            "spec": {"containers": [{"name": "a"}]},
        }
    )
    world.pods.remove(("team", f"sb-{claim}"), uid_of(world.pod(f"sb-{claim}")))
    await world.turn(3)
    assert world.plane.claims_[claim].reason == "PodRefused"
    assert "belongs to another owner" in world.plane.claims_[claim].message
    assert world.kube.of("Pod"), "it is not ours to delete"


def _refusals(dice: random.Random) -> Iterator[KubeError | None]:
    while True:
        yield dice.choice(
            [
                *[None] * 9,
                KubeError(429, "TooManyRequests", "slow down", retry_after=0.1),
                KubeError(503, "ServiceUnavailable", "etcd is not there"),
                KubeError(0, "Unreachable", "no answer"),
                KubeConflict(409, "Conflict", "the object has been modified"),
            ]
        )


@pytest.mark.parametrize("seed", range(25))
async def test_nothing_leaks_whatever_happens(seed: int) -> None:
    """The faults are those of API server and control plane, lost watches, killed operators and dying pods."""
    dice = random.Random(seed)
    creation = SETTINGS.sandbox_creation.model_copy(update={"burst": 1000, "per_second": 1000.0})
    world = World(SETTINGS.model_copy(update={"sandbox_creation": creation}))
    faults = _refusals(dice)
    bound: dict[str, str] = {}

    def faulty(on: bool) -> None:
        world.kube.refuse = lambda verb, obj: next(faults) if on else None
        world.plane.fault = lambda: on and dice.random() < 0.15

    def check() -> None:
        addresses = [claim.address for claim in world.plane.claims_.values() if claim.state == "Bound"]
        assert len(addresses) == len(set(addresses)), "two claims share a sandbox"
        for claim in world.plane.claims_.values():
            if claim.state == "Bound":
                assert bound.setdefault(claim.id, claim.address) == claim.address

    faulty(True)
    for _ in range(80):
        action = dice.randrange(10)
        claims = list(world.plane.claims_)
        pods = world.kube.of("Pod")
        if action <= 2:
            world.plane.file(sandbox_shape(dice.choice([1.0, 2.0])))
        elif action == 3 and claims:
            world.plane.release(dice.choice(claims))
        elif action == 4:
            world.plane.want(dice.randrange(4), sandbox_shape(dice.choice([1.0, 2.0])))
        elif action == 5 and pods:
            world.status(dice.choice(pods), **ended(1))
        elif action == 6 and pods:
            world.kube.remove("Pod", *key_of(dice.choice(pods)))
        elif action == 7:
            world.deaf = not world.deaf
            if not world.deaf:
                world.resync()
        elif action == 8:
            world.loop = world.operator()
        world.start()
        if dice.random() < 0.5:
            world.reap()
        world.now += timedelta(seconds=dice.random())
        await world.turn()
        check()

    faulty(False)
    world.deaf = False
    world.resync()
    for _ in range(12):
        world.now += timedelta(seconds=61)
        world.start()
        world.reap()
        await world.turn()
        check()
    calls = len(world.kube.calls)
    await world.turn(3)
    assert len(world.kube.calls) == calls, "a repeat does nothing"
    listed = {claim.id: claim.state for claim in (await world.plane.claims()).claims}
    assert set(listed.values()) <= {"Bound"}
    claimed = {
        pod["metadata"]["labels"][labels.CLAIM]
        for pod in world.kube.of("Pod")
        if labels.CLAIM in pod["metadata"]["labels"]
    }
    assert claimed == set(listed)
    warm = [pod for pod in world.kube.of("Pod") if labels.CLAIM not in pod["metadata"]["labels"]]
    assert len(warm) == sum(want.count for want in world.plane.warm)
