"""A group runs as a program in the Slurm lab: what it misses comes back, and an interruption lets it end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from rollyard_bench import lab
from rollyard_bench.processes import Missing
from rollyard_bench.results import Baseline, Measurement, Settings

LAB = """#!/bin/sh
case $1 in
info) echo '{"nodes": ["cn1"]}' ;;
run)
  while [ "$1" != -- ]; do shift; done
  shift
  exec "$@"
  ;;
esac
"""
GROUP = """
import asyncio, os
from pathlib import Path
from rollyard_bench import lab
from rollyard_bench.processes import Missing
from rollyard_bench.results import Baseline, Measurement

async def measured(settings):
    said = Path(os.environ["SAID"])
    if not said.parent.exists():
        raise Missing("no folder\\nhere")
    if said.exists():
        return [Measurement("a", 1.0, Baseline("b", 2.0), "how"), Measurement("c", None, None, "no c")]
    try:
        said.write_text("begun")
        await asyncio.sleep(60)
    finally:
        said.write_text("ended in order")

lab.program("a_group", measured)
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of the group, which runs in a lab without Slurm."""
    script = tmp_path / "lab"
    script.write_text(LAB)
    script.chmod(0o755)
    (tmp_path / "a_group.py").write_text(GROUP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    monkeypatch.setattr(lab, "LAB", script)
    monkeypatch.setattr(lab, "_compiled", lambda: asyncio.sleep(0))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path / "said"


async def _never(settings: Settings) -> list[Measurement]:
    raise AssertionError("root does not measure itself")


async def _group() -> list[Measurement]:
    return await lab.on_slurm("a_group", Settings(quick=True), _never)


async def test_measurements_and_what_is_missing_come_back(
    said: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said.touch()
    one, other = await _group()
    assert (one.figure, one.value, one.baseline) == ("a", 1.0, Baseline("b", 2.0))
    assert (other.figure, other.value, other.how) == ("c", None, "no c")
    monkeypatch.setenv("SAID", "/none/said")
    with pytest.raises(Missing, match=r"^no folder here$"):
        await _group()


async def test_an_interruption_lets_the_program_end_in_order(said: Path) -> None:
    running = asyncio.create_task(_group())
    async with asyncio.timeout(120):
        while not said.exists() or said.read_text() != "begun":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert said.read_text() == "ended in order"
