"""Records with raw arrays hold, number by number, what the JSON lines hold."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
from rollyard_api.core.problems import Unavailable
from rollyard_api.settings import Settings
from rollyard_api.trajectories.object_store import ObjectMissing, open_store
from rollyard_api.trajectories.packed import ARRAYS, HEAD_BYTES, joined, of_segments, packed, places
from rollyard_client import AsyncClient, Client, TrajectoryArrays
from rollyard_client.training.packed import trajectories
from rollyard_crds.token_arrays import PackedSegment
from rollyard_testing.api.plane import Worker, make_manifest, read_pages, serving, start_api

PATH = "/v1/rolloutjobs/job/trajectories"
Record = dict[str, Any]


def plain(value: Any) -> Any:
    """Return the list that a value of a packed segment stands for."""
    match value:
        case {"dtype": dtype, "data": data}:
            return np.frombuffer(data, dtype).tolist()
        case {"runs": runs}:
            return [version for version, count in runs for _ in range(count)]
    return value


def unpacked(record: Record) -> Record:
    segments = [{name: plain(value) for name, value in one.items()} for one in record["segments"]]
    return record | {"segments": segments}


async def both(served: Any, path: str) -> tuple[list[Record], bytes]:
    """Return the documents of a page as JSON has them, and the page with raw arrays."""
    lines = (await served.admin.get(path, params={"limit": 100})).content.splitlines()
    answer = await served.admin.get(path, params={"limit": 100}, headers={"Accept": ARRAYS})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == ARRAYS
    return [json.loads(line) for line in lines], answer.content


async def same(served: Any) -> bytes:
    """Return the page with raw arrays, after a look whether it holds what the JSON lines hold."""
    documents, page = await both(served, PATH)
    assert documents
    assert [unpacked(record) for record in msgpack.unpackb(page)] == documents
    read = trajectories(page, ARRAYS)
    for one, document in zip(read, documents, strict=True):
        assert {**one.record, "segments": document["segments"]} == document
        for mine, segment in zip(one.segments, document["segments"], strict=True):
            assert mine.loss_mask.tolist() == segment["loss_mask"]
            assert mine.logprobs.tolist() == segment["logprobs"]
            assert mine.logprobs.dtype.kind == "f"
    groups, answered = await both(served, "/v1/rolloutjobs/job/groups")
    assert [
        group | {"trajectories": [unpacked(one) for one in group["trajectories"]]}
        for group in msgpack.unpackb(answered)
    ] == groups
    return page


@pytest.mark.parametrize("page_bytes", [16 << 20, 1000], ids=["pages", "groups larger than a page"])
async def test_pages_from_the_database_and_the_store(
    settings: Settings, monkeypatch: Any, page_bytes: int
) -> None:
    monkeypatch.setattr("rollyard_api.service.FLUSH_SECONDS", 3600.0)
    async with serving(settings, page_bytes=page_bytes) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=3))
        await Worker(served.worker).finish_all()
        before = await same(served)
        await served.plane.flush()
        assert await served.plane.archive.unstored() == 0
        assert await same(served) == before


async def test_a_page_whose_records_are_stored_in_part(settings: Settings, monkeypatch: Any) -> None:
    """Members of one group lie in two parts and in the database, and come in the order of their samples."""
    monkeypatch.setattr("rollyard_api.service.FLUSH_SECONDS", 3600.0)
    async with serving(settings) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest("other", samplesPerTask=1))
        await Worker(served.worker).finish_all()
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=4))
        worker = Worker(served.worker)
        leases = await worker.reach("eval", 8)
        ids = {}
        for sample in (2, 0, 3, 1):
            own = [lease for lease in leases if lease["sample_index"] == sample]
            results = [worker.result(one, reward=float(sample)) for one in own]
            assert await worker.complete(*results) == ["accepted"] * 2
            ids[sample] = [one["rollout"] for one in own]
            if sample in (0, 3):
                await served.plane.flush()
        assert await served.plane.archive.unstored() == 2
        await same(served)
        lines = [json.loads(line) for line in (await served.admin.get(PATH)).content.splitlines()]
        ended = [rollout for sample in (2, 0, 3, 1) for rollout in ids[sample]]
        assert [(one["id"], one["reward"]) for one in lines] == [
            (rollout, float(rollout[-1])) for rollout in ended
        ]
        answer = await served.admin.get("/v1/rolloutjobs/job/groups")
        for group in map(json.loads, answer.content.splitlines()):
            assert [one["reward"] for one in group["trajectories"]] == [0.0, 1.0, 2.0, 3.0]
            assert {one["task_id"] for one in group["trajectories"]} == {group["task_id"]}


@pytest.mark.attack(
    "an object with raw arrays was cut short, or its index was changed",
    boundary="tenants",
    surface="trajectory store",
    stopped_by="lengths and the index are checked; the answer is 503, and JSON lines are read from the "
    "other object",
)
async def test_parts_whose_arrays_are_deleted_or_damaged(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings) as served:
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(samplesPerTask=3))
        await Worker(served.worker).finish_all()
        while await served.plane.flush():
            pass
        before = await same(served)
        files = sorted((tmp_path / "trajectories").rglob("*.arrays"))
        kept = {file: file.read_bytes() for file in files}
        assert [file.with_suffix(".ndjson").exists() for file in files] == [True] * len(files)
        for data, status in (
            (lambda whole: whole[:-1], 503),
            (lambda whole: whole[: HEAD_BYTES // 2], 503),
            (lambda whole: b"x" + whole[1:], 503),
            (lambda whole: whole[:16] + bytes(HEAD_BYTES - 16) + whole[HEAD_BYTES:], 503),
            (None, 200),
        ):
            for file, whole in kept.items():
                file.unlink() if data is None else file.write_bytes(data(whole))
            answer = await served.admin.get(PATH, headers={"Accept": ARRAYS})
            assert answer.status_code == status, answer.text
            assert (await served.admin.get(PATH)).status_code == 200
        assert await same(served) == before, "they are not needed"


def described(found: list[TrajectoryArrays]) -> list[Any]:
    """Return all that trajectories hold, in a form that can be compared."""
    return [
        (
            one.record,
            [
                [
                    (array.dtype, array.tolist())
                    for array in (part.prompt_ids, part.response_ids, part.loss_mask, part.logprobs)
                ]
                + [part.policy_versions]
                for part in one.segments
            ],
        )
        for one in found
    ]


async def test_both_clients_read_pages_of_arrays(tmp_path: Path) -> None:
    """The same arrays are made of JSON lines."""
    with start_api(tmp_path, "--page-bytes", "3000") as process:
        token = process.tokens["admin"]
        headers = {"Authorization": f"Bearer {process.tokens['worker']}"}
        async with (
            AsyncClient(process.url, token) as client,
            httpx.AsyncClient(base_url=process.url, headers=headers) as http,
        ):
            await client.submit(make_manifest(samplesPerTask=8))
            await Worker(http).finish_all()
            pages = [page async for page in client.array_pages("job")]
            assert len(pages) > 1
            assert [page.finished for page in pages] == [False] * (len(pages) - 1) + [True]
            found = [one for page in pages for one in page.trajectories]
            assert len(found) >= 8
            rest = [one async for one in client.array_pages("job", cursor=pages[0].cursor)]
            # The page's end may move when the records do, from the database to the store.
            assert rest[-1].cursor == pages[-1].cursor
            assert described([one for page in rest for one in page.trajectories]) == described(
                [one for page in pages[1:] for one in page.trajectories]
            )
            assert not [page async for page in client.array_pages("job", status="failed")]

            def read() -> list[TrajectoryArrays]:
                with Client(process.url, token) as sync:
                    return [one for page in sync.array_pages("job") for one in page.trajectories]

            again = await asyncio.to_thread(read)
            http.headers["Authorization"] = f"Bearer {token}"
            lines = b"".join([page.content async for page in read_pages(http, PATH)])
            assert described(again) == described(found)
            assert described(trajectories(lines, "application/x-ndjson")) == described(found)


def test_a_remote_store_says_that_an_object_is_missing() -> None:
    store = open_store("memory://arrays", 5.0)
    store.write("default/job-1/part-000001.arrays", b"data")
    assert store.read("default/job-1/part-000001.arrays", 1, 2) == b"at"
    with pytest.raises(ObjectMissing):
        store.read("default/job-1/part-000002.arrays", 0, 1)
    with pytest.raises(Unavailable) as failed:
        store.read("default/job-1/part-000001.arrays", 0, 9)
    assert not isinstance(failed.value, ObjectMissing)


def test_a_part_is_built_twice_with_the_same_bytes() -> None:
    """A killed process writes its part again, after which readers must find the same objects."""
    segment = PackedSegment.of([1], [300], [1], [-0.1], ["v"])

    def records() -> list[bytes]:
        return [packed({"id": str(number)}, of_segments([segment])) for number in range(3)]

    lines = [b"x" * (number + 1) for number in range(3)]
    made = joined(lines, records())
    assert made == joined(lines, records())
    found = places(made[:HEAD_BYTES], "part")
    assert list(found) == [0, 1, 3]
    assert [made[begin:end] for begin, end in found.values()] == records()
