"""Pages are bounded in bytes, cursors know their job, and nothing is skipped or repeated."""

from __future__ import annotations

import asyncio
import base64
import json
import random
from typing import Any

import msgpack
import pyarrow.parquet as pq
import pytest
from rollyard_api.core import cursors
from rollyard_api.jobs import jobs
from rollyard_api.settings import Settings
from rollyard_api.storage import jobs as job_rows
from rollyard_client import AsyncClient
from rollyard_client.call import ready
from rollyard_client.errors import JobReplaced
from rollyard_client.paging import Cursor, Files, Following, Listing
from rollyard_client.requests.results import Page
from rollyard_testing.api.plane import Worker, listed, make_manifest, read_pages, serving, start_api
from rollyard_testing.waiting import eventually

NOTES = "n" * 3000
PAGE = 8_000


def tasks(count: int) -> dict[str, Any]:
    return {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(count)]}


async def finish(worker: Any) -> None:
    """Take every rollout to its end, with a record of about 4 kB."""
    while leases := await worker.lease(init=16, run=16, eval=16):
        results = []
        for one in leases:
            item = worker.result(one)
            if one["stage"] == "run":
                item["trajectory"] = item["trajectory"] | {"metadata": {"notes": NOTES}}
            elif one["stage"] == "eval":
                item["reward"] = float(one["sample_index"])
            results.append(item)
        assert set(await worker.complete(*results)) == {"accepted"}


async def test_a_backlog_is_stored_without_pauses(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that came faster than one part takes in a second do not pile up."""
    monkeypatch.setattr("rollyard_api.service.FLUSH_SECONDS", 3600.0)
    monkeypatch.setattr("rollyard_api.trajectories.archive.PART_RECORDS", 2)
    monkeypatch.setattr("rollyard_api.service.BACKLOG", 3)
    async with serving(settings) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks(9), samplesPerTask=1))
        await finish(Worker(served.worker))
        assert await served.plane.archive.unstored() == 9
        await served.plane.flush()
        assert await served.plane.archive.unstored() == 1, "less than a backlog waits for the next round"
        await served.plane.flush()
        assert await served.plane.archive.unstored() == 0


ENORMOUS_PAGES = pytest.mark.attack(
    "enormous records or groups fill the control plane's memory",
    boundary="tenants",
    surface="pages of results",
    stopped_by="pages are bounded in bytes; what is larger is sent in parts",
)


@ENORMOUS_PAGES
@pytest.mark.parametrize("where", ["database", "store"])
async def test_pages_end_early_and_the_cursor_goes_on(
    settings: Settings, tmp_path: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "database":
        monkeypatch.setattr("rollyard_api.service.FLUSH_SECONDS", 3600.0)
    async with serving(settings, page_bytes=PAGE) as served:
        await served.submit(tasks=tasks(6), samplesPerTask=2)
        await finish(Worker(served.worker))
        if where == "store":
            await served.until_stored()
        path = "/v1/rolloutjobs/job/trajectories"

        ids: list[str] = []
        pages = 0
        async for page in read_pages(served.admin, path, limit=1000):
            assert len(ids) < 12, "only the last page says that it is the last"
            lines = page.content.splitlines()
            assert lines, "a page makes progress"
            assert len(page.content) <= PAGE
            ids += [json.loads(line)["id"] for line in lines]
            pages += 1
        assert pages >= 6
        assert len(ids) == len(set(ids)) == 12

        packed: list[str] = []
        served.admin.headers["Accept"] = "application/msgpack"
        async for page in read_pages(served.admin, path):
            assert len(packed) < 12
            packed += [one["id"] for one in msgpack.unpackb(page.content)]
        assert packed == ids

        groups: list[str] = []
        served.admin.headers["Accept"] = "application/x-ndjson"
        async for page in read_pages(served.admin, "/v1/rolloutjobs/job/groups", limit=256):
            assert len(groups) < 6
            found = [json.loads(line) for line in page.content.splitlines()]
            assert all(len(group["trajectories"]) == 2 for group in found)
            groups += [group["group_id"] for group in found]
        assert sorted(groups) == [f"t{i}" for i in range(6)]


@ENORMOUS_PAGES
async def test_one_record_larger_than_a_page_has_a_page_to_itself(settings: Settings) -> None:
    async with serving(settings, page_bytes=1000) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks(2), samplesPerTask=3))
        await finish(Worker(served.worker))
        path = "/v1/rolloutjobs/job"
        page = await served.admin.get(f"{path}/trajectories")
        (line,) = page.content.splitlines()
        one = await served.admin.get(f"{path}/rollouts/{json.loads(line)['id']}")
        assert one.json() == json.loads(line)
        found = []
        cursor = ""
        for _ in range(2):
            answer = await served.admin.get(f"{path}/groups", params={"cursor": cursor})
            (group,) = [json.loads(line) for line in answer.content.splitlines()]
            found.append(group["group_id"])
            assert [t["sample_index"] for t in group["trajectories"]] == [0, 1, 2]
            cursor = answer.headers["rollyard-cursor"]
        assert sorted(found) == ["t0", "t1"]
        assert answer.headers["rollyard-finished"] == "true"
        refused = await served.admin.get(f"{path}/groups", headers={"Accept": "application/msgpack"})
        assert (refused.status_code, refused.json()["reason"]) == (413, "GroupTooLarge")


async def test_a_group_larger_than_a_page_whose_first_sample_failed(settings: Settings) -> None:
    async with serving(settings, page_bytes=1000) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks(1), samplesPerTask=4))
        worker = Worker(served.worker)
        leases = await worker.lease(init=4)
        (failing,) = (one for one in leases if one["sample_index"] == 0)
        await worker.fail(failing, "BadTask", retryable=False)
        await worker.complete(*[worker.result(one) for one in leases if one is not failing])
        await finish(worker)
        answer = await served.admin.get("/v1/rolloutjobs/job/groups")
        (group,) = [json.loads(line) for line in answer.content.splitlines()]
        assert [one["sample_index"] for one in group["trajectories"]] == [1, 2, 3]


ENORMOUS_LISTS = pytest.mark.attack(
    "large manifests, tasks or trajectories make one answer of gigabytes",
    boundary="tenants",
    surface="lists and leases",
    stopped_by="they end at the number of bytes that bounds pages of results",
)


@ENORMOUS_LISTS
async def test_lists_of_jobs_and_rollouts_are_bounded_too(settings: Settings) -> None:
    big = {"inline": [{"id": "t", "prompt": "p" * 5000}]}
    async with serving(settings, page_bytes=PAGE) as served:
        for n in range(5):
            await served.submit(f"j{n}", tasks=big, samplesPerTask=20)
        for path, expected in (("/v1/rolloutjobs", 5), ("/v1/rolloutjobs/j0/rollouts", 20)):
            assert len(await listed(served.admin, path)) == expected, path
            assert "continue" in (await served.admin.get(path)).json()["metadata"], path


@ENORMOUS_LISTS
async def test_leases_carry_a_bounded_number_of_bytes(settings: Settings) -> None:
    big = {"inline": [{"id": f"t{i}", "prompt": "p" * 5000} for i in range(6)]}
    async with serving(settings, page_bytes=12_000) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=big))
        worker = Worker(served.worker)
        (first,) = await worker.lease(init=1)
        await worker.complete(worker.result(first))
        both = await worker.lease(init=16, run=16)
        assert [one["stage"] for one in both] == ["run", "init"], "the stages share the room"
        seen = [one["rollout"] for one in both]
        while leases := await worker.lease(init=16):
            assert len(leases) <= 2
            seen += [one["rollout"] for one in leases]
        assert len(set(seen)) == len(seen) == 6, "what had no room stayed in its queue"


# Cursors.


CURSOR_OF_A_DELETED_JOB = pytest.mark.attack(
    "a cursor of a deleted job skips results of the job that has its name now",
    boundary="tenants",
    surface="cursors",
    stopped_by="cursors carry the job's uid",
)


@CURSOR_OF_A_DELETED_JOB
async def test_cursors_of_a_deleted_job_are_gone(served: Any) -> None:
    path = "/v1/rolloutjobs/job"
    await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    await Worker(served.worker).finish_all()
    old = {
        what: (await served.admin.get(f"{path}/{what}", params={"limit": 1})).headers["rollyard-cursor"]
        for what in ("trajectories", "groups")
    }
    listed = await served.admin.get(f"{path}/rollouts", params={"limit": 1})
    rollout = listed.json()["metadata"]["continue"]
    assert (await served.admin.delete(path)).status_code == 202
    assert (
        await served.admin.get(f"{path}/trajectories", params={"cursor": old["trajectories"]})
    ).status_code == 404
    made = await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=2))
    asked = [(f"{path}/{what}", {"cursor": cursor}) for what, cursor in old.items()]
    asked.append((f"{path}/rollouts", {"continue": rollout}))
    for url, query in asked:
        refused = await served.admin.get(url, params=query)
        assert (refused.status_code, refused.json()["reason"]) == (410, "CursorGone"), url
    kinds: tuple[cursors.Kind, ...] = ("trajectories", "groups")
    for kind in kinds:
        past = cursors.text(kind, made.json()["metadata"]["uid"], 1)
        beyond = await served.admin.get(f"{path}/{kind}", params={"cursor": past})
        # It is not answered as finished, with no results.
        assert (beyond.status_code, beyond.json()["reason"]) == (409, "CursorBeyondEnd")


async def test_garbage_is_refused_by_the_name_of_the_parameter(served: Any) -> None:
    uid = (await served.admin.post("/v1/rolloutjobs", json=make_manifest())).json()["metadata"]["uid"]
    await Worker(served.worker).finish_all()
    good = cursors.text("trajectories", uid, 1)
    packed = base64.urlsafe_b64encode(b"\xff" * 17).decode()
    bad = ["x", "1", "-1", "1.5", "9" * 19, "٣", "v1", "v1.t"]
    bad += [good[:-2], f"{good}x", f"{good}.1", good.replace("v1", "v2")]
    bad += [good.replace(".t.", ".g."), f"v1.t.{packed}.1", "v1.t.!.1", good[:-1] + "-1", "v1." * 100]
    for what, parameter, values in (
        ("trajectories", "cursor", bad),
        ("groups", "cursor", [*bad, good]),
        ("rollouts", "continue", ["x", "v1", good]),
    ):
        for value in values:
            if what == "groups" and value == good.replace(".t.", ".g."):
                continue
            refused = await served.admin.get(f"/v1/rolloutjobs/job/{what}", params={parameter: value})
            assert (refused.status_code, refused.json()["reason"]) == (400, "CursorInvalid"), (what, value)
            assert refused.json()["errors"][0].startswith(f"{parameter}: ")
    stream = await served.admin.get("/v1/rolloutjobs/job/events", headers={"Last-Event-ID": "nonsense"})
    assert (stream.status_code, stream.json()["reason"]) == (400, "CursorInvalid")


async def test_a_poll_that_waits_while_its_job_is_replaced_is_told(served: Any) -> None:
    path = "/v1/rolloutjobs/job"
    await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    poll = asyncio.create_task(served.admin.get(f"{path}/trajectories", params={"wait": 60}))
    await eventually(lambda: served.plane.polls.open("default"))
    job = await served.plane.database.read(lambda conn: job_rows.find(conn, "default", "job"))

    def replace(tx: Any) -> None:
        jobs.delete(tx, "default", "job")

    await served.plane.database.write(replace)
    made = await served.admin.post("/v1/rolloutjobs", json=make_manifest())
    assert made.json()["metadata"]["uid"] != job.uid
    await served.plane.cancel_rest(job.id)
    answer = await poll
    assert (answer.status_code, answer.json()["reason"]) in ((410, "CursorGone"), (404, "JobNotFound"))


class Simulation:
    """A trainer that keeps reading while somebody submits, completes, deletes and submits again."""

    def __init__(self, seed: int, served: Any, worker: Any) -> None:
        self.rng = random.Random(seed)
        self.served, self.worker = served, worker
        self.lives = 0
        self.there = False
        self.ended: dict[str, set[str]] = {}
        """The rollouts that have ended, by uid of the job."""
        self.uid = ""
        self.cursor = ""
        self.read: dict[str, list[str]] = {}
        """The rollouts that were read with one cursor, by uid of the job."""
        self.reading = ""

    async def submit(self) -> None:
        if not self.there:
            made = await self.served.admin.post(
                "/v1/rolloutjobs", json=make_manifest(tasks=tasks(self.rng.randint(1, 4)), samplesPerTask=2)
            )
            self.uid, self.there = made.json()["metadata"]["uid"], True
            self.ended[self.uid] = set()
            self.lives += 1

    async def complete(self) -> None:
        for stage in ("eval", "run", "init"):
            for lease in await self.worker.lease(**{stage: self.rng.randint(1, 3)}):
                assert await self.worker.complete(self.worker.result(lease)) == ["accepted"]
                if stage == "eval":
                    self.ended[lease["job_uid"]].add(lease["rollout"])

    async def delete(self) -> None:
        if self.there:
            await self.served.admin.delete("/v1/rolloutjobs/job")
            self.there = False
            if self.rng.random() < 0.5:
                await self.served.until_stored()
                await self.served.plane.sweep()

    async def read_some(self) -> None:
        query = {"cursor": self.cursor, "limit": self.rng.randint(1, 3), "status": "succeeded"}
        page = await self.served.admin.get("/v1/rolloutjobs/job/trajectories", params=query)
        if page.status_code in (404, 410):
            assert not self.there if page.status_code == 404 else self.reading != self.uid
            if page.status_code == 410:
                self.cursor = ""
            return
        assert page.status_code == 200, page.text
        assert self.cursor == "" or self.reading == self.uid, "an old cursor was taken for one of this job"
        self.reading = self.uid
        if not self.cursor:
            self.read[self.uid] = []
        found = [json.loads(line)["id"] for line in page.content.splitlines()]
        seen = self.read[self.uid]
        assert not set(found) & set(seen), "a result was repeated"
        seen += found
        self.cursor = page.headers["rollyard-cursor"]
        if len(found) < query["limit"]:
            assert set(seen) == self.ended[self.uid], "a result was skipped"


@CURSOR_OF_A_DELETED_JOB
@pytest.mark.parametrize("seed", range(4))
async def test_no_sequence_of_calls_skips_or_repeats_a_result(seed: int, served: Any) -> None:
    run = Simulation(seed, served, Worker(served.worker))
    for _ in range(60):
        await run.rng.choice(
            [run.submit, run.complete, run.complete, run.read_some, run.read_some, run.delete]
        )()
    assert run.lives > 2


# The client.


def page(count: int, cursor: str, *, finished: bool = False) -> Page:
    return Page([b"{}"] * count, cursor, finished, [cursor] * count)


def test_clients_do_not_take_a_short_page_for_the_end() -> None:
    walk = Cursor(lambda _cursor, _wait: ready(), json.loads, Following("j", "default"))  # type: ignore[arg-type,return-value]
    walk.take(page(1, "v1.t.x.1"))
    assert not walk.done
    walk.take(page(1, "v1.t.x.2", finished=True))
    assert walk.done
    assert [walk.hand_out(), walk.hand_out()] == [{}, {}]
    assert not walk.waiting
    listing = Listing(lambda _after: ready())  # type: ignore[arg-type,return-value,var-annotated]
    assert listing.take(([1], "next")) == [1]
    assert not listing.done
    files = Files(lambda _cursor: ready())  # type: ignore[arg-type,return-value]
    assert files.take((b"a", "v1.t.x.3", False)) == [b"a"]
    assert not files.done
    assert files.take((b"", "v1.t.x.3", False)) == []
    assert files.done
    empty = Files(lambda _cursor: ready())  # type: ignore[arg-type,return-value]
    assert empty.take((b"no rows", "v1.t.x.0", False)) == [b"no rows"]
    assert empty.take((b"no rows", "v1.t.x.0", False)) == []
    assert empty.done


async def test_the_sdk_raises_typed_errors_and_exports_all(tmp_path: Any) -> None:
    import httpx

    with start_api(tmp_path, "--page-bytes", "6000") as process:
        async with (
            AsyncClient(process.url, process.tokens["admin"]) as client,
            httpx.AsyncClient(
                base_url=process.url, headers={"Authorization": f"Bearer {process.tokens['worker']}"}
            ) as http,
        ):
            job = await client.submit(make_manifest(tasks=tasks(6)))
            await finish(Worker(http))
            assert len([one async for one in client.trajectories("job")]) == 6
            assert len([one async for one in client.groups("job", dropped=True)]) == 6
            rows = 0
            parts = [part async for part in client.parquet("job")]
            for n, part in enumerate(parts):
                (tmp_path / f"{n}.parquet").write_bytes(part)
                rows += pq.read_table(tmp_path / f"{n}.parquet").num_rows
            assert rows == 6
            assert len(parts) > 1
            beyond = cursors.text("trajectories", job.metadata.uid or "", 7)
            with pytest.raises(JobReplaced) as refused:
                await anext(aiter(client.trajectories("job", cursor=beyond)))
            assert (refused.value.status, refused.value.reason) == (409, "CursorBeyondEnd")
            await client.delete("job")
            await client.submit(make_manifest(tasks=tasks(6)))
            with pytest.raises(JobReplaced) as gone:
                await anext(
                    aiter(client.groups("job", cursor=cursors.text("groups", job.metadata.uid or "", 1)))
                )
            assert (gone.value.status, gone.value.reason) == (410, "CursorGone")
