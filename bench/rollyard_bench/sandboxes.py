"""Sandboxes for measurements, from the stage workers' own provider in a run folder of its own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider, SandboxRequest

from rollyard_bench.processes import needed

OWNER = LeaseRef(rollout="bench", token=1)
COMMAND_SECONDS = 30.0

REQUEST = SandboxRequest(memory_bytes=1 << 29, disk_bytes=1 << 26)
"""The sandbox of every figure has no network and all limits."""


@asynccontextmanager
async def bubblewrap() -> AsyncIterator[SandboxProvider]:
    """Yield a started bubblewrap provider, which leaves nothing behind.

    Raises:
        Missing: There is no bubblewrap.
    """
    needed("bwrap", "bubblewrap")
    with tempfile.TemporaryDirectory(prefix="ryb-") as folder:
        provider = open_provider("bubblewrap", run_dir=Path(folder), node="bench")
        await provider.start()
        try:
            yield provider
        finally:
            for left in provider.claimed():
                await provider.release(left)
            await provider.aclose()


async def release_all(run_dir: Path) -> None:
    """Release every sandbox of a run folder whose workers have ended, because claimed ones outlive them."""
    provider = open_provider("bubblewrap", run_dir=run_dir, node="bench")
    await provider.start()
    try:
        for left in provider.claimed():
            await provider.release(left)
    finally:
        await provider.aclose()


@asynccontextmanager
async def claimed(provider: SandboxProvider, count: int = 1) -> AsyncIterator[list[Sandbox]]:
    """Yield `count` sandboxes, which are started one after the other and released at the end."""
    async with AsyncExitStack() as stack:
        sandboxes: list[Sandbox] = []
        for _ in range(count):
            sandbox = await provider.acquire(REQUEST, OWNER)
            stack.push_async_callback(provider.release, sandbox.handle)
            sandboxes.append(await stack.enter_async_context(sandbox))
        yield sandboxes
