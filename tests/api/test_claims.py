"""Sandbox claims: filed, bound, failed, and released by every way out of a rollout; and what drivers see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.rollouts import sweeps
from rollyard_api.service import ControlPlane
from rollyard_api.storage.database import Transaction, driver_of
from rollyard_api.storage.schema import claims as claim_table
from rollyard_crds.claims import Claim, ClaimList
from rollyard_testing.api.plane import Worker, make_manifest, serving
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

SHAPE = {"image": "busybox", "cpu": 1.0, "memory_bytes": 1 << 30, "disk_bytes": 1 << 30, "processes": 64}
BOUND = {"state": "Bound", "address": "tcp://10.0.0.7:7411", "secret": "s3cret"}


@pytest.fixture
async def worker(served: Any) -> Any:
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(3)]}
    await served.submit(tasks=tasks)
    return Worker(served.worker, node="kubernetes")


async def _file(served: Any, lease: dict[str, Any], **fields: Any) -> Any:
    body = {"rollout": lease["rollout"], "token": lease["token"], "shape": SHAPE, **fields}
    return await served.worker.post("/v1/claims", json=body)


async def _filed(served: Any, lease: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = await _file(served, lease, **fields)
    assert answer.status_code == 200, answer.text
    claim: dict[str, Any] = answer.json()
    Claim.model_validate(claim)
    return claim


async def _put(served: Any, claim: dict[str, Any], **status: Any) -> Any:
    return await served.driver.put(f"/v1/claims/{claim['id']}/status", json=status)


async def _get(served: Any, claim: dict[str, Any]) -> Any:
    return await served.worker.get(f"/v1/claims/{claim['id']}")


async def _listed(served: Any, **query: Any) -> ClaimList:
    answer = await served.driver.get("/v1/claims", params=query)
    assert answer.status_code == 200, answer.text
    return ClaimList.model_validate(answer.json())


async def _states(served: Any) -> dict[str, str]:
    await served.plane.sweep()
    return {claim.id: claim.state for claim in (await _listed(served)).claims}


def _handle(claim: dict[str, Any]) -> dict[str, Any]:
    return {"provider": "kubernetes", "id": claim["id"], "node": "kubernetes", "address": BOUND["address"]}


async def test_the_whole_way(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    assert (claim["state"], claim["secret"], claim["address"]) == ("Pending", "", "")
    assert claim["namespace"] == "default"
    assert (claim["job"], claim["job_uid"]) == (lease["job"], lease["job_uid"])
    assert len(claim["id"]) <= 40
    again = await _filed(served, lease)
    assert again["id"] == claim["id"], "the same rollout and token is the same claim"
    (seen,) = (await _listed(served)).claims
    assert (seen.id, seen.state, seen.rollout) == (claim["id"], "Pending", lease["rollout"])

    bound = (await _put(served, claim, **BOUND)).json()
    assert {k: bound[k] for k in BOUND} == BOUND
    other = await _put(served, claim, **BOUND | {"address": "tcp://10.0.0.8:7411"})
    assert other.json()["address"] == BOUND["address"], "the first one stands"
    assert (await worker.complete(worker.result(lease, sandbox=_handle(claim)))) == ["accepted"]
    for stage in ("run", "eval"):
        assert await _states(served) == {claim["id"]: "Bound"}
        (lease,) = await worker.lease(**{stage: 1})
        assert lease["sandbox"]["id"] == claim["id"]
        assert await _states(served) == {claim["id"]: "Bound"}
        await worker.complete(worker.result(lease))
    assert await _states(served) == {claim["id"]: "Released"}
    assert (await _put(served, claim, **BOUND)).json()["state"] == "Released", "it came too late"
    for _ in range(2):
        assert (await _put(served, claim, state="Removed")).status_code == 204
    assert await _states(served) == {}
    missing = await _get(served, claim)
    assert (missing.status_code, missing.json()["reason"]) == (404, "ClaimNotFound")
    late = await _put(served, claim, **BOUND)
    assert (late.status_code, late.json()["reason"]) == (404, "ClaimNotFound")


async def test_filing_waits_until_it_is_bound(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    revision = (await _listed(served)).revision
    following = asyncio.create_task(_listed(served, revision=revision, wait=60))
    await served.until_waiting()
    assert not following.done()
    waiting = asyncio.create_task(_filed(served, lease, wait=60))
    (pending,) = (await asyncio.wait_for(following, patience(10))).claims
    await served.until_waiting()
    assert not waiting.done()
    looking = asyncio.create_task(served.worker.get(f"/v1/claims/{pending.id}", params={"wait": 60}))
    await served.until_waiting(2)
    await _put(served, {"id": pending.id}, **BOUND)
    assert (await asyncio.wait_for(waiting, patience(10)))["secret"] == BOUND["secret"]
    assert (await asyncio.wait_for(looking, patience(10))).json()["state"] == "Bound"
    started = time.monotonic()
    assert (await _filed(served, lease, wait=60))["state"] == "Bound"
    assert time.monotonic() - started < 20, "what is bound is answered at once"


async def test_a_wait_ends_without_an_answer(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    assert (await _filed(served, lease, wait=0.1))["state"] == "Pending"
    revision = (await _listed(served)).revision
    assert (await _listed(served, revision=revision, wait=0.1)).revision == revision


async def test_refused_claims_say_why(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    first = {"state": "Failed", "reason": "ImagePullFailed", "message": "no such image", "retryable": False}
    told = (await _put(served, claim, **first)).json()
    assert {k: told[k] for k in first} == first
    again = await _put(served, claim, state="Failed", reason="QuotaExceeded")
    assert again.json()["reason"] == "ImagePullFailed"
    assert (await _put(served, claim, **BOUND)).json()["state"] == "Failed"
    assert (await _filed(served, lease))["reason"] == "ImagePullFailed"
    assert await worker.fail(lease, "ImagePullFailed", retryable=False) == "accepted"
    assert await _states(served) == {claim["id"]: "Released"}


async def test_a_bound_sandbox_may_fail_and_its_worker_can_still_ask_why(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    await _put(served, claim, **BOUND)
    await worker.complete(worker.result(lease, sandbox=_handle(claim)))
    (run,) = await worker.lease(run=1)
    await _put(served, claim, state="Failed", reason="OutOfMemory", message="killed")
    for _ in range(2):
        assert (await _put(served, claim, state="Removed")).status_code == 204
        assert await _states(served) == {}, "nothing is left for a driver to do"
        told = (await _get(served, claim)).json()
        assert (told["state"], told["reason"], told["secret"]) == ("Failed", "OutOfMemory", "")
    await worker.fail(run, "SandboxLost", return_to="init")
    await served.plane.sweep()
    assert (await _get(served, claim)).status_code == 404, "forgotten once nobody needs it"


@pytest.mark.parametrize("state", ["Pending", "Bound"])
async def test_removed_before_its_time_is_a_failure(served: Any, worker: Any, state: str) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    if state == "Bound":
        await _put(served, claim, **BOUND)
    assert (await _put(served, claim, state="Removed")).status_code == 204
    told = (await _get(served, claim)).json()
    assert (told["state"], told["reason"], told["retryable"]) == ("Failed", "SandboxRemoved", True)
    assert await _states(served) == {}
    released = await served.worker.delete(f"/v1/claims/{claim['id']}")
    assert released.status_code == 204
    assert (await _get(served, claim)).status_code == 404


async def test_release_by_the_worker(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    await _put(served, claim, **BOUND)
    waiting = asyncio.create_task(_listed(served, revision=(await _listed(served)).revision, wait=60))
    for _ in range(2):
        assert (await served.worker.delete(f"/v1/claims/{claim['id']}")).status_code == 204
    (seen,) = (await asyncio.wait_for(waiting, patience(10))).claims
    assert (seen.state, seen.secret) == ("Released", "")
    assert (await _put(served, claim, state="Failed", reason="X")).json()["state"] == "Released"
    assert (await served.worker.delete("/v1/claims/cnobody")).status_code == 204


async def test_filing_while_it_is_released_and_removed_is_a_lost_lease(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    waiting = asyncio.create_task(_file(served, lease, wait=60))

    async def listed() -> list[Claim]:
        return (await _listed(served)).claims

    (claim,) = await eventually(listed)

    def op(tx: Transaction) -> None:
        tx.conn.execute(sa.delete(claim_table))
        tx.wake(f"claim:{claim.id}")

    await served.plane.database.write(op)
    answer = await asyncio.wait_for(waiting, patience(10))
    assert (answer.status_code, answer.json()["reason"]) == (409, "LeaseLost")


async def _cancel_rollout(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await served.admin.post("/v1/rolloutjobs/job/cancel", json={"rollout": lease["rollout"]})


async def _cancel_job(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await served.driver.post("/v1/rolloutjobs/job/cancel", json={})


async def _delete_job(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    assert (await served.driver.delete("/v1/rolloutjobs/job")).status_code == 202


async def _fail(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await worker.fail(lease, "SandboxLost", return_to="init")


async def _fail_for_good(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await worker.fail(lease, "Broken", retryable=False)


async def _hand_over(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await worker.fail(lease, "Draining", counts=False, return_to="init")


async def _worker_dies(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await served.later(3600, sweeps.expire)


async def _delete_and_purge(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await _delete_job(served, worker, lease)
    await served.until_stored()
    await served.plane.sweep()


async def _other_sandbox(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    """Bring Init to another sandbox than the one that was claimed."""
    await worker.complete(worker.result(lease))


WAYS: list[Callable[..., Any]] = [
    _cancel_rollout,
    _cancel_job,
    _delete_job,
    _delete_and_purge,
    _fail,
    _fail_for_good,
    _hand_over,
    _worker_dies,
]


@pytest.mark.parametrize(
    ("stage", "way"),
    [("init", _other_sandbox), *((stage, way) for stage in ("init", "run") for way in WAYS)],
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
async def test_no_way_out_of_a_rollout_leaks_its_sandbox(
    served: Any, worker: Any, stage: str, way: Callable[..., Any]
) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    await _put(served, claim, **BOUND)
    if stage == "run":
        await worker.complete(worker.result(lease, sandbox=_handle(claim)))
        (lease,) = await worker.lease(run=1)
    assert await _states(served) == {claim["id"]: "Bound"}, "what a rollout needs is kept"
    await way(served, worker, lease)
    # A lease that begins another attempt needs a claim of its own.
    await worker.lease(init=1)
    assert await _states(served) == {claim["id"]: "Released"}
    refused = await _file(served, lease)
    assert refused.status_code in (404, 409), "no claim in the name of a lost lease"
    await _put(served, claim, state="Removed")
    assert (await _listed(served)).claims == []


async def test_cancelling_a_job_gives_its_sandboxes_up_at_once(served: Any, worker: Any) -> None:
    for lease in await worker.lease(init=3):
        await _filed(served, lease)
    await served.admin.post("/v1/rolloutjobs/job/cancel", json={})
    assert {claim.state for claim in (await _listed(served)).claims} == {"Released"}


async def test_a_dead_eval_worker_leaves_the_sandbox_to_the_next(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    await worker.complete(worker.result(lease, sandbox=_handle(claim)))
    (run,) = await worker.lease(run=1)
    await worker.complete(worker.result(run))
    await worker.lease(eval=1)
    await served.later(3600, sweeps.expire)
    assert list(await _states(served)) == [claim["id"]]
    (again,) = await worker.lease(eval=1)
    assert again["sandbox"]["id"] == claim["id"]
    assert (await _get(served, claim)).json()["state"] == "Pending"


async def test_claims_survive_a_restart(settings: Any) -> None:
    async with serving(settings) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest())
        worker = Worker(served.worker, node="kubernetes")
        kept, lost = await worker.lease(init=2)
        first, second = [await _filed(served, lease) for lease in (kept, lost)]
        await _put(served, first, **BOUND)
        before = await _listed(served)
        await served.admin.post("/v1/rolloutjobs/job/cancel", json={"rollout": lost["rollout"]})
    async with serving(settings, sweep_seconds=0.05) as served:

        async def swept() -> ClaimList | None:
            found = await _listed(served)
            return found if found.claims[1].state == "Released" else None

        after = await eventually(swept)
        assert [claim.id for claim in after.claims] == [first["id"], second["id"]]
        assert after.claims[0].secret == BOUND["secret"]
        assert after.revision != before.revision
        assert (await _listed(served)).revision == after.revision
    async with serving(settings) as served:
        assert (await _listed(served, revision=after.revision)).revision == after.revision
        await _put(served, second, state="Removed")
        assert (await _listed(served, revision=after.revision, wait=60)).revision != after.revision


async def test_filing_is_refused_where_no_init_lease_is_held(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    unknown = await _file(served, lease | {"rollout": "nobody"})
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "RolloutNotFound")
    for token in (lease["token"] + 1, lease["token"] + 7):
        stale = await _file(served, lease | {"token": token})
        assert (stale.status_code, stale.json()["reason"]) == (409, "LeaseLost")
    await _filed(served, lease)
    other = await _file(served, lease, shape=SHAPE | {"image": "other"})
    assert (other.status_code, other.json()["reason"]) == (409, "AlreadyExists")
    await worker.complete(worker.result(lease))
    (run,) = await worker.lease(run=1)
    assert (await _file(served, run)).json()["reason"] == "LeaseLost", "Run has its sandbox from Init"


async def test_the_number_of_claims_is_bounded(settings: Any) -> None:
    async with serving(settings, max_claims=1) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest())
        one, two = await Worker(served.worker).lease(init=2)
        first = await _filed(served, one)
        full = await _file(served, two)
        assert (full.status_code, full.json()["reason"]) == (429, "QueueFull")
        assert int(full.headers["retry-after"]) > 0
        assert (await _filed(served, one))["id"] == first["id"], "a repeat is none more"
        await served.worker.delete(f"/v1/claims/{first['id']}")
        assert (await _file(served, two)).status_code == 429, "its pod is still there"
        await _put(served, first, state="Removed")
        assert (await _file(served, two)).status_code == 200


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"state": "Bound", "secret": "s"}, "address"),
        ({"state": "Bound", "secret": "s", "address": "10.0.0.1:7411"}, "address"),
        ({"state": "Bound", "address": "tcp://10.0.0.1:7411"}, "secret"),
        ({"state": "Failed"}, "reason"),
        ({"state": "Gone"}, "state"),
        ({"state": "Removed", "colour": "red"}, "colour"),
    ],
)
async def test_wrong_reports_are_refused_by_field(served: Any, worker: Any, body: Any, field: str) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    answer = await _put(served, claim, **body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["errors"][0].startswith(f"{field}: ")
    assert (await _get(served, claim)).json()["state"] == "Pending"


async def test_wrong_claims_are_refused_by_field(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    answer = await _file(served, lease, shape=SHAPE | {"cpu": "many"})
    assert answer.status_code == 422
    assert answer.json()["errors"][0].startswith("shape.cpu: ")
    assert (await _file(served, lease, wait=61)).status_code == 422
    assert (await served.driver.get("/v1/claims", params={"wait": 61})).status_code == 422


async def test_roles(served: Any, worker: Any) -> None:
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    one = f"/v1/claims/{claim['id']}"
    for path in ("/v1/claims", "/v1/claims/"):
        assert (await served.worker.get(path)).status_code == 403
    assert (await served.worker.put(f"{one}/status", json=BOUND)).status_code == 403
    assert (await served.worker.get(f"{one}/status")).status_code == 403
    assert (await served.anonymous.get(one)).status_code == 401
    for client in (served.worker, served.driver, served.admin):
        assert (await client.get(one)).status_code == 200
    body = {"rollout": lease["rollout"], "token": lease["token"], "shape": SHAPE}
    assert (await served.driver.post("/v1/claims", json=body)).status_code == 200
    assert (await served.driver.delete(one)).status_code == 204


async def test_one_namespace(served: Any, worker: Any) -> None:
    await served.admin.post("/v1/rolloutjobs?namespace=team", json=make_manifest("other"))
    for lease in await worker.lease(init=8):
        await _filed(served, lease)
    assert len((await _listed(served)).claims) == 5
    assert {claim.job for claim in (await _listed(served, namespace="team")).claims} == {"other"}
    assert len((await _listed(served, namespace="team")).claims) == 2
    assert (await _listed(served, namespace="nobody")).claims == []


async def test_metrics(served: Any, worker: Any) -> None:
    one, two = await worker.lease(init=2)
    await _put(served, await _filed(served, one), **BOUND)
    await _put(served, await _filed(served, two), state="Failed", reason="QuotaExceeded")
    text = (await served.admin.get("/metrics")).text
    assert 'rollyard_claims{namespace="default",state="Bound"} 1.0' in text
    assert 'rollyard_claim_failures_total{reason="QuotaExceeded"} 1.0' in text
    assert "rollyard_claim_seconds_count 1.0" in text


async def test_a_lease_cycle_without_claims_asks_nothing_of_them(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        asked.append(statement)

    def watch(tx: Transaction) -> None:
        """Note what SQLite's driver runs by itself, too."""
        if tx.sqlite:
            driver_of(tx.conn).set_trace_callback(asked.append)

    async def idle(_plane: ControlPlane) -> None:
        """Keep the sweep from running.

        It reads claims, and runs beside the lease cycle and once at the start.
        """

    monkeypatch.setattr(ControlPlane, "sweep", idle)
    async with serving(settings) as served:
        assert (await served.admin.post("/v1/rolloutjobs", json=make_manifest())).status_code == 201
        sa.event.listen(served.plane.database.writer, "before_cursor_execute", note)
        await served.plane.database.write(watch)
        assert await Worker(served.worker).finish_all() == 2
        sa.event.remove(served.plane.database.writer, "before_cursor_execute", note)
    assert any("rollouts" in statement for statement in asked)
    assert not any("claims" in statement for statement in asked)


async def _in_eval(served: Any, worker: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a rollout's claim of Init, bound, and its Eval lease."""
    (lease,) = await worker.lease(init=1)
    claim = await _filed(served, lease)
    await _put(served, claim, **BOUND)
    await worker.complete(worker.result(lease, sandbox=_handle(claim)))
    (run,) = await worker.lease(run=1)
    await worker.complete(worker.result(run))
    (evaluated,) = await worker.lease(eval=1)
    return claim, evaluated


async def _fail_and_keep(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await worker.fail(lease, "EvalSandboxFailed")


async def _evaluate(served: Any, worker: Any, lease: dict[str, Any]) -> None:
    await worker.complete(worker.result(lease))


@pytest.mark.parametrize(
    "way", [*WAYS, _fail_and_keep, _evaluate], ids=lambda way: str(way.__name__).strip("_")
)
async def test_an_eval_lease_has_a_claim_beside_runs_and_takes_it_along(
    served: Any, worker: Any, way: Callable[..., Any]
) -> None:
    first, lease = await _in_eval(served, worker)
    fresh = await _filed(served, lease)
    await _put(served, fresh, **BOUND)
    assert fresh["id"] != first["id"]
    assert (await _filed(served, lease))["id"] == fresh["id"], "the same lease is the same claim"
    assert await _states(served) == {first["id"]: "Bound", fresh["id"]: "Bound"}
    await way(served, worker, lease)
    states = await _states(served)
    assert states.pop(fresh["id"]) == "Released"
    still = "Bound" if way in (_fail_and_keep, _worker_dies) else "Released"
    assert states == {first["id"]: still}, "what Run left is there for another Eval, and only for that"
    assert (await _file(served, lease)).status_code in (404, 409), "no claim in the name of a lost lease"


@pytest.mark.attack(
    "rollouts that wait for Eval hold every place of a node",
    boundary="evaluation",
    surface="fresh Eval sandboxes",
    stopped_by="places are kept for Eval; claims, too",
)
async def test_claims_of_init_never_take_those_that_eval_needs(settings: Any) -> None:
    async with serving(settings, max_claims=8) as served:
        tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(9)]}
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks))
        worker = Worker(served.worker, node="kubernetes")
        _, lease = await _in_eval(served, worker)
        answers = [await _file(served, each) for each in await worker.lease(init=8)]
        assert [answer.status_code for answer in answers] == [200] * 6 + [429] * 2
        await _filed(served, lease)
