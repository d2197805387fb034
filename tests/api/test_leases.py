"""Leases: fencing, expiry, retries, hand-overs, affinity and orphans."""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import msgpack
from rollyard_api.jobs import jobs
from rollyard_api.rollouts import heartbeats, sweeps
from rollyard_api.storage.database import Transaction
from rollyard_crds.names import NO_TOOL_PARSER
from rollyard_crds.trajectory import Transcript
from rollyard_testing.api.plane import Worker, make_manifest
from rollyard_testing.crds.segments import packed
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
    assert answer.json() == {"leases": [], "draining": True, "places": None}


async def test_msgpack_both_ways(served: Any, worker: Any) -> None:
    body = msgpack.packb({"worker": "w", "node": "n", "capacity": {"init": 1}})
    headers = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
    answer = await served.worker.post("/v1/leases", content=body, headers=headers)
    assert msgpack.unpackb(answer.content)["leases"][0]["stage"] == "init"


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
