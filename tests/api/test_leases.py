"""Leases: fencing, expiry, retries, hand-overs, affinity and orphans."""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from functools import partial
from typing import Any

import msgpack
import pyarrow.parquet
import pytest
from rollyard_api.core.codec import MAX_KEYS, unpack
from rollyard_api.core.problems import Invalid
from rollyard_api.jobs import jobs
from rollyard_api.machine.events import RunDone
from rollyard_api.rollouts import heartbeats, reports, sweeps
from rollyard_api.storage.database import Transaction
from rollyard_api.trajectories.packed import segments_of
from rollyard_crds.names import NO_TOOL_PARSER
from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import Transcript
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.crds.segments import packed, reported
from rollyard_testing.pace import patience


async def _expire_all(served: Any) -> int:
    """Let every lease run out at this moment, and return the number of rollouts that were returned."""
    return int(await served.later(3600, sweeps.expire))


async def test_expired_lease_is_fenced_off(served: Any, worker: Any) -> None:
    (old,) = await worker.lease(init=1)
    assert await _expire_all(served) == 1
    (new,) = await worker.lease(init=1)
    assert new["rollout"] == old["rollout"]
    assert new["token"] == old["token"] + 1
    assert new["attempt"] == 0
    assert await worker.complete(worker.result(old)) == ["stale"]
    assert await worker.fail(old) == "stale"
    told = await worker.heartbeat(old, new)
    assert [ref["token"] for ref in told["lost"]] == [old["token"]]
    assert await worker.complete(worker.result(new)) == ["accepted"]


async def test_heartbeat_renews(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    before = time.time()
    assert await worker.heartbeat(lease) == {"lost": [], "cancelled": [], "orphans": [], "watched": []}

    def op(tx: Transaction) -> int:
        tx.now = before + 29.0  # seconds; the lease of 30 s was renewed after `before`
        return sweeps.expire(tx)

    assert await served.plane.database.write(op) == 0


async def test_a_heartbeat_renews_every_lease_that_it_names_and_no_other(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    worker = Worker(served.worker)
    named = await worker.lease(init=4)
    forgotten = named.pop(1)

    def later(tx: Transaction) -> int:
        tx.now += 20.0
        held = [(one["rollout"], one["token"]) for one in named]
        stale = (forgotten["rollout"], forgotten["token"] - 1)
        assert heartbeats.renew(tx, [*held, stale], 30.0) == ([stale], [])
        tx.now += 20.0
        return sweeps.expire(tx)

    assert await served.plane.database.write(later) == 1
    assert (await worker.heartbeat(*named, forgotten))["lost"] == [
        {"rollout": forgotten["rollout"], "token": forgotten["token"]}
    ]


async def test_expired_run_goes_back_to_init_without_its_sandbox(served: Any, worker: Any) -> None:
    (init,) = await worker.lease(init=1)
    await worker.complete(worker.result(init, carry={"k": 1}))
    (run,) = await worker.lease(run=1)
    sandbox = run["sandbox"]["id"]
    assert (await worker.heartbeat(run, sandboxes=[sandbox]))["orphans"] == []
    await _expire_all(served)
    assert (await served.counts())["init"]["queued"] == 1
    assert (await worker.heartbeat(sandboxes=[sandbox]))["orphans"] == [sandbox]
    (again,) = await worker.lease(init=1)
    assert again["carry"] == {}
    assert again["sandbox"] is None


async def test_expired_eval_is_tried_once_more_in_its_sandbox_then_from_init(
    served: Any, worker: Any
) -> None:
    (evaluation,) = await worker.reach("eval")
    await _expire_all(served)
    (again,) = await worker.lease(eval=1)
    assert again["sandbox"] == evaluation["sandbox"]
    assert again["trajectory"] == evaluation["trajectory"]
    await _expire_all(served)
    assert await worker.lease(eval=1, run=1) == []
    # The sandbox that follows is trusted as much as the first one was.
    (fresh,) = await worker.reach("eval")
    assert fresh["sandbox"] != evaluation["sandbox"]
    await _expire_all(served)
    assert [one["sandbox"] for one in await worker.lease(eval=1)] == [fresh["sandbox"]]


async def test_attempts_are_counted_for_each_stage_and_limited_by_its_own_job(served: Any) -> None:
    tasks = {"inline": [{"id": "t0", "prompt": "p"}]}
    for name, limits in (("job", {"init": 2, "run": 3}), ("other", {"init": 3, "run": 2})):
        stages = {stage: {"maxAttempts": most} for stage, most in limits.items()}
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(name, tasks=tasks, stages=stages))
    worker = Worker(served.worker)

    async def fail_both(stage: str) -> dict[str, int]:
        leases = await worker.lease(**{stage: 2})
        assert await worker.fail_all(leases) == ["accepted"] * len(leases)
        return {one["job"]: one["attempt"] for one in leases}

    assert await fail_both("init") == {"job": 0, "other": 0}
    again = await worker.lease(init=2)
    assert [one["attempt"] for one in again] == [1, 1]
    await worker.complete(*map(worker.result, again))
    assert await fail_both("run") == {"job": 0, "other": 0}, "the failure of Init is none of Run"
    assert await fail_both("run") == {"job": 1, "other": 1}
    assert await fail_both("run") == {"job": 2}, "the other job allows two attempts"
    assert [(await served.counts(name))["failed"] for name in ("job", "other")] == [1, 1]


async def test_a_failed_stage_is_tried_again_in_its_sandbox(served: Any, worker: Any) -> None:
    (init,) = await worker.lease(init=1)
    await worker.complete(worker.result(init, carry={"k": 1}))
    for stage in ("run", "eval"):
        (lease,) = await worker.lease(**{stage: 1})
        assert await worker.fail(lease) == "accepted"
        elsewhere = Worker(served.worker, node="elsewhere")
        assert await elsewhere.lease(init=1, run=1, eval=1) == []
        assert await elsewhere.lease(**{stage: 1}) == []
        (again,) = await worker.lease(**{stage: 1})
        assert again["attempt"] == 1
        kept = ("sandbox", "carry", "trajectory")
        assert {name: again[name] for name in kept} == {name: lease[name] for name in kept}
        assert again["carry"] == {"k": 1}
        await worker.complete(worker.result(again))


async def test_without_a_sandbox_any_node_may_continue(served: Any, worker: Any) -> None:
    (init,) = await worker.lease(init=1)
    await worker.complete(worker.result(init, sandbox=None))
    for number, stage in enumerate(("run", "run", "eval", "eval")):
        elsewhere = Worker(served.worker, name=f"w{number}", node=f"n{number}")
        (lease,) = await elsewhere.lease(**{stage: 1})
        assert lease["sandbox"] is None
        if number % 2:
            assert await elsewhere.complete(elsewhere.result(lease)) == ["accepted"]
        else:
            assert await elsewhere.fail(lease) == "accepted"
    assert (await served.counts())["succeeded"] == 1


async def test_a_report_is_judged_by_its_token_and_stage_and_by_what_it_reports(
    served: Any, worker: Any
) -> None:
    (first,) = await worker.lease(init=1)
    assert await worker.complete(worker.result(first | {"stage": "run"})) == ["stale"]
    assert await worker.fail(first | {"stage": "eval"}) == "stale"
    assert await worker.complete(worker.result(first | {"token": first["token"] + 1})) == ["stale"]
    assert await worker.complete(worker.result(first | {"rollout": "nobody"})) == ["unknown"]
    assert await worker.fail(first, counts=False) == "accepted"
    assert await worker.complete(worker.result(first)) == ["stale"], "it failed, and is queued again"
    for _ in range(9):
        (lease,) = await worker.lease(init=1)
        assert lease["attempt"] == 0
        assert await worker.fail(lease, counts=False) == "accepted"
    (last,) = await worker.lease(init=1)
    assert last["token"] == 11
    assert await worker.complete(worker.result(last), worker.result(last)) == ["accepted", "repeated"]
    assert await worker.complete(worker.result(last)) == ["repeated"]
    assert await worker.fail(last) == "stale", "it was complete"
    assert await worker.complete(worker.result(first)) == ["stale"], "no repeat of the one with token 11"
    assert (await served.counts())["run"] == {"queued": 1, "active": 0}


async def test_unknown_sandbox_is_no_orphan_while_an_init_may_own_it(served: Any, worker: Any) -> None:
    (init,) = await worker.lease(init=1)
    # One is claimed by this Init and not reported yet; the other one belongs to nobody and is listed with it.
    assert (await worker.heartbeat(init, sandboxes=["sb-new"]))["orphans"] == []
    await worker.complete(
        worker.result(init)
        | {"sandbox": {"provider": "p", "id": "sb-new", "node": "n", "address": "unix:/x"}}
    )
    assert (await worker.heartbeat(sandboxes=["sb-new", "sb-left"]))["orphans"] == ["sb-left"]


async def test_an_unknown_sandbox_may_belong_to_any_init_of_its_node(served: Any, worker: Any) -> None:
    (first,) = await worker.lease(init=1)
    await served.admin.post("/v1/rolloutjobs", json=make_manifest("other"))
    assert (await worker.heartbeat(first, sandboxes=["sb-first"]))["orphans"] == []
    (second,) = await worker.lease(init=1)
    assert second["rollout"] != first["rollout"]
    assert (await worker.heartbeat(first, second, sandboxes=["sb-first"]))["orphans"] == []
    await worker.complete(worker.result(first))
    told = await worker.heartbeat(second, sandboxes=["sb-first", "sb-second"])
    assert told["orphans"] == ["sb-first"], "it was there before the only Init that is left"


async def test_only_an_init_of_the_same_node_may_own_an_unknown_sandbox(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    here, elsewhere = Worker(served.worker), Worker(served.worker, name="e", node="elsewhere")
    (run,) = await here.reach("run")
    assert len(await elsewhere.lease(init=1)) == 1
    mine = run["sandbox"]["id"]
    assert (await here.heartbeat(run, sandboxes=["sb-left", mine]))["orphans"] == ["sb-left"]
    assert (await elsewhere.heartbeat(sandboxes=["sb-left"]))["orphans"] == []
    await here.complete(here.result(run))
    (evaluation,) = await here.lease(eval=1)
    assert (await here.heartbeat(evaluation, sandboxes=[mine]))["orphans"] == []
    await here.complete(here.result(evaluation))
    assert (await here.heartbeat(sandboxes=[mine]))["orphans"] == [mine], "its rollout has ended"


async def test_a_fenced_off_holder_of_a_cancelled_rollout_has_lost_it(served: Any, worker: Any) -> None:
    """The rollout may be another worker's, and so may the sandbox be."""
    (old,) = await worker.lease(init=1)
    await _expire_all(served)
    (new,) = await worker.lease(init=1)
    await served.admin.post("/v1/rolloutjobs/job/cancel", json={"rollout": new["rollout"]})
    told = await worker.heartbeat(old, new)
    assert ([ref["token"] for ref in told["lost"]], [ref["token"] for ref in told["cancelled"]]) == ([1], [2])
    assert await worker.complete(worker.result(old), worker.result(new)) == ["stale", "cancelled"]
    assert [await worker.fail(old), await worker.fail(new)] == ["stale", "cancelled"]


async def test_nothing_of_a_cancelled_job_is_leased_while_its_rollouts_are_being_ended(
    served: Any, worker: Any
) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest("other"))

    def cancel(tx: Transaction) -> int:
        return jobs.cancel(tx, "default", "job", "Cancelled")

    job_id = await served.plane.database.write(cancel)
    assert {lease["job"] for lease in await worker.lease(init=8)} == {"other"}
    await served.plane.cancel_rest(job_id)
    assert (await served.counts())["cancelled"] == 1


async def test_a_failure_that_every_rollout_would_have_ends_the_job(served: Any) -> None:
    tasks = {"inline": [{"id": f"t{number}", "prompt": "p"} for number in range(5)]}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks))
    worker = Worker(served.worker)
    await worker.complete(*map(worker.result, await worker.lease(init=4)))
    first, second, third = await worker.lease(run=3)
    said = {"message": "set agent.toolParser", "retryable": False}
    assert await worker.fail_all([first, second], NO_TOOL_PARSER, **said) == ["accepted"] * 2
    assert await worker.lease(init=8, run=8, eval=8) == []
    assert await worker.fail(first, NO_TOOL_PARSER, **said) == "repeated"
    await served.plane.sweep()
    told = await worker.heartbeat(third)
    assert [ref["rollout"] for ref in told["cancelled"]] == [third["rollout"]]
    counts = await served.counts()
    assert (counts["failed"], counts["cancelled"], counts["total"]) == (2, 3, 5)
    job = (await served.admin.get("/v1/rolloutjobs/job")).json()
    assert job["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == NO_TOOL_PARSER
    ended = (await served.admin.get("/v1/rolloutjobs/job/rollouts")).json()["items"]
    reasons = {(one["status"], one["reason"]) for one in ended}
    assert reasons == {("failed", NO_TOOL_PARSER), ("cancelled", NO_TOOL_PARSER)}


async def test_the_only_rollout_of_a_job_ends_it_with_its_reason(served: Any, worker: Any) -> None:
    (lease,) = await worker.reach("run")
    await worker.fail(lease, NO_TOOL_PARSER, retryable=False)
    job = (await served.admin.get("/v1/rolloutjobs/job")).json()
    assert job["metadata"]["annotations"]["rollyard.dev/cancel-reason"] == NO_TOOL_PARSER
    assert job["status"]["completionTime"]


async def test_jobs_of_one_name_in_two_namespaces_are_leased_apart(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/rolloutjobs?namespace=team", json=make_manifest())
    body = {"worker": "w", "node": "n", "capacity": {"init": 8}}
    for asked, number in (
        ({"namespace": "nobody", "job": "job"}, 0),
        ({"namespace": "team", "job": "job"}, 2),
        ({"namespace": "nobody"}, 0),
        ({"namespace": "default"}, 1),
    ):
        answer = await served.worker.post("/v1/leases", json=body | asked)
        leases = answer.json()["leases"]
        assert [one["namespace"] for one in leases] == [asked["namespace"]] * number


async def test_a_request_for_several_stages_is_bounded_as_a_whole_and_later_stages_come_first(
    served: Any,
) -> None:
    tasks = {"inline": [{"id": f"t{number}", "prompt": "p"} for number in range(67)]}
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks))
    worker = Worker(served.worker)
    for stage, count in (("init", 3), ("run", 1)):
        leases = await worker.lease(**{stage: count})
        assert await worker.complete(*map(worker.result, leases)) == ["accepted"] * count
    stages = [lease["stage"] for lease in await worker.lease(init=64, run=64, eval=64)]
    assert stages == ["eval"] + ["run"] * 2 + ["init"] * 61
    assert len(await worker.lease(init=64, run=64, eval=64)) == 3


async def test_long_poll_wakes_when_a_job_comes(served: Any, worker: Any) -> None:
    await worker.lease(init=1)
    waiting = asyncio.create_task(worker.lease(wait=60, init=1))
    await served.until_waiting()
    await served.admin.post("/v1/rolloutjobs", json=make_manifest("other"))
    (lease,) = await asyncio.wait_for(waiting, patience(10))
    assert lease["job"] == "other"


async def test_draining_once_the_job_has_ended(served: Any, worker: Any) -> None:
    body = {"worker": "w", "node": "n", "capacity": {"init": 1}, "job": "job", "namespace": "default"}
    await worker.finish_all()
    answer = await served.worker.post("/v1/leases", json=body | {"wait": 60})
    assert answer.json() == {"leases": [], "draining": True}


async def test_msgpack_both_ways(served: Any, worker: Any) -> None:
    body = msgpack.packb({"worker": "w", "node": "n", "capacity": {"init": 1}})
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    answer = await served.worker.post("/v1/leases", content=body, headers=headers)
    assert msgpack.unpackb(answer.content)["leases"][0]["stage"] == "init"


async def _refused(served: Any, worker: Any, lease: dict[str, Any], **fields: Any) -> list[str]:
    body = {"worker": "w", "results": [reported(worker.result(lease, **fields))]}
    answer = await served.worker.post("/v1/leases/complete", json=body)
    assert answer.status_code == 422, answer.text
    errors: list[str] = answer.json()["errors"]
    return errors


async def test_wrong_results_are_refused_by_field(served: Any, worker: Any) -> None:
    (init,) = await worker.lease(init=1)
    assert (
        "results[0].sandbox.node"
        in (await _refused(served, worker, init, sandbox={"provider": "p", "id": "i", "address": "a"}))[0]
    )
    assert "only the Eval stage" in (await _refused(served, worker, init, reward=1.0))[0]
    await worker.complete(worker.result(init))
    (run,) = await worker.lease(run=1)
    good = worker.result(run)["trajectory"]
    turns = [{"segment": 0, "start": 0, "end": 9, "finish_reason": "stop"}]
    assert "turns[0]" in (await _refused(served, worker, run, trajectory=good | {"turns": turns}))[0]
    assert "is required" in (await _refused(served, worker, run, trajectory=None))[0]
    assert await worker.complete(worker.result(run)) == ["accepted"]
    (evaluation,) = await worker.lease(eval=1)
    assert "finite number" in (await _refused(served, worker, evaluation, reward=None))[0]
    assert "finite number" in (await _refused(served, worker, evaluation, reward="1"))[0]
    assert (await served.counts())["succeeded"] == 0


_GOOD: dict[str, Any] = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4],
    "loss_mask": [1, 0],
    "logprobs": [-0.5, 0],
    "policy_versions": ["v1", ""],
}


def _trajectory(*segments: Any, turns: tuple[Any, ...] = (), **fields: Any) -> dict[str, Any]:
    turn = {"segment": 0, "start": 0, "end": 1, "finish_reason": "stop"}
    document = {"id": "r", "job": "job", "task_id": "t", "group_id": "t", "sample_index": 0}
    return document | {"segments": [*segments], "turns": [turn | one for one in turns]} | fields


def _ran(trajectory: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a CompleteRequest with one Run."""
    item = reported({"rollout": "r", "token": 1, "stage": "run", "trajectory": trajectory})
    return {"worker": "w", "results": [item | fields]}


@pytest.mark.parametrize(
    "trajectory",
    [
        _trajectory(),
        _trajectory(_GOOD, _GOOD),
        _trajectory(_GOOD, _GOOD, turns=({}, {"segment": 1, "start": 1, "end": 2}, {"segment": 1, "end": 0})),
        _trajectory(turns=({"end": 0, "finish_reason": "replayed"},)),
    ],
    ids=["no segments", "two segments", "turns of two segments", "a replayed turn without tokens"],
)
def test_trajectories_that_are_taken(trajectory: dict[str, Any]) -> None:
    ((rollout, event),), _ = reports.check_results(_ran(trajectory))
    assert isinstance(event, RunDone)
    assert (rollout, event.token, event.tokens_in_eval) == ("r", 1, False)
    assert event.counts.sampled_tokens == len(trajectory["segments"])
    kept = [dict(one.lists()) for one in segments_of(event.segments)]
    assert kept == trajectory["segments"], "the lists come back as they were"
    sizes = [{"prompt_tokens": 2, "response_tokens": 2, "sampled_tokens": 1}] * len(kept)
    record = {name: value for name, value in trajectory.items() if name != "segments"}
    assert json.loads(unpack(event.record)) == record | {"segment_sizes": sizes}


UNEVEN_LISTS = pytest.mark.attack(
    "runs of versions for 10¹² tokens, lists of different lengths, floats in the place of ids, a mask of "
    "other numbers",
    boundary="worker",
    surface="token lists of reports",
    stopped_by="lengths are compared before anything is unpacked; types and values are checked, and the "
    "message names the field",
)


@pytest.mark.attack(
    "log-probabilities that no sampler gives (-9999, NaN), on which a trainer would train",
    boundary="control plane",
    surface="answers of backends, records of workers",
    stopped_by="refused unless they are numbers from -1,000 to 0; the message names the token and the value",
)
@UNEVEN_LISTS
@pytest.mark.parametrize(
    ("trajectory", "problem"),
    [
        (_trajectory(_GOOD | {"loss_mask": [1]}), "loss_mask has 1 entries, response_ids has 2"),
        (_trajectory(_GOOD | {"logprobs": [-0.5]}), "results[0].segments[0]: logprobs has 1 entries"),
        (_trajectory(_GOOD | {"policy_versions": ["v1"] * 3}), "policy_versions has 3 entries"),
        (_trajectory(_GOOD | {"loss_mask": [1, 2]}), "loss_mask: every entry must be 0 or 1"),
        (_trajectory(_GOOD | {"loss_mask": [1, 256]}), "loss_mask: every entry must be 0 or 1"),
        (_trajectory(_GOOD, _GOOD | {"logprobs": [-0.5, -0.5]}), "segments[1]: logprobs: must be 0.0 where"),
        (_trajectory(_GOOD | {"logprobs": [-math.inf, 0.0]}), "must be from -1000 to 0 (got -inf)"),
        (_trajectory(_GOOD | {"logprobs": [math.nan, 0.0]}), "must be from -1000 to 0 (got nan)"),
        (
            _trajectory(_GOOD | {"loss_mask": [1, 1], "logprobs": [-0.5, math.nan]}),
            "must be from -1000 to 0 (got nan)",
        ),
        (_trajectory(_GOOD | {"logprobs": [-9999.0, 0.0]}), "must be from -1000 to 0 (got -9999.0)"),
        (_trajectory(_GOOD | {"logprobs": [0.5, 0.0]}), "must be from -1000 to 0 (got 0.5)"),
        (
            _trajectory(_GOOD, turns=({}, {"segment": 1})),
            "turns[1].segment: there is no segment 1",
        ),
        (_trajectory(_GOOD, turns=({"segment": -1},)), "trajectory.turns[0].segment"),
        (_trajectory(_GOOD, turns=({"start": 2},)), "trajectory.turns[0]: [2, 1) does not lie in segment 0"),
        (_trajectory(_GOOD, turns=({"start": -1},)), "trajectory.turns[0]"),
        (_trajectory(_GOOD, turns=({"end": 3},)), "trajectory.turns[0]: [0, 3) does not lie in segment 0"),
        (_trajectory(turns=({"end": 0},)), "trajectory.turns[0].segment: there is no segment 0"),
        (_trajectory(turns=({"end": 1, "finish_reason": "replayed"},)), "there is no segment 0"),
        (_trajectory(_GOOD, sample_index="first"), "trajectory.sample_index"),
        (_trajectory(_GOOD, status="failed"), "trajectory.status: unknown field"),
    ],
)
def test_trajectories_that_are_refused(trajectory: dict[str, Any], problem: str) -> None:
    with pytest.raises(Invalid) as refused:
        reports.check_results(_ran(trajectory))
    assert problem in refused.value.errors[0]


@UNEVEN_LISTS
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"text": "x"}, "segments[0].text: unknown field"),
        ({"policy_versions": None}, "segments[0].policy_versions: "),
        ({"policy_versions": {"runs": [["v1", 2, 3]]}}, "segments[0].policy_versions: runs[0]: must be"),
        ({"policy_versions": {"runs": [["v1", -1], ["", 3]]}}, "must be [version, number of tokens]"),
        ({"policy_versions": {"runs": [["v1", "2"]]}}, "must be [version, number of tokens]"),
        ({"policy_versions": {"runs": [["v1", 1 << 32]]}}, "policy_versions has 4294967296 entries"),
        ({"policy_versions": {"runs": [["v1", (1 << 64) - 1]]}}, "must be [version, number of tokens]"),
        ({"policy_versions": {"runs": [["v1", True], ["", 1]]}}, "policy_versions: runs[0]: must be"),
        ({"prompt_ids": [1, 2]}, "segments[0].prompt_ids: "),
        ({"prompt_ids": {"dtype": "<u2", "data": "AQ=="}}, "are not whole numbers of <u2"),
        ({"prompt_ids": {"dtype": "<u2", "data": "A Q="}}, "segments[0].prompt_ids.data: must be base64"),
        ({"prompt_ids": {"dtype": "<u2", "data": 7}}, "segments[0].prompt_ids.data: "),
        ({"prompt_ids": {"dtype": "|O", "data": "AQ=="}}, "segments[0].prompt_ids.dtype: "),
        ({"prompt_ids": {"dtype": "<f4", "data": "AAAAAA=="}}, "every entry must be an integer"),
        ({"response_ids": {"dtype": "<f4", "data": "AAAAAAAAAAA="}}, "every entry must be an integer"),
        ({"logprobs": {"dtype": "<u1", "data": "AAA="}}, "logprobs: every entry must be a float"),
        ({"loss_mask": {"dtype": "<u2", "data": "AQAAAA=="}}, "loss_mask: every entry must be 0 or 1"),
    ],
)
def test_arrays_that_are_refused(change: dict[str, Any], problem: str) -> None:
    (segment,) = packed(_GOOD)
    with pytest.raises(Invalid) as refused:
        reports.check_results(_ran(_trajectory(), segments=[segment | change]))
    assert problem in refused.value.errors[0]
    missing = {name: value for name, value in segment.items() if name not in change}
    if len(missing) < len(segment):
        with pytest.raises(Invalid, match=f"{next(iter(change))}: Field required"):
            reports.check_results(_ran(_trajectory(), segments=[missing]))


WRONG_ITEMS = pytest.mark.attack(
    "a million wrong items or unknown keys, whose description takes gigabytes and holds up everybody",
    boundary="worker",
    surface="reports of workers",
    stopped_by="a list is described by its first wrong item; objects have a bounded number of keys",
)


@WRONG_ITEMS
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"segments": [{}]}, "segments[0]"),
        ({"segments": [packed(_GOOD)[0] | {"policy_versions": {"runs": [["v", 1.5]] * 10_000}}]}, "segments"),
        ({"turns": [{}] * 10_000}, "trajectory.turns[0]"),
        ({"messages": [{}] * 10_000}, "trajectory.messages[0]"),
        (
            {"turns": _trajectory(turns=({"tool_calls": [{}] * 10_000},))["turns"]},
            "trajectory.turns[0].tool_calls[0]",
        ),
    ],
    ids=["segments", "runs", "turns", "messages", "tool calls"],
)
def test_a_list_of_wrong_items_is_described_by_the_first(change: dict[str, Any], field: str) -> None:
    """The description of a million takes gigabytes of memory, and seconds in which nobody is served."""
    body = _ran(_trajectory())
    item = body["results"][0] if "segments" in change else body["results"][0]["trajectory"]
    item |= change
    with pytest.raises(Invalid) as refused:
        reports.check_results(body)
    assert len(refused.value.errors) <= len(PackedSegment.model_fields)
    assert all(line.startswith(f"results[0].{field}") for line in refused.value.errors)


@WRONG_ITEMS
async def test_an_object_with_too_many_keys_is_refused(served: Any) -> None:
    item = _ran(_trajectory())["results"][0] | dict.fromkeys(map(str, range(MAX_KEYS + 1)), 1)
    refused = await served.worker.post("/v1/leases/complete", json={"worker": "w", "results": [item]})
    assert refused.status_code == 400
    assert f"more than {MAX_KEYS} keys" in refused.json()["detail"]


@pytest.mark.attack(
    "a worker sends numbers that break statistics, Parquet files or trainers: 1e308 seconds, NaN in "
    "msgpack, 2⁶⁴ tokens",
    boundary="worker",
    surface="times, counts and records of workers",
    stopped_by="refused by field",
)
@pytest.mark.parametrize("form", ["application/json", "application/msgpack"])
async def test_numbers_that_would_break_statistics_and_records_are_refused(
    served: Any, worker: Any, form: str
) -> None:
    (lease,) = await worker.reach("run")
    item = reported(worker.result(lease))
    sampling = {"temperature": math.nan, "top_p": 1.0, "max_tokens": 1, "seed": 1}
    turn = {"segment": 0, "start": 0, "end": 0, "finish_reason": "replayed", "model_seconds": math.inf}
    changes: list[tuple[dict[str, Any], str]] = [
        ({"times": {"model_seconds": 1e308}}, "times.model_seconds: "),
        ({"times": {"tool_seconds": -1e308}}, "times.tool_seconds: "),
        ({"stats": {"sampled_tokens": (1 << 64) - 1}}, "stats.sampled_tokens: "),
        ({"trajectory": item["trajectory"] | {"template_breaks": 1 << 31}}, "trajectory.template_breaks: "),
    ]
    if form == "application/msgpack":
        # JSON has no such numbers, and what is stored of them would be null.
        changes += [
            ({"times": {"own_seconds": math.nan}}, "times.own_seconds: must be a finite number"),
            ({"carry": {"a": [math.inf]}}, "carry.a[0]: must be a finite number"),
            (
                {"trajectory": item["trajectory"] | {"sampling": sampling}},
                "trajectory.sampling.temperature: ",
            ),
            ({"trajectory": item["trajectory"] | {"turns": [turn]}}, "trajectory.turns[0].model_seconds: "),
        ]
    write = msgpack.packb if form == "application/msgpack" else json.dumps
    for change, problem in changes:
        body = write({"worker": worker.name, "results": [item | change]})
        refused = await worker.http.post("/v1/leases/complete", content=body, headers={"content-type": form})
        assert refused.status_code == 422, change
        assert refused.json()["errors"][0].startswith(f"results[0].{problem}")
    assert await worker.complete(worker.result(lease)) == ["accepted"]


async def test_one_wrong_report_refuses_all_of_its_request(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    worker = Worker(served.worker)
    first, second = await worker.lease(init=2)
    good, name = worker.result(first), "results[1]"
    record = _ran(_trajectory())["results"][0]["trajectory"]
    for wrong, problem in (
        ({"rollout": 7}, f"{name}.rollout: Input should be a valid string (got 7)"),
        ({"token": True}, f"{name}.token: Input should be a valid integer (got True)"),
        ({"token": "1"}, f"{name}.token: Input should be a valid integer (got '1')"),
        ({"stage": "end"}, f"{name}.stage: Input should be 'init', 'run' or 'eval' (got 'end')"),
        ({"carry": [1]}, f"{name}.carry: Input should be a valid dictionary"),
        ({"carry": {"k": "x" * reports.MAX_CARRY_BYTES}}, f"{name}.carry: is longer than"),
        (
            {"trajectory": record},
            f"{name}.trajectory: only the Run stage gives one",
        ),
        ({"segments": packed(_GOOD)}, f"{name}.segments: only the Run stage gives one"),
        ({"tokens_in_eval": True}, f"{name}.tokens_in_eval: only the Run stage gives one"),
        ({"reward_output": "x"}, f"{name}.reward_output: only the Eval stage gives one"),
        ({"times": {"model_seconds": "long"}}, f"{name}.times.model_seconds"),
        ({"colour": "red"}, f"{name}.colour: unknown field"),
    ):
        body = {"worker": "w", "results": [good, worker.result(second) | wrong]}
        refused = await served.worker.post("/v1/leases/complete", json=body)
        assert refused.status_code == 422, wrong
        assert refused.json()["errors"][0].startswith(problem)
    failure = {key: first[key] for key in ("rollout", "token", "stage")} | {"reason": "Broken"}
    for path, fields in (
        ("complete", {"results": []}),
        ("complete", {"results": [good] * 65}),
        ("complete", {"results": [good], "worker": ""}),
        ("complete", {"results": [good], "more": 1}),
        ("fail", {"failures": [failure] * 65}),
        ("fail", {"failures": [failure, failure | {"stage": "end"}]}),
    ):
        refused = await served.worker.post(f"/v1/leases/{path}", json={"worker": "w"} | fields)
        assert refused.status_code == 422, (path, fields)
    assert await worker.complete(good, worker.result(second)) == ["accepted"] * 2, "nothing was taken before"


async def test_a_lease_of_eval_has_token_lists_only_if_the_handler_needs_them(served: Any) -> None:
    await served.submit(tasks={"inline": [{"id": "t0", "prompt": "p"}]}, samplesPerTask=2)
    worker = Worker(served.worker)
    count = 8192
    segment = {
        "prompt_ids": list(range(300)),
        "response_ids": list(range(100_000, 100_000 + count)),
        "loss_mask": [1, 0] * (count // 2),
        "logprobs": [-0.1, 0.0] * (count // 2),
        "policy_versions": ["v1", ""] * (count // 2),
    }
    results = []
    for number, lease in enumerate(await worker.reach("run", 2)):
        result = worker.result(lease, tokens_in_eval=number == 1)
        result["trajectory"]["segments"] = [segment]
        results.append(result)
    assert await worker.complete(*results) == ["accepted"] * 2
    without, having = await worker.lease(eval=2)
    assert without["segments"] == []
    sizes = [{"prompt_tokens": 300, "response_tokens": count, "sampled_tokens": count // 2}]
    assert without["trajectory"]["segment_sizes"] == having["trajectory"]["segment_sizes"] == sizes
    assert Transcript.model_validate(without["trajectory"]).sampled_tokens == count // 2
    assert having["segments"] == packed(segment), "they come as they were sent"
    assert len(json.dumps(without)) < 2000 < 8 * count < len(json.dumps(having))
    await worker.complete(worker.result(without), worker.result(having))
    lines = (await served.admin.get("/v1/rolloutjobs/job/trajectories")).text.splitlines()
    assert [json.loads(line)["segments"] for line in lines] == [[segment]] * 2
    assert not any("segment_sizes" in line or "tokens_in_eval" in line for line in lines)


@pytest.mark.attack(
    "a worker sends NaN, Infinity, 1e999 or 10⁷",
    boundary="worker",
    surface="rewards",
    stopped_by="refused by field",
)
async def test_rewards_are_finite_and_of_bounded_size(served: Any, worker: Any) -> None:
    (lease,) = await worker.reach("eval")
    wrong: dict[str, Any] = {"reward": 1.5e6, "reward_components": {"good": 1.0, "style": -2e6}}
    problems = await _refused(served, worker, lease, **wrong)
    assert [problem.partition(":")[0] for problem in problems] == [
        "results[0].reward",
        "results[0].reward_components.style",
    ]
    assert "from -1,000,000 to 1,000,000 (got 1500000.0)" in problems[0]
    # It is sent as raw text, because no library that keeps to JSON would write it.
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 400):
        for field, value in (("reward", number), ("reward_components", f'{{"style": {number}}}')):
            item = json.dumps(worker.result(lease) | {field: "HERE"}).replace('"HERE"', value)
            answer = await worker.http.post(
                "/v1/leases/complete",
                content=f'{{"worker": "{worker.name}", "results": [{item}]}}',
                headers={"content-type": "application/json"},
            )
            assert answer.status_code == 400
            name = f"results[0].{field}" + (".style" if field == "reward_components" else "")
            assert f"{name}: must be a finite number" in answer.text
    for unbounded in (math.nan, math.inf):
        body = msgpack.packb({"worker": worker.name, "results": [worker.result(lease, reward=unbounded)]})
        answer = await worker.http.post(
            "/v1/leases/complete", content=body, headers={"content-type": "application/msgpack"}
        )
        assert answer.status_code == 422
        assert "results[0].reward: must be a finite number" in answer.text
    assert "only the Eval stage" in (await _refused(served, worker, lease, stage="init", reward=None,
                                                    reward_reason="TestTimeout"))[0]  # fmt: skip
    for reason in ("test timeout", "Test\n", "x" * 200, 7):
        refused = await _refused(served, worker, lease, reward_reason=reason)
        assert refused[0].startswith("results[0].reward_reason: ")
    for output in ("x" * 4097, 7, ["x"]):
        refused = await _refused(served, worker, lease, reward_output=output)
        assert refused[0].startswith("results[0].reward_output: ")
    assert await worker.complete(worker.result(lease, reward=-1e6)) == ["accepted"]


@pytest.mark.attack(
    "Run says why Eval gave a reward",
    boundary="evaluation",
    surface="reward's reason",
    stopped_by="only Eval's own word is recorded",
)
async def test_the_reason_of_a_reward_reaches_the_record(served: Any) -> None:
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    worker = Worker(served.worker)
    runs = await worker.reach("run", 8)
    recorded = worker.result(runs[0])["trajectory"]
    for field in ("reward_reason", "reward_output"):  # Run may not set these.
        refused = await _refused(served, worker, runs[0], trajectory=recorded | {field: "ByRun"})
        assert refused[0].startswith(f"results[0].trajectory.{field}: unknown field")
    await worker.complete(*map(worker.result, runs))
    first, *rest = await worker.lease(eval=8)
    results = [
        worker.result(first, reward=0.0, reward_reason="SandboxSabotaged", reward_output="a locked folder")
    ]
    await worker.complete(*results, *[worker.result(lease) for lease in rest])
    path = "/v1/rolloutjobs/job/trajectories"
    records = [json.loads(line) for line in (await served.admin.get(path)).text.splitlines()]
    by_id = {record["id"]: record for record in records}
    assert by_id[first["rollout"]]["reward_reason"] == "SandboxSabotaged"
    assert [record.get("reward_reason") for record in records].count(None) == len(rest)
    assert by_id[first["rollout"]]["reward_output"] == "a locked folder"
    assert [record.get("reward_output") for record in records].count(None) == len(rest)
    answer = await served.admin.get(path, headers={"Accept": "application/vnd.apache.parquet"})
    table = pyarrow.parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    assert sorted(row["reward_reason"] for row in table) == [""] * len(rest) + ["SandboxSabotaged"]


async def test_start_gives_every_lease_its_full_time(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)

    def late_start(tx: Transaction) -> int:
        tx.now += 100
        heartbeats.grace(tx, 30.0)
        tx.now += 29
        return sweeps.expire(tx)

    assert await served.plane.database.write(late_start) == 0
    assert await worker.complete(worker.result(lease)) == ["accepted"]


async def test_spec_for_workers(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    get = partial(served.worker.get, "/v1/leases/job")
    answer = await get(params={"name": "job", "uid": lease["job_uid"]})
    assert answer.json()["spec"]["handler"] == "shell"
    assert "inline" not in answer.json()["spec"]["tasks"]
    assert (await get(params={"name": "job", "uid": "another"})).status_code == 404


async def test_images_of_waiting_tasks_for_workers(served: Any) -> None:
    """They come in the order of the queue, each once, and without those of rollouts that were leased."""
    named = ["docker://a:1", None, "docker://b:1", "docker://a:1", "dockerfile:0123", "docker://c:1"]
    tasks = [
        {"id": f"t{number}", "prompt": "p", "sandbox": {"image": image} if image else {}}
        for number, image in enumerate(named)
    ]
    manifest = make_manifest(tasks={"inline": tasks}, samplesPerTask=2)
    uid = (await served.admin.post("/v1/rolloutjobs", json=manifest)).json()["metadata"]["uid"]
    get = partial(served.worker.get, "/v1/leases/images")
    seen = []
    for leased in (0, 2, 6, 4):
        if leased:
            assert len(await Worker(served.worker).lease(init=leased)) == leased
        seen.append((await get(params={"name": "job", "uid": uid})).json()["images"])
    every = ["docker://a:1", "docker://b:1", "docker://c:1"]
    # The second task named a:1, too, and is leased in the third step.
    assert seen == [every, ["docker://b:1", "docker://a:1", "docker://c:1"], every[2:], []]
    assert (await get(params={"name": "job", "uid": "another"})).status_code == 404
    assert (await get(params={"name": "nosuch"})).status_code == 404
