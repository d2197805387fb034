"""What workers, tenants and odd files try with acknowledged cursors and with the hash of a tokenizer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.reading import vocabulary
from rollyard_testing.adversary.restplane import Yard, control_plane
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="trainers", surface="acknowledged cursors")


HUGE = 10**17


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path) as made:
        for name in ("mine", "other"):
            await made.submit(name, tasks=2)
        yield made


async def cursor_of(yard: Yard, name: str) -> str:
    """Return the cursor before the first group of a job."""
    answer = await yard.admin.get(f"/v1/rolloutjobs/{name}/groups")
    return str(answer.headers["rollyard-cursor"])


async def kept(yard: Yard, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await yard.admin.get(f"/v1/rolloutjobs/{name}/cursors")).json()["items"]
    return found


@pytest.mark.attack(
    "a worker, or a guessed token, moves a trainer's cursor, so that results are skipped",
    stopped_by="the calls are the admin's alone",
)
async def test_no_token_of_workers_moves_or_reads_a_cursor(yard: Yard) -> None:
    path, cursor = "/v1/rolloutjobs/mine/cursors/trainer", await cursor_of(yard, "mine")
    for token in (
        yard.job_token("mine"),
        yard.job_token("other"),
        yard.plane.tokens.current("worker"),
        "forged",
        None,
    ):
        http = yard.client(token)
        refused = [
            await http.put(path, json={"cursor": cursor}),
            await http.get(path),
            await http.delete(path),
            await http.get("/v1/rolloutjobs/mine/cursors"),
        ]
        assert {answer.status_code for answer in refused} <= {401, 403}, token
    assert await kept(yard, "mine") == []


@pytest.mark.attack(
    "a cursor of another job, or one beyond the end, is kept",
    stopped_by="a cursor holds its job's uid, and is compared with what the job has",
)
async def test_a_cursor_of_another_job_or_beyond_the_end_is_not_kept(yard: Yard) -> None:
    path, cursor = "/v1/rolloutjobs/mine/cursors/trainer", await cursor_of(yard, "mine")
    foreign = await yard.admin.put(path, json={"cursor": await cursor_of(yard, "other")})
    assert foreign.status_code == 410
    elsewhere = await yard.admin.put(path, params={"namespace": "elsewhere"}, json={"cursor": cursor})
    assert elsewhere.status_code == 404
    begin = cursor.rpartition(".")[0]
    for position in (1, HUGE, f"{HUGE}0", "-1", "1e3", "NaN", "٣", "0x1", " 1", "1;2"):
        refused = await yard.admin.put(path, json={"cursor": f"{begin}.{position}"})
        assert refused.status_code in (400, 409), position
    assert await kept(yard, "mine") == []


@pytest.mark.attack(
    "odd names, long bodies, numbers in other scripts",
    stopped_by="names and cursors have one form; the body has at most 1 MiB",
)
async def test_odd_names_and_bodies_keep_nothing(yard: Yard) -> None:
    cursor = await cursor_of(yard, "mine")
    for name in ("a" * 64, "%2e%2e%2fother", "a%00b", "a%0ab", "a;DROP", "é", "-a"):
        refused = await yard.admin.put(f"/v1/rolloutjobs/mine/cursors/{name}", json={"cursor": cursor})
        assert refused.status_code in (400, 404, 422), name
    path = "/v1/rolloutjobs/mine/cursors/trainer"
    large = await yard.admin.put(path, content=b'{"cursor": "' + b"a" * (2 << 20) + b'"}')
    assert large.status_code == 413
    for body in ({"cursor": "v1.g." + "A" * 300}, {"cursor": [cursor]}, {"cursor": cursor, "moved": 1}, []):
        assert (await yard.admin.put(path, json=body)).status_code in (400, 422), body
    assert await kept(yard, "mine") == []


@pytest.mark.attack(
    "names without end fill the database",
    stopped_by="at most 64 of a job, counted while its row is locked; they go with the job",
)
async def test_many_names_at_once_do_not_pass_the_bound(yard: Yard) -> None:
    cursor = await cursor_of(yard, "mine")
    answers = await asyncio.gather(
        *[yard.admin.put(f"/v1/rolloutjobs/mine/cursors/c{n}", json={"cursor": cursor}) for n in range(100)]
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 64 + [409] * 36
    assert len(await kept(yard, "mine")) == 64


@pytest.mark.attack(
    "a pool's author names a pipe, a device, or a file of another kind, to hang the control plane or to "
    "read the file",
    surface="a pool's tokenizer",
    stopped_by="regular files named tokenizer.json only, at most 64 MiB, by a thread with a time-out; the "
    "answer has a hash, or no more than the kind of the fault",
)
@pytest.mark.parametrize("content", ["missing", "pipe", "device", "deep", "large", "lists", "negative"])
async def test_a_tokenizer_that_is_no_tokenizer_shows_and_holds_up_nothing(
    yard: Yard, tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    monkeypatch.setattr(vocabulary, "MAX_FILE", 1 << 20)
    if content == "pipe":
        os.mkfifo(file)
    elif content == "device":
        file.symlink_to("/dev/zero")
    elif content == "deep":
        file.write_text('{"model": ' + "[" * 500_000)
    elif content == "large":
        file.write_text("secret" * (1 << 20))
    elif content == "lists":
        file.write_text('{"model": {"vocab": [["a", 0.0], [["secret"], 0.0]]}}')
    elif content == "negative":
        file.write_text('{"model": {"vocab": {"a": -1}}}')
    pool = {"metadata": {"name": "pool"}, "spec": {"model": "m", "tokenizer": str(tmp_path)}}
    body = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "BackendPool", **pool}
    assert (await yard.admin.post("/v1/backendpools", json=body)).status_code == 201
    answer = await asyncio.wait_for(yard.admin.get("/v1/backendpools/pool/tokenizer"), patience(20))
    assert answer.status_code == (404 if content in ("missing", "pipe", "device") else 422)
    assert "secret" not in answer.text
    assert len(answer.content) < 4096
