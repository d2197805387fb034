"""The operator's pool loop over a cluster and a control plane in memory."""

from __future__ import annotations

from rollyard_crds import BackendPool, BackendStatus
from rollyard_crds.fields.annotations import DELETE_REQUESTED, OBJECT_UID
from rollyard_operator.controllers.pool import difference
from rollyard_testing.operator.operatorlab import NAMESPACE, Lab, job, pool, until

KEY = (NAMESPACE, "qwen")
WHERE = ("BackendPool", *KEY)


async def ready_pool(lab: Lab, **spec: object) -> None:
    lab.kube.put(pool(**spec))
    replicas = lab.kube.objects[WHERE]["spec"]["replicas"]
    await until(lambda: len(lab.kube.of("Pod")) == replicas)
    lab.start_pods()
    await until(lambda: lab.status("qwen", "BackendPool").get("readyReplicas") == replicas)


async def test_backends_are_reported_once_they_answered_a_completion(lab: Lab) -> None:
    await lab.with_workers(pool(), count=2)
    assert lab.kube.names("Service") == ["rollyard-qwen"]
    lab.sick = {"10.0.0.2", "10.0.0.3", "10.0.0.4"}
    lab.start_pods()
    await until(lambda: len(lab.control.all_pools[KEY].status.backends) == 2)
    assert not any(one.ready for one in lab.control.all_pools[KEY].status.backends)
    assert not lab.holds("Ready", "qwen", "BackendPool")
    lab.sick = set()
    await until(lambda: lab.holds("Ready", "qwen", "BackendPool"))
    await until(lambda: all(one.ready for one in lab.control.all_pools[KEY].status.backends))
    backends = lab.control.all_pools[KEY].status.backends
    assert {one.policy_version for one in backends} == {"base"}
    assert all(one.url.endswith(":8000") for one in backends)


async def test_a_job_waits_for_its_pool_and_is_woken_by_it(lab: Lab) -> None:
    lab.kube.put(job(backendRef={"name": "qwen"}, agent={"type": "tools"}))
    await until(lambda: lab.condition("Running").get("reason") == "BackendPoolNotFound")
    assert lab.kube.of("Pod") == []
    await lab.with_workers(pool(replicas=1), count=4)
    lab.start_pods()
    await until(lambda: lab.holds("Running"))


async def test_a_backend_that_goes_is_drained_first(lab: Lab) -> None:
    await ready_pool(lab)
    url = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in lab.kube.of("Pod")}
    names = sorted(url)
    lab.control.all_pools[KEY].status.backends = [
        one.model_copy(update={"active_rollouts": 3}) for one in lab.control.all_pools[KEY].status.backends
    ]
    lab.kube.put(pool(replicas=1))

    def going() -> list[BackendStatus]:
        known = lab.control.all_pools[KEY].status.backends
        return [one for one in known if url[names[1]] in one.url]

    await until(lambda: going() and going()[0].draining)
    pod = lab.kube.objects[("Pod", NAMESPACE, names[1])]
    assert "rollyard.dev/draining-since" in pod["metadata"]["annotations"]
    assert "deletionTimestamp" not in pod["metadata"]
    # It is wanted again, so it continues.
    lab.kube.put(pool(replicas=2))
    await until(lambda: going() and not going()[0].draining)
    pod = lab.kube.objects[("Pod", NAMESPACE, names[1])]
    assert "rollyard.dev/draining-since" not in pod["metadata"]["annotations"]


async def test_a_template_that_is_not_allowed_starts_no_backend(lab: Lab) -> None:
    keys = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "a"}}}
    lab.kube.put(pool(template={"env": [keys]}))
    await until(lambda: lab.condition("Ready", "qwen", "BackendPool").get("reason") == "TemplateNotAllowed")
    told = lab.condition("Ready", "qwen", "BackendPool")
    assert told["status"] == "False"
    assert "spec.template.env[0].valueFrom.secretKeyRef" in told["message"]
    assert "jobs.allow.secrets" in told["message"]
    await until(lambda: "TemplateNotAllowed" in str(lab.control.all_pools[KEY].status.conditions))
    assert lab.kube.of("Pod") == []
    await lab.with_workers(pool(template={}), count=2)


async def test_scaling_over_rest_reaches_the_object(lab: Lab) -> None:
    await ready_pool(lab)
    lab.control.change_pool(KEY, replicas=3)
    await until(lambda: lab.kube.objects[WHERE]["spec"]["replicas"] == 3)
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    assert lab.control.all_pools[KEY].spec.replicas == 3


async def test_a_pool_of_rest_becomes_an_object_and_goes_with_it(lab: Lab) -> None:
    lab.control.post_pool(BackendPool.model_validate(pool(replicas=1)))
    await until(lambda: len(lab.kube.of("Pod")) == 1)
    made = lab.kube.objects[WHERE]
    assert made["metadata"]["annotations"] == {"rollyard.dev/origin": "rest"}
    await until(
        lambda: lab.control.all_pools[KEY].metadata.annotations.get(OBJECT_UID) == made["metadata"]["uid"]
    )
    lab.control.all_pools[KEY].metadata.annotations[DELETE_REQUESTED] = "true"
    await until(lambda: WHERE not in lab.kube.objects)
    await until(lambda: lab.control.deleted == ["BackendPool/qwen"])


async def test_an_external_pool_shows_what_the_control_plane_finds(lab: Lab) -> None:
    urls = ["http://server:8000"]
    lab.kube.put(pool(replicas=1, engine={"type": "external", "external": {"urls": urls}}))
    await until(lambda: KEY in lab.control.all_pools)
    status = lab.control.all_pools[KEY].status
    found = status.model_copy(update={"backends": [BackendStatus(url=urls[0], ready=True)]})
    lab.control.all_pools[KEY] = lab.control.all_pools[KEY].model_copy(update={"status": found})
    await until(lambda: lab.holds("Ready", "qwen", "BackendPool"))
    assert lab.kube.of("Pod") == lab.kube.of("Service") == []


async def test_a_deleted_pool_leaves_nothing(lab: Lab) -> None:
    await ready_pool(lab)
    lab.kube.remove(*WHERE)
    await until(lambda: lab.control.deleted == ["BackendPool/qwen"])
    await until(lambda: ("BackendPool", KEY) not in lab.operator._loops)
    assert lab.kube.of("Pod") == []


async def test_a_backend_that_dies_is_told_as_gone_and_made_anew(lab: Lab) -> None:
    await ready_pool(lab, replicas=1)
    name = lab.kube.names("Pod")[0]
    first = lab.pod(name)["metadata"]["uid"]
    lab.end_pod(name, 1)
    where = ("Pod", NAMESPACE, name)
    await until(lambda: where in lab.kube.objects and lab.kube.objects[where]["metadata"]["uid"] != first)
    await until(lambda: lab.control.all_pools[KEY].status.backends == [])
    lab.start_pods()
    await until(lambda: [one.ready for one in lab.control.all_pools[KEY].status.backends] == [True])


async def test_a_backend_that_is_replaced_is_counted_as_restarted(lab: Lab) -> None:
    await ready_pool(lab, replicas=1)
    (name,) = lab.kube.names("Pod")
    where = ("Pod", NAMESPACE, name)
    first = lab.kube.objects[where]["metadata"]["uid"]
    lab.control.all_pools[KEY].status.backends = [
        one.model_copy(update={"restart_requested": True})
        for one in lab.control.all_pools[KEY].status.backends
    ]
    await until(lambda: "deletionTimestamp" in lab.kube.objects[where]["metadata"])
    lab.kube.remove(*where)
    await until(lambda: where in lab.kube.objects and lab.kube.objects[where]["metadata"]["uid"] != first)
    told = lab.kube.objects[where]["metadata"]["annotations"]
    assert (told["rollyard.dev/restarts"], told["rollyard.dev/last-end"]) == ("1", "had wrong weights")


def test_the_difference_of_two_specs_is_a_merge_patch() -> None:
    before = {"a": 1, "b": {"c": 1, "d": [1]}, "gone": True}
    after = {"a": 1, "b": {"c": 2, "d": [1]}, "new": {"x": 1}}
    assert difference(before, after) == {"b": {"c": 2}, "gone": None, "new": {"x": 1}}
    assert difference(before, before) == {}
