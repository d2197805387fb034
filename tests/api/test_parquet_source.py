"""The process that converts a foreign Parquet file ends with its reader."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
from rollyard_api.jobs.task_reader import parquet_lines
from rollyard_testing.pace import patience

PATIENCE_SECONDS = patience(30.0)
LOOKS = 5


def children() -> list[Path]:
    """Return the folders in /proc of this process's children."""
    text = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return [Path("/proc", pid) for pid in text.split()]


async def until_asleep(process: Path) -> None:
    """Wait until a process sleeps at several looks after each other, because nobody reads its output."""
    looks = 0
    while looks < LOOKS:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        looks = looks + 1 if state == "S" else 0
        await asyncio.sleep(0.05)


async def nothing() -> AsyncIterator[bytes]:
    for piece in ():
        yield piece


async def test_a_reader_that_gives_up_in_the_middle_waits_for_nothing() -> None:
    """Far more output than the buffers hold is left, so the process waits for its reader when it is ended."""
    file = io.BytesIO()
    parquet.write_table(arrow.table({"prompt": ["a" * (4 << 20)] * 4}), file, compression="zstd")
    before = set(children())
    with ThreadPoolExecutor(1) as disk:
        async with asyncio.timeout(PATIENCE_SECONDS):
            async with aclosing(parquet_lines(file.getvalue(), nothing(), 1 << 30, disk)) as rows:
                assert await anext(rows)
                (process,) = set(children()) - before
                await until_asleep(process)
    assert not process.exists()
