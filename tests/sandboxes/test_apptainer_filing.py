"""An Apptainer sandbox is ready when its instance is filed: its start command may still run."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rollyard_pipeline.sandboxes.apptainer.starter import (
    ApptainerOptions,
    ApptainerStarter,
    Instance,
    end_instance,
    filed_instances,
    forget_instance,
    instance_name,
    load_instance,
)
from rollyard_pipeline.sandboxes.errors import SandboxStartFailed
from rollyard_pipeline.sandboxes.host.processes import ProcessRef, process_ref
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_testing.pace import patience

NAME = instance_name("filed")


class Waiting:
    """A process that waits until it is asked to end."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        ref = process_ref(self.process.pid)
        assert ref is not None
        self.ref: ProcessRef = ref

    def end(self) -> None:
        """End the process, and wait until it has ended."""
        self.process.stdin.close()
        self.process.wait(timeout=patience(10))


@pytest.fixture
def waiting() -> Iterator[Callable[[], Waiting]]:
    """Return a function that starts a process. All of them end after the test."""
    started: list[Waiting] = []

    def start() -> Waiting:
        started.append(Waiting())
        return started[-1]

    yield start
    for one in started:
        one.end()


@pytest.fixture
def starter(tmp_path: Path) -> ApptainerStarter:
    return ApptainerStarter(SandboxFolder(tmp_path), [], ApptainerOptions())


def file_instance(run_dir: Path, root: ProcessRef) -> None:
    """File an instance as Apptainer does."""
    folder = run_dir / "apptainer" / "instances" / "app" / "host" / "user" / NAME
    folder.mkdir(parents=True)
    (folder / f"{NAME}.json").write_text(json.dumps({"pid": root.pid, "ppid": root.pid}))


async def test_a_filed_instance_does_not_wait_for_its_start_command(
    starter: ApptainerStarter, tmp_path: Path, waiting: Callable[[], Waiting]
) -> None:
    """The command counts as a helper, so that the sandbox's end takes it along."""
    root, command = waiting(), waiting()
    file_instance(tmp_path, root.ref)
    async with asyncio.timeout(patience(10)):
        found = await starter._filed(NAME, command.ref)
    assert command.ref.alive()
    assert (found.root, found.helpers) == (root.ref, (command.ref,))
    assert await asyncio.to_thread(end_instance, found.root, None, found.helpers, 10.0)
    assert not command.ref.alive()


async def test_a_start_command_that_has_ended_is_no_helper(
    starter: ApptainerStarter, tmp_path: Path, waiting: Callable[[], Waiting]
) -> None:
    root, command = waiting(), waiting()
    file_instance(tmp_path, root.ref)
    command.end()
    assert (await starter._filed(NAME, command.ref)).helpers == ()


async def test_an_instance_that_is_not_filed_yet_is_looked_for_after_its_start_command(
    starter: ApptainerStarter, tmp_path: Path, waiting: Callable[[], Waiting], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, command = waiting(), waiting()
    looked = asyncio.Event()
    loop, load = asyncio.get_running_loop(), load_instance

    def watched(config: Path, name: str) -> Instance | None:
        found = load(config, name)
        loop.call_soon_threadsafe(looked.set)
        return found

    monkeypatch.setattr("rollyard_pipeline.sandboxes.apptainer.starter.load_instance", watched)
    async with asyncio.timeout(patience(10)):
        filing = asyncio.create_task(starter._filed(NAME, command.ref))
        await looked.wait()
        assert not filing.done()
        file_instance(tmp_path, root.ref)
        command.end()
        assert await filing == Instance(root.ref, root.ref, ())


async def test_an_instance_that_is_never_filed_is_an_error(
    starter: ApptainerStarter, waiting: Callable[[], Waiting]
) -> None:
    command = waiting()
    command.end()
    with pytest.raises(SandboxStartFailed, match=f"no instance {NAME} is filed"):
        await starter._filed(NAME, command.ref)


def test_what_is_filed_of_one_instance_is_forgotten_alone(tmp_path: Path) -> None:
    """The names of instances may begin alike, and a run folder may be used under two names of the host."""
    ids = ("0a", "0a1", "ff")
    for host in ("one", "two"):
        for sandbox_id in ids:
            name = instance_name(sandbox_id)
            folder = tmp_path / "instances" / "app" / host / "user" / name
            folder.mkdir(parents=True)
            (folder / f"{name}.json").write_text("{}")
            logs = tmp_path / "instances" / "logs" / host / "user"
            logs.mkdir(parents=True, exist_ok=True)
            for kind in ("out", "err"):
                (logs / f"{name}.{kind}").touch()
        (tmp_path / "instances" / "app" / host / "user" / "another").mkdir()
    assert filed_instances(tmp_path) == ["0a", "0a1", "ff"]
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    forget_instance(tmp_path, instance_name("0a"))
    assert filed_instances(tmp_path) == ["0a1", "ff"]
    gone = before - {path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.stem for path in gone} == {instance_name("0a")}
    assert len(gone) == 6
