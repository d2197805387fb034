"""Jobs from kubectl and from REST run to both outcomes, and may change in part while they run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from rollyard_client import NotFound
from rollyard_testing.kubernetes.installedchart import HOLD, condition, in_namespace, is_so, job, pool, task

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_testing.kubernetes.installedchart import Installation

pytestmark = pytest.mark.kubernetes


def gone_from_rest(client: Client, name: str) -> bool:
    try:
        client.job(name)
    except NotFound:
        return True
    return False


def tells(installation: Installation, name: str, reasons: set[str]) -> None:
    """Wait for events of a job. The operator sends them after the status that they are about."""
    installation.until(
        lambda: reasons <= {one["reason"] for one in installation.events(name)}, f"events {sorted(reasons)}"
    )


def test_an_applied_job_succeeds_and_its_trajectories_are_in_rest(installation: Installation) -> None:
    tasks = task("a", hold=HOLD), task("b", hold=HOLD)
    with installation.client() as client, installation.made(job("good", *tasks, samplesPerTask=2)):
        installation.wait("rj", "good", "Running")
        installation.until(lambda: client.job("good").status.counts.run.active == 4, "all are in Run")
        installation.let_go("good")
        installation.wait("rj", "good", "Succeeded")
        found = installation.get("rj", "good")
        assert found is not None
        assert found["status"]["phase"] == "Succeeded"
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"]
        assert found["status"]["counts"]["succeeded"] == found["status"]["counts"]["total"] == 4
        tells(installation, "good", {"Admitted", "Running", "Succeeded"})
        assert client.job("good").metadata.annotations["rollyard.dev/object-uid"] == found["metadata"]["uid"]
        rewards = sorted((one.task_id, one.sample_index, one.reward) for one in client.trajectories("good"))
        assert rewards == [("a", 0, 1.0), ("a", 1, 1.0), ("b", 0, 1.0), ("b", 1, 1.0)]
        installation.until(lambda: not installation.pods(), "the workers of a finished job go")


def test_a_job_that_cannot_be_set_up_fails(installation: Installation) -> None:
    with installation.made(job("bad", task("a", setup="echo no such luck >&2; exit 3"))):
        installation.wait("rj", "bad", "Failed")
        found = installation.get("rj", "bad") or {}
        assert condition(found, "Failed")["reason"] == "TooManyFailures"
        assert is_so(found, "Succeeded", "False")
        assert is_so(found, "Finished")
        assert found["status"]["counts"]["failed"] == 1
        done = installation.cluster.run(
            "kubectl", "wait", "--for=condition=Succeeded", "rj/bad", "-n", installation.jobs, "--timeout=1s"
        )
        assert done.returncode != 0
        with installation.client() as client:
            (only,) = client.trajectories("bad")
        assert "no such luck" in only.message


def test_a_job_of_rest_becomes_an_object_and_goes_with_it(installation: Installation) -> None:
    with installation.client() as client:
        client.submit(in_namespace(job("posted", suspend=True), installation.jobs))
        found = installation.until(lambda: installation.get("rj", "posted"), "the job's object")
        assert found["metadata"]["annotations"]["rollyard.dev/origin"] == "rest"
        assert found["spec"]["handler"] == "shell"
        installation.until_condition("rj", "posted", "Suspended", "Suspended", "True")
        # REST's words on it reach the object, and the object's words reach REST.
        client.update("posted", suspend=False)
        installation.wait("rj", "posted", "Running")
        assert (installation.get("rj", "posted") or {})["spec"]["suspend"] is False
        installation.until(
            lambda: any(
                (one.type, one.status) == ("Running", "True")
                for one in client.job("posted").status.conditions
            ),
            "REST says that it runs",
        )
        installation.delete("rj", "posted")
        installation.until(lambda: gone_from_rest(client, "posted"), "the job is gone from REST")
        installation.until(lambda: not installation.pods(job="posted"), "its workers are gone")


def test_an_applied_job_deleted_over_rest_is_gone_from_the_cluster(installation: Installation) -> None:
    with installation.client() as client, installation.made(job("applied", suspend=True)):
        installation.until(lambda: not gone_from_rest(client, "applied"), "the job is in REST")
        client.delete("applied")
        installation.until(lambda: installation.get("rj", "applied") is None, "its object is gone")
        installation.until(lambda: gone_from_rest(client, "applied"), "the job is gone from REST")
        # No cache that still held the job brings it back.
        installation.apply(job("after", suspend=True))
        installation.until(lambda: not gone_from_rest(client, "after"), "the operator has gone on")
        assert installation.get("rj", "applied") is None
        client.delete("after")
        installation.until(lambda: installation.get("rj", "after") is None, "its object is gone")


def test_pools_live_on_both_sides(installation: Installation) -> None:
    with installation.client() as client:
        client.create_pool(in_namespace(pool("posted", replicas=0), installation.jobs))
        found = installation.until(lambda: installation.get("bp", "posted"), "the pool's object")
        assert found["metadata"]["annotations"]["rollyard.dev/origin"] == "rest"
        installation.delete("bp", "posted")
        installation.until(lambda: not client.pools(), "the pool is gone from REST")
        with installation.made(pool("applied", replicas=0)):
            installation.until(client.pools, "the pool is in REST")
            installation.until_condition("bp", "applied", "Ready", "NoBackends")
            client.delete_pool("applied")
            installation.until(lambda: installation.get("bp", "applied") is None, "its object is gone")
            installation.until(lambda: not client.pools(), "the pool is gone from REST")


def test_suspended_jobs_have_no_workers_and_go_on(installation: Installation) -> None:
    with installation.client() as client, installation.made(job("stopped")):
        installation.wait("rj", "stopped", "Running")
        client.push_tasks("stopped", [task("first")])
        installation.until(lambda: client.job("stopped").status.counts.succeeded == 1, "the first task")
        assert len(installation.pods("stage-worker", job="stopped")) == 3
        assert installation.patch("rj", "stopped", {"suspend": True}) == ""
        installation.wait("rj", "stopped", "Suspended")
        installation.until(lambda: not installation.pods(job="stopped"), "its workers are gone")
        client.push_tasks("stopped", [task("second")])
        assert not is_so(installation.get("rj", "stopped") or {}, "Admitted")
        assert installation.patch("rj", "stopped", {"suspend": False}) == ""
        installation.wait("rj", "stopped", "Running")
        client.close_stream("stopped")
        installation.wait("rj", "stopped", "Succeeded")
        assert client.job("stopped").status.counts.succeeded == 2
        tells(installation, "stopped", {"Suspended", "Resumed"})


def run_workers(installation: Installation, name: str) -> dict[str, str]:
    """Return the uid of each existing Run worker, by its pod's name."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for pod in installation.pods("stage-worker", job=name)
        if pod["metadata"]["labels"]["rollyard.dev/stage"] == "run"
    }


def test_a_spec_edited_during_a_run_is_applied_where_it_can_be(installation: Installation) -> None:
    held = [task(name, hold=HOLD) for name in "abc"]
    edited = job("edited", *held, stages={"run": {"concurrency": 1, "maxReplicas": 1}})
    with installation.client() as client, installation.made(edited):

        def active() -> int:
            return client.job("edited").status.counts.run.active

        installation.until(
            lambda: (active(), client.job("edited").status.counts.run.queued) == (1, 2), "one runs, two wait"
        )
        assert len(run_workers(installation, "edited")) == 1
        # More workers start, as the queue calls for them; the one that is busy continues.
        before = run_workers(installation, "edited")
        assert installation.patch("rj", "edited", {"stages": {"run": {"maxReplicas": 2}}}) == ""
        installation.until(lambda: active() == 2, "a second one runs")
        now = run_workers(installation, "edited")
        assert before.items() <= now.items()
        assert len(now) == 2
        # With more rollouts for each worker other workers start, which take over.
        assert installation.patch("rj", "edited", {"stages": {"run": {"concurrency": 4}}}) == ""
        for words, patch in (
            ("samplesPerTask", {"samplesPerTask": 2}),
            ("handler", {"handler": "math"}),
            ("tasks", {"tasks": {"inline": None, "stream": True}}),
            ("backendRef", {"backendRef": {"name": "other"}}),
        ):
            said = installation.patch("rj", "edited", patch)
            assert words in said
            assert "immutable" in said
        said = installation.patch("rj", "edited", {"stages": {"run": {"maxReplicas": 0}}})
        assert "maxReplicas" in said
        installation.until(lambda: active() == 3, "the third one runs")
        installation.let_go("edited")
        installation.wait("rj", "edited", "Succeeded")
        found = installation.get("rj", "edited") or {}
        assert found["status"]["observedGeneration"] == found["metadata"]["generation"] == 3
        assert sorted(one.task_id for one in client.trajectories("edited")) == ["a", "b", "c"]
        # The rollouts are handed over, and none has failed.
        assert [one.attempt for one in client.trajectories("edited")] == [0, 0, 0]


def test_a_job_deleted_during_init_leaves_nothing(installation: Installation) -> None:
    with installation.client() as client:
        with installation.made(job("short", task("a", setup="sleep 200"), samplesPerTask=2)):
            installation.until(lambda: client.job("short").status.counts.init.active == 2, "both are in Init")
            installation.until(lambda: len(installation.pods("sandbox")) == 2, "both have a sandbox")
            installation.delete("rj", "short")
        installation.until(lambda: gone_from_rest(client, "short"), "the job is gone from REST")
        installation.until(
            lambda: not installation.cluster.items("pods", installation.jobs), "no pod is left"
        )
        installation.until(lambda: installation.claims() == [], "the control plane has no claim of it")
