"""Who may report that a worker has died: nobody but a driver, because the report takes leases away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_testing.adversary.restplane import Yard, control_plane, result

pytestmark = pytest.mark.attack(boundary="worker", surface="`/v1/workers/died`")


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path) as made:
        await made.submit("mine", tasks=2)
        await made.submit("other", tasks=2)
        yield made


@pytest.mark.attack(
    "a worker, or whoever has its token, reports a living worker as dead to take its rollouts",
    stopped_by="only a driver may report",
)
@pytest.mark.parametrize("who", ["job of its own", "job of another", "worker", "metrics", "nobody"])
async def test_a_lease_is_not_taken_away_by_a_false_report(yard: Yard, who: str) -> None:
    (lease, *_) = await yard.lease(yard.client(yard.job_token("other")), "other", init=2)
    token = {
        "job of its own": yard.job_token("other"),
        "job of another": yard.job_token("mine"),
        "worker": yard.plane.tokens.current("worker"),
        "metrics": yard.plane.tokens.by_role["metrics"][0],
        "nobody": None,
    }[who]
    report = {"namespace": "default", "job": "other", "worker": "w-other"}
    answer = await yard.client(token).post("/v1/workers/died", json=report)
    assert answer.status_code == (401 if who == "nobody" else 403), answer.text
    assert "returned" not in answer.text
    done = await yard.worker.post(
        "/v1/leases/complete", json={"worker": "w-other", "results": [result(lease)]}
    )
    assert done.json()["outcomes"][0]["outcome"] == "accepted"


@pytest.mark.attack(
    "one job's workers take the name of another job's worker, so that its leases go with theirs",
    stopped_by="the report names the job, and no other job's leases are looked at",
)
async def test_a_worker_cannot_end_the_leases_of_another_job_by_taking_its_name(yard: Yard) -> None:
    """Workers choose their names. A job whose workers take another job's names gains nothing."""
    (lease, *_) = await yard.lease(yard.client(yard.job_token("other")), "other", init=2)
    ask = {"worker": "w-other", "node": "n", "capacity": {"init": 2}, "job": "mine"}
    await yard.client(yard.job_token("mine")).post("/v1/leases", json=ask)
    driver = yard.client(yard.plane.tokens.current("driver"))
    report = {"namespace": "default", "job": "mine", "worker": "w-other"}
    assert (await driver.post("/v1/workers/died", json=report)).json()["returned"] == 2
    done = await yard.worker.post(
        "/v1/leases/complete", json={"worker": "w-other", "results": [result(lease)]}
    )
    assert done.json()["outcomes"][0]["outcome"] == "accepted"
