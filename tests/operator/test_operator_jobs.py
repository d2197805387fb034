"""The operator's job loop over a cluster and a control plane in memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollyard_client import Invalid
from rollyard_crds import RolloutJob
from rollyard_crds.fields.annotations import OBJECT_UID
from rollyard_crds.rolloutjob import Advice
from rollyard_operator.kube.errors import KubeError
from rollyard_testing.operator.fakecluster import FakeControlPlane, FakeKube, Object
from rollyard_testing.operator.operatorlab import (
    KEY,
    NAMESPACE,
    Lab,
    at_rest,
    job,
    running,
    settings_in,
    some_passes,
    until,
)


async def test_an_applied_job_is_registered_and_gets_its_workers(lab: Lab) -> None:
    await lab.with_workers()
    uid = lab.kube.objects[("RolloutJob", *KEY)]["metadata"]["uid"]
    assert lab.control.all_jobs[KEY].metadata.annotations[OBJECT_UID] == uid
    assert [pod["metadata"]["labels"]["rollyard.dev/stage"] for pod in lab.kube.of("Pod")] == [
        "eval",
        "init",
        "run",
    ]
    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in lab.kube.of("Pod")} == {uid}
    (secret,) = lab.kube.of("Secret")
    assert secret["metadata"]["ownerReferences"][0]["uid"] == uid
    lab.start_pods()
    await until(lambda: lab.holds("Running"))
    assert lab.status()["observedGeneration"] == 1
    assert lab.status()["counts"]["total"] == 2
    # REST says the same, in the control plane's own generation.
    await until(lambda: lab.control.all_jobs[KEY].status.phase == lab.status()["phase"])


async def test_an_end_is_told_with_counts_and_reward_and_workers_go(lab: Lab) -> None:
    await lab.with_running_workers()
    lab.control.counts(KEY, succeeded=2, init={"queued": 0, "active": 0})
    await until(lambda: lab.holds("Succeeded"))
    status = lab.status()
    assert (status["phase"], status["rewardMean"], status["counts"]["succeeded"]) == ("Succeeded", 0.5, 2)
    assert status["rewardText"] == "0.500"
    await until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in lab.kube.of("Pod")))
    await until(lambda: lab.control.all_jobs[KEY].status.phase == "Succeeded")
    await until(lambda: len(lab.kube.events) >= 3)  # Events are written beside the work.
    told = [reason for _, _, reason, _ in lab.kube.events]
    assert told == ["Admitted", "Running", "Succeeded"]


async def test_an_object_that_is_deleted_takes_its_job_along(lab: Lab) -> None:
    await lab.with_workers()
    lab.kube.remove("RolloutJob", *KEY)
    await until(lambda: lab.control.deleted == ["RolloutJob/math"])
    await until(lambda: ("RolloutJob", KEY) not in lab.operator._loops)
    assert lab.kube.of("Pod") == []


async def test_workers_orphaned_by_a_deletion_are_stopped(lab: Lab) -> None:
    await lab.with_workers()
    for pod in lab.kube.of("Pod"):  # This happens with kubectl delete --cascade=orphan.
        pod["metadata"]["ownerReferences"] = []
    lab.kube.remove("RolloutJob", *KEY)
    await lab.stopped()
    await until(lambda: ("RolloutJob", KEY) not in lab.operator._loops)


async def test_a_job_made_anew_under_its_name_begins_anew(lab: Lab) -> None:
    await lab.with_workers()
    first = set(lab.kube.names("Pod"))
    lab.kube.remove("RolloutJob", *KEY)
    await lab.with_workers()
    assert first.isdisjoint(lab.kube.names("Pod"))
    uid = lab.kube.objects[("RolloutJob", *KEY)]["metadata"]["uid"]
    await until(lambda: lab.control.all_jobs[KEY].metadata.annotations[OBJECT_UID] == uid)


async def test_suspending_by_kubectl_and_resuming_over_rest(lab: Lab) -> None:
    await lab.with_running_workers()
    lab.kube.put(job(suspend=True))
    await until(lambda: lab.holds("Suspended"))
    assert lab.control.all_jobs[KEY].spec.suspend
    await lab.stopped()
    lab.control.change(KEY, suspend=False)
    await until(lambda: lab.kube.objects[("RolloutJob", *KEY)]["spec"]["suspend"] is False)
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    assert not lab.control.all_jobs[KEY].spec.suspend
    # The status, and with it the event, is written after the workers are made.
    await until(lambda: "Resumed" in [reason for _, _, reason, _ in lab.kube.events])
    told = [reason for _, _, reason, _ in lab.kube.events]
    assert told.count("Suspended") == told.count("Resumed") == 1


async def test_a_worker_that_exits_is_made_anew_with_its_count(lab: Lab) -> None:
    await lab.with_workers()
    name = lab.kube.names("Pod")[0]
    first = lab.pod(name)["metadata"]["uid"]
    lab.end_pod(name, 3)
    await until(lambda: lab.pod(name) and lab.pod(name)["metadata"]["uid"] != first)
    pod = lab.pod(name)
    assert pod["metadata"]["annotations"]["rollyard.dev/restarts"] == "1"
    assert pod["metadata"]["annotations"]["rollyard.dev/last-end"].startswith("exited with ")
    await until(lambda: lab.condition("Degraded").get("status") == "True")


async def test_a_dead_worker_is_reported_under_its_own_name_before_its_successor_is_made(lab: Lab) -> None:
    await lab.with_workers()
    name = lab.kube.names("Pod")[0]
    pod = lab.pod(name)
    (container,) = pod["spec"]["containers"]
    leases_as = container["args"][container["args"].index("--name") + 1]
    assert leases_as == f"{name}.$(ROLLYARD_POD_UID)"
    assert {
        "name": "ROLLYARD_POD_UID",
        "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}},
    } in container["env"]
    uid = pod["metadata"]["uid"]
    lab.control.down = True
    lab.end_pod(name, 137)
    await at_rest(lab.kube)
    assert lab.pod(name)["metadata"]["uid"] == uid, "no successor without a report"
    lab.control.down = False
    await until(lambda: lab.pod(name) and lab.pod(name)["metadata"]["uid"] != uid)
    assert [(one.job, one.worker) for one in lab.control.deaths] == [(KEY[1], f"{name}.{uid}")]


async def test_pods_that_the_api_server_refuses_are_told_in_its_words(lab: Lab) -> None:
    full = KubeError(403, "Forbidden", "exceeded quota: pods=0")
    lab.kube.refuse = lambda verb, obj: full if (verb, obj["kind"]) == ("create", "Pod") else None
    lab.kube.put(job())
    await until(lambda: lab.holds("Degraded"))
    assert "exceeded quota: pods=0" in lab.condition("Degraded")["message"]
    assert lab.condition("Degraded")["reason"] == "WorkersBlocked"
    lab.kube.refuse = lambda verb, obj: None
    await until(lambda: len(lab.kube.of("Pod")) == 3)


async def test_a_pod_of_another_installation_is_left_alone(lab: Lab) -> None:
    lab.kube.put(job(suspend=True))
    await until(lambda: lab.holds("Suspended"))
    uid = lab.kube.objects[("RolloutJob", *KEY)]["metadata"]["uid"]
    theirs = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"math-{uid[:8]}-run-0",
            "namespace": NAMESPACE,
            "labels": {"rollyard.dev/instance": "other"},
        },
        "spec": {"containers": [{"name": "worker", "image": "x"}]},
    }
    before = lab.kube.put(theirs)
    lab.kube.put(job(suspend=False))
    await until(
        lambda: "belongs to the Rollyard installation 'other'" in lab.condition("Degraded").get("message", "")
    )
    assert lab.kube.objects[("Pod", NAMESPACE, theirs["metadata"]["name"])] == before


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("NotInstalled", "spec.handler: not installed"),
        ("TasksNotAllowed", "spec.tasks.url: the installation reads uploads only"),
    ],
)
async def test_a_refused_job_says_why_and_is_tried_again(lab: Lab, reason: str, message: str) -> None:
    lab.control.refuse = lambda job: Invalid(message, reason=reason, status=422)
    lab.kube.put(job())
    await until(lambda: lab.condition("Admitted").get("reason") == reason)
    assert lab.condition("Admitted")["status"] == "False"
    assert lab.status()["message"] == message
    lab.control.refuse = lambda job: None
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    told = [reason for _, _, reason, _ in lab.kube.events]
    assert told.count(reason) == 1


async def test_tasks_of_a_config_map_are_read_when_it_comes(lab: Lab) -> None:
    lab.kube.put(job(tasks={"configMapRef": {"name": "tasks"}}))
    await until(lambda: lab.condition("Admitted").get("reason") == "ConfigMapNotFound")
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tasks", "namespace": NAMESPACE}}
    lab.kube.put(config | {"data": {"other": ""}})
    await until(lambda: lab.condition("Admitted").get("reason") == "ConfigMapKeyNotFound")
    lab.kube.put(config | {"data": {"tasks.jsonl": '{"id": 1}\n'}})
    await until(lambda: lab.condition("Admitted").get("reason") == "InvalidTasks")
    assert "line 1: id" in lab.condition("Admitted")["message"]
    await lab.with_workers(config | {"data": {"tasks.jsonl": '{"id": "a", "prompt": "1+1?"}\n'}})
    assert [task.id for task in lab.control.tasks[KEY]] == ["a"]


async def test_the_object_shows_which_rows_of_a_config_map_are_skipped(lab: Lab) -> None:
    text = '{"id": "a", "prompt": "1+1?"}\n{"id": 1}\n\nx\n'
    meta = {"name": "tasks", "namespace": NAMESPACE}
    lab.kube.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"tasks.jsonl": text}})
    await lab.with_workers(job(tasks={"configMapRef": {"name": "tasks"}, "onBadRow": "skip"}))
    assert [task.id for task in lab.control.tasks[KEY]] == ["a"]
    await until(lambda: "skippedRows" in lab.status())
    shown = lab.status()["skippedRows"]
    assert (shown["count"], shown["read"]) == (2, 3)
    assert [reason.split(": ")[0] for reason in shown["reasons"]] == ["line 2", "line 4"]
    warning = "2 of 3 rows of the task list are skipped; the first is line 2: "
    assert lab.condition("Admitted")["message"].startswith(warning)


async def test_the_object_shows_advice_as_long_as_the_control_plane_has_it(lab: Lab) -> None:
    await lab.with_workers()
    advice = Advice(reason="EqualRewards", message="the reward is 0 in all of 32 rollouts")
    lab.control.all_jobs[KEY].status.advice = [advice]
    await until(lambda: lab.status().get("advice") == [advice.to_json()])
    lab.control.all_jobs[KEY].status.advice = []
    await until(lambda: not lab.status().get("advice"))


async def test_a_job_of_rest_becomes_an_object_and_goes_with_it(lab: Lab) -> None:
    lab.control.post_job(RolloutJob.model_validate(job()))
    await until(lambda: ("RolloutJob", *KEY) in lab.kube.objects)
    made = lab.kube.objects[("RolloutJob", *KEY)]
    assert made["metadata"]["annotations"] == {"rollyard.dev/origin": "rest"}
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    assert lab.control.all_jobs[KEY].metadata.annotations[OBJECT_UID] == made["metadata"]["uid"]
    lab.control.delete_over_rest(KEY)
    await until(lambda: ("RolloutJob", *KEY) not in lab.kube.objects)
    await until(lambda: lab.control.deleted == ["RolloutJob/math"])


HOST = {"template": {"volumes": [{"name": "etc", "hostPath": {"path": "/etc"}}]}}


async def test_a_template_that_is_not_allowed_starts_nothing_and_is_named(lab: Lab) -> None:
    lab.kube.put(job(stages={"run": HOST}))
    await until(lambda: lab.condition("Admitted").get("reason") == "TemplateNotAllowed")
    told = lab.condition("Admitted")
    assert told["status"] == "False"
    assert "spec.stages.run.template.volumes[0].hostPath" in told["message"]
    assert "jobs.allow.hostPath" in told["message"]
    await at_rest(lab.kube)
    assert lab.kube.of("Pod") == []
    assert lab.kube.of("Secret") == [], "no token is made for it"
    await lab.with_workers()
    await until(lambda: lab.holds("Admitted"))


async def test_a_job_of_rest_is_judged_the_same_and_says_so_there(lab: Lab) -> None:
    spec = {"sandbox": {"template": {"labels": {"role": "egress"}}}}
    lab.control.post_job(RolloutJob.model_validate(job(**spec)))

    def told() -> dict[str, str]:
        return {
            one.reason: one.message
            for one in lab.control.all_jobs[KEY].status.conditions
            if one.type == "Admitted"
        }

    await until(lambda: "TemplateNotAllowed" in told())
    assert "spec.sandbox.template.labels['role']" in told()["TemplateNotAllowed"]
    assert lab.kube.of("Pod") == []


@pytest.mark.attack(
    "its author edits the template to what is refused",
    boundary="kubernetes",
    surface="a running job",
    stopped_by="its workers are stopped, and none is started",
)
async def test_a_job_that_is_changed_to_what_is_not_allowed_loses_its_workers(lab: Lab) -> None:
    await lab.with_running_workers()
    lab.kube.put(job(stages={"run": HOST}))
    await until(lambda: lab.condition("Running").get("reason") == "TemplateNotAllowed")
    await until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in lab.kube.of("Pod")))
    await lab.control.cancel(lab.control.all_jobs[KEY])
    await until(lambda: lab.holds("Finished"))


async def test_a_job_of_rest_whose_namespace_is_missing_says_so(lab: Lab) -> None:
    missing = KubeError(404, "NotFound", 'namespaces "team" not found')
    lab.kube.refuse = lambda verb, obj: missing if (verb, obj["kind"]) == ("create", "RolloutJob") else None
    lab.control.post_job(RolloutJob.model_validate(job()))
    await until(lambda: 'namespaces "team" not found' in lab.control.all_jobs[KEY].status.message)


async def test_a_job_of_rest_in_a_namespace_that_nobody_serves_says_so(tmp_path: Path, quick: None) -> None:
    lab = Lab(settings_in(tmp_path, namespaces=["other"]), FakeKube(), FakeControlPlane())
    lab.control.post_job(RolloutJob.model_validate(job()))
    async with running(lab):
        await until(
            lambda: "does not serve 'team'; it serves other" in lab.control.all_jobs[KEY].status.message
        )
        (admitted,) = [c for c in lab.control.all_jobs[KEY].status.conditions if c.type == "Admitted"]
        assert (admitted.status, admitted.reason) == ("False", "NamespaceNotServed")
        assert ("RolloutJob", *KEY) not in lab.kube.objects


async def test_only_so_many_jobs_run_at_once_and_priority_decides_who_is_next(lab: Lab) -> None:
    await lab.with_workers(job("one"))
    await lab.with_workers(job("two"), count=6)
    lab.kube.put(job("late"))
    lab.kube.put(job("urgent", priority=5))
    for name in ("late", "urgent"):
        await until(lambda name=name: lab.condition("Admitted", name).get("reason") == "Queued")
    lab.control.counts((NAMESPACE, "one"), succeeded=2, init={"queued": 0, "active": 0})
    await until(lambda: lab.holds("Admitted", "urgent"))
    assert not lab.holds("Admitted", "late")


async def test_while_the_control_plane_is_down_nothing_is_lost(lab: Lab) -> None:
    lab.control.down = True
    lab.kube.put(job())
    await some_passes(lab.control)
    assert lab.kube.of("Pod") == []
    lab.control.down = False
    await until(lambda: len(lab.kube.of("Pod")) == 3)


async def test_a_job_past_its_time_to_live_is_deleted(lab: Lab) -> None:
    await lab.with_workers(job(ttlSecondsAfterFinished=0))
    lab.control.counts(KEY, succeeded=2, init={"queued": 0, "active": 0})
    await lab.stopped()
    await until(lambda: ("RolloutJob", *KEY) not in lab.kube.objects)
    await until(lambda: lab.control.deleted == ["RolloutJob/math"])


async def test_an_operator_that_begins_anew_changes_nothing(tmp_path: Path, quick: None) -> None:
    kube, control, settings = FakeKube(), FakeControlPlane(), settings_in(tmp_path)
    async with running(Lab(settings, kube, control)) as lab:
        kube.put(job())
        await until(lambda: len(kube.of("Pod")) == 3)
        lab.start_pods()
        await until(lambda: lab.holds("Running"))
        await until(lambda: control.all_jobs[KEY].status.phase == lab.status()["phase"])
    before, events = {k: v for k, v in kube.objects.items() if k[0] != "Secret"}, list(kube.events)
    kube.calls.clear()
    async with running(Lab(settings, kube, control)) as lab:
        await until(
            lambda: lab.operator.context.plane.unfinished.get(
                KEY, before[("RolloutJob", *KEY)]["metadata"]["uid"]
            )
        )
        await some_passes(control)
        assert {k: v for k, v in kube.objects.items() if k[0] != "Secret"} == before
        assert kube.events == events
        assert [call for call in kube.calls if call[0] not in ("get", "list", "watch")] == []


async def test_two_operators_at_once_make_each_pod_once(tmp_path: Path, quick: None) -> None:
    kube, control, settings = FakeKube(), FakeControlPlane(), settings_in(tmp_path)
    async with running(Lab(settings, kube, control)) as lab, running(Lab(settings, kube, control)):
        kube.put(job())
        await until(lambda: len(kube.of("Pod")) == 3)
        uids = {pod["metadata"]["uid"] for pod in kube.of("Pod")}
        lab.start_pods()
        await until(lambda: lab.holds("Running"))
        await at_rest(kube)  # They do not answer each other's writes.
        assert {pod["metadata"]["uid"] for pod in kube.of("Pod")} == uids


async def test_workers_that_another_operator_made_since_the_plan_are_left_alone(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube, control, settings = FakeKube(), FakeControlPlane(), settings_in(tmp_path)
    waits, answer, create = asyncio.Event(), asyncio.Event(), kube.create

    async def slow(obj: Object) -> Object:
        if (
            obj["kind"] == "Secret" and not waits.is_set()
        ):  # This is the first of the two, between its plan and its launches.
            waits.set()
            await answer.wait()
        return await create(obj)

    monkeypatch.setattr(kube, "create", slow)
    deleted: list[str] = []
    async with running(Lab(settings, kube, control)) as lab, running(Lab(settings, kube, control)):
        kube.watchers.append(lambda verb, obj: deleted.append(verb) if verb == "DELETED" else None)
        kube.put(job())
        await until(lambda: waits.is_set() and len(kube.of("Pod")) == 3)
        uids = {pod["metadata"]["uid"] for pod in kube.of("Pod")}
        lab.start_pods()
        await until(lambda: lab.holds("Running"))
        await at_rest(kube)
        answer.set()
        await until(lambda: "patch_status" in [verb for verb, _, _ in kube.calls])  # It continues.
        await at_rest(kube)
        assert {pod["metadata"]["uid"] for pod in kube.of("Pod")} == uids
        assert deleted == []
        assert lab.holds("Running")


async def test_what_went_while_no_operator_ran_is_cleaned_up(tmp_path: Path, quick: None) -> None:
    kube, control, settings = FakeKube(), FakeControlPlane(), settings_in(tmp_path)
    async with running(Lab(settings, kube, control)):
        kube.put(job())
        await until(lambda: len(kube.of("Pod")) == 3)
        control.counts(KEY, succeeded=2, init={"queued": 0, "active": 0})
        await until(lambda: control.all_jobs[KEY].status.phase == "Succeeded")
    for pod in kube.of("Pod"):
        pod["metadata"]["ownerReferences"] = []
        pod["metadata"].pop("deletionTimestamp", None)
    kube.remove("RolloutJob", *KEY)
    async with running(Lab(settings, kube, control)):
        await until(lambda: control.deleted == ["RolloutJob/math"])
        await until(lambda: all("deletionTimestamp" in pod["metadata"] for pod in kube.of("Pod")))


async def test_what_was_deleted_while_a_watch_was_broken_is_noticed_by_the_next_list(
    tmp_path: Path, quick: None
) -> None:
    kube, control = FakeKube(), FakeControlPlane()
    async with running(Lab(settings_in(tmp_path), kube, control)):
        kube.put(job())
        await until(lambda: len(kube.of("Pod")) == 3)
        worker = kube.names("Pod")[0]
        before = {pod["metadata"]["uid"] for pod in kube.of("Pod")}
        kube.deaf = True
        kube.remove("Pod", NAMESPACE, worker)
        await some_passes(control)
        assert len(kube.of("Pod")) == 2
        kube.deaf = False
        kube.break_watches()
        await until(lambda: len(kube.of("Pod")) == 3)
        assert len({pod["metadata"]["uid"] for pod in kube.of("Pod")} - before) == 1
        # The list that follows is empty: no event of any kind says that the job is gone.
        kube.deaf = True
        kube.remove("RolloutJob", *KEY)
        kube.deaf = False
        kube.break_watches()
        await until(lambda: control.deleted == ["RolloutJob/math"])


async def test_a_namespace_that_refuses_the_operator_is_left_alone(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_operator.installation.SWEEP_SECONDS", 0.05)
    kube, control = FakeKube(), FakeControlPlane()
    closed, forbidden = {"locked"}, KubeError(403, "Forbidden", "cannot list resource in namespace locked")
    refused = 0

    def refuse(verb: str, obj: dict[str, Any]) -> KubeError | None:
        nonlocal refused
        if obj["metadata"]["namespace"] not in closed:
            return None
        refused += 1
        return forbidden

    kube.refuse = refuse
    there = job()
    there["metadata"]["namespace"] = "locked"
    kube.put(job())
    kube.put(there)
    lab = Lab(settings_in(tmp_path, namespaces=[NAMESPACE, "locked"]), kube, control)
    async with running(lab):
        await until(lambda: KEY in control.all_jobs)
        assert lab.operator.context.access.denied == {"locked"}
        before = refused
        await until(lambda: refused > before + 2)  # Sweeps try it again.
        assert set(control.all_jobs) == {KEY}
        closed.clear()
        await until(lambda: ("locked", KEY[1]) in control.all_jobs)
        await until(lambda: not lab.operator.context.access.denied)


async def test_without_any_namespace_it_waits(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kube, control = FakeKube(), FakeControlPlane()
    forbidden = KubeError(403, "Forbidden", "cannot list resource in any namespace")
    kube.refuse = lambda verb, obj: forbidden
    kube.put(job())
    async with running(Lab(settings_in(tmp_path), kube, control)):
        await until(lambda: len(kube.calls) > 2)
        assert not control.all_jobs
        kube.refuse = lambda verb, obj: None
        await until(lambda: KEY in control.all_jobs)
