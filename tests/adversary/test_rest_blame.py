"""A holder of a lease tries to take other tenants' backends out of service by blaming them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.backends.circuits import THRESHOLD
from rollyard_testing.adversary.restplane import Yard, control_plane, result
from rollyard_testing.manifests import pool_manifest

pytestmark = pytest.mark.attack(boundary="worker", surface="`/v1/leases/route`")


MINE, THEIRS, SHARED = "http://mine", "http://theirs", "http://shared"
OFTEN = 3 * THRESHOLD


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    """Yield two tenants with a pool each. The author of the first named a server of the second in it."""
    async with control_plane(tmp_path) as made:
        for name, urls in (("mine", [MINE, SHARED]), ("other", [THEIRS, SHARED])):
            manifest = pool_manifest(name, {"model": "tiny"})
            assert (await made.admin.post("/v1/backendpools", json=manifest)).status_code == 201
            body = {"backends": [{"url": url, "ready": True} for url in urls]}
            driver = made.client(made.plane.tokens.current("driver"))
            assert (await driver.put(f"/v1/backendpools/{name}/backends", json=body)).status_code == 200
            await made.submit(name, tasks=4 * THRESHOLD, agent={"type": "tools"}, backendRef={"name": name})
        yield made


async def running(yard: Yard, http: httpx.AsyncClient, n: int) -> list[dict[str, Any]]:
    """Return leases of n rollouts in Run."""
    inits = await yard.lease(http, "mine", init=n)
    done = [result(lease) for lease in inits]
    for one in done:
        one["sandbox"]["node"] = "n-mine"
    answer = await http.post("/v1/leases/complete", json={"worker": "w-mine", "results": done})
    assert answer.status_code == 200, answer.text
    return await yard.lease(http, "mine", run=n)


async def circuits(yard: Yard, pool: str) -> dict[str, str]:
    found = (await yard.admin.get(f"/v1/backendpools/{pool}")).json()["status"]["backends"]
    return {one["url"]: one["circuit"] for one in found}


async def blame(http: httpx.AsyncClient, lease: dict[str, Any], url: str) -> None:
    ask = {"rollout": lease["rollout"], "token": lease["token"], "failed_url": url, "error": "ConnectError"}
    answer = await http.post("/v1/leases/route", json=ask)
    assert answer.status_code == 200, answer.text


@pytest.mark.attack(
    "a lease's holder opens the circuit of another pool's backend by naming its URL",
    stopped_by="only the backend that the control plane assigned is blamed",
)
@pytest.mark.parametrize("holder", ["job", "worker"])
async def test_a_lease_blames_no_backend_of_others(yard: Yard, holder: str) -> None:
    http = yard.client(yard.job_token("mine") if holder == "job" else yard.plane.tokens.current("worker"))
    for lease in await running(yard, http, OFTEN):
        for url in (THEIRS, "http://nowhere"):
            await blame(http, lease, url)
    assert set((await circuits(yard, "other")).values()) == {"Closed"}
    assert set((await circuits(yard, "mine")).values()) == {"Closed"}


@pytest.mark.attack(
    "each lease of a job blames a backend on which it has never been",
    stopped_by="only the backend that was assigned to the lease is blamed",
)
async def test_a_lease_blames_no_backend_but_its_own(yard: Yard) -> None:
    """Each rollout blames the other backend of its pool, on which it has never been."""
    http = yard.client(yard.job_token("mine"))
    for lease in await running(yard, http, OFTEN):
        await blame(http, lease, SHARED if lease["backend"]["url"] == MINE else MINE)
    assert set((await circuits(yard, "mine")).values()) == {"Closed"}


@pytest.mark.attack(
    "an author names another tenant's server in their own pool, and blames it there",
    stopped_by="failures and successes count in the job's own pool alone",
)
async def test_a_backend_that_two_pools_name_is_blamed_in_the_rollouts_own(yard: Yard) -> None:
    http = yard.client(yard.job_token("mine"))
    for lease in await running(yard, http, 4 * THRESHOLD):
        if lease["backend"]["url"] == SHARED:
            await blame(http, lease, SHARED)
    assert (await circuits(yard, "mine"))[SHARED] == "Open", "its own pool sees the failures"
    assert set((await circuits(yard, "other")).values()) == {"Closed"}


REPEATED_BLAME = pytest.mark.attack(
    "one lease blames its backend again and again, also in turn with another",
    stopped_by="a backend is blamed once under each fencing token",
)


@REPEATED_BLAME
async def test_the_same_blame_again_changes_nothing(yard: Yard) -> None:
    http = yard.client(yard.job_token("mine"))
    (lease,) = await running(yard, http, 1)
    for _ in range(OFTEN):
        # The rollout moves to and fro: each call says that the backend failed which the one before assigned.
        for url in (MINE, SHARED):
            await blame(http, lease, url)
    assert set((await circuits(yard, "mine")).values()) == {"Closed"}


@REPEATED_BLAME
async def test_an_earlier_token_blames_nobody(yard: Yard) -> None:
    http = yard.client(yard.job_token("mine"))
    leases = await running(yard, http, OFTEN)
    for lease in leases:
        ask = {"rollout": lease["rollout"], "token": lease["token"] - 1}
        told = await http.post("/v1/leases/route", json=ask | {"failed_url": lease["backend"]["url"]})
        assert (told.status_code, told.json()["reason"]) == (409, "LeaseLost")
    assert set((await circuits(yard, "mine")).values()) == {"Closed"}
