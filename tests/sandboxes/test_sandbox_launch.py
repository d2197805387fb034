"""A start that fails is reported at once, with what the program wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rollyard_pipeline.sandboxes.errors import SandboxStartFailed
from rollyard_pipeline.sandboxes.host.processes import Reaper
from rollyard_pipeline.sandboxes.starters.launch import LOG_FD, READY_FD, SandboxLaunch, start


def launch(folder: Path, script: str, *, info: bool = False, log: bool = False) -> SandboxLaunch:
    return SandboxLaunch(
        argv=["/bin/sh", "-c", script], env={"PATH": os.defpath}, socket_path=folder / "s", info=info, log=log
    )


@pytest.mark.parametrize("info", [False, True])
async def test_an_early_end_is_not_waited_out(folder: Path, info: bool) -> None:
    with pytest.raises(SandboxStartFailed, match="ended before it was ready: what went wrong"):
        # This is more seconds than the test may take.
        await start(launch(folder, "echo what went wrong >&2; exit 3", info=info), Reaper(), 600)


async def test_readiness_comes_from_whoever_has_the_pipe(folder: Path) -> None:
    script = f"(sleep 0.2; echo ready >&{READY_FD}; sleep 0.2) & exec {READY_FD}>&-"
    reaper = Reaper()
    started = await start(launch(folder, script), reaper, 20)
    assert started.inner is None
    reaper.close()


async def test_the_log_is_a_descriptor_of_its_own_too(folder: Path) -> None:
    with pytest.raises(SandboxStartFailed, match="through the other"):
        await start(launch(folder, f"echo through the other >&{LOG_FD}", log=True), Reaper(), 600)
