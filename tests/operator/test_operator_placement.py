"""Jobs and pools of another driver: the operator shows what that driver reports, and does nothing else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds import BackendPool, BackendStatus, RolloutJob
from rollyard_crds.fields.annotations import DELETE_REQUESTED
from rollyard_drivers.reconcile.conditions import ConditionUpdate, updated
from rollyard_drivers.reconcile.placement import UNSPOKEN_SECONDS, is_for, is_unspoken
from rollyard_testing.operator.fakecluster import FakeControlPlane, FakeKube
from rollyard_testing.operator.operatorlab import (
    KEY,
    NAMESPACE,
    Lab,
    job,
    pool,
    running,
    settings_in,
    some_passes,
    until,
)

POOL = (NAMESPACE, "qwen")


async def speak(control: FakeControlPlane, *claims: ConditionUpdate, phase: str = "Run") -> None:
    """Let the other driver report how the job stands."""
    known = control.all_jobs[KEY]
    generation = known.metadata.generation or 0
    conditions = updated(known.status.conditions, claims, generation, datetime.now(UTC))
    said = {"conditions": conditions, "observed_generation": generation, "phase": phase}
    await control.put_job_status(known, known.status.model_copy(update=said))


async def speak_of_pool(control: FakeControlPlane, *urls: str) -> None:
    """Let the other driver report that these backends of the pool are ready."""
    known = control.all_pools[POOL]
    generation = known.metadata.generation or 0
    claims = (ConditionUpdate("Ready", bool(urls), "BackendsReady" if urls else "NoBackendReady"),)
    conditions = updated(known.status.conditions, claims, generation, datetime.now(UTC))
    said = {"conditions": conditions, "observed_generation": generation, "replicas": len(urls)}
    await control.put_pool_status(known, known.status.model_copy(update=said))
    await control.put_backends(known, [BackendStatus(url=url, ready=True) for url in urls])


async def test_an_applied_job_of_another_driver_shows_what_that_one_says(lab: Lab) -> None:
    lab.kube.put(job(placement="slurm"))
    await until(lambda: KEY in lab.control.all_jobs)
    await speak(
        lab.control,
        ConditionUpdate("Admitted", True, "Admitted"),
        ConditionUpdate("Running", True, "WorkersReady"),
    )
    await until(lambda: lab.holds("Running"))
    assert (lab.status()["phase"], lab.status()["observedGeneration"]) == ("Run", 1)
    lab.control.counts(KEY, succeeded=2, init={"queued": 0, "active": 0})
    await until(lambda: lab.status()["counts"]["succeeded"] == 2)
    await speak(lab.control, *(ConditionUpdate(one, True, "AllEnded") for one in ("Finished", "Succeeded")))
    await until(lambda: lab.holds("Succeeded"))
    assert (lab.status()["counts"]["succeeded"], lab.status()["rewardMean"]) == (2, 0.5)
    assert lab.kube.of("Pod") == []
    assert lab.kube.of("Secret") == [], "nothing of ours has to do with it"


async def test_what_the_other_driver_has_not_looked_at_yet_keeps_its_generation(lab: Lab) -> None:
    lab.kube.put(job(placement="slurm"))
    await until(lambda: KEY in lab.control.all_jobs)
    await speak(lab.control, ConditionUpdate("Running", True, "WorkersReady"))
    await until(lambda: lab.holds("Running"))
    lab.kube.put(job(placement="slurm", suspend=True))
    await until(lambda: lab.control.all_jobs[KEY].spec.suspend)
    lab.control.counts(KEY, init={"queued": 1, "active": 1})
    await until(lambda: lab.status()["counts"]["init"]["active"] == 1)
    assert lab.status()["observedGeneration"] == 1
    assert lab.condition("Running")["observedGeneration"] == 1
    await speak(lab.control, ConditionUpdate("Running", False, "Suspended"))
    await until(lambda: lab.status()["observedGeneration"] == 2)
    assert lab.condition("Running")["observedGeneration"] == 2


@pytest.mark.parametrize("side", ["kubectl", "REST"])
async def test_a_job_of_another_driver_is_deleted_on_both_sides(lab: Lab, side: str) -> None:
    lab.kube.put(job(placement="slurm"))
    await until(lambda: KEY in lab.control.all_jobs)
    if side == "kubectl":
        lab.kube.remove("RolloutJob", *KEY)
    else:
        lab.control.delete_over_rest(KEY)
    await until(lambda: lab.control.deleted == ["RolloutJob/math"])
    assert ("RolloutJob", *KEY) not in lab.kube.objects


async def test_an_object_deleted_while_no_operator_ran_takes_another_driver_s_job_along(
    tmp_path: Path, quick: None
) -> None:
    kube, control, settings = FakeKube(), FakeControlPlane(), settings_in(tmp_path)
    async with running(Lab(settings, kube, control)):
        kube.put(job(placement="slurm"))
        await until(lambda: KEY in control.all_jobs)
    kube.remove("RolloutJob", *KEY)
    async with running(Lab(settings, kube, control)):
        await until(lambda: control.deleted == ["RolloutJob/math"])


async def test_a_job_of_rest_for_another_driver_stays_in_the_store(lab: Lab) -> None:
    lab.control.post_job(RolloutJob.model_validate(job(placement="slurm")))
    await speak(lab.control, ConditionUpdate("Running", True, "WorkersReady"))
    lab.control.post_pool(BackendPool.model_validate(pool(placement="slurm")))
    await speak_of_pool(lab.control, "http://cn1:1")
    await some_passes(lab.control)
    assert lab.kube.of("RolloutJob") == []
    assert lab.kube.of("BackendPool") == []
    assert lab.kube.of("Pod") == []
    assert lab.control.deleted == []


async def test_jobs_of_other_drivers_do_not_count_among_those_that_run_at_once(
    tmp_path: Path, quick: None
) -> None:
    kube, control, settings = FakeKube(), FakeControlPlane(), settings_in(tmp_path)
    names = ("one", "two")
    async with running(Lab(settings, kube, control)) as lab:
        for name in names:
            kube.put(job(name, placement="slurm"))
            await until(lambda name=name: (NAMESPACE, name) in control.all_jobs)
            known = control.all_jobs[NAMESPACE, name]
            conditions = updated((), (ConditionUpdate("Admitted", True, "Admitted"),), 1, datetime.now(UTC))
            status = known.status.model_copy(update={"conditions": conditions, "observed_generation": 1})
            await control.put_job_status(known, status)
            await until(lambda name=name: lab.holds("Admitted", name))
    async with running(Lab(settings, kube, control)) as lab:  # It knows the admitted ones from their status.
        kube.put(job())
        await until(lambda: lab.holds("Admitted"))


async def test_an_applied_pool_of_another_driver_shows_its_backends(lab: Lab) -> None:
    lab.kube.put(pool(placement="slurm"))
    lab.kube.put(job(backendRef={"name": "qwen"}, agent={"type": "tools"}))
    await until(lambda: POOL in lab.control.all_pools)
    await speak_of_pool(lab.control, "http://cn1:1", "http://cn2:2")
    await until(lambda: lab.holds("Ready", "qwen", "BackendPool"))
    status = lab.status("qwen", "BackendPool")
    assert (status["readyReplicas"], status["replicas"]) == (2, 2)
    assert [one["url"] for one in status["backends"]] == ["http://cn1:1", "http://cn2:2"]
    # A job in pods may use it, where pods reach the nodes, and learns when the pool is ready.
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    lab.start_pods()
    await until(lambda: lab.holds("Running"))
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in lab.kube.of("Pod")}
    assert components == {"stage-worker"}
    assert lab.kube.names("Service") == []
    # After it was scaled by kubectl, the other driver sees it.
    lab.kube.put(pool(placement="slurm", replicas=3))
    await until(lambda: lab.control.all_pools[POOL].spec.replicas == 3)


@pytest.mark.parametrize("side", ["kubectl", "REST"])
async def test_a_pool_of_another_driver_is_deleted_on_both_sides(lab: Lab, side: str) -> None:
    lab.kube.put(pool(placement="slurm"))
    await until(lambda: POOL in lab.control.all_pools)
    if side == "kubectl":
        lab.kube.remove("BackendPool", *POOL)
    else:
        lab.control.all_pools[POOL].metadata.annotations[DELETE_REQUESTED] = "true"
    await until(lambda: lab.control.deleted == ["BackendPool/qwen"])
    assert ("BackendPool", *POOL) not in lab.kube.objects


async def test_what_no_driver_speaks_of_says_which_one_is_missing(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_drivers.reconcile.placement.UNSPOKEN_SECONDS", 0.0)
    lab.kube.put(job(placement="local"))
    await until(lambda: lab.condition("Admitted").get("reason") == "NoDriver")
    assert lab.condition("Running")["status"] == "False"
    assert "no driver 'local' has reported on it yet" in lab.status()["message"]
    lab.control.post_pool(BackendPool.model_validate(pool(placement="slurm")))

    def ready() -> Any:
        return next((c for c in lab.control.all_pools[POOL].status.conditions if c.type == "Ready"), None)

    await until(lambda: ready() is not None)
    assert (ready().status, ready().reason) == ("False", "NoDriver")
    assert "slurm-bridge up --join" in ready().message
    await speak_of_pool(lab.control, "http://cn1:1")  # It came, and its report is kept.
    await some_passes(lab.control)
    assert ready().status == "True"


def test_whose_a_job_or_a_pool_is() -> None:
    for thing in (RolloutJob.model_validate(job()), BackendPool.model_validate(pool())):
        assert is_for(thing, "kubernetes")
        assert not is_for(thing, "slurm", default=False)
    for thing in (
        RolloutJob.model_validate(job(placement="slurm")),
        BackendPool.model_validate(pool(placement="slurm")),
    ):
        assert is_for(thing, "slurm", default=False)
        assert not is_for(thing, "kubernetes")


def test_a_driver_is_given_time_to_speak() -> None:
    thing, now = RolloutJob.model_validate(job(placement="slurm")), datetime.now(UTC)
    young = now - timedelta(seconds=UNSPOKEN_SECONDS - 1)
    thing.metadata.creation_timestamp = young
    assert not is_unspoken(thing, now)
    assert is_unspoken(thing, now + timedelta(seconds=2))
    thing.status.conditions = updated((), (ConditionUpdate("Running", True, "WorkersReady"),), 1, now)
    assert not is_unspoken(thing, now + timedelta(seconds=2))
