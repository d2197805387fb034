"""Real providers in private run folders, and listings of what they leave behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.cgroups import find_places
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider

NODE = "node-a"
SMALL = {"memory_bytes": 192 << 20, "disk_bytes": 16 << 20, "processes": 64}


class Kit:
    """What the tests share; a fixture, since test modules import nothing from each other."""

    NODE = NODE
    SMALL = SMALL

    @staticmethod
    async def clean(provider: NodeProvider) -> None:
        for sandbox_id in provider.claimed():
            await provider.release(sandbox_id)
        await provider.sweep()  # claimed ones that died in the test
        await provider.aclose()

    @staticmethod
    async def sh(sandbox: Sandbox, script: str, timeout: float = 20) -> tuple[int | None, str]:
        """Exit code and output of a bash script inside."""
        result = await sandbox.client.run(["bash", "-c", script], timeout=timeout)
        return result.exit_code, result.output.decode(errors="replace").strip()

    @staticmethod
    async def acquire(provider: NodeProvider, owner: str = "r-1", **changes: object) -> Sandbox:
        return await provider.acquire(SandboxRequest(**{**SMALL, **changes}), owner)  # type: ignore[arg-type]

    @staticmethod
    def processes_naming(text: str) -> list[str]:
        """Command lines of all processes of this machine that hold `text`."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
                if text in line:
                    found.append(line)
        return found

    @staticmethod
    def left_behind(run_dir: Path) -> dict[str, list[str]]:
        """Folders, control groups, mounts and sockets of sandboxes under `run_dir`."""
        folder = run_dir / "sandboxes"
        names = [name for name in os.listdir(folder) if name != ".sweep"] if folder.is_dir() else []
        return {
            "folders": names,
            "mounts": [
                line for line in Path("/proc/self/mounts").read_text().splitlines() if str(run_dir) in line
            ],
            "sockets": [
                line for line in Path("/proc/net/unix").read_text().splitlines() if str(run_dir) in line
            ],
        }

    @staticmethod
    def groups_of(sandbox_ids: list[str]) -> list[Path]:
        """Control groups of these sandboxes that exist."""
        return [p.path / name for p in find_places() for name in sandbox_ids if (p.path / name).exists()]

    @staticmethod
    async def until(condition: object, seconds: float = 15) -> None:
        """Waits for what the kernel does by itself, such as ending a namespace; bounded."""
        assert callable(condition)
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - the kernel raises no event for it
                await asyncio.sleep(0.02)


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short, because sockets live below it."""
    with tempfile.TemporaryDirectory(prefix="ry-") as folder:
        yield Path(folder)


@pytest.fixture
async def bubblewrap(bubblewrap_works: None, run_dir: Path) -> AsyncIterator[NodeProvider]:
    provider = open_provider("bubblewrap", run_dir=run_dir, node=NODE)
    await provider.start()
    try:
        yield provider
    finally:
        await Kit.clean(provider)


@pytest.fixture(params=["bubblewrap", "process"])
async def provider(request: pytest.FixtureRequest, run_dir: Path) -> AsyncIterator[NodeProvider]:
    """Both kinds: what their interface promises holds for both."""
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap_works")
    provider = open_provider(request.param, run_dir=run_dir, node=NODE)
    await provider.start()
    try:
        yield provider
    finally:
        await Kit.clean(provider)
