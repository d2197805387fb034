"""Warm sandbox pods: made, shared, taken, refilled, and lost in between."""

from __future__ import annotations

from rollyard_operator.kube import labels
from rollyard_operator.kube.object_cache import key_of, uid_of
from rollyard_testing.operator.sandboxworld import World, ended


async def test_warm_pods_are_made_taken_and_refilled(world: World) -> None:
    world.plane.want(2)
    await world.turn()
    assert len(world.kube.of("Pod")) == 2
    config = world.kube.objects["ConfigMap", "team", "rollyard-test-warm"]
    for pod in world.kube.of("Pod"):
        assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == [uid_of(config)]
        assert pod["metadata"]["labels"][labels.WARM] == "true"
    world.start()
    claim = world.plane.file()
    await world.turn()
    assert world.state(claim) == "Bound", "in the same turn"
    (taken,) = [pod for pod in world.kube.of("Pod") if pod["metadata"]["labels"].get(labels.CLAIM) == claim]
    job = world.kube.objects["RolloutJob", "team", "job"]
    assert [one["uid"] for one in taken["metadata"]["ownerReferences"]] == [uid_of(job)], "re-owned"
    assert labels.WARM not in taken["metadata"]["labels"]
    assert len(world.kube.of("Pod")) == 3, "refilled"
    assert f"sb-{claim}" not in world.kube.names("Pod")
    world.plane.want(0)
    await world.turn()
    world.reap()
    assert world.kube.of("Pod") == [world.pod(taken["metadata"]["name"])]


async def test_jobs_of_one_flavor_share_warm_pods_and_others_do_not(world: World) -> None:
    world.add_job("same")
    world.add_job("other", template={"runtimeClassName": "gvisor"})
    world.plane.want(1)
    await world.turn()
    world.start()
    other, same = world.plane.file(job="other"), world.plane.file(job="same")
    await world.turn()
    assert (world.state(other), world.state(same)) == ("Pending", "Bound")
    assert world.pod(f"sb-{other}")["spec"]["runtimeClassName"] == "gvisor"


async def test_a_warm_pod_that_is_gone_when_it_is_taken_costs_nothing(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    (pod,) = world.kube.of("Pod")
    world.deaf = True
    world.kube.remove("Pod", *key_of(pod))
    world.deaf = False
    claim = world.plane.file()
    await world.turn(2)
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound"


async def test_a_warm_pod_of_the_same_name_but_another_uid_is_not_taken(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    (old,) = world.kube.of("Pod")
    world.deaf = True
    world.kube.remove("Pod", *key_of(old))
    world.kube.put({**old, "metadata": {k: v for k, v in old["metadata"].items() if k != "uid"}})
    world.deaf = False
    claim = world.plane.file()
    await world.turn()
    new = world.pod(old["metadata"]["name"])
    assert uid_of(new) != uid_of(old)
    assert labels.CLAIM not in new["metadata"]["labels"]
    assert world.state(claim) == "Pending"


async def test_a_warm_pod_that_broke_unseen_is_not_handed_out(world: World) -> None:
    world.plane.want(1)
    await world.turn()
    world.start()
    (pod,) = world.kube.of("Pod")
    world.deaf = True
    world.status(pod, **ended(137, "OOMKilled"))
    world.deaf = False
    claim = world.plane.file()
    await world.turn()
    assert world.state(claim) == "Pending"
    assert not [status for _, status in world.plane.told if status.state == "Bound"]
    await world.turn(2)
    world.start()
    await world.turn()
    assert world.state(claim) == "Bound", "to another pod"
    assert not labels.label_of(world.pod(key_of(pod)[1]), labels.CLAIM)
