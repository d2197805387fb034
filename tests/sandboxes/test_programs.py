"""Programs of the machine are ended in time, with all that they started."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from rollyard_pipeline.sandboxes.host.programs import run_program
from rollyard_testing.pace import patience


async def test_programs_that_hang_are_ended(tmp_path: Path) -> None:
    code, text = await run_program(["/bin/sh", "-c", "echo early; sleep 60"], seconds=0.3, env={})
    assert code == 124
    assert text.startswith("early\n")
    assert "no end within 0.3 s" in text


async def test_a_program_that_floods_its_output_and_does_not_end_is_killed() -> None:
    """asyncio reads no output while its buffer is full, and sees the end of a process only after it."""
    flood = ["/bin/sh", "-c", "trap '' TERM; exec yes"]
    async with asyncio.timeout(patience(30)):
        code, text = await run_program(flood, seconds=0.3, env={})
    assert code == 124
    assert text.endswith("no end within 0.3 s")


async def test_a_start_that_is_cancelled_ends_what_the_program_has_started(tmp_path: Path) -> None:
    """asyncio then kills the program alone, and waits for the end of its output, which its children hold."""
    began = tmp_path / "began"
    call = asyncio.create_task(
        run_program(["/bin/sh", "-c", f"sleep 60 & echo $! > {began}; wait"], seconds=60, env={})
    )
    for _ in range(2):
        await asyncio.sleep(0)
    end = time.monotonic() + patience(30)
    while not began.exists() or not began.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.01)  # noqa: ASYNC251 - The event loop must not see that the start is complete.
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(patience(20)):
            await call
    child = Path(f"/proc/{began.read_text().strip()}/stat")
    while child.exists() and child.read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < end, "the program's child still runs"
        await asyncio.sleep(0.01)
