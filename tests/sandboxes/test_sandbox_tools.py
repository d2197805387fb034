"""The installer's folder with programs, which every sandbox of a worker sees."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.runtime import TOOLS


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder with one program."""
    program = tmp_path / "tools" / "greeter" / "bin" / "greet"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho hello from the folder\n")
    program.chmod(0o755)
    return tmp_path / "tools"


async def test_every_sandbox_runs_its_programs_and_changes_none(
    kit: Any, provider: NodeProvider, run_dir: Path, image_of: Callable[[str], str | None], tools: Path
) -> None:
    image = image_of(provider.name)
    with_tools = open_provider(
        provider.name,
        run_dir=run_dir,
        node=kit.NODE,
        apptainer=ApptainerOptions(default_image=image),
        default_image=image,
        tools=tools,
    )
    await with_tools.start()
    sandbox = await with_tools.acquire(SandboxRequest(**kit.SMALL), LeaseRef(rollout="r-1", token=1))
    try:
        async with sandbox:
            ran = await sandbox.client.bash(f"{TOOLS}/greeter/bin/greet; touch {TOOLS}/mine; ls {TOOLS}")
        if provider.name == "process":  # Nothing can be mounted for a bare process.
            assert ran.exit_code == 2
            return
        assert "hello from the folder" in ran.output.decode()
        assert "Read-only file system" in ran.output.decode()
        assert [entry.name for entry in tools.iterdir()] == ["greeter"]
    finally:
        await with_tools.release(sandbox.handle.id)
        await with_tools.aclose()


async def test_there_is_no_such_folder_unless_the_installer_gives_one(
    kit: Any, provider: NodeProvider
) -> None:
    sandbox = await provider.acquire(SandboxRequest(**kit.SMALL), LeaseRef(rollout="r-1", token=1))
    async with sandbox:
        ran = await sandbox.client.bash(f"test -e {TOOLS}")
    assert ran.exit_code == 1


def test_a_folder_that_cannot_be_shown_is_refused(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--sandbox-tools .*none: there is no such folder on this node"):
        open_provider("bubblewrap", run_dir=run_dir, node="n", tools=tmp_path / "none")
    for folder in (run_dir.resolve(), run_dir.resolve().parent):
        with pytest.raises(ValueError, match="holds, or lies within, the run dir"):
            open_provider("bubblewrap", run_dir=run_dir, node="n", tools=folder)
