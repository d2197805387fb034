"""Uploads are taken whole or not at all, are seen in their namespace only, and go with their last job."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.jobs import blobs
from rollyard_api.storage.schema import blob_pieces, jobs
from rollyard_api.storage.schema import blobs as blob_table
from rollyard_testing.api.plane import make_manifest, serving
from rollyard_testing.pace import patience

LINES = [json.dumps({"id": f"t{i}", "prompt": f"{i} + 1?", "answer": str(i + 1)}) for i in range(5_000)]
TEXT = "\n".join(LINES).encode()


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def upload(served: Any, data: bytes, namespace: str = "default", digest: str = "") -> Any:
    return await served.admin.put(
        f"/v1/blobs/{digest or digest_of(data)}", params={"namespace": namespace}, content=data
    )


async def submit(served: Any, manifest: Any, namespace: str = "default") -> Any:
    return await served.admin.post("/v1/rolloutjobs", json=manifest, params={"namespace": namespace})


async def stored(served: Any) -> tuple[int, int]:
    """Return the numbers of uploads and pieces in the database, unfinished ones included."""

    def count(conn: Any) -> tuple[int, int]:
        return tuple(
            conn.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
            for table in (blob_table, blob_pieces)
        )

    counted: tuple[int, int] = await served.plane.database.read(count)
    return counted


async def rows(served: Any) -> int:
    """Return the number of jobs in the database, deleted ones included."""

    def count(conn: Any) -> int:
        return int(conn.execute(sa.select(sa.func.count()).select_from(jobs)).scalar_one())

    found: int = await served.plane.database.read(count)
    return found


async def test_a_job_over_an_upload(served: Any) -> None:
    for data in (TEXT, gzip.compress(TEXT)):
        digest = digest_of(data)
        made = await upload(served, data)
        assert (made.status_code, made.json()["url"]) == (201, f"blob:sha256:{digest}")
        assert (await upload(served, data)).status_code == 200, "a repeat is harmless"
        status = await served.admin.get(f"/v1/blobs/{digest}")
        assert status.json()["size"] == len(data)
        assert (await served.admin.head(f"/v1/blobs/{digest}")).status_code == 200
        manifest = make_manifest(f"job-{digest[:8]}", tasks={"url": f"blob:sha256:{digest}"})
        job = await submit(served, manifest)
        assert job.status_code == 201, job.text
        assert job.json()["status"]["counts"]["total"] == len(LINES)
        assert (await submit(served, manifest)).status_code == 200


@pytest.mark.attack(
    "a namespace fills the disk with uploads",
    boundary="control plane",
    surface="`/v1/blobs`",
    stopped_by="bounds on bytes and number; unused ones are removed",
)
async def test_what_is_refused_leaves_nothing(settings: Any) -> None:
    limits = {"max_blob_bytes": 1 << 20, "max_namespace_blob_bytes": 3 << 19, "max_namespace_blobs": 2}
    async with serving(settings, **limits) as served:
        wrong = await upload(served, b"x" * 300_000, digest="0" * 64)
        assert (wrong.status_code, wrong.json()["reason"]) == (422, "BlobHashMismatch")
        large = await upload(served, bytes((1 << 20) + 1))
        assert large.status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(1 << 16)

        answer = await served.admin.put(f"/v1/blobs/{'1' * 64}", content=endless())
        assert answer.status_code == 413
        assert (await upload(served, b"x", namespace="../x")).status_code == 422
        assert (await served.admin.put("/v1/blobs/ABC", content=b"x")).status_code == 422
        await served.plane.uploads.remove_unneeded()
        assert await stored(served) == (0, 0)

        assert (await upload(served, os.urandom(1 << 20))).status_code == 201
        full = await upload(served, os.urandom(1 << 20))
        assert (full.status_code, full.json()["reason"]) == (429, "BlobsFull")
        await served.plane.uploads.remove_unneeded()
        assert (await upload(served, b"small")).status_code == 201
        full = await upload(served, b"a third one")
        assert (full.status_code, full.json()["reason"]) == (429, "BlobsFull")
        assert int(full.headers["Retry-After"]) > 0
        assert (await upload(served, b"a third one", namespace="other")).status_code == 201


async def test_an_upload_is_of_its_namespace(served: Any) -> None:
    digest = digest_of(TEXT)
    await upload(served, TEXT, namespace="team-a")
    there = await served.admin.get(f"/v1/blobs/{digest}", params={"namespace": "team-b"})
    nowhere = await served.admin.get(f"/v1/blobs/{'2' * 64}", params={"namespace": "team-b"})
    assert there.status_code == nowhere.status_code == 404
    assert there.text.replace(digest, "2" * 64) == nowhere.text
    answers = [
        await submit(served, make_manifest("spy", tasks={"url": f"blob:sha256:{one}"}), namespace="team-b")
        for one in (digest, "2" * 64)
    ]
    assert [answer.status_code for answer in answers] == [422, 422]
    assert answers[0].json()["reason"] == "BlobNotFound"
    assert answers[0].text.replace(digest, "2" * 64) == answers[1].text


async def test_it_goes_with_the_last_job(served: Any) -> None:
    data = LINES[0].encode()
    tasks = {"url": f"blob:sha256:{digest_of(data)}"}
    # Pretend that an upload was not asked for during longer than one stays.
    expire = partial(blobs.expire, kept_seconds=-1.0)
    await upload(served, data)
    for name in ("first", "second"):
        made = await submit(served, make_manifest(name, tasks=tasks))
        assert made.status_code == 201, made.text
    for name, jobs_left, left in (("first", 1, (1, 1)), ("second", 0, (0, 0))):
        await served.plane.database.write(expire)
        await served.admin.delete(f"/v1/rolloutjobs/{name}")
        # The control plane stores the deleted job's results by itself, and removes the job only after that.
        async with asyncio.timeout(patience(60)):
            while await rows(served) > jobs_left:
                await served.plane.sweep()
        await served.plane.sweep()
        assert await stored(served) == left
    await upload(served, data)
    await served.plane.sweep()
    assert await stored(served) == (1, 1), "a job may still come"
    await served.plane.database.write(expire)
    await served.plane.sweep()
    assert await stored(served) == (0, 0), "no job uses it"
    missing = await submit(served, make_manifest("late", tasks=tasks))
    assert missing.json()["reason"] == "BlobNotFound"


async def test_uploads_at_once_are_bounded(served: Any) -> None:
    gate = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        await gate.wait()
        yield b"x"

    digest = digest_of(b"x")
    running = [asyncio.create_task(served.plane.uploads.take("default", digest, body())) for _ in range(4)]
    await asyncio.sleep(0)
    more = await upload(served, b"y")
    assert (more.status_code, more.json()["reason"]) == (429, "UploadsBusy")
    assert (await upload(served, b"y", namespace="other")).status_code == 201
    gate.set()
    assert sorted(await asyncio.gather(*running, return_exceptions=True), key=str) == [False] * 3 + [True]


async def test_lines_of_an_upload_are_quoted_to_its_owner(served: Any) -> None:
    data = b'{"id": "a", "prompt": 5}\n'
    await upload(served, data)
    answer = await submit(served, make_manifest(tasks={"url": f"blob:sha256:{digest_of(data)}"}))
    (line,) = answer.json()["errors"]
    assert line.endswith("line 1: prompt: must be a string (got 5)")


@pytest.mark.parametrize("url", ["blob:sha256:" + "A" * 64, "blob:md5:x", "blob:"])
async def test_a_malformed_reference(served: Any, url: str) -> None:
    answer = await submit(served, make_manifest(tasks={"url": url}))
    assert (answer.status_code, answer.json()["reason"]) == (422, "InvalidTasks")
    assert "64 lower-case hexadecimal digits" in answer.text


async def test_an_upload_outlives_the_process(settings: Any) -> None:
    async with serving(settings) as served:
        await upload(served, TEXT)
    async with serving(settings, sweep_seconds=1800.0) as served:
        made = await submit(served, make_manifest(tasks={"url": f"blob:sha256:{digest_of(TEXT)}"}))
        assert made.json()["status"]["counts"]["total"] == len(LINES)
