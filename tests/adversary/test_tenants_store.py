"""A trajectory store that hangs makes its own readers wait, and nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from rollyard_api.core.bulkhead import SPARE
from rollyard_api.trajectories.archive import READ_THREADS, WRITE_THREADS
from rollyard_testing.adversary.restplane import Yard, control_plane
from rollyard_testing.adversary.tenants import PATIENCE, HangingStore, finish, read, stored
from rollyard_testing.waiting import eventually

pytestmark = pytest.mark.attack(boundary="tenants", surface="trajectory store")


READERS = 24


@pytest.fixture(autouse=True)
def _store() -> Iterator[None]:
    fsspec.register_implementation("hang", HangingStore, clobber=True)
    HangingStore.reset()
    yield
    HangingStore.free()


async def _all_places_hang(yard: Yard) -> None:
    async def look() -> bool:
        return HangingStore.hanging >= READ_THREADS

    await eventually(look)


@pytest.mark.attack(
    "it hangs, and readers of one tenant's results hold readiness, lists, leases and all other results up",
    stopped_by="it is read by threads of its own with a time-out, never within a read of the database",
)
async def test_readers_of_a_hanging_store_hold_nobody_else_up(tmp_path: Path) -> None:
    async with control_plane(tmp_path, trajectories="hang://a", store_seconds=PATIENCE) as yard:
        await yard.submit("victim", tasks=4)
        await yard.submit("reader", tasks=4)
        assert await finish(yard, "reader") == 4
        await stored(yard)
        HangingStore.hangs = True
        admin, anonymous = yard.admin, yard.client(None)
        readers = [asyncio.create_task(read(admin, "reader")) for _ in range(READERS)]
        readers.append(asyncio.create_task(admin.get("/v1/rolloutjobs/reader/groups")))
        await _all_places_hang(yard)

        assert (await anonymous.get("/readyz")).status_code == 200
        assert len((await admin.get("/v1/rolloutjobs")).json()["items"]) == 2
        assert await finish(yard, "victim") == 4, "leases and completions go on"
        page = await read(admin, "victim")
        assert page.status_code == 200, "what waits for the store is read from the database"
        assert len(page.content.splitlines()) == 4
        assert (await admin.get("/v1/rolloutjobs/reader/rollouts")).status_code == 200
        assert not any(task.done() for task in readers), "the store does hang"
        # The waiting readers hold places for pages of their own namespace only.
        assert yard.plane.archive.reads.threads == READ_THREADS
        HangingStore.free()
        assert {answer.status_code for answer in await asyncio.gather(*readers)} <= {200, 503}


@pytest.mark.attack(
    "each reader of a store that hangs leaves a thread behind",
    stopped_by="threads are bounded; while all hang, callers get 503 at once, and single probes find out "
    "when the store is back",
)
async def test_a_hanging_store_is_answered_in_time_and_its_threads_are_bounded(tmp_path: Path) -> None:
    async with control_plane(tmp_path, trajectories="hang://b", store_seconds=0.3) as yard:
        await yard.submit("job", tasks=2)
        assert await finish(yard, "job") == 2
        await stored(yard)
        HangingStore.hangs = True
        admin = yard.admin
        for _ in range(4):
            answers = await asyncio.gather(*(read(admin, "job") for _ in range(READERS)))
            for answer in answers:
                assert answer.status_code in (429, 503, 504), answer.text
                assert int(answer.headers["retry-after"]) > 0
        reads = yard.plane.archive.reads
        assert len(reads.hanging) >= READ_THREADS
        assert reads.threads <= SPARE * READ_THREADS
        refused = await read(admin, "job")
        assert refused.status_code in (503, 504)

        # The store is back. Calls that hung before hang for ever, and nobody waits for them.
        HangingStore.hangs = False

        async def back() -> bool:
            return (await read(admin, "job")).status_code == 200

        await eventually(back)
        assert len(reads.hanging) >= READ_THREADS
        reads.seconds = PATIENCE
        answers = await asyncio.gather(*(read(admin, "job") for _ in range(READ_THREADS)))
        assert {answer.status_code for answer in answers} == {200}, "all places are there again"


@pytest.mark.attack(
    "it takes nothing, and the database grows without bound",
    stopped_by="beyond `--max-unstored`, completions get 503 or 507 and are sent again",
)
async def test_a_store_that_takes_nothing_stops_completions_only_where_the_database_is_full(
    tmp_path: Path,
) -> None:
    async with control_plane(tmp_path, trajectories="hang://c", store_seconds=0.1, max_unstored=3) as yard:
        HangingStore.hangs = True
        await yard.submit("job", tasks=6)
        worker = yard.worker
        assert await finish(yard, "job", most=3) == 3

        async def refusing() -> bool:
            return yard.plane.archive.refused is not None

        await eventually(refusing)
        leases = await yard.lease(worker, "job", eval=1)
        body = {"worker": "w-job", "results": [{**_eval(leases[0])}]}
        refused = await worker.post("/v1/leases/complete", json=body)
        assert (refused.status_code, refused.json()["reason"]) == (503, "Unavailable"), refused.text
        assert refused.headers["retry-after"]
        assert yard.plane.archive.writes.threads <= SPARE * WRITE_THREADS
        assert (await yard.client(None).get("/readyz")).status_code == 200
        HangingStore.hangs = False

        async def taken() -> bool:
            return (await worker.post("/v1/leases/complete", json=body)).status_code == 200

        await eventually(taken)
        assert await finish(yard, "job") == 2
        await stored(yard)
        page = await read(yard.admin, "job")
        assert len(page.content.splitlines()) == 6


def _eval(lease: dict[str, object]) -> dict[str, object]:
    return {"rollout": lease["rollout"], "token": lease["token"], "stage": "eval", "reward": 1.0}


@pytest.mark.attack(
    "it hangs while the control plane starts", stopped_by="the start waits for it a bounded time"
)
async def test_the_control_plane_starts_beside_a_hanging_store(tmp_path: Path) -> None:
    HangingStore.hangs = True
    async with control_plane(tmp_path, trajectories="hang://d", store_seconds=0.2) as yard:
        assert (await yard.client(None).get("/readyz")).status_code == 200
