"""Handlers of installed packages, whose calls run in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import StageFailure, StageResult
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import RunRecord
from rollyard_pipeline.handlers.base import Handler
from rollyard_pipeline.handlers.isolated.handler import HandlerProcesses, IsolatedHandler
from rollyard_pipeline.handlers.unscored import UnscoredHandler
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.installed import line_of
from rollyard_testing.pipeline.workerlab import Outcome, Plane, lease, spec, working
from rollyard_testing.waiting import eventually

Install = Callable[[str], None]
SECONDS = round(patience(1))
"""The limit of the stage in which a handler blocks. Its process has been started before."""


@pytest.fixture(autouse=True)
def _quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollyard_pipeline.worker.heartbeat.INTERVAL", 0.05)


async def outcomes_of(plane: Plane, *leases: Any, **options: Any) -> dict[str, Outcome]:
    """Return the outcomes of leases, by rollout."""
    async with working(plane, None, **options):
        plane.offer(*leases)
        return {outcome.rollout: outcome for outcome in await plane.wait_for(len(leases))}


def failure(outcome: Outcome) -> StageFailure:
    assert isinstance(outcome, StageFailure)
    return outcome


BLOCKING = """
class Judge(Handler):
    needs_sandbox = False

    async def init(self, ctx):
        Path(f"FOLDER/{ctx.rollout}-waits").touch()
        while not Path(f"FOLDER/{ctx.rollout}").exists():
            await asyncio.sleep(0.02)
        ctx.carry["at"] = os.getpid()

    async def eval(self, ctx):
        Path("FOLDER/blocks").touch()
        BLOCK
"""


@pytest.mark.attack(
    "a text makes the handler's code run for ever, so that the worker loses the leases of all its rollouts",
    boundary="evaluation",
    surface="handlers of packages",
    stopped_by="calls run in processes that end at the limit of the stage, with what they have started",
)
@pytest.mark.parametrize(
    "block",
    ["while True: pass", "time.sleep(3600)", "import re; re.match('(a|a)+$', 'a' * 64 + 'b')"],
    ids=["loop", "sleep", "regex"],
)
async def test_a_handler_that_blocks_fails_at_the_limit_and_holds_up_nobody(
    install: Install, tmp_path: Path, block: str
) -> None:
    source = BLOCKING.replace("FOLDER", str(tmp_path)).replace("BLOCK", block)
    install(source)
    plane = Plane(spec(eval={"timeoutSeconds": SECONDS}))
    async with working(plane, None, eval_grace=0.0):
        # Both are in Init at once, so that there is a process for each of them.
        plane.offer(lease(0), lease(2))
        await eventually((tmp_path / "r0-waits").exists)
        await eventually((tmp_path / "r2-waits").exists)
        (tmp_path / "r0").touch()
        await plane.wait_for(1)
        plane.offer(lease(1, "eval"))
        await eventually((tmp_path / "blocks").exists)
        before = len(plane.beats)
        await plane.wait_for(2)
        during = plane.beats[before:]
        assert len(during) >= 5 * SECONDS
        # The other rollout of this worker has kept its lease, and continues where it was.
        assert all({"r2"} <= {ref.rollout for ref in beat.leases} for beat in during)
        (tmp_path / "r2").touch()
        outcomes = {outcome.rollout: outcome for outcome in await plane.wait_for(3)}
    blocked = failure(outcomes["r1"])
    assert (blocked.reason, blocked.retryable, blocked.counts) == ("EvalTimeout", True, True)
    assert blocked.message == (
        f"Eval took longer than {SECONDS} s: handler 'steered' was blocked at judge.py, "
        f"line {line_of(source, block)}, in eval"
    )
    other = outcomes["r2"]
    assert isinstance(other, StageResult)
    assert other.carry["at"] != os.getpid()


async def test_run_that_blocks_is_no_timeout_of_the_policy(install: Install) -> None:
    source = """
class Judge(Handler):
    needs_sandbox = False

    async def run(self, ctx):
        await ctx.run_agent()
        if ctx.rollout == "r1":
            time.sleep(3600)
        if ctx.rollout == "r2":
            await asyncio.sleep(3600)
        ctx.carry["played"] = True

    async def eval(self, ctx):
        return Evaluation(0.0)
"""
    install(source)
    plane = Plane(spec(run={"timeoutSeconds": SECONDS}))
    async with working(plane, None):
        # One after the other: the process of the first one serves the second one, which ends it.
        for done, number in enumerate((3, 1, 2), 1):
            plane.offer(lease(number, "run"))
            await plane.wait_for(done)
    outcomes = {outcome.rollout: outcome for outcome in plane.outcomes}
    blocked = failure(outcomes["r1"])
    assert (blocked.reason, blocked.counts) == ("HandlerBlocked", True)
    assert f"judge.py, line {line_of(source, 'time.sleep')}, in run" in blocked.message
    waited, played = outcomes["r2"], outcomes["r3"]
    assert isinstance(waited, StageResult)
    assert waited.trajectory.truncated_reason == "RunTimeout"
    assert isinstance(played, StageResult)
    assert played.carry == {"played": True}
    assert not played.trajectory.truncated


async def test_a_blocked_init_names_the_handler(install: Install) -> None:
    source = """
class Judge(Handler):
    needs_sandbox = False

    async def init(self, ctx):
        if ctx.rollout != "r0":
            time.sleep(3600)

    async def eval(self, ctx):
        return Evaluation(0.0)
"""
    install(source)
    plane = Plane(spec(init={"timeoutSeconds": SECONDS}))
    async with working(plane, None):
        plane.offer(lease(0))
        await plane.wait_for(1)
        plane.offer(lease(1))
        blocked = failure((await plane.wait_for(2))[1])
    assert blocked.reason == "InitTimeout"
    assert (
        f"handler 'steered' was blocked at judge.py, line {line_of(source, 'time.sleep')}" in blocked.message
    )


ENDING = """
import ctypes
from rollyard_pipeline.errors import PipelineError, RewardUnusable

class JudgeGone(PipelineError):
    reason = "JudgeGone"
    retryable = False

class Judge(Handler):
    needs_sandbox = False
    reward_range = (0.0, 1.0)

    async def eval(self, ctx):
        END
"""


@pytest.mark.parametrize(
    ("end", "reason", "retryable", "message"),
    [
        ("raise ValueError('no judge')", "InternalError", True, "ValueError: no judge (judge.py, line LINE"),
        ("sys.exit(3)", "InternalError", True, "SystemExit: 3 (judge.py, line LINE, in eval)"),
        ("os._exit(3)", "HandlerFailed", True, "handler 'steered': its process ended in eval with status 3"),
        ("ctypes.string_at(0)", "HandlerFailed", True, "in eval by SIGSEGV, at judge.py, line LINE, in eval"),
        ("raise JudgeGone('no judge')", "JudgeGone", False, "no judge"),
        ("raise RewardUnusable('no reward', 'RewardMissing')", "RewardUnusable", False, "no reward"),
        ("return Evaluation(2.0)", "EvaluationInvalid", False, "reward 2.0 is not in reward_range, 0 to 1"),
        ("return Evaluation('high')", "EvaluationInvalid", False, "reward is 'high', expected"),
        ("return Evaluation(float('nan'))", "EvaluationInvalid", False, "reward is nan"),
        ("return Evaluation(object())", "EvaluationInvalid", False, "reward is '<object object at"),
        ("ctx.carry['x'] = {1, 2}", "HandlerStateInvalid", False, "carry is not JSON: Object of type set"),
        ("ctx.carry = [1]; return Evaluation(0.0)", "HandlerStateInvalid", False, "is not a JSON object"),
    ],
)  # fmt: skip
async def test_what_ends_a_call_is_what_the_worker_reports(
    install: Install, end: str, reason: str, retryable: bool, message: str
) -> None:
    if end.startswith("ctx.carry['x']"):
        end = f"{end}; return Evaluation(0.0)"
    source = ENDING.replace("END", end)
    install(source)
    outcomes = await outcomes_of(Plane(spec()), lease(1, "eval"))
    ended = failure(outcomes["r1"])
    assert (ended.reason, ended.retryable) == (reason, retryable)
    assert message.replace("LINE", str(line_of(source, end))) in ended.message


async def test_calls_share_processes_but_nothing_else(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """One process performs a call after the other. Its records are the worker's own."""
    source = """
import logging

class Judge(Handler):
    needs_sandbox = False
    components = ("calls",)

    def __init__(self):
        self.calls = 0

    async def eval(self, ctx):
        self.calls += 1
        asyncio.get_running_loop().create_task(self.linger(), name="left")
        left = [task for task in asyncio.all_tasks() if task.get_name() == "left"]
        logging.getLogger("judge").warning("judged %s", ctx.rollout)
        ctx.show(f"shown {ctx.rollout}")
        ctx.carry["pid"] = os.getpid()
        return Evaluation(0.5, {"calls": self.calls, "left": len(left)}, "JudgedSo")

    async def linger(self):
        await asyncio.sleep(3600)
"""
    install(source)
    plane = Plane(spec())
    with caplog.at_level(logging.INFO):
        async with working(plane, None):
            for number in range(3):
                plane.offer(lease(number, "eval", carry={"of": number}))
                await plane.wait_for(number + 1)
    found = [outcome for outcome in plane.outcomes if isinstance(outcome, StageResult)]
    assert [outcome.reward_components for outcome in found] == [
        {"calls": float(number), "left": 1.0} for number in (1, 2, 3)
    ]
    assert [outcome.reward_output for outcome in found] == [f"shown r{number}" for number in range(3)]
    assert [outcome.reward_reason for outcome in found] == ["JudgedSo"] * 3
    assert len({outcome.carry["pid"] for outcome in found}) == 1
    assert [outcome.carry["of"] for outcome in found] == [0, 1, 2]
    logged = [(record.name, record.getMessage()) for record in caplog.records]
    assert ("judge", "judged r1") in logged
    # The process ends with the worker.
    with pytest.raises(ProcessLookupError):
        os.kill(found[0].carry["pid"], 0)


async def test_a_drained_worker_ends_the_calls(install: Install, tmp_path: Path) -> None:
    source = """
class Judge(Handler):
    needs_sandbox = False

    async def eval(self, ctx):
        Path("FOLDER/pid").write_text(str(os.getpid()))
        time.sleep(3600)
"""
    install(source.replace("FOLDER", str(tmp_path)))
    plane = Plane(spec())
    async with working(plane, None, drain_seconds=0.1) as (worker, task):
        plane.offer(lease(1, "eval"))
        await eventually(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
        worker.drain()
        async with asyncio.timeout(patience(20)):
            await task
    drained = failure(plane.outcomes[0])
    assert (drained.reason, drained.counts) == ("WorkerDrained", False)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("source", "reason", "message"),
    [
        ("time.sleep(3600)", "HandlerFailed", "was not loaded within 3 s, blocked at judge.py, line 6"),
        ("import judge_of_nowhere", "UnknownHandler", "No module named 'judge_of_nowhere'"),
        ("class Other: pass", "UnknownHandler", "has no attribute 'Judge'"),
        ("raise ValueError('no key')", "InternalError", "ValueError: no key (judge.py, line 6, in <module>)"),
    ],
    ids=["blocks", "needs a package", "has no class", "raises"],
)  # fmt: skip
async def test_a_handler_that_cannot_be_loaded_fails_its_own_rollouts(
    install: Install, monkeypatch: pytest.MonkeyPatch, source: str, reason: str, message: str
) -> None:
    """A process of its own tries the import, so that the worker is not blocked by it."""
    if "sleep" in source:
        monkeypatch.setattr("rollyard_pipeline.handlers.isolated.handler._START_SECONDS", 3)
    install(source)
    outcomes = await outcomes_of(Plane(spec()), lease(1), lease(2, "eval"))
    for outcome in outcomes.values():
        assert failure(outcome).reason == reason
        assert message in failure(outcome).message


def test_nothing_of_a_handler_is_answered_by_the_base_class() -> None:
    isolated = IsolatedHandler(UnscoredHandler(), HandlerProcesses("unscored", "nowhere:Unscored"))
    public = {name for name in vars(Handler) if not name.startswith("_")}
    assert public <= vars(isolated).keys() | vars(IsolatedHandler).keys()


JUDGES_TOKENS = """
class Judge(Handler):
    needs_sandbox = False
    NEEDS

    async def eval(self, ctx):
        (segment,) = ctx.trajectory.segments
        counts = {"sampled": ctx.trajectory.sampled_tokens, "first": segment.response_ids[0]}
        return Evaluation(segment.logprobs[0], counts)
"""


@pytest.mark.parametrize("says", [True, False])
async def test_a_handler_gets_token_lists_if_it_says_that_it_needs_them(install: Install, says: bool) -> None:
    """A handler that forgets it fails with that advice, and does not take the trajectory for an empty one."""
    needs = "needs_tokens = True" if says else ""
    install(JUDGES_TOKENS.replace("NEEDS", needs))
    segment = PackedSegment.of([1, 2], [70_000, 4], [1, 0], [-0.5, 0.0], ["v1", ""])
    record = RunRecord(id="r0", job="j", task_id="t", group_id="g", sample_index=0)
    ran = {"trajectory": record.transcript_with([segment.sizes]), "segments": [segment] if says else []}
    plane = Plane(spec())
    outcomes = await outcomes_of(plane, lease(0, "eval", **ran), lease(1, "run"))
    played = outcomes["r1"]
    assert isinstance(played, StageResult)
    assert played.tokens_in_eval is says, "the lease of Eval has what the handler needs"
    if says:
        judged = outcomes["r0"]
        assert isinstance(judged, StageResult)
        assert (judged.reward, judged.reward_components) == (-0.5, {"sampled": 1.0, "first": 70_000.0})
    else:
        failed = failure(outcomes["r0"])
        assert (failed.reason, failed.retryable) == ("TokensMissing", False)
        assert "must say needs_tokens = True on its class" in failed.message


async def test_token_lists_that_did_not_come_are_no_empty_trajectory(install: Install) -> None:
    """Run may have been played by a worker that had an earlier version of the handler."""
    install(JUDGES_TOKENS.replace("NEEDS", "needs_tokens = True"))
    segment = PackedSegment.of([1], [2], [1], [-0.5], ["v1"])
    record = RunRecord(id="r0", job="j", task_id="t", group_id="g", sample_index=0)
    outcomes = await outcomes_of(
        Plane(spec()), lease(0, "eval", trajectory=record.transcript_with([segment.sizes]))
    )
    failed = failure(outcomes["r0"])
    assert (failed.reason, failed.retryable) == ("TokensMissing", False)
    assert "has 1 segments, and the token lists of 0 came" in failed.message
