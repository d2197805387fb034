"""Whole rollouts over claims: a real control plane, a real worker, and this machine in a cluster's place."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from rollyard_client import AsyncClient
from rollyard_client.driver import DriverClient
from rollyard_crds.claims import ClaimStatus
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

ROLLOUTS = 6


class Driver:
    """A driver that does what an operator does, with this machine's sandboxes for pods; its first one dies at
    once.
    """

    def __init__(self, client: DriverClient, pods: Any, bundle: Path, root: Path) -> None:
        self._client, self._pods, self._bundle, self._root = client, pods, bundle, root
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self.started = 0

    @property
    def running(self) -> int:
        return len(self._running)

    async def run(self) -> None:
        revision: int | None = None
        while True:
            listing = await self._client.claims(revision, wait=5.0)
            revision = listing.revision
            for claim in listing.claims:
                if claim.state == "Pending":
                    await self._bind(claim.id)
                elif claim.state in ("Released", "Failed"):
                    await self.end(claim.id)
                    await self._client.put_claim_status(claim.id, ClaimStatus(state="Removed"))

    async def end(self, claim_id: str) -> None:
        if (process := self._running.pop(claim_id, None)) is not None:
            await self._pods.stop(process)

    async def end_all(self) -> None:
        for claim_id in list(self._running):
            await self.end(claim_id)

    async def _bind(self, claim_id: str) -> None:
        process, address = await self._pods.start(self._bundle, self._root, "--listen", "tcp://127.0.0.1:0")
        self._running[claim_id] = process
        self.started += 1
        if self.started == 1:
            await self._pods.stop(process)
        status = ClaimStatus(state="Bound", address=address, secret=self._pods.SECRET)
        await self._client.put_claim_status(claim_id, status)


@asynccontextmanager
async def process(*command: str, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as file:
        started = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.terminate()
        await started.wait()


async def appears(path: Path, log: Path) -> str:
    async with asyncio.timeout(patience(90)):
        while not path.exists() or not path.read_text():
            assert "Traceback" not in log.read_text(), log.read_text()[-2000:]
            await asyncio.sleep(0.05)
    return path.read_text()


SHELL: dict[str, Any] = {
    "solution": [{"name": "bash", "arguments": {"command": "cp made answer; echo > other"}}],
    "test_script": '[ "$(cat answer)" = xy ] && [ -e other ]',
}
FRESH = SHELL | {"test_script": '[ "$(cat answer given made)" = "xy\nxxy" ] && [ ! -e other ]'}
CODE: dict[str, Any] = {
    "solution": [{"name": "submit", "arguments": {"answer": "def f(i): return i + 1"}}],
    "tests": {"entry_point": "f", "cases": [{"program": "assert f(2) == 3"}]},
}


@pytest.mark.parametrize(
    ("task", "job", "each"),
    [
        (SHELL, {"handler": "shell"}, 1),
        (FRESH, {"handler": "shell", "stages": {"eval": {"carry": {"files": ["answer"]}}}}, 2),
        # Init and Run have none, and the one of Eval is prepared as Init's would be.
        (CODE, {"handler": "code", "agent": {"type": "oracle", "tools": ["submit"]}}, 1),
    ],
    ids=["shared", "fresh", "eval-alone"],
)
async def test_every_rollout_gets_its_sandboxes_and_gives_them_back(
    pods: Any, bundle: Path, tmp_path: Path, task: dict[str, Any], job: dict[str, Any], each: int
) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for name in ("bin", "lib", "lib64", "usr"):
        if Path("/", name).exists():
            (root / name).symlink_to(f"/{name}")
    state, log = tmp_path / "state", tmp_path / "api.log"
    api = process(
        sys.executable, "-m", "rollyard_api", "--state-dir", str(state), "--port", "0",
        "--port-file", str(tmp_path / "port"), log=log,
    )  # fmt: skip
    sandbox = {"files": {"given": "x"}, "setup": "echo $(cat given)y > made"}
    task = {"id": "t", "prompt": "q", "sandbox": sandbox, **task}
    manifest = job_manifest("claimed", {
            "tasks": {"inline": [task]}, "samplesPerTask": ROLLOUTS, "agent": {"type": "oracle"},
            "sandbox": {"image": "docker://some/image:1"}, **job,
        })  # fmt: skip
    async with api:
        url = f"http://127.0.0.1:{(await appears(tmp_path / 'port', log)).strip()}"
        tokens = json.loads((state / "tokens.json").read_text())
        worker = process(
            sys.executable, "-m", "rollyard_pipeline", "--url", url,
            "--token-file", str(state / "tokens.json"), "--job", "claimed", "--sandbox", "kubernetes",
            "--concurrency", "init=3,run=3,eval=3",
            log=tmp_path / "worker.log",
        )  # fmt: skip
        async with AsyncClient(url, tokens["admin"]) as client, DriverClient(url, tokens["driver"]) as calls:
            driver = Driver(calls, pods, bundle, root)
            driving = asyncio.create_task(driver.run())
            try:
                await client.submit(manifest)
                async with worker:
                    # Nothing reports the job's phase here: its rollouts are all that ends.
                    async with asyncio.timeout(patience(120)):
                        while (status := (await client.job("claimed")).status).counts.succeeded < ROLLOUTS:
                            assert status.counts.failed == 0, (tmp_path / "worker.log").read_text()[-2000:]
                            await asyncio.sleep(0.1)
                    assert status.counts.total == ROLLOUTS
                    assert status.reward_mean == 1.0
                async with asyncio.timeout(patience(10)):
                    while driver.running or (await calls.claims()).claims:  # noqa: ASYNC110 - level-based
                        await asyncio.sleep(0.1)
                # One was lost before it was used, so that rollout got another.
                assert driver.started == each * ROLLOUTS + 1
            finally:
                driving.cancel()
                await asyncio.gather(driving, return_exceptions=True)
                await driver.end_all()
