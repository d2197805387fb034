"""A real `rollyard slurm-bridge up` for measurements. No Slurm job outlives it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from rollyard_bench.memory import posted
from rollyard_bench.processes import Program, ProgramFailed, program

READY_SECONDS = 60.0
STOP_SECONDS = 90.0
"""The longest wait for the end: the workers hand over what they hold, then Slurm ends them."""


@dataclass(frozen=True, slots=True)
class Bridge:
    """A running bridge and its control plane."""

    program: Program
    home: Path
    url: str
    token: str

    def client(self) -> httpx.AsyncClient:
        """Return an HTTP client with the administrator's token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=60.0)

    def check(self) -> None:
        """Raise ProgramFailed if the bridge has ended."""
        self.program.check("slurm-bridge")


@asynccontextmanager
async def shared_folder() -> AsyncIterator[Path]:
    """Yield a folder that the nodes see, too. It is below the user's home and is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-", dir=Path.home()) as name:
        yield Path(name)


@asynccontextmanager
async def bridge(
    folder: Path,
    profile: Mapping[str, Any],
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Bridge]:
    """Yield a ready bridge with its home below `folder`. At the end it ends its Slurm jobs and itself.

    Raises:
        ProgramFailed: The bridge did not become ready.
    """
    home, file = folder / "home", folder / "profile.yaml"
    file.write_text(yaml.safe_dump(dict(profile)))
    command = [sys.executable, "-m", "rollyard", "slurm-bridge", "up", "--home", str(home)]
    command += ["--profile", str(file), *options]
    log = folder / "bridge.log"
    async with program(command, log, environment, stop=signal.SIGINT, stop_seconds=STOP_SECONDS) as running:
        try:
            async with asyncio.timeout(READY_SECONDS):
                while _read(home / "bridge.json").get("pid") != running.process.pid:
                    running.check("slurm-bridge")
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise ProgramFailed(f"the bridge is not ready: {running.tail()}") from error
        url = str(_read(home / "context.json")["url"])
        yield Bridge(running, home, url, str(_read(home / "state" / "tokens.json")["admin"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


async def finished(client: httpx.AsyncClient, name: str, seconds: float) -> dict[str, Any]:
    """Return the job once it is over.

    Raises:
        ProgramFailed: The job is not over in time.
    """
    found: dict[str, Any] = {}
    try:
        async with asyncio.timeout(seconds):
            while True:
                found = (await client.get(f"/v1/rolloutjobs/{name}")).raise_for_status().json()
                if any((one["type"], one["status"]) == ("Finished", "True") for one in _conditions(found)):
                    return found
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        conditions = [
            f"{one['type']}={one['status']} {one['reason']}: {one['message']}" for one in _conditions(found)
        ]
        raise ProgramFailed(f"{name} is not over after {seconds:.0f} s: {'; '.join(conditions)}") from error


def _conditions(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list((job.get("status") or {}).get("conditions") or ())


async def trajectories(client: httpx.AsyncClient, name: str) -> list[dict[str, Any]]:
    """Return all trajectories that have been delivered so far."""
    answer = await client.get(f"/v1/rolloutjobs/{name}/trajectories")
    answer.raise_for_status()
    return [json.loads(line) for line in answer.text.splitlines() if line]


async def submitted(client: httpx.AsyncClient, manifest: Mapping[str, Any]) -> None:
    """Post a RolloutJob."""
    await posted(client, "/v1/rolloutjobs", json=manifest)
