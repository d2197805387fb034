"""A full disk: the answer is 507, nothing is half-done, and work continues when there is room."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rollyard_api.core.problems import StorageFull
from rollyard_api.settings import Settings
from rollyard_testing.api.plane import Worker, make_manifest, serving
from rollyard_testing.waiting import eventually


@pytest.fixture
def sqlite(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path, sweep_seconds=3600.0, health_seconds=3600.0)


async def test_full_database(sqlite: Settings) -> None:
    big = {"inline": [{"id": f"b{i}", "prompt": os.urandom(30_000).hex()} for i in range(40)]}
    async with serving(sqlite, sqlite_max_pages=100) as served:
        assert (await served.admin.post("/v1/rolloutjobs", json=make_manifest())).status_code == 201
        answer = await served.admin.post("/v1/rolloutjobs", json=make_manifest("big", tasks=big))
        assert (answer.status_code, answer.json()["reason"]) == (507, "StorageFull")
        assert (await served.admin.get("/v1/rolloutjobs/big")).status_code == 404
        counts = (await served.admin.get("/v1/rolloutjobs/job")).json()["status"]["counts"]
        assert counts["init"]["queued"] == 2
        assert await Worker(served.worker).finish_all() == 2, "what needs no room continues"
    async with serving(sqlite) as served:
        assert (
            await served.admin.post("/v1/rolloutjobs", json=make_manifest("big", tasks=big))
        ).status_code == 201


@pytest.fixture
def tiny(tmp_path: Path, missing: Callable[[str], NoReturn]) -> Iterator[Path]:
    """Yield a file system of 256 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        missing("a small tmpfs can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_full_trajectory_store(sqlite: Settings, tiny: Path) -> None:
    tasks = {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(12)]}
    filler = tiny / "filler"
    async with serving(sqlite, trajectories=str(tiny), max_unstored=2) as served:
        filler.write_bytes(b"x" * 250_000)
        await served.admin.post("/v1/rolloutjobs", json=make_manifest(tasks=tasks))
        worker = Worker(served.worker)
        big = {"notes": "y" * 30_000}

        async def through(stage: str) -> list[dict[str, Any]]:
            leases: list[dict[str, Any]] = await worker.lease(**{stage: 16})
            return leases

        await worker.complete(*[worker.result(one) for one in await through("init")])
        runs = [worker.result(one) for one in await through("run")]
        for run in runs:
            run["trajectory"] = run["trajectory"] | {"metadata": big}
        await worker.complete(*runs)
        evals = [worker.result(one) for one in await through("eval")]
        assert set(await worker.complete(*evals[:4])) == {"accepted"}
        await eventually(lambda: isinstance(served.plane.archive.refused, StorageFull))
        refused = await served.worker.post("/v1/leases/complete", json={"worker": "w", "results": evals[4:]})
        assert (refused.status_code, refused.json()["reason"]) == (507, "StorageFull")
        path = "/v1/rolloutjobs/job/trajectories"
        assert len((await served.admin.get(path)).content.splitlines()) == 4, "what was accepted is there"
        assert [file.name for file in tiny.rglob("*") if file.is_file()] == ["filler"], "nothing half-written"

        filler.unlink()
        remount = ["mount", "-o", "remount,size=8m", str(tiny)]
        await asyncio.to_thread(subprocess.run, remount, check=True)

        async def taken() -> bool:
            answer = await served.worker.post(
                "/v1/leases/complete", json={"worker": "w", "results": evals[4:]}
            )
            return answer.status_code == 200

        await eventually(taken)
        await served.until_stored()
        records = (await served.admin.get(path, params={"limit": 1000})).content.splitlines()
        assert len(records) == 12
        parts = b"".join(file.read_bytes() for file in tiny.rglob("*.ndjson")).splitlines()
        assert sorted(parts) == sorted(records)
