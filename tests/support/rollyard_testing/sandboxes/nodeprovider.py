"""A provider of sandboxes on this node, for one test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.provider import NodeProvider


@asynccontextmanager
async def node_provider(kind: str = "bubblewrap", **options: Any) -> AsyncIterator[NodeProvider]:
    """Yield a started provider in a folder with a short name, and release its sandboxes at the end."""
    with tempfile.TemporaryDirectory(prefix="ry-") as folder:
        provider = open_provider(kind, run_dir=Path(folder), node="node-a", **options)
        assert isinstance(provider, NodeProvider)
        await provider.start()
        try:
            yield provider
        finally:
            for sandbox_id in provider.claimed():
                await provider.release(sandbox_id)
            await provider.aclose()
