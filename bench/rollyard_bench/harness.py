"""What surrounds a real control plane: a stage worker, a pool of running servers, and a waiting trainer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollyard import AsyncClient
from rollyard_crds import Trajectory
from rollyard_testing.manifests import job_manifest, pool_manifest

from rollyard_bench.processes import (
    BENCH,
    ControlPlane,
    Program,
    ProgramFailed,
    control_plane,
    needed,
    program,
)
from rollyard_bench.sandboxes import started

READY_SECONDS = 30.0


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """Return a RolloutJob manifest."""
    return job_manifest(name, spec)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A running control plane, its administrator's client, and a stage worker."""

    plane: ControlPlane
    client: AsyncClient
    worker: Program

    async def deliver(self, job: str, count: int, seconds: float) -> list[Trajectory]:
        """Follow the job as a trainer does, until so many rollouts have come or the job is finished.

        Raises:
            ProgramFailed: That took too long.
        """
        delivered: list[Trajectory] = []
        try:
            async with asyncio.timeout(seconds):
                async for trajectory in self.client.trajectories(job, follow=True):
                    delivered.append(trajectory)
                    if len(delivered) == count:
                        break
        except TimeoutError as error:
            raise ProgramFailed(
                f"{len(delivered)} of {count} rollouts of {job} came in {seconds:.0f} s; the worker said: "
                f"{self.worker.tail()}"
            ) from error
        return delivered

    async def external_pool(
        self, name: str, model: str, tokenizer: Path, urls: Sequence[str], max_active: int = 256
    ) -> None:
        """Register running servers, and return once the control plane calls every one of them ready."""
        spec = {
            "model": model,
            "tokenizer": str(tokenizer),
            "maxActiveRollouts": max_active,
            "engine": {"type": "external", "external": {"urls": list(urls)}},
        }
        await self.client.create_pool(pool_manifest(name, spec))
        async with asyncio.timeout(READY_SECONDS):
            while True:
                backends = (await self.client.pool(name)).status.backends
                if backends and all(backend.ready for backend in backends):
                    return
                await asyncio.sleep(0.1)


@asynccontextmanager
async def deployment(
    folder: Path, places: Mapping[str, int], *further: str, handlers: bool = False
) -> AsyncIterator[Deployment]:
    """Start a control plane and `python -m rollyard_pipeline`. No sandbox outlives them.

    Args:
        folder: A folder for all of their files, which need not exist.
        places: The worker's places for each stage.
        further: Further options of the worker.
        handlers: Whether the bench's own handlers (`latency_handler`) are installed.

    Raises:
        Missing: There is no bubblewrap.
    """
    needed("bwrap", "bubblewrap")
    folder.mkdir(mode=0o700, exist_ok=True)
    environment = {"PYTHONPATH": str(BENCH / "latency_handler")} if handlers else {}
    async with control_plane(folder, environment) as plane, plane.client() as client:
        command = [sys.executable, "-m", "rollyard_pipeline", "--url", plane.url]
        command += ["--token-file", str(plane.tokens_file), "--stages", ",".join(places)]
        command += ["--concurrency", ",".join(f"{stage}={count}" for stage, count in places.items())]
        command += ["--run-dir", str(folder / "run"), "--sandbox", "bubblewrap", "--name", "bench", *further]
        try:
            async with program(command, folder / "worker.log", environment) as worker:
                yield Deployment(plane, client, worker)
        finally:
            async with started("bubblewrap", folder / "run"):
                pass  # This releases every sandbox that the worker has left.
