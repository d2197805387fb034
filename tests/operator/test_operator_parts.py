"""The parts of the operator's shell on their own: caches, admission, events, the client's retries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio import client
from rollyard_crds import Condition, RolloutJob
from rollyard_operator.__main__ import main
from rollyard_operator.controllers.context import Admissions
from rollyard_operator.kube.client import ATTEMPTS, KubeClient
from rollyard_operator.kube.errors import KubeConflict, KubeError
from rollyard_operator.kube.events import notes
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import PodCache
from rollyard_operator.pods.status import observed_workload
from rollyard_process.backoff import Backoff
from rollyard_testing.operator.operatorlab import PATIENCE_SECONDS

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def pod(name: str, version: int, uid: str = "u1", **labels: str) -> Object:
    meta = {"name": name, "namespace": "n", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"kind": "Pod", "metadata": meta}


OWNED = {"rollyard.dev/job-uid": "j", "app.kubernetes.io/component": "stage-worker"}


def test_what_is_older_is_ignored_and_what_was_removed_stays_away() -> None:
    told: list[str] = []
    cache = PodCache(lambda one: told.append(one["metadata"]["resourceVersion"]))
    assert cache.put(pod("a", 5, **OWNED))
    assert not cache.put(pod("a", 5, **OWNED))
    assert not cache.put(pod("a", 4, **OWNED))
    assert [one["metadata"]["name"] for one in cache.owned("j", "stage-worker")] == ["a"]
    assert cache.owned("j", "sandbox") == []
    assert not cache.remove(("n", "a"), "another uid")
    assert cache.remove(("n", "a"), "u1")
    assert not cache.put(pod("a", 9, **OWNED))  # This is the answer to a call that a deletion overtook.
    assert cache.put(pod("a", 10, uid="u2", **OWNED))
    assert len(told) == 3


def test_a_pod_made_anew_replaces_the_old_one_whose_end_was_missed() -> None:
    cache = PodCache()
    cache.put(pod("a", 5, uid="u1", **OWNED))
    cache.put(pod("a", 8, uid="u2"))
    assert cache.owned("j", "stage-worker") == []
    assert not cache.remove(("n", "a"), "u1")  # Its deletion is reported late.
    assert len(cache) == 1


def test_a_container_that_could_not_be_started_did_not_begin_in_1970() -> None:
    made = pod("a", 1, **OWNED)
    made["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    made["spec"] = {"containers": [{"name": "worker"}]}
    zero = "1970-01-01T00:00:00Z"
    over = {"exitCode": 128, "reason": "StartError", "startedAt": zero, "finishedAt": "2026-01-01T00:00:01Z"}
    state = {"name": "worker", "state": {"terminated": over}}
    made["status"] = {"phase": "Failed", "containerStatuses": [state]}
    seen = observed_workload(made)
    assert (seen.state, seen.started_at) == ("exited", NOW)  # Otherwise it counts as one that ran for long.


def job(name: str, priority: int, admitted: str, reason: str = "Queued") -> RolloutJob:
    condition = {"type": "Admitted", "status": admitted, "reason": reason, "lastTransitionTime": NOW}
    return RolloutJob.model_validate(
        {
            "metadata": {"name": name, "namespace": "n", "creationTimestamp": NOW},
            "spec": {
                "tasks": {"stream": True},
                "handler": "math",
                "agent": {"type": "oracle"},
                "priority": priority,
            },
            "status": {"conditions": [condition]},
        }
    )


def test_a_place_goes_to_the_most_urgent_of_those_who_wait() -> None:
    woken: list[str] = []
    admissions = Admissions(1, lambda key: woken.append(key[1]))
    admissions.note(("n", "a"), job("a", 0, "True"))
    for name, priority in (("b", 0), ("c", 5)):
        assert admissions.others(("n", name), job(name, priority, "False")) == 1
        admissions.note(("n", name), job(name, priority, "False"))
    admissions.leave(("n", "a"))
    assert woken == ["c", "b"]
    assert admissions.others(("n", "b"), job("b", 0, "False")) == 1
    assert admissions.others(("n", "c"), job("c", 5, "False")) == 0
    admissions.note(("n", "c"), job("c", 5, "False", reason="Suspended"))
    assert admissions.others(("n", "b"), job("b", 0, "False")) == 0


def condition(kind: str, status: str, reason: str, message: str = "m") -> Condition:
    return Condition.model_validate(
        {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW}
    )


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ([], [("Admitted", "True", "Admitted")], [("Normal", "Admitted")]),
        ([], [("Admitted", "False", "ConfigMapNotFound")], [("Warning", "ConfigMapNotFound")]),
        ([], [("Running", "False", "WorkersStarting")], []),
        (
            [("Running", "False", "WorkersStarting")],
            [("Running", "False", "BackendPoolNotFound")],
            [("Warning", "BackendPoolNotFound")],
        ),
        ([("Degraded", "True", "Restarting")], [("Degraded", "True", "CrashLoopBackOff")], []),
        ([("Degraded", "True", "Restarting")], [("Degraded", "False", "Healthy")], [("Normal", "Recovered")]),
        (
            [("Suspended", "True", "Suspended")],
            [("Suspended", "False", "NotSuspended")],
            [("Normal", "Resumed")],
        ),
        (
            [("Running", "True", "WorkersReady"), ("Degraded", "True", "Restarting")],
            [
                ("Running", "False", "TooManyFailures"),
                ("Degraded", "False", "Finished"),
                ("Finished", "True", "TooManyFailures"),
                ("Failed", "True", "TooManyFailures"),
                ("Succeeded", "False", "TooManyFailures"),
            ],
            [("Warning", "TooManyFailures")],
        ),
        (
            [("Ready", "True", "BackendsReady")],
            [("Ready", "False", "NoBackendReady")],
            [("Warning", "NoBackendReady")],
        ),
    ],
)
def test_each_transition_is_told_once(
    before: list[tuple[str, str, str]], after: list[tuple[str, str, str]], told: list[tuple[str, str]]
) -> None:
    old, new = [condition(*one) for one in before], [condition(*one) for one in after]
    assert [(note.type, note.reason) for note in notes(old, new)] == told
    assert notes(new, new) == []


class Server:
    """An API server with scripted answers, which remembers what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[tuple[str, str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path_qs, body))
        status, document = self.answers.pop(0)
        return web.json_response(document, status=status)


def refusal(code: int, reason: str, message: str = "no", **details: Any) -> tuple[int, Any]:
    return code, {"kind": "Status", "code": code, "reason": reason, "message": message, "details": details}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_operator.kube.client.PAUSES", Backoff(first=0.0, longest=0.0))
    monkeypatch.setattr("rollyard_operator.kube.client.TIMEOUT_SECONDS", PATIENCE_SECONDS)


@pytest.fixture
async def kube(quick: None) -> Any:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.handle)
    async with TestServer(app) as listening:
        configuration = client.Configuration()
        configuration.host = str(listening.make_url("")).rstrip("/")
        made = KubeClient(configuration)
        yield made, server
        await made.close()


async def test_what_may_be_repeated_is_and_what_may_not_is_raised(kube: Any) -> None:
    api, server = kube
    server.answers = [refusal(429, "TooManyRequests"), refusal(500, "InternalError"), (200, {"ok": True})]
    assert await api.get("Pod", "n", "a") == {"ok": True}
    server.answers = [refusal(403, "Forbidden", "exceeded quota")]
    with pytest.raises(KubeError) as refused:
        await api.create({"kind": "Pod", "metadata": {"name": "a", "namespace": "n"}})
    assert (refused.value.status, refused.value.reason) == (403, "Forbidden")
    assert "exceeded quota" in str(refused.value)
    server.answers = [refusal(503, "ServiceUnavailable", retryAfterSeconds=7)] * ATTEMPTS
    with pytest.raises(KubeError) as busy:
        await api.get("Pod", "n", "a")
    assert busy.value.retry_after == 7
    assert server.answers == []


async def test_a_taken_name_is_a_conflict_at_once_and_two_writers_are_tried_again(kube: Any) -> None:
    api, server = kube
    server.answers = [refusal(409, "AlreadyExists")]
    with pytest.raises(KubeConflict):
        await api.create({"kind": "Pod", "metadata": {"name": "a", "namespace": "n"}})
    server.answers = [refusal(409, "Conflict"), (200, {"ok": True})]
    assert await api.apply({"kind": "Secret", "metadata": {"name": "a", "namespace": "n"}})
    server.answers = [refusal(409, "Conflict")]
    with pytest.raises(KubeConflict):
        await api.patch_status("RolloutJob", "n", "a", {}, version="12")
    assert server.asked[-1][2]["metadata"] == {"resourceVersion": "12"}


async def test_what_is_gone_or_another_is_success_or_nothing(kube: Any) -> None:
    api, server = kube
    server.answers = [
        refusal(404, "NotFound"),
        refusal(409, "Conflict", "Precondition failed: UID in precondition"),
    ]
    await api.delete("Pod", "n", "a", grace=3)
    await api.delete("Pod", "n", "a", uid="u1")
    assert server.asked[0][2]["gracePeriodSeconds"] == 3
    assert server.asked[1][2]["preconditions"] == {"uid": "u1"}
    server.answers = [
        refusal(404, "NotFound"),
        refusal(409, "Conflict", "Precondition failed: UID in object meta"),
    ]
    assert await api.get("Pod", "n", "a") is None
    assert await api.patch("Pod", "n", "a", {}, uid="u1") is None


async def test_lists_are_read_page_by_page(kube: Any) -> None:
    api, server = kube
    server.answers = [
        (200, {"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "a"}}]}),
        (200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]}),
    ]
    found = await api.list("RolloutJob", None, "x=y")
    assert [one["metadata"]["name"] for one in found] == ["a", "b"]
    assert found[0]["kind"] == "RolloutJob"
    assert [path for _, path, _ in server.asked] == [
        "/apis/rollyard.dev/v1alpha1/rolloutjobs?limit=500&labelSelector=x%3Dy",
        "/apis/rollyard.dev/v1alpha1/rolloutjobs?limit=500&labelSelector=x%3Dy&continue=next",
    ]


async def test_a_list_whose_next_page_is_forgotten_begins_anew(kube: Any) -> None:
    api, server = kube
    first = (200, {"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "a"}}]})
    last = (200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]})
    server.answers = [first, refusal(410, "Expired"), first, last]
    assert [one["metadata"]["name"] for one in await api.list("Pod", "n")] == ["a", "b"]
    assert ["continue=next" in path for _, path, _ in server.asked] == [False, True, False, True]
    server.answers = [refusal(410, "Expired")] * ATTEMPTS
    with pytest.raises(KubeError) as gone:
        await api.list("Pod", "n")
    assert gone.value.status == 410
    assert server.answers == []


async def test_a_server_that_is_not_there_is_an_error_and_not_a_hang(quick: None) -> None:
    configuration = client.Configuration()
    configuration.host = "http://127.0.0.1:9"
    api = KubeClient(configuration)
    with pytest.raises(KubeError) as gone:
        await api.get("Pod", "n", "a")
    assert (gone.value.status, gone.value.reason) == (0, "Unreachable")
    await api.close()


def test_unusable_settings_end_the_program_with_the_field(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "operator.yaml"
    file.write_text("instance: Not A Name\n")
    assert main(["--config", str(file)]) == 2
    assert "instance:" in capsys.readouterr().err
