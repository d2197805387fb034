"""Templates of bubblewrap sandboxes: when one is started, renewed and ended, and starts without one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.errors import SandboxStartFailed
from rollyard_pipeline.sandboxes.host.processes import ProcessRef, process_ref
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.host.threads import in_thread
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.bubblewrap import (
    FORK_FAILURES,
    MAX_TEMPLATES,
    Fork,
    Template,
    source_stamp,
)
from rollyard_sandbox.server.template import Forks
from rollyard_testing.pace import patience

# A bwrap that refuses every start without a pid namespace, which is how templates are started.
NO_TEMPLATES = """#!/bin/sh
if [ "$1" = --args ] && ! tr '\\0' '\\n' < /proc/self/fd/6 | grep -qx -e --unshare-pid; then
    echo no template here >&2; exit 1
fi
exec {bwrap} "$@"
"""


def opened(run_dir: Path, **options: Any) -> NodeProvider:
    provider = open_provider("bubblewrap", run_dir=run_dir, node="n", **options)
    assert isinstance(provider, NodeProvider)
    return provider


async def acquire(provider: NodeProvider, image: str | None = None) -> Sandbox:
    request = SandboxRequest(memory_bytes=192 << 20, disk_bytes=16 << 20, processes=64, image=image)
    return await provider.acquire(request, LeaseRef(rollout="r-1", token=1))


async def works(sandbox: Sandbox) -> bool:
    result = await sandbox.client.run(
        ["bash", "-c", "echo works > /work/file; cat /work/file"], timeout=patience(20)
    )
    return result.output == b"works\n"


def parent(run_dir: Path, sandbox: Sandbox) -> ProcessRef:
    """Return the process that has started the exec server, which is a template or bwrap."""
    record = SandboxFolder(run_dir).load(sandbox.handle.id)
    line = Path(f"/proc/{record.root.pid}/stat").read_text()
    found = process_ref(int(line[line.rindex(")") + 2 :].split()[1]))
    assert found is not None
    return found


def test_what_a_template_depends_on_includes_the_files_that_it_binds(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("one")
    arguments = ["--ro-bind", str(tmp_path / "hosts"), "/etc/hosts", "--ro-bind", "/none", "/none"]
    before = source_stamp(arguments)
    assert source_stamp(arguments) == before
    (tmp_path / "new").write_text("two")
    (tmp_path / "new").rename(tmp_path / "hosts")
    assert source_stamp(arguments) != before
    assert source_stamp([*arguments, "--dir", "/x"]) != source_stamp(arguments)


async def test_one_template_serves_a_root_folder_until_that_changes(
    run_dir: Path, root_folder: Path, bubblewrap_works: None, kit: Any, tmp_path: Path
) -> None:
    image = tmp_path / "image"
    shutil.copytree(root_folder, image, symlinks=True)
    provider = opened(run_dir)
    await provider.start()
    try:
        async with await acquire(provider, str(image)) as one, await acquire(provider, str(image)) as two:
            assert parent(run_dir, one) == parent(run_dir, two)
            (image / "added").mkdir()
            async with await acquire(provider, str(image)) as three:
                assert parent(run_dir, three) != parent(run_dir, two)
                listing = await three.client.run(["ls", "/"], timeout=patience(20))
                assert b"added" in listing.output
                assert await works(one)
    finally:
        await kit.clean(provider)


async def test_templates_are_few_and_end_with_their_worker(
    run_dir: Path, root_folder: Path, bubblewrap_works: None, kit: Any, tmp_path: Path
) -> None:
    provider = opened(run_dir)
    await provider.start()
    templates, sandboxes = [], []
    try:
        for number in range(MAX_TEMPLATES + 1):
            image = tmp_path / f"image-{number}"
            shutil.copytree(root_folder, image, symlinks=True)
            sandboxes.append(await acquire(provider, str(image)))
            templates.append(parent(run_dir, sandboxes[-1]))
        await kit.until(lambda: not templates[0].alive())
        assert all(each.alive() for each in templates[1:])
        assert await works(sandboxes[0])
    finally:
        for sandbox in sandboxes:
            await sandbox.close()
        await kit.clean(provider)
    await kit.until(lambda: not any(each.alive() for each in templates))


async def test_where_no_template_can_be_started_each_sandbox_is_started_alone(
    run_dir: Path, bubblewrap_works: None, kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bwrap = tmp_path / "bwrap"
    bwrap.write_text(NO_TEMPLATES.format(bwrap=shutil.which("bwrap")))
    bwrap.chmod(0o755)
    provider = opened(run_dir, bwrap=str(bwrap))
    await provider.start()
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(FORK_FAILURES + 1):
                async with await acquire(provider) as sandbox:
                    assert await works(sandbox)
        (line,) = [line for line in caplog.messages if "started alone" in line]
        assert "no template here" in line
    finally:
        await kit.clean(provider)


async def test_without_templates_bwrap_stays_as_the_monitor(
    run_dir: Path, bubblewrap_works: None, kit: Any
) -> None:
    provider = opened(run_dir, templates=False)
    await provider.start()
    try:
        async with await acquire(provider) as sandbox:
            assert await works(sandbox)
            record = SandboxFolder(run_dir).load(sandbox.handle.id)
            assert record.monitor is not None
            assert record.monitor == parent(run_dir, sandbox)
    finally:
        await kit.clean(provider)


@pytest.mark.parametrize("how", ["cancelled", "too late"])
async def test_a_start_that_is_given_up_leaves_no_process(tmp_path: Path, how: str) -> None:
    """The template names the process that it has forked only after the worker has given up the start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(Template(ours, None)) as template, theirs:
        fork = Fork(tmp_path / "exec.sock", b"secret", [], {})
        start = asyncio.create_task(template.fork(fork, 0.2 if how == "too late" else 60.0))
        _, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, theirs, 65536, 32)
        if how == "cancelled":
            start.cancel()
        done, _ = await asyncio.wait({start}, timeout=0.4)
        assert not done, "it waits for the name"
        forked = await asyncio.create_subprocess_exec("sleep", "300")
        os.write(descriptors[2], json.dumps({"child-pid": forked.pid}).encode())
        result = (await asyncio.gather(start, return_exceptions=True))[0]
        assert await forked.wait() == -signal.SIGKILL
        for descriptor in descriptors:
            os.close(descriptor)
    assert isinstance(result, asyncio.CancelledError if how == "cancelled" else SandboxStartFailed)


FORK = """
import os, random
from rollyard_sandbox.server.template import Forks
os.register_at_fork(
    # Two processes write at the same time, so each line is one write.
    before=lambda: os.write(1, b"before\\n"),
    after_in_child=lambda: os.write(1, b"in the child %d\\n" % os.getpid()),
    after_in_parent=lambda: os.write(1, b"in the parent\\n"),
)
forks, drawn = Forks(), []
for _ in range(2):
    reading, writing = os.pipe()
    child = forks.fork()
    if child == 0:
        os.write(writing, b"%d %d" % (os.getpid(), random.getrandbits(64)))
        os._exit(0)
    os.close(writing)
    assert os.waitpid(child, 0) == (child, 0)
    number, value = os.read(reading, 100).split()
    assert number == b"1", "it is process 1 of its namespace"
    drawn.append(value)
assert drawn[0] != drawn[1], "the generator of each process begins elsewhere"
"""


def test_a_fork_of_the_template_is_a_fork_for_python_too(bubblewrap_works: None) -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(["before", "in the child 1", "in the parent"] * 2)


def test_a_template_does_not_start_on_a_processor_whose_clone_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "n", "7", "1", "s390x")))
    with pytest.raises(OSError, match="clone\\(2\\) on s390x is not known"):
        Forks()


async def test_work_in_a_thread_is_awaited_however_often_it_is_cancelled() -> None:
    going, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert going.wait(patience(30))
        ended.set()

    task = asyncio.create_task(in_thread(work))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    done, _ = await asyncio.wait({task}, timeout=0.05)
    assert not done
    going.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
