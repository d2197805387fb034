"""What surrounds a real control plane: a stage worker, a pool of running servers, and a waiting trainer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from rollyard_bench.memory import posted
from rollyard_bench.processes import ControlPlane, Program, needed, program
from rollyard_bench.sandboxes import release_all

WAIT = 20  # seconds of one long poll
READY_SECONDS = 30.0


@asynccontextmanager
async def stage_worker(
    plane: ControlPlane,
    folder: Path,
    places: Mapping[str, int],
    environment: Mapping[str, str] | None = None,
    further: Sequence[str] = (),
) -> AsyncIterator[Program]:
    """Run `python -m rollyard_pipeline` with this many places for each stage. No sandbox outlives it.

    Raises:
        Missing: There is no bubblewrap.
    """
    needed("bwrap", "bubblewrap")
    command = [sys.executable, "-m", "rollyard_pipeline", "--url", plane.url]
    command += ["--token-file", str(plane.tokens_file), "--stages", ",".join(places)]
    command += ["--concurrency", ",".join(f"{stage}={count}" for stage, count in places.items())]
    command += ["--run-dir", str(folder / "run"), "--sandbox", "bubblewrap", "--name", "bench"]
    command += further
    try:
        async with program(command, folder / "worker.log", environment) as running:
            yield running
    finally:
        await release_all(folder / "run")


async def external_pool(
    client: httpx.AsyncClient,
    name: str,
    model: str,
    tokenizer: Path,
    urls: Sequence[str],
    max_active: int = 256,
) -> None:
    """Register running servers, and return once the control plane calls every one of them ready."""
    spec = {
        "model": model,
        "tokenizer": str(tokenizer),
        "maxActiveRollouts": max_active,
        "engine": {"type": "external", "external": {"urls": list(urls)}},
    }
    pool = {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "BackendPool",
        "metadata": {"name": name},
        "spec": spec,
    }
    await posted(client, "/v1/backendpools", json=pool)
    async with asyncio.timeout(READY_SECONDS):
        while True:
            answer = await client.get(f"/v1/backendpools/{name}")
            answer.raise_for_status()
            backends = answer.json()["status"]["backends"]
            if backends and all(backend["ready"] for backend in backends):
                return
            await asyncio.sleep(0.1)


async def deliver(client: httpx.AsyncClient, worker: Program, job: str, count: int) -> list[dict[str, Any]]:
    """Follow the job as a trainer does, until the control plane says that it is finished."""
    delivered: list[dict[str, Any]] = []
    cursor = ""
    while True:
        worker.check("rollyard_pipeline")
        query = {"cursor": cursor, "wait": str(WAIT)} if cursor else {"wait": str(WAIT)}
        answer = await client.get(f"/v1/rolloutjobs/{job}/trajectories", params=query)
        answer.raise_for_status()
        delivered += [json.loads(line) for line in answer.text.splitlines() if line]
        cursor = answer.headers["Rollyard-Cursor"]
        if len(delivered) >= count or answer.headers["Rollyard-Finished"] == "true":
            return delivered
