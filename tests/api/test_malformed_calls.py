"""A job none of whose tool calls can be read says so after 32 rollouts, until a well-formed call comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rollyard_api.jobs.job_views import MALFORMED_ROLLOUTS
from rollyard_api.machine.events import RunDone
from rollyard_api.rollouts import reports
from rollyard_testing.api.plane import Worker, serving
from rollyard_testing.crds.segments import reported

MALFORMED = {"name": "", "error": "malformed tool call: </tool_call> is missing"}
CUT = {"name": "", "error": "only the first 64 calls of a turn are run"}
UNKNOWN = {"name": "bsh", "error": "unknown tool 'bsh'; tools: bash"}
GOOD = {"name": "bash", "arguments": {"command": "ls"}}


def turn(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"segment": 0, "start": 0, "end": 3, "finish_reason": "stop", "tool_calls": list(calls), **fields}


REPLAYED = turn(GOOD, finish_reason="replayed", start=0, end=0)


@pytest.mark.parametrize(
    ("turns", "total", "malformed"),
    [
        ([], 0, 0),
        ([turn()], 0, 0),
        ([turn(MALFORMED, MALFORMED), turn(MALFORMED)], 3, 3),
        ([turn(MALFORMED, CUT)], 1, 1),
        ([turn(MALFORMED), REPLAYED], 1, 1),
        ([turn({**MALFORMED, "name": "bash"}), turn(GOOD)], 2, 1),
        ([turn(UNKNOWN)], 1, 0),
    ],
)
def test_what_counts_as_a_call(turns: list[dict[str, Any]], total: int, malformed: int) -> None:
    segment = {
        "prompt_ids": [1],
        "response_ids": [2] * 3,
        "loss_mask": [1] * 3,
        "logprobs": [-0.5] * 3,
        "policy_versions": ["v1"] * 3,
    }
    names = dict.fromkeys(("id", "job", "task_id", "group_id"), "x")
    trajectory = names | {"sample_index": 0, "turns": turns, "segments": [segment]}
    item = reported({"rollout": "x", "token": 1, "stage": "run", "trajectory": trajectory})
    (report,), _ = reports.check_results({"worker": "w", "results": [item]})
    assert isinstance(report.event, RunDone)
    counts = report.event.counts
    assert (counts.written_calls, counts.malformed_calls) == (total, malformed)


async def play(worker: Any, turns: Sequence[dict[str, Any]], rollouts: int) -> None:
    """Take so many rollouts through Run, each with these turns."""
    results = [worker.result(lease) for lease in await worker.reach("run", rollouts)]
    assert len(results) == rollouts
    for result in results:
        result["trajectory"]["turns"] = list(turns)
    assert set(await worker.complete(*results)) == {"accepted"}
    assert set(await worker.complete(*results)) == {"repeated"}


async def status(served: Any) -> dict[str, Any]:
    answer = await served.admin.get("/v1/rolloutjobs/job")
    found: dict[str, Any] = answer.json()["status"]
    return found


async def test_a_job_without_a_well_formed_call(settings: Any) -> None:
    tasks = {"inline": [{"id": f"t{n}", "prompt": "p"} for n in range(3 * MALFORMED_ROLLOUTS)]}
    async with serving(settings) as served:
        await served.submit(tasks=tasks)
        worker = Worker(served.worker)
        await play(worker, [turn()], 4)
        await play(worker, [turn(MALFORMED), turn(MALFORMED)], MALFORMED_ROLLOUTS - 1)
        assert "malformedCalls" not in await status(served), "too few to tell"
        await play(worker, [turn(MALFORMED, CUT)], 1)
        expected = {"rollouts": MALFORMED_ROLLOUTS, "calls": 2 * MALFORMED_ROLLOUTS - 1}
        assert (await status(served))["malformedCalls"] == expected
    async with serving(settings) as served:
        assert (await status(served))["malformedCalls"] == expected
        worker = Worker(served.worker)
        await play(worker, [turn(MALFORMED), turn(GOOD)], 1)
        assert "malformedCalls" not in await status(served)
        await play(worker, [turn(MALFORMED)], MALFORMED_ROLLOUTS)
        assert "malformedCalls" not in await status(served), "one well-formed call shows that the parser fits"
