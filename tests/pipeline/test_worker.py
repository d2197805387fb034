"""The worker with a control plane in memory: pools, reports, cancellation, fencing and drain."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import Lease, LeaseRef, SandboxHandle, StageFailure, StageResult, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_pipeline import registry
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable, JobSpecs
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import ChildFailed, ControlPlaneRefused, PermanentFailure
from rollyard_pipeline.handlers.shell import ShellHandler
from rollyard_pipeline.sandboxes.errors import NodeDiskFull, SandboxLost
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.stages.stages import Stages
from rollyard_pipeline.worker.worker import PACE_SECONDS, WorkerOptions
from rollyard_process.backoff import Backoff
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.workerlab import Answer, Plane, Provider, Steered, lease, spec, working
from rollyard_testing.waiting import eventually


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests wait for heartbeats, which tell that the worker has had time for whatever it does."""
    monkeypatch.setattr("rollyard_pipeline.worker.heartbeat.INTERVAL", 0.05)


@pytest.fixture
def handler() -> type[Steered]:
    return type("Fresh", (Steered,), {"gate": asyncio.Event(), "entered": []})


async def test_three_stages_are_reported_with_times(handler: type[Steered]) -> None:
    plane = Plane(spec())
    handler.gate.set()
    async with working(plane, handler):
        plane.offer(lease(1), lease(2, "run"), lease(3, "eval"))
        outcomes = {outcome.rollout: outcome for outcome in await plane.wait_for(3)}
    init, run, evaluated = (outcomes[f"r{number}"] for number in (1, 2, 3))
    assert isinstance(init, StageResult)
    assert init.carry == {"seen": 1}
    assert isinstance(run, StageResult)
    assert run.trajectory.id == "r2"
    assert run.trajectory.truncated is False
    assert isinstance(evaluated, StageResult)
    assert (evaluated.reward, evaluated.reward_components) == (1.0, {"part": 0.5})
    for outcome in outcomes.values():
        assert outcome.times.active_seconds > 0
        assert outcome.times.own_seconds <= outcome.times.active_seconds


async def test_a_pool_never_holds_more_than_its_places(handler: type[Steered]) -> None:
    plane = Plane(spec())
    async with working(plane, handler, concurrency={"init": 2, "eval": 1}):
        plane.offer(*(lease(number) for number in range(5)), lease(9, "eval"))
        await eventually(lambda: len(handler.entered) == 3)
        # Init is full, but Eval has places of its own.
        assert sorted(handler.entered) == ["r0", "r1", "r9"]
        assert len(plane.queues["init"]) == 3
        handler.gate.set()
        await plane.wait_for(6)
    assert all(1 <= request.capacity.get("init", 1) <= 2 for request in plane.asked)
    assert not any("run" in request.capacity for request in plane.asked)


@pytest.mark.parametrize("stage", ["run", "eval"])
async def test_a_cancelled_rollout_stops_and_its_sandbox_goes(handler: type[Steered], stage: str) -> None:
    plane, provider = Plane(spec()), Provider()
    async with working(plane, handler, provider):
        plane.offer(lease(1, stage, "box"))
        await eventually(lambda: handler.entered == ["r1"])
        plane.cancelled = [LeaseRef(rollout="r1", token=1)]
        await eventually(lambda: provider.released == ["box"])
        plane.offer(lease(2, "run"))
        handler.gate.set()
        outcomes = await plane.wait_for(1)
    assert [outcome.rollout for outcome in outcomes] == ["r2"]


@pytest.mark.parametrize(
    ("answer", "released"), [("accepted", []), ("stale", []), ("cancelled", ["box"]), ("unknown", ["box"])]
)
async def test_the_answer_to_a_report_says_whether_anybody_needs_the_sandbox(
    handler: type[Steered], answer: Answer, released: list[str]
) -> None:
    """A worker that ends at once has no further heartbeat that would find it."""
    plane, provider = Plane(spec()), Provider()
    plane.answer = answer
    async with working(plane, handler, provider) as (worker, task):
        plane.offer(lease(1, "run", "box"))
        await eventually(lambda: handler.entered == ["r1"])
        worker.drain()
        handler.gate.set()
        await task
    assert [outcome.rollout for outcome in plane.outcomes] == ["r1"]
    assert provider.released == released


@pytest.mark.parametrize(
    ("stage", "error", "reward", "released"),
    [
        ("run", None, 1.0, []),
        ("eval", None, 1.0, ["box"]),
        ("run", RuntimeError("bug"), 1.0, ["box"]),
        ("eval", RuntimeError("bug"), 1.0, []),
        ("eval", SandboxLost("gone"), 1.0, ["box"]),
        ("eval", None, "no number", ["box"]),
    ],
    ids=["run", "eval", "failed run", "failed eval", "eval without sandbox", "final failure"],
)
async def test_a_sandbox_stays_while_another_lease_needs_it(
    handler: type[Steered], stage: str, error: Exception | None, reward: Any, released: list[str]
) -> None:
    plane, provider = Plane(spec()), Provider()
    handler.error, handler.reward = error, reward
    handler.gate.set()
    async with working(plane, handler, provider):
        plane.offer(lease(1, stage, "box"))
        await plane.wait_for(1)
    assert provider.released == released


async def test_a_sandbox_goes_after_run_where_the_trainer_gives_the_rewards(
    handler: type[Steered], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The steered handler has another name than the only one for which a trainer gives rewards.
    monkeypatch.setattr(RolloutJobSpec, "trainer_reward_seconds", 3600)
    plane, provider = Plane(spec()), Provider()
    handler.gate.set()
    async with working(plane, handler, provider):
        plane.offer(lease(1, "run", "box"))
        await plane.wait_for(1)
    assert provider.released == ["box"]


class Starting(Provider):
    """A provider whose sandboxes start at once, one with the name of each rollout."""

    async def acquire(self, request: SandboxRequest, owner: LeaseRef, *, for_eval: bool = False) -> Any:
        handle = SandboxHandle(provider="fake", id=f"of-{owner.rollout}", node="n", address="unix:/x")
        self.claims.append(handle.id)
        return await self.attach(handle)

    async def warm(self, request: SandboxRequest, count: int) -> None:
        """Start none in advance."""

    def own(self) -> list[str]:
        return [name for name in self.claims if name.startswith("of-")]


@pytest.mark.parametrize("end", ["cancelled", "lost", "failed", "drained"])
async def test_a_sandbox_of_init_is_named_to_nobody_and_given_back(
    handler: type[Steered], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane does not know it before Init is done, and may take it for an orphan."""
    monkeypatch.setattr("rollyard_pipeline.worker.heartbeat._SCAN_EVERY", 0.0)
    plane, provider = Plane(spec()), Starting()
    handler.needs_sandbox = True
    provider.claims = ["kept", "orphan"]
    async with working(plane, handler, provider, drain_seconds=0.1) as (worker, task):
        plane.offer(lease(1), lease(2, "run", "kept"))
        await eventually(lambda: sorted(handler.entered) == ["r1", "r2"])
        plane.orphans = ["orphan", "of-r1"]
        seen = len(plane.beats)
        await eventually(lambda: len(plane.beats) > seen + 1 and bool(provider.released))
        assert all("of-r1" not in beat.sandboxes for beat in plane.beats)
        assert (set(provider.released), "kept" in plane.beats[-1].sandboxes) == ({"orphan"}, True)
        provider.released.clear()
        plane.orphans = []
        if end == "drained":
            worker.drain()
            await task
        elif end == "failed":
            handler.error = RuntimeError("bug")
            handler.gate.set()
            await plane.wait_for(2)
        else:
            setattr(plane, end, [LeaseRef(rollout="r1", token=1)])
        await eventually(lambda: "of-r1" in provider.released)
        handler.error = None
        handler.gate.set()
    # The orphan's removal may be under way once more.
    released = sorted(name for name in provider.released if name != "orphan")
    assert released == (["kept", "of-r1"] if end in ("failed", "drained") else ["of-r1"])


async def test_all_sandboxes_but_orphans_are_renewed_and_one_of_init_before_it_is_reported(
    handler: type[Steered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_pipeline.worker.heartbeat._RENEW_EVERY", 0.0)
    plane, provider = Plane(spec()), Starting()
    handler.needs_sandbox = True
    provider.claims, plane.orphans = ["kept", "orphan"], ["orphan"]
    async with working(plane, handler, provider):
        plane.offer(lease(1))
        await eventually(lambda: handler.entered == ["r1"])
        provider.claims = ["kept", "orphan"]
        provider.renewed.clear()
        await eventually(lambda: len(provider.renewed) >= 4)
        assert set(provider.renewed) == {"kept", "of-r1"}
        handler.gate.set()


@pytest.mark.parametrize("sandboxes_end", [False, True])
async def test_the_last_heartbeat_names_the_sandboxes_that_end_with_the_worker(
    handler: type[Steered], sandboxes_end: bool
) -> None:
    plane, provider = Plane(spec()), Starting()
    provider.claims = ["another-worker's", "of-r1", "of-r2"]
    async with working(plane, handler, provider, sandboxes_end=sandboxes_end) as (worker, task):
        await eventually(lambda: bool(plane.beats))
        worker.drain()
        await task
    assert all(beat.ending == [] for beat in plane.beats[:-1])
    assert plane.beats[-1].ending == (["of-r1", "of-r2"] if sandboxes_end else [])


async def test_the_shortest_lease_says_how_often_heartbeats_come(
    handler: type[Steered], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Plane(spec())
    short = lease(1, "run").model_copy(update={"lease_seconds": 0.3})
    async with working(plane, handler):
        plane.offer(lease(2, "run").model_copy(update={"lease_seconds": 9000.0}), short, lease(3, "eval"))
        await eventually(lambda: len(handler.entered) == 3)
        monkeypatch.setattr("rollyard_pipeline.worker.heartbeat.INTERVAL", 1000.0)
        seen = len(plane.beats)
        await eventually(lambda: len(plane.beats) > seen + 2)
        handler.gate.set()
        await plane.wait_for(3)


async def test_a_failure_that_is_refused_frees_its_place(handler: type[Steered]) -> None:
    plane = Plane(spec())
    plane.refuse = lambda outcome: isinstance(outcome, StageFailure)
    handler.error = RuntimeError("bug")
    handler.gate.set()
    async with working(plane, handler, concurrency={"run": 2}, drain_seconds=0.1):
        plane.offer(lease(1, "run"), lease(2, "run"))
        await eventually(lambda: plane.reports >= 2)
        seen = len(plane.beats)
        await eventually(lambda: len(plane.beats) > seen + 1 and not plane.beats[-1].leases)
        assert plane.outcomes == []


async def test_leases_are_handed_over_at_once_before_the_drain_is_over(handler: type[Steered]) -> None:
    plane, provider = Plane(spec()), Provider()
    async with working(plane, handler, provider, drain_seconds=600.0) as (worker, task):
        plane.offer(lease(1, "run", "box"), lease(2, "eval", "other"))
        await eventually(lambda: sorted(handler.entered) == ["r1", "r2"])
        worker.drain()
        worker.hand_over()
        async with asyncio.timeout(patience(30)):
            await task
    assert [(outcome.reason, outcome.counts) for outcome in plane.outcomes] == [("WorkerDrained", False)] * 2
    # An Eval may continue in its sandbox.
    assert provider.released == ["box"]


@pytest.mark.parametrize(("stage", "released"), [("run", ["box"]), ("eval", [])])
async def test_a_lost_lease_stops_without_a_report(
    handler: type[Steered], stage: str, released: list[str]
) -> None:
    plane, provider = Plane(spec()), Provider()
    async with working(plane, handler, provider) as (_, _task):
        plane.offer(lease(1, stage, "box"))
        await eventually(lambda: handler.entered == ["r1"])
        plane.lost = [LeaseRef(rollout="r1", token=1)]
        await eventually(lambda: bool(plane.beats) and not plane.beats[-1].leases and len(plane.beats) > 1)
    # A lost Eval may continue elsewhere in the same sandbox.
    assert provider.released == released
    assert plane.outcomes == []


@pytest.mark.parametrize("what", ["lost", "cancelled"])
@pytest.mark.parametrize("other", [1, 3])
async def test_another_token_of_the_same_rollout_is_not_stopped(
    handler: type[Steered], what: str, other: int
) -> None:
    plane = Plane(spec())
    async with working(plane, handler):
        plane.offer(lease(1, "run").model_copy(update={"token": 2}))
        await eventually(lambda: handler.entered == ["r1"])
        setattr(plane, what, [LeaseRef(rollout="r1", token=other)])
        seen = len(plane.beats)
        await eventually(lambda: len(plane.beats) > seen + 1)
        handler.gate.set()
        (outcome,) = await plane.wait_for(1)
    assert isinstance(outcome, StageResult)


async def test_a_rollout_that_is_held_again_goes_on_when_its_older_lease_is_lost(
    handler: type[Steered],
) -> None:
    """The older lease's Run has not ended yet when the rollout comes back to the same worker."""
    plane, provider = Plane(spec()), Provider()
    async with working(plane, handler, provider):
        plane.offer(lease(1, "run", "old"), lease(1, "run", "new").model_copy(update={"token": 2}))
        await eventually(lambda: handler.entered == ["r1", "r1"])
        plane.lost = [LeaseRef(rollout="r1", token=1)]
        await eventually(lambda: [ref.token for ref in plane.beats[-1].leases] == [2])
        handler.gate.set()
        (outcome,) = await plane.wait_for(1)
    assert isinstance(outcome, StageResult)
    assert outcome.token == 2
    assert provider.released == ["old"]


async def test_a_lease_is_renewed_until_its_outcome_has_been_taken(
    handler: type[Steered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would expire while its report is on the way, and its work would be done again."""
    plane, asked, answered = Plane(spec()), asyncio.Event(), asyncio.Event()
    complete = plane.complete

    async def slow(request: Any) -> Any:
        asked.set()
        await answered.wait()
        return await complete(request)

    monkeypatch.setattr(plane, "complete", slow)
    handler.gate.set()
    async with working(plane, handler):
        plane.offer(lease(1, "eval"))
        await eventually(asked.is_set)
        seen = len(plane.beats)
        await eventually(lambda: len(plane.beats) > seen + 2)
        assert all([ref.rollout for ref in beat.leases] == ["r1"] for beat in plane.beats[seen:])
        answered.set()
        await plane.wait_for(1)
        await eventually(lambda: not plane.beats[-1].leases)


async def test_outcomes_wait_for_a_control_plane_that_is_away(handler: type[Steered]) -> None:
    plane = Plane(spec())
    async with working(plane, handler):
        plane.offer(lease(1, "eval"), lease(2, "eval"))
        await eventually(lambda: len(handler.entered) == 2)
        plane.away = True
        handler.gate.set()
        await eventually(lambda: plane.reports > 1)
        assert plane.outcomes == []
        plane.away = False
        outcomes = await plane.wait_for(2)
    assert sorted(outcome.rollout for outcome in outcomes) == ["r1", "r2"]


async def test_a_refused_result_fails_its_own_rollout_only(handler: type[Steered]) -> None:
    plane = Plane(spec())
    plane.refuse = lambda outcome: isinstance(outcome, StageResult) and outcome.rollout == "r1"
    async with working(plane, handler, concurrency={"eval": 3}):
        plane.offer(lease(0, "eval"), lease(1, "eval"), lease(2, "eval"))
        handler.gate.set()
        outcomes = {outcome.rollout: outcome for outcome in await plane.wait_for(3)}
    assert isinstance(outcomes["r0"], StageResult)
    assert isinstance(outcomes["r2"], StageResult)
    failure = outcomes["r1"]
    assert isinstance(failure, StageFailure)
    assert (failure.reason, failure.retryable) == ("ResultRefused", False)


async def test_drain_finishes_what_is_held(handler: type[Steered]) -> None:
    plane = Plane(spec())
    async with working(plane, handler) as (worker, task):
        plane.offer(lease(1, "run"))
        await eventually(lambda: handler.entered == ["r1"])
        # The pool's wait for other places ends now, and its next request is due after this step of the test.
        time.sleep(2 * PACE_SECONDS)  # noqa: ASYNC251
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        worker.drain()
        plane.offer(lease(2, "run"))
        seen = len(plane.beats)
        await eventually(lambda: len(plane.beats) > seen + 1)
        handler.gate.set()
        await task
    (outcome,) = plane.outcomes
    assert isinstance(outcome, StageResult)
    assert len(plane.queues["run"]) == 1


async def test_drain_hands_over_what_does_not_finish(handler: type[Steered]) -> None:
    plane, provider = Plane(spec()), Provider()
    async with working(plane, handler, provider, drain_seconds=0.1) as (worker, task):
        plane.offer(lease(1, "run", "a"), lease(2, "eval", "b"), lease(3, "run"), lease(4))
        await eventually(lambda: len(handler.entered) == 4)
        worker.drain()
        await task
    assert provider.drained
    failures = {outcome.rollout: outcome for outcome in plane.outcomes}
    for failure in failures.values():
        assert isinstance(failure, StageFailure)
        assert (failure.reason, failure.counts, failure.retryable) == ("WorkerDrained", False, True)
    # Run has used its sandbox; Eval begins by killing everything, so another worker may continue.
    back = {name: one.return_to for name, one in failures.items() if isinstance(one, StageFailure)}
    assert back == {"r1": "init", "r2": None, "r3": None, "r4": None}
    assert provider.released == ["a"]


async def test_a_worker_of_a_job_ends_with_it(handler: type[Steered]) -> None:
    plane = Plane(spec())
    async with working(plane, handler, job="j", namespace="default") as (_, task):
        plane.offer(lease(1, "eval"))
        await eventually(lambda: handler.entered == ["r1"])
        plane.end()
        seen = len(plane.beats)
        await eventually(lambda: len(plane.beats) > seen + 1)
        assert not task.done()
        handler.gate.set()
        async with asyncio.timeout(patience(20)):
            await task
    assert len(plane.outcomes) == 1


async def test_orphans_are_removed_and_the_rest_renewed(handler: type[Steered]) -> None:
    plane, provider = Plane(spec()), Provider()
    provider.claims = ["kept", "orphan"]
    plane.orphans = ["orphan"]
    async with working(plane, handler, provider):
        await eventually(lambda: provider.released == ["orphan"] and bool(provider.renewed))
    assert provider.renewed == ["kept"]
    assert plane.beats[0].sandboxes == ["kept", "orphan"]


async def test_orphans_are_removed_before_the_worker_ends(handler: type[Steered]) -> None:
    plane, provider = Plane(spec()), Provider()
    handler.gate.set()
    async with working(plane, handler, provider, job="j", namespace="default") as (_, task):
        await eventually(lambda: bool(plane.beats))
        # A worker that was killed a moment ago left it; the next regular beat would come too late.
        provider.claims, plane.orphans = ["orphan"], ["orphan"]
        plane.end()
        async with asyncio.timeout(patience(20)):
            await task
    assert provider.released == ["orphan"]
    assert plane.beats[-1].sandboxes == ["orphan"]


async def test_removing_orphans_delays_no_heartbeat(handler: type[Steered]) -> None:
    stuck = asyncio.Event()

    class Slow(Provider):
        async def release(self, handle: SandboxHandle | str) -> None:
            await stuck.wait()
            await super().release(handle)

    plane, provider = Plane(spec()), Slow()
    provider.claims, plane.orphans = ["orphan"], ["orphan"]
    async with working(plane, handler, provider):
        await eventually(lambda: len(plane.beats) >= 2)
        assert provider.released == []
        stuck.set()
        await eventually(lambda: provider.released[:1] == ["orphan"])


async def test_init_waits_while_the_node_is_full_of_sandboxes(handler: type[Steered]) -> None:
    plane, provider = Plane(spec()), Provider()
    provider.claims = ["a", "b"]
    handler.gate.set()
    async with working(plane, handler, provider, max_sandboxes=2):
        plane.offer(lease(1), lease(2, "eval"))
        await plane.wait_for(1)
        assert len(plane.queues["init"]) == 1
        provider.claims = ["a"]
        await plane.wait_for(2)


@pytest.mark.parametrize(
    ("needs", "early", "trouble", "goes_on"),
    [(True, True, "", False), (True, False, "", True), (False, True, "", True), (True, False, "full", False),
     (False, True, "full", True)],
)  # fmt: skip
async def test_init_waits_for_no_place_of_a_sandbox_that_it_does_not_start(
    handler: type[Steered], needs: bool, early: bool, trouble: str, goes_on: bool
) -> None:
    handler.needs_sandbox, handler.sandbox_before_eval = needs, early
    plane, provider = Plane(spec()), Provider()
    provider.claims, provider.full = ["a", "b"], trouble
    handler.gate.set()
    async with working(plane, handler, provider, max_sandboxes=2, job="j") as (worker, _):
        await eventually(lambda: worker._sandbox_use != "run" or (needs and early))
        plane.offer(lease(1), lease(2, "eval", "box"))
        await plane.wait_for(2 if goes_on else 1)
        assert len(plane.queues["init"]) == (0 if goes_on else 1)


async def test_as_many_sandboxes_are_prepared_as_the_pool_takes_rollouts(handler: type[Steered]) -> None:
    """A worker has 1,024 places in Run, which the pool bounds; sandboxes beyond that would stand idle."""
    plane, provider = Plane(spec()), Provider()
    handler.gate.set()
    places = {"init": 2, "run": 1024, "eval": 2}
    async with working(plane, handler, provider, concurrency=places) as (worker, _):
        for known, limit in ((None, 64 + 2 + 4), (10, 10 + 2 + 4), (5000, 1024 + 2 + 4)):
            plane.places = known
            plane.offer(lease(limit, "run", "box"))
            await plane.wait_for(len(plane.outcomes) + 1)
            provider.claims = [f"s{number}" for number in range(limit - 1)]
            assert await asyncio.to_thread(worker._room) == 1
    for memory, limit in ((16 << 30, 256 + 2 + 4), (1 << 40, 1024 + 2 + 4), (1 << 30, 64 + 2 + 4)):
        options = WorkerOptions("w", "n", places, memory=memory)
        assert (options.sandbox_limit(5000), options.sandbox_limit(10)) == (limit, 16)
    bounded = WorkerOptions("w", "n", places, max_sandboxes=7, memory=1 << 30)
    assert (bounded.sandbox_limit(), bounded.sandbox_limit(500)) == (7, 7), "the installer's comes first"


async def test_init_takes_no_more_at_once_than_the_node_may_have_sandboxes(handler: type[Steered]) -> None:
    class Looked(Provider):
        looks = 0

        def trouble(self) -> str:
            self.looks += 1
            return super().trouble()

    plane, provider = Plane(spec()), Looked()
    async with working(plane, handler, provider, max_sandboxes=2, concurrency={"init": 4}):
        plane.offer(lease(1), lease(2), lease(3))
        await eventually(lambda: len(handler.entered) == 2)
        looks = provider.looks
        await eventually(lambda: provider.looks >= looks + 2)
        assert len(plane.queues["init"]) == 1, "two are about to have their sandboxes"
        handler.gate.set()
        await plane.wait_for(3)


async def test_init_waits_while_the_nodes_disk_is_full(handler: type[Steered], tmp_path: Path) -> None:
    plane, provider, told = Plane(spec()), Provider(), tmp_path / "w-7"
    provider.full = "node n starts no sandboxes: No space left on device"
    handler.gate.set()
    async with working(plane, handler, provider, trouble_file=told):
        plane.offer(lease(1), lease(2, "eval"))
        await plane.wait_for(1)
        assert len(plane.queues["init"]) == 1, "what has a sandbox continues, and nothing begins"
        await eventually(told.exists)
        assert told.read_text() == provider.full
        provider.full = ""
        await plane.wait_for(2)
        assert list(tmp_path.iterdir()) == []


async def test_a_full_disk_costs_no_attempt(handler: type[Steered]) -> None:
    handler.error = NodeDiskFull("no room left on the disk of run dir /tmp/x")
    handler.gate.set()
    plane = Plane(spec())
    async with working(plane, handler):
        plane.offer(lease(1))
        (failure,) = await plane.wait_for(1)
    assert isinstance(failure, StageFailure)
    assert (failure.reason, failure.counts, failure.retryable) == ("NodeDiskFull", False, True)


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        # The place is in the file that Rollyard called, which is the one that its author knows.
        (RuntimeError("bug"), "InternalError", r"RuntimeError: bug \(workerlab\.py, line \d+, in _pass\)"),
        (ControlPlaneRefused("no such job"), "ControlPlaneRefused", "no such job"),
    ],
)
async def test_a_broken_stage_is_an_infrastructure_failure(
    handler: type[Steered], error: Exception, reason: str, message: str
) -> None:
    plane = Plane(spec())
    handler.error = error
    handler.gate.set()
    async with working(plane, handler):
        plane.offer(lease(1, "eval"))
        (failure,) = await plane.wait_for(1)
    assert isinstance(failure, StageFailure)
    assert (failure.reason, failure.retryable) == (reason, True)
    assert re.fullmatch(message, failure.message), failure.message


async def test_the_traceback_of_a_users_code_is_logged(
    handler: type[Steered], caplog: pytest.LogCaptureFixture
) -> None:
    plane = Plane(spec())
    handler.error = ChildFailed("the reward function 'near' raised KeyError", "RewardFunctionFailed")
    handler.error.add_note("line 12, in near")
    handler.gate.set()
    async with working(plane, handler):
        plane.offer(lease(1, "eval"))
        await plane.wait_for(1)
    assert "line 12, in near" in caplog.text


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1.0", True])
async def test_a_reward_that_is_no_number_is_no_reward(handler: type[Steered], reward: Any) -> None:
    plane = Plane(spec())
    handler.reward = reward
    handler.gate.set()
    async with working(plane, handler):
        plane.offer(lease(1, "eval"))
        (failure,) = await plane.wait_for(1)
    assert isinstance(failure, StageFailure)
    assert (failure.reason, failure.retryable) == ("EvaluationInvalid", False)


async def test_stage_limits(handler: type[Steered]) -> None:
    """Init and Eval past their limit are infrastructure failures; Run past its limit goes to Eval as
    truncated.
    """
    limits = {stage: {"timeoutSeconds": 1} for stage in ("init", "run", "eval")}
    plane = Plane(spec(**limits))
    async with working(plane, handler, eval_grace=0.0):
        plane.offer(lease(1), lease(2, "run"), lease(3, "eval"))
        outcomes = {outcome.rollout: outcome for outcome in await plane.wait_for(3)}
    init, run, evaluated = (outcomes[f"r{number}"] for number in (1, 2, 3))
    assert isinstance(init, StageFailure)
    assert init.reason == "InitTimeout"
    assert isinstance(evaluated, StageFailure)
    assert evaluated.reason == "EvalTimeout"
    assert isinstance(run, StageResult)
    assert (run.trajectory.truncated, run.trajectory.truncated_reason) == (True, "RunTimeout")


@pytest.mark.parametrize(
    ("changes", "reason", "says"),
    [
        ({"handler": "no-such"}, "UnknownHandler", "installed: "),
        ({"agent": {"type": "no-such", "tools": []}, "backendRef": {"name": "p"}}, "UnknownAgent", "no-such"),
        ({"agent": {"type": "single_turn", "toolParser": "no-such"}, "backendRef": {"name": "p"}},
         "UnknownToolParser", "hermes"),
        ({"agent": {"type": "tools", "tools": ["no-such"]}, "backendRef": {"name": "p"}},
         "UnknownTool", "bash"),
    ],
)  # fmt: skip
async def test_unknown_names_are_not_retried(
    handler: type[Steered], changes: dict[str, Any], reason: str, says: str
) -> None:
    base = spec().model_dump(mode="json", by_alias=True)
    plane = Plane(RolloutJobSpec.model_validate(base | changes))
    async with working(plane, handler):
        plane.offer(lease(1))
        (failure,) = await plane.wait_for(1)
    assert isinstance(failure, StageFailure)
    assert (failure.reason, failure.retryable) == (reason, False)
    assert says in failure.message


class Specs(Plane):
    """A control plane that notes which jobs it is asked about."""

    def __init__(self) -> None:
        super().__init__(spec())
        self.asked_for: list[tuple[str, str, str]] = []
        self.failures = 0

    async def job_spec(self, namespace: str, name: str, uid: str) -> RolloutJobSpec:
        self.asked_for.append((namespace, name, uid))
        if self.failures:
            self.failures -= 1
            raise ControlPlaneUnavailable("away", 0.001)
        return self.spec.model_copy()


def of_job(uid: str, name: str = "j", namespace: str = "default") -> Lease:
    return lease(1).model_copy(update={"job_uid": uid, "job": name, "namespace": namespace})


async def test_a_job_that_was_made_again_under_its_name_has_its_own_spec() -> None:
    plane = Specs()
    jobs = JobSpecs(plane, size=2)
    first = await jobs.get(of_job("a"))
    other = await jobs.get(of_job("b"))
    assert other is not first
    assert await jobs.get(of_job("a")) is first
    # The one that was used longest ago is dropped.
    await jobs.get(of_job("c", "k", "team"))
    assert await jobs.get(of_job("a")) is first
    assert await jobs.get(of_job("b")) is not other
    asked = [("default", "j", "a"), ("default", "j", "b"), ("team", "k", "c"), ("default", "j", "b")]
    assert plane.asked_for == asked


async def test_a_spec_is_asked_for_until_the_control_plane_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_pipeline.control_plane.calls.TRY_AGAIN", Backoff(0.001, 0.001))
    plane = Specs()
    plane.failures = 3
    jobs = JobSpecs(plane)
    found = await asyncio.gather(*(jobs.get(of_job("a")) for _ in range(3)))
    assert found[0] is found[1] is found[2]
    assert plane.asked_for == [("default", "j", "a")] * 4


async def test_a_worker_that_ends_closes_every_handler_that_it_has_used() -> None:
    closed: list[str] = []

    class Closing(ShellHandler):
        async def close(self) -> None:
            closed.append(type(self).__name__)

    kinds = {name: type(name, (Closing,), {}) for name in ("one", "two", "three")}
    plane = Plane(spec())
    stages = Stages(plane, BackendClient(), None, registry.Registry({registry.HANDLERS: kinds}))
    for name in ("two", "one", "two"):
        plane.spec = plane.spec.model_copy(update={"handler": name})
        with pytest.raises(PermanentFailure, match="no sandboxes"):
            await stages.work(HeldLease(of_job(f"{name}-{id(plane.spec)}")), StageTimes())
    await stages.close()
    assert sorted(closed) == ["one", "two"]
