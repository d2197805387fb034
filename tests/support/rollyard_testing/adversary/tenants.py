"""Two tenants of one control plane: their jobs, carried to their ends, and a store that hangs."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from rollyard_testing.adversary.restplane import Yard, result
from rollyard_testing.crds.segments import reported
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

PATIENCE = patience(60.0)


class HangingStore(AbstractFileSystem):  # type: ignore[misc]
    """A store in memory whose calls hang for ever on request, like one behind a dead network."""

    protocol = "hang"
    cachable = False
    hangs: ClassVar[bool] = False
    hanging: ClassVar[int] = 0
    """The number of calls that hang now."""
    freed: ClassVar[threading.Event] = threading.Event()
    """The event lets the hanging calls return at the end of a test."""
    _memory: ClassVar[MemoryFileSystem] = MemoryFileSystem()

    @classmethod
    def reset(cls) -> None:
        cls.hangs, cls.hanging, cls.freed = False, 0, threading.Event()

    @classmethod
    def free(cls) -> None:
        cls.hangs = False
        cls.freed.set()

    def _maybe_hang(self) -> None:
        cls = type(self)
        if cls.hangs:
            cls.hanging += 1
            cls.freed.wait(PATIENCE)
            raise OSError("the store was gone for long")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._maybe_hang()
        self._memory.makedirs(path, exist_ok=exist_ok)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._maybe_hang()
        self._memory.pipe_file(path, value)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._maybe_hang()
        return bytes(self._memory.cat_file(path, start=start, end=end))


def outcome(lease: dict[str, Any], notes: str = "") -> dict[str, Any]:
    """Return the StageResult of any stage; `notes` goes into the trajectory's metadata."""
    if lease["stage"] == "init":
        made = result(lease)
        made["sandbox"]["node"] = f"n-{lease['job']}"
        return made
    if lease["stage"] == "eval":
        return result(lease)
    item = {k: lease[k] for k in ("rollout", "token", "stage")}
    segment = {
        "prompt_ids": [1],
        "response_ids": [2],
        "loss_mask": [1],
        "logprobs": [-0.5],
        "policy_versions": [""],
    }
    item["trajectory"] = {
        "id": lease["rollout"],
        "job": lease["job"],
        "task_id": lease["task"]["id"],
        "group_id": lease["group_id"],
        "sample_index": lease["sample_index"],
        "segments": [segment],
        "metadata": {"notes": notes},
    }
    return reported(item)


async def finish(yard: Yard, job: str, *, notes: str = "", most: int = 10_000) -> int:
    """Carry up to `most` rollouts of a job to their ends, and return how many got a reward."""
    worker, done = yard.worker, 0
    while done < most:
        leases = await yard.lease(worker, job, init=8, run=8, eval=min(8, most - done))
        if not leases:
            break
        body = {"worker": f"w-{job}", "results": [outcome(one, notes) for one in leases]}
        answer = await worker.post("/v1/leases/complete", json=body)
        assert answer.status_code == 200, answer.text
        assert {one["outcome"] for one in answer.json()["outcomes"]} == {"accepted"}
        done += sum(one["stage"] == "eval" for one in leases)
    return done


async def stored(yard: Yard) -> None:
    """Wait until every record lies in the trajectory store."""

    async def look() -> bool:
        return await yard.plane.archive.unstored() == 0

    await eventually(look)


async def read(http: httpx.AsyncClient, job: str, **query: Any) -> httpx.Response:
    """Return a page of a job's trajectories."""
    return await http.get(f"/v1/rolloutjobs/{job}/trajectories", params=query)


@asynccontextmanager
async def a_process(folder: Path, *options: str) -> AsyncIterator[tuple[str, dict[str, str]]]:
    """Yield a control plane in a process of its own: its address and its tokens."""
    port_file = folder / "port"
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(folder), "--port", "0"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, "--port-file", str(port_file), *options, stdout=log, stderr=log, cwd=folder
        )
        try:

            async def started() -> bool:
                assert process.returncode is None, (folder / "log").read_text()
                return port_file.exists()

            await eventually(started)
            tokens: dict[str, str] = json.loads((folder / "tokens.json").read_text())
            yield f"http://127.0.0.1:{port_file.read_text().strip()}", tokens
        finally:
            process.kill()
            await process.wait()
