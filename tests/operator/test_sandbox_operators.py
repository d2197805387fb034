"""Several operators at once, and one after the other, on the same sandbox pods."""

from __future__ import annotations

import hashlib

from rollyard_crds.claims import ClaimList
from rollyard_operator.kube import labels
from rollyard_operator.kube.object_cache import key_of, uid_of
from rollyard_testing.operator.fakeclaims import ClaimDesk
from rollyard_testing.operator.sandboxworld import World


async def test_an_operator_killed_between_taking_and_binding_goes_on(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    claim = world.plane.file()
    world.plane.fault = lambda: True
    world.loop.claims.learn(await _listed(world.plane))
    await world.loop.run_pass()
    (taken,) = [pod for pod in world.kube.of("Pod") if pod["metadata"]["labels"].get(labels.CLAIM) == claim]
    assert world.state(claim) == "Pending"
    world.plane.fault = lambda: False
    world.loop = world.operator()
    await world.turn()
    bound = world.plane.claims_[claim]
    assert bound.state == "Bound"
    assert hashlib.sha256(bound.secret.encode()).hexdigest() in taken["spec"]["containers"][0]["args"]


async def _listed(plane: ClaimDesk) -> ClaimList:
    fault, plane.fault = plane.fault, lambda: False
    listed = await plane.claims()
    plane.fault = fault
    return listed


async def test_with_another_key_pods_whose_secret_is_lost_are_replaced(world: World) -> None:
    claim = world.plane.file()
    world.plane.want(1)
    await world.turn()
    before = {uid_of(pod) for pod in world.kube.of("Pod")}
    world.loop = world.operator(key="another")
    for _ in range(3):
        await world.turn()
        world.reap()
        world.start()
    await world.turn()
    assert not before & {uid_of(pod) for pod in world.kube.of("Pod")}
    assert world.state(claim) == "Bound"


class Beside:
    """A second operator on the same cluster and control plane, which sees pods only when a test lets it."""

    def __init__(self, world: World) -> None:
        self.world, first, seen = world, world.loop, world.pods
        self.loop, self.pods = world.operator(), world.pods
        world.loop, world.pods = first, seen

    async def turn(self) -> None:
        await self.loop.run_pass()

    async def lists_claims(self) -> None:
        self.loop.claims.learn(await self.world.plane.claims())


async def test_a_warm_pod_is_taken_for_one_claim_by_two_operators(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    await world.turn()
    second = Beside(world)
    one = world.plane.file()
    await world.turn()
    (address,) = [claim.address for claim in world.plane.claims_.values() if claim.state == "Bound"]
    other = world.plane.file()
    await second.lists_claims()
    # It still sees the warm pod without an owner, and has a claim that wants one.
    assert [not labels.label_of(pod, labels.CLAIM) for pod in second.pods] == [True]
    await second.turn()
    assert labels.label_of(world.pod(key_of(next(iter(second.pods)))[1]), labels.CLAIM) == one
    await second.turn()
    assert (world.state(other), world.plane.claims_[one].address) == ("Pending", address)


async def test_an_operator_that_is_behind_with_pods_loses_no_sandbox(world: World) -> None:
    second = Beside(world)
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"
    await second.lists_claims()
    await second.turn()
    assert world.state(claim) == "Bound", "its pod was not seen yet"
    assert [key_of(pod)[1] for pod in second.pods] == [f"sb-{claim}"]
    # It is gone for good, for both.
    world.kube.remove("Pod", "team", f"sb-{claim}")
    second.pods.remove(("team", f"sb-{claim}"), uid_of(next(iter(second.pods))))
    await second.turn()
    assert (world.state(claim), world.plane.claims_[claim].reason) == ("Failed", "SandboxLost")


async def test_an_operator_that_is_behind_with_claims_deletes_no_sandbox(world: World) -> None:
    second = Beside(world)
    await second.lists_claims()
    claim = world.plane.file()
    await world.turn()
    world.start()
    await world.turn()
    for pod in world.kube.of("Pod"):
        second.pods.put(pod)
    await second.turn()
    assert "deletionTimestamp" not in world.pod(f"sb-{claim}")["metadata"]
    # While the control plane is away, its owner is unknown.
    world.plane.claims_.clear()
    world.plane.fault = lambda: True
    third = Beside(world)
    await third.turn()
    third.loop.claims.learn(ClaimList(revision=9, claims=[], warm=[]))
    await third.turn()
    assert "deletionTimestamp" not in world.pod(f"sb-{claim}")["metadata"]
    world.plane.fault = lambda: False
    await third.turn()
    assert "deletionTimestamp" in world.pod(f"sb-{claim}")["metadata"]


async def test_of_two_pods_of_a_claim_none_goes_before_one_is_bound(world: World) -> None:
    """Two operators have each found one; the other may be binding its own at this moment."""
    claim = world.plane.file()
    await world.turn()
    world.plane.want(1)
    await world.turn()
    world.plane.want(0)
    (warm,) = [name for name in world.kube.names("Pod") if name != f"sb-{claim}"]
    await world.kube.patch("Pod", "team", warm, {"metadata": {"labels": {labels.CLAIM: claim}}})
    await world.turn(2)
    assert [pod["metadata"].get("deletionTimestamp") for pod in world.kube.of("Pod")] == [None, None]
    world.start()
    await world.turn(2)
    assert world.state(claim) == "Bound"
    left = [pod for pod in world.kube.of("Pod") if "deletionTimestamp" not in pod["metadata"]]
    assert [pod["status"]["podIP"] in world.plane.claims_[claim].address for pod in left] == [True]
