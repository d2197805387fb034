"""One pass over a job or a pool: which steps it takes, in which order, and what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus, RolloutJob, RolloutJobStatus
from rollyard_drivers.loop.passes import BackendReports, job_pass, pool_pass
from rollyard_drivers.reconcile.plan import ObservedJob, ObservedPool, Plan, PoolState, Profile
from rollyard_drivers.reconcile.reconcile_pass import job_report, pool_report, pool_state, routed_by

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROFILE = Profile()
SEEN = ObservedJob(pool=PoolState(True), closed=True)
META = {"name": "a", "namespace": "n", "uid": "u1", "generation": 3}


def a_job() -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": META,
            "status": {
                "counts": {"total": 4, "init": {"queued": 4}},
                "conditions": [
                    {
                        "type": "Admitted",
                        "status": "True",
                        "reason": "R",
                        "lastTransitionTime": "2025-01-01T00:00:00Z",
                    }
                ],
            },
            "spec": {
                "tasks": {"inline": [{"id": "t", "prompt": "p"}]},
                "handler": "math",
                "backendRef": {"name": "p"},
            },
        }
    )


def a_pool(**engine: object) -> BackendPool:
    return BackendPool.model_validate(
        {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "BackendPool",
            "metadata": META,
            "spec": {"model": "m", "engine": engine},
        }
    )


class Actions:
    """Actions that record what is asked of them, for a job or a pool; `failing` raises."""

    def __init__(self, failing: str = "") -> None:
        self.steps: list[str] = []
        self.failing = failing
        self.launched: tuple[str, ...] = ()
        self.reported: BackendPoolStatus | RolloutJobStatus | None = None

    def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self.failing:
            raise RuntimeError(name)

    def planned(self, plan: Plan[RolloutJobStatus]) -> None:
        self._step("planned")

    async def prepare(self, plan: Plan[RolloutJobStatus] | Plan[BackendPoolStatus]) -> None:
        self._step("prepare")

    async def carry_out(self, plan: Plan[RolloutJobStatus] | Plan[BackendPoolStatus]) -> None:
        self.launched = tuple(one.workload.name for one in plan.launch)
        self._step("carry_out")

    async def show(self, status: RolloutJobStatus | BackendPoolStatus) -> None:
        await asyncio.sleep(0)
        self._step("show")

    async def cancel(self) -> None:
        self._step("cancel")

    async def report_backends(self, backends: Sequence[BackendStatus]) -> None:
        self._step("report_backends")

    async def report(self, status: RolloutJobStatus | BackendPoolStatus) -> None:
        self.reported = status
        self._step("report")


async def test_a_jobs_plan_is_noted_carried_out_and_reported() -> None:
    actions = Actions()
    plan = await job_pass(a_job(), SEEN, actions, NOW, PROFILE)
    assert actions.steps == ["planned", "prepare", "carry_out", "show", "report"]
    assert actions.launched == tuple(one.workload.name for one in plan.launch)
    assert actions.launched
    assert actions.reported == plan.status


async def test_a_plan_is_noted_before_anything_else_may_run() -> None:
    """One free place must not admit two jobs."""
    actions = Actions()
    first = asyncio.ensure_future(job_pass(a_job(), SEEN, actions, NOW, PROFILE))
    seen: list[list[str]] = []
    asyncio.get_running_loop().call_soon(lambda: seen.append(list(actions.steps)))
    await first
    assert seen == [["planned", "prepare"]]


@pytest.mark.parametrize("failing", ["carry_out", "show"])
async def test_what_fails_is_raised_after_the_step_beside_it(failing: str) -> None:
    actions = Actions(failing)
    with pytest.raises(RuntimeError, match=failing):
        await job_pass(a_job(), SEEN, actions, NOW, PROFILE)
    assert actions.steps == ["planned", "prepare", "carry_out", "show"]


@pytest.mark.parametrize(("cancelled", "asked"), [("", True), ("DeadlineExceeded", False)])
async def test_a_job_past_its_deadline_is_cancelled_once(cancelled: str, asked: bool) -> None:
    job = a_job()
    job.spec.active_deadline_seconds = 1
    actions = Actions()
    plan = await job_pass(job, replace(SEEN, cancelled=cancelled), actions, NOW, PROFILE)
    assert ("cancel" in actions.steps) is asked
    assert not asked or plan.cancel == "DeadlineExceeded"
    assert actions.steps[-1] == "report"


@pytest.mark.parametrize("external", [False, True])
async def test_a_pools_backends_are_reported_unless_they_are_somebody_elses(external: bool) -> None:
    pool = a_pool(type="external", external={"urls": ["http://h:1"]}) if external else a_pool(type="embedded")
    actions = Actions()
    await pool_pass(pool, ObservedPool(), actions, NOW, PROFILE)
    middle = [] if external else ["report_backends"]
    assert actions.steps == ["prepare", "carry_out", *middle, "show", "report"]


async def test_backends_are_reported_when_they_change_or_are_not_known() -> None:
    sent: list[list[str]] = []

    async def put(backends: Sequence[BackendStatus]) -> int:
        sent.append([one.url for one in backends])
        return len(sent)

    one, other = BackendStatus(url="http://a:1", ready=True), BackendStatus(url="http://b:1", ready=True)
    reports = BackendReports()
    assert await reports.send([one], [], put) == 1
    assert await reports.send([one], [one], put) is None
    assert await reports.send([one], [], put) == 2, "the control plane has lost it"
    assert await reports.send([one, other], [one], put) == 3
    assert await reports.send([other], [one, other], put) == 4
    assert sent == [["http://a:1"], ["http://a:1"], ["http://a:1", "http://b:1"], ["http://b:1"]]


async def test_a_report_of_backends_that_failed_is_repeated() -> None:
    tries: list[int] = []

    async def put(backends: Sequence[BackendStatus]) -> bool:
        tries.append(len(backends))
        if len(tries) == 1:
            raise OSError("away")
        return True

    reports, backends = BackendReports(), [BackendStatus(url="http://a:1", ready=True)]
    with pytest.raises(OSError, match="away"):
        await reports.send(backends, backends, put)
    assert await reports.send(backends, backends, put) is True
    assert await reports.send(backends, backends, put) is None


async def test_a_status_is_reported_in_the_control_planes_generations() -> None:
    job, actions = a_job(), Actions()
    status = (await job_pass(job, SEEN, actions, NOW, PROFILE)).status
    known = a_job()
    known.metadata.generation = 7
    report = job_report(known, status)
    assert report is not None
    assert report.observed_generation == 7
    assert {one.observed_generation for one in report.conditions} == {7}
    known.status = report
    assert job_report(known, status) is None
    for change in ({"message": "other"}, {"phase": "Failed"}, {"conditions": report.conditions[1:]}):
        assert job_report(known, status.model_copy(update=change)) is not None, change
    known.status = report.model_copy(update={"observed_generation": 6})
    assert job_report(known, status) is not None, "the control plane waits for its newest generation"


async def test_a_pools_status_is_reported_in_the_control_planes_generations() -> None:
    pool, actions = a_pool(type="embedded"), Actions()
    status = (await pool_pass(pool, ObservedPool(), actions, NOW, PROFILE)).status
    assert pool_report(pool, status) == status, "the same generation: nothing is translated"
    known = a_pool(type="embedded")
    known.metadata.generation = 7
    report = pool_report(known, status)
    assert report is not None
    assert {one.observed_generation for one in report.conditions} == {7}
    known.status = report
    assert pool_report(known, status) is None
    for change in ({"replicas": 9}, {"selector": "a=b"}, {"conditions": report.conditions[1:]}):
        assert pool_report(known, status.model_copy(update=change)) is not None, change
    known.status = report.model_copy(update={"observed_generation": 6})
    assert pool_report(known, status) is not None, "the control plane waits for its newest generation"


@pytest.mark.parametrize(
    ("change", "reported", "routed"),
    [
        ({"url": "http://b:1"}, True, True),
        ({"ready": False}, True, True),
        ({"draining": True}, True, True),
        ({"policy_version": "v2"}, True, False),
        ({"message": "its weights are behind"}, False, False),
        ({"active_rollouts": 3}, False, False),
    ],
)
async def test_which_changes_of_a_backend_are_reported_and_which_move_rollouts(
    change: dict[str, object], reported: bool, routed: bool
) -> None:
    async def put(backends: Sequence[BackendStatus]) -> bool:
        return True

    before = BackendStatus(url="http://a:1", ready=True, policy_version="v1")
    after = before.model_copy(update=change)
    reports = BackendReports()
    await reports.send([before], [before], put)
    assert await reports.send([after], [before], put) == (True if reported else None)
    assert (routed_by([before]) != routed_by([after])) == routed


async def test_why_a_backend_is_not_ready_is_reported() -> None:
    async def put(backends: Sequence[BackendStatus]) -> bool:
        return True

    down = BackendStatus(url="http://a:1", message="it does not answer")
    reports = BackendReports()
    await reports.send([down], [down], put)
    assert await reports.send([down.model_copy(update={"message": "away"})], [down], put)


def test_what_a_job_is_told_of_its_pool_is_why_it_is_not_ready() -> None:
    def told(kind: str, status: str, message: str) -> dict[str, str]:
        at = "2025-01-01T00:00:00Z"
        return {"type": kind, "status": status, "reason": "R", "message": message, "lastTransitionTime": at}

    degraded, away = told("Degraded", "True", "slow"), told("Ready", "False", "no GPU")
    status = BackendPoolStatus.model_validate({"conditions": [degraded, away]})
    assert pool_state(status) == PoolState(False, "no GPU")
    ready = BackendPoolStatus.model_validate({"conditions": [degraded, told("Ready", "True", "all")]})
    assert pool_state(ready) == PoolState(True, "")
