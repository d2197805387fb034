"""The loop of sandbox pods over a cluster and a control plane in memory."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from datetime import timedelta

import pytest
from rollyard_operator.kube import labels
from rollyard_operator.kube.object_cache import uid_of
from rollyard_testing.operator.operatorlab import PATIENCE_SECONDS
from rollyard_testing.operator.sandboxworld import SETTINGS, World, running


async def test_a_claim_gets_a_pod_of_its_own_and_gives_it_back(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    pod = world.pod(f"sb-{claim}")
    owner = world.kube.objects["RolloutJob", "team", "job"]
    assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == [uid_of(owner)]
    assert pod["metadata"]["labels"][labels.CLAIM] == claim
    assert pod["metadata"]["labels"][labels.QUEUE] == "queue"
    assert world.state(claim) == "Pending", "it takes no connections yet"
    world.start()
    await world.turn()
    bound = world.plane.claims_[claim]
    assert (bound.state, bound.address) == ("Bound", "tcp://10.1.0.1:7411")
    args = pod["spec"]["containers"][0]["args"]
    known = args[args.index("--token-sha256") + 1]
    assert known == hashlib.sha256(bound.secret.encode()).hexdigest()
    assert bound.secret not in str(pod), "the secret itself stands nowhere in the cluster"
    assert args[args.index("--isolation-check") + 1] == "10.0.0.1:443"
    world.plane.release(claim)
    await world.turn()
    assert world.pod(f"sb-{claim}")["metadata"]["deletionTimestamp"]
    assert claim in world.plane.claims_, "not before the pod is gone"
    world.reap()
    await world.turn()
    assert (world.plane.claims_, world.kube.of("Pod")) == ({}, [])


async def test_a_pod_that_answers_is_handed_out_before_the_kubelet_has_looked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = world.plane.file()
    await world.turn()
    tried: list[tuple[str, int]] = []
    listens = asyncio.Event()

    async def connect(host: str, port: int) -> None:
        tried.append((host, port))
        await listens.wait()

    monkeypatch.setattr(world.loop._probes, "_connect", connect)
    working = asyncio.create_task(world.loop._probes.run())
    status = running("10.1.0.9")
    status["conditions"] = [{"type": "Ready", "status": "False"}]
    world.status(world.pod(f"sb-{claim}"), **status)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not tried:
            await world.turn()
            await asyncio.sleep(0)
    await world.turn()
    assert (world.state(claim), tried) == ("Pending", [("10.1.0.9", 7411)])
    listens.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while world.state(claim) == "Pending":
            await world.turn()
            await asyncio.sleep(0.01)
    bound = world.plane.claims_[claim]
    assert (bound.state, bound.address) == ("Bound", "tcp://10.1.0.9:7411")
    # It keeps its owner also after a restart, when nothing of it is remembered.
    world.loop = world.operator()
    await world.turn(3)
    assert world.state(claim) == "Bound"
    assert f"sb-{claim}" in world.kube.names("Pod")
    working.cancel()


async def test_a_pod_that_the_watch_did_not_tell_is_found_by_its_name(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = world.plane.file()
    world.deaf = True
    await world.turn()
    monkeypatch.setattr(world, "resync", lambda: None)  # The cache was filled before the pod was made.
    world.loop = world.operator()
    assert not len(world.pods)
    world.deaf = False
    await world.turn()
    assert len(world.kube.of("Pod")) == 1
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


async def test_what_is_deleted_is_deleted_once(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.deaf = True
    world.plane.release(claim)
    await world.turn(5)
    assert [verb for verb, _, _ in world.kube.calls].count("delete") == 1
    world.reap()
    world.now += timedelta(seconds=120)
    await world.turn(2)
    assert world.plane.claims_ == {}, "nobody told that it is gone, and it was found out"


async def test_pods_of_claims_that_nobody_knows_are_deleted(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    del world.plane.claims_[claim]
    world.plane._change()
    await world.turn()
    world.reap()
    assert world.kube.of("Pod") == []


async def test_before_the_first_list_of_claims_nothing_is_touched(world: World) -> None:
    claim = world.plane.file()
    await world.turn()
    world.loop = world.operator()
    await world.loop.run_pass()
    assert "deletionTimestamp" not in world.pod(f"sb-{claim}")["metadata"]


async def test_a_claim_waits_for_the_object_of_its_job(world: World) -> None:
    claim = world.plane.file(job="later")
    assert await world.turn() == 1.0
    assert world.kube.of("Pod") == []
    world.add_job("later")
    await world.turn()
    assert world.kube.names("Pod") == [f"sb-{claim}"]


async def test_other_namespaces_are_left_alone() -> None:
    world = World(SETTINGS.model_copy(update={"namespaces": ["team"]}))
    world.add_job("job", "elsewhere")
    world.plane.file(namespace="elsewhere")
    await world.turn()
    assert world.kube.of("Pod") == []


async def test_creation_is_limited(world: World) -> None:
    world.settings = SETTINGS.model_copy(
        update={
            "sandbox_creation": SETTINGS.sandbox_creation.model_copy(update={"burst": 3, "per_second": 0.01})
        }
    )
    world.loop = world.operator()
    for _ in range(8):
        world.plane.file()
    after = await world.turn(3)
    assert len(world.kube.of("Pod")) == 3
    assert after is not None
    assert 50 < after <= 100


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - the doubles raise no event for it
        await asyncio.sleep(0.001)


async def test_it_runs_by_itself(world: World) -> None:
    """It runs the tasks of `run`: claims by long poll, pods by the cache, no timer."""
    running_loop = asyncio.create_task(world.loop.run())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            claim = world.plane.file()
            await until(lambda: f"sb-{claim}" in world.kube.names("Pod"))
            world.start()
            await until(lambda: world.state(claim) == "Bound")
            world.plane.release(claim)
            await until(lambda: "deletionTimestamp" in world.pod(f"sb-{claim}")["metadata"])
            world.reap()
            await until(lambda: not world.plane.claims_)
    finally:
        running_loop.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running_loop
