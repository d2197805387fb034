"""Stage workers that stand ready in a cluster in memory: who takes them, once, and what becomes of them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.security.ready_token import ready_worker_of
from rollyard_operator.controllers import ready_pool
from rollyard_operator.kube import labels
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.labels import Object
from rollyard_testing.operator.fakecluster import FakeControlPlane, FakeKube
from rollyard_testing.operator.operatorlab import (
    KEY,
    NAMESPACE,
    Lab,
    at_rest,
    hurry,
    job,
    pool,
    running,
    settings_in,
    until,
)

Start = Callable[..., Any]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a context manager that runs an operator with so many ready workers, in a cluster of its own."""
    hurry(monkeypatch)
    monkeypatch.setattr(ready_pool, "TOGETHER_SECONDS", 0.01)
    kube, control = FakeKube(), FakeControlPlane()

    @asynccontextmanager
    async def started(count: int, **more: Any) -> AsyncIterator[Lab]:
        settings = settings_in(tmp_path, readyWorkers=count, namespaces=[NAMESPACE], **more)
        lab = Lab(settings, kube, control)
        deleting = asyncio.create_task(ending(kube))
        try:
            async with running(lab):
                yield lab
        finally:
            deleting.cancel()
            await asyncio.gather(deleting, return_exceptions=True)

    return started


async def ending(kube: FakeKube) -> None:
    """End the pods that are deleted, as the kubelet does."""
    while True:
        for pod in kube.of("Pod"):
            if pod["metadata"].get("deletionTimestamp"):
                kube.remove(*("Pod", NAMESPACE, pod["metadata"]["name"]))
        await asyncio.sleep(0.02)


def standing(lab: Lab) -> list[Object]:
    return [pod for pod in lab.kube.of("Pod") if labels.READY in pod["metadata"]["labels"]]


def workers(lab: Lab) -> dict[str, Object]:
    """Return the pods of jobs by the name of their workload."""
    found = [pod for pod in lab.kube.of("Pod") if labels.JOB in pod["metadata"]["labels"]]
    by_name = {labels.annotation_of(pod, labels.WORKLOAD) or pod["metadata"]["name"]: pod for pod in found}
    assert len(by_name) == len(found), "no workload has two pods"
    return by_name


async def ready(lab: Lab, count: int) -> list[str]:
    """Wait until so many pods stand ready, let them run, and return their names."""
    await until(lambda: len(standing(lab)) == count)
    lab.start_pods()
    await at_rest(lab.kube)
    return sorted(pod["metadata"]["name"] for pod in standing(lab))


async def test_without_the_option_nothing_stands_ready(start: Start) -> None:
    async with start(0) as lab:
        await lab.with_workers()
        lab.start_pods()
        await at_rest(lab.kube)
        assert standing(lab) == []
        assert lab.control.offers == {}
        assert not any(labels.annotation_of(pod, labels.WORKLOAD) for pod in lab.kube.of("Pod"))


@pytest.mark.attack(
    "whoever may read pods reads its token; a template of a job mounts its Secret",
    boundary="worker",
    surface="ready pod",
    stopped_by="the token is in a Secret of the pod, whose name templates may not use",
)
async def test_a_ready_pod_holds_a_token_of_its_own_and_belongs_to_no_job(start: Start) -> None:
    async with start(2) as lab:
        names = await ready(lab, 2)
        assert len(set(names)) == 2
        for pod in standing(lab):
            meta, spec = pod["metadata"], pod["spec"]
            assert labels.JOB not in meta["labels"]
            (owner,) = meta["ownerReferences"]
            assert owner["kind"] == "ConfigMap", "it goes when the installation's objects go"
            (container,) = spec["containers"]
            assert container["args"][-2:] == ["--ready", meta["name"]]
            secret = lab.kube.objects[("Secret", NAMESPACE, meta["name"])]
            token = base64.b64decode(secret["data"]["token"]).decode()
            assert token not in json.dumps(pod), "whoever may read pods does not read the token"
            found = ready_worker_of(token, "worker-token")
            assert found is not None
            assert (found.namespace, found.worker) == (NAMESPACE, meta["name"])
            (owner,) = secret["metadata"]["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("Pod", meta["uid"])


async def test_a_job_with_a_tokenizer_of_the_hub_has_workers_that_can_download_it(start: Start) -> None:
    async with start(1, hub={"tokenSecret": "hub-token"}) as lab:
        (name,) = await ready(lab, 1)
        assert "hub-token" not in json.dumps(standing(lab))
        lab.kube.put(pool(model="org/m", replicas=0))
        lab.kube.put(job(backendRef={"name": "qwen"}, agent={"type": "tools"}))
        await until(lambda: len(workers(lab)) == 3)
        assert [pod["metadata"]["name"] for pod in standing(lab)] == [name], "it has no token of the hub"
        assert all("hub-token" in json.dumps(pod) for pod in workers(lab).values())


async def test_a_new_job_takes_them_and_others_stand_ready_again(start: Start) -> None:
    async with start(2) as lab:
        names = await ready(lab, 2)
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3 and len(lab.control.offers) == 2)
        taken = {name: pod for name, pod in workers(lab).items() if pod["metadata"]["name"] in names}
        assert len(taken) == 2, "two stand ready, and the third is an ordinary pod"
        uid = lab.kube.objects[("RolloutJob", *KEY)]["metadata"]["uid"]
        for name, pod in taken.items():
            meta = pod["metadata"]
            assert meta["labels"][labels.JOB_UID] == uid
            assert meta["labels"][labels.STAGE] in name
            assert labels.READY not in meta["labels"]
            (owner,) = meta["ownerReferences"]
            assert (owner["kind"], owner["uid"]) == ("RolloutJob", uid)
            offered = lab.control.offers[meta["name"]]
            assert (offered.job, offered.uid) == ("math", uid)
            arguments = offered.arguments
            assert arguments[arguments.index("--name") + 1] == f"{name}.{meta['uid']}"
        await ready(lab, 2)
        assert not set(names) & {pod["metadata"]["name"] for pod in standing(lab)}
        assert len(workers(lab)) == 3


async def test_its_pod_ends_with_the_job(start: Start) -> None:
    async with start(3) as lab:
        await ready(lab, 3)
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3)
        lab.kube.remove("RolloutJob", *KEY)
        await until(lambda: not workers(lab))
        assert len(await ready(lab, 3)) == 3


async def test_a_dead_one_is_reported_and_followed_by_an_ordinary_pod(start: Start) -> None:
    async with start(1) as lab:
        (name,) = await ready(lab, 1)
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3)
        (workload,) = [one for one, pod in workers(lab).items() if pod["metadata"]["name"] == name]
        uid = workers(lab)[workload]["metadata"]["uid"]
        await ready(lab, 1)
        lab.end_pod(name, 137)
        await until(lambda: workers(lab).get(workload, {}).get("metadata", {}).get("name") == workload)
        assert [one.worker for one in lab.control.deaths] == [f"{workload}.{uid}"]
        assert workers(lab)[workload]["metadata"]["annotations"][labels.RESTARTS] == "1"
        await until(lambda: ("Pod", NAMESPACE, name) not in lab.kube.objects)


@pytest.mark.parametrize(
    "spec",
    [
        {
            "stages": {
                stage: {"template": {"nodeSelector": {"disk": "fast"}}} for stage in ("init", "run", "eval")
            }
        },
        {"stages": {stage: {"template": {"image": "w:1"}} for stage in ("init", "run", "eval")}},
    ],
    ids=["another placement", "an image of its own"],
)
async def test_a_job_with_a_template_gets_ordinary_pods(start: Start, spec: dict[str, Any]) -> None:
    async with start(3, allow={"images": True}) as lab:
        names = await ready(lab, 3)
        lab.kube.put(job(**spec))
        await until(lambda: len(workers(lab)) == 3)
        await at_rest(lab.kube)
        assert sorted(pod["metadata"]["name"] for pod in standing(lab)) == names
        assert lab.control.offers == {}


async def test_a_job_with_a_queue_gets_ordinary_pods(start: Start) -> None:
    """A queue admits pods before they start, which is too late for one that runs."""
    async with start(3) as lab:
        names = await ready(lab, 3)
        queued = job()
        queued["metadata"]["labels"] = {labels.QUEUE: "gpu"}
        lab.kube.put(queued)
        await until(lambda: len(workers(lab)) == 3)
        assert sorted(pod["metadata"]["name"] for pod in standing(lab)) == names


async def test_one_that_does_not_run_yet_is_not_waited_for(start: Start) -> None:
    async with start(3) as lab:
        await until(lambda: len(standing(lab)) == 3)
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3)
        assert lab.control.offers == {}


async def test_of_two_jobs_at_once_each_gets_its_own(start: Start) -> None:
    async with start(3) as lab:
        await ready(lab, 3)
        lab.kube.put(job())
        lab.kube.put(job("other"))
        await until(lambda: len(workers(lab)) == 6)
        await at_rest(lab.kube)
        by_worker = {one.worker: one.job for one in lab.control.offers.values()}
        assert len(by_worker) >= 3
        for pod in lab.kube.of("Pod"):
            if pod["metadata"]["name"] in by_worker:
                assert by_worker[pod["metadata"]["name"]] == pod["metadata"]["labels"][labels.JOB]


async def test_an_operator_that_dies_before_the_offer_makes_it_later(start: Start) -> None:
    """The pod has its job already, so it is neither given to another job nor made a second time."""
    async with start(3) as lab:
        names = await ready(lab, 3)
        before = lab.control.offer

        async def never(offered: Any) -> Any:
            raise KubeError(0, "Killed", "the operator ends here")

        lab.control.offer = never  # type: ignore[method-assign]
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3)
        assert lab.control.offers == {}
        lab.control.offer = before  # type: ignore[method-assign]
    async with start(3) as lab:
        await until(lambda: len(lab.control.offers) == 3)
        await at_rest(lab.kube)
        assert sorted(pod["metadata"]["name"] for pod in workers(lab).values()) == names
        assert {one.job for one in lab.control.offers.values()} == {"math"}


async def test_an_operator_that_dies_before_the_secret_makes_it_later(start: Start) -> None:
    async with start(1) as lab:
        lab.kube.refuse = lambda verb, obj: (
            KubeError(0, "Killed", "the operator ends here")
            if (verb, obj["kind"]) == ("create", "Secret")
            else None
        )
        await until(lambda: lab.kube.of("Pod"))
    assert lab.kube.of("Secret") == []
    lab.kube.refuse = lambda verb, obj: None
    async with start(1) as lab:
        await until(lambda: lab.kube.of("Secret"))
        assert lab.kube.names("Secret") == lab.kube.names("Pod")


async def test_two_operators_give_no_pod_to_two_workloads(start: Start) -> None:
    async with start(3) as lab, start(3):
        await until(lambda: len(standing(lab)) >= 3)
        lab.start_pods()
        await at_rest(lab.kube)
        lab.kube.put(job())
        lab.kube.put(job("other"))

        def each_has_one() -> bool:
            pods = [pod for pod in lab.kube.of("Pod") if labels.JOB in pod["metadata"]["labels"]]
            names = [labels.annotation_of(pod, labels.WORKLOAD) or pod["metadata"]["name"] for pod in pods]
            return len(names) == len(set(names)) == 6

        await until(each_has_one)
        await at_rest(lab.kube)
        lab.start_pods()
        await at_rest(lab.kube)
        assert len(workers(lab)) == 6
        for offered in lab.control.offers.values():
            pod = lab.kube.objects.get(("Pod", NAMESPACE, offered.worker))
            assert pod is None or pod["metadata"]["labels"][labels.JOB] == offered.job
        assert len(standing(lab)) == 3


async def test_the_ready_pods_go_with_the_option(start: Start) -> None:
    async with start(2) as lab:
        await ready(lab, 2)
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3)
        await ready(lab, 2)
    async with start(0) as lab:
        await until(lambda: not standing(lab))
        assert len(workers(lab)) == 3, "those of jobs stay"


async def test_they_are_replaced_when_the_token_of_all_workers_changes(start: Start, tmp_path: Path) -> None:
    async with start(1) as lab:
        (before,) = await ready(lab, 1)
        (tmp_path / "worker").write_text("another-token\n")
        # A change of any pod starts a pass.
        status = lab.kube.objects[("Pod", NAMESPACE, before)]["status"]
        lab.kube.pod_status(NAMESPACE, before, {**status, "message": "It runs."})
        await until(lambda: before not in lab.kube.names("Pod") and len(standing(lab)) == 1)
        (after,) = [pod["metadata"]["name"] for pod in standing(lab)]
        token = base64.b64decode(lab.kube.objects[("Secret", NAMESPACE, after)]["data"]["token"]).decode()
        assert ready_worker_of(token, "another-token") is not None


async def test_one_that_ends_by_itself_is_replaced_after_a_pause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []

    class Pauses:
        first = 0.01

        def pause(self, failures: int) -> float:
            pauses.append(failures)
            return 0.01

    monkeypatch.setattr(ready_pool, "_PAUSES", Pauses())
    async with start(1) as lab:
        for failure in (1, 2):
            (name,) = await ready(lab, 1)
            lab.end_pod(name, 2)
            await until(lambda: ("Pod", NAMESPACE, name) not in lab.kube.objects)  # noqa: B023
            assert pauses[-1] == failure, "each failure in a row makes the pause longer"
        await ready(lab, 1)


async def test_pods_that_the_cluster_refuses_leave_jobs_alone(start: Start) -> None:
    full = KubeError(403, "Forbidden", "exceeded quota: pods=0")
    async with start(2) as lab:
        lab.kube.refuse = lambda verb, obj: (
            full
            if (verb, obj["kind"]) == ("create", "Pod") and labels.READY in obj["metadata"]["labels"]
            else None
        )
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3)
        assert standing(lab) == []
        tries = sum(call[:2] == ("create", "Pod") for call in lab.kube.calls)
        assert tries < 3 + 10, "the operator does not insist"


async def test_a_control_plane_that_refuses_offers_gets_ordinary_workers(start: Start) -> None:
    async with start(3) as lab:
        await ready(lab, 3)

        async def unknown(offered: Any) -> Any:
            from rollyard_client import Unauthorized

            raise Unauthorized("the role may not", status=403, reason="Forbidden")

        lab.control.offer = unknown  # type: ignore[method-assign]
        lab.kube.put(job())

        def ordinary() -> bool:
            return sorted(workers(lab)) == sorted(pod["metadata"]["name"] for pod in workers(lab).values())

        await until(lambda: len(workers(lab)) == 3 and ordinary())
        assert lab.control.offers == {}


async def test_a_worker_that_was_ready_for_long_lives_from_its_assignment_on(start: Start) -> None:
    """Otherwise one that fails at once would count as one that ran for a long time."""
    async with start(1) as lab:
        (name,) = await ready(lab, 1)
        since = datetime.now(UTC) - timedelta(hours=5)
        pod = lab.pod(name)
        pod["metadata"]["creationTimestamp"] = since.isoformat().replace("+00:00", "Z")
        pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] = since.isoformat()
        lab.kube.put(job())
        await until(lambda: len(workers(lab)) == 3)
        lab.end_pod(name, 3)
        await until(lambda: lab.condition("Degraded").get("status") == "True")
        assert "restart 1 " in lab.condition("Degraded")["message"]
        (workload,) = [one.arguments[-1].rpartition(".")[0] for one in lab.control.offers.values()]
        await until(lambda: workload in lab.kube.names("Pod"))
