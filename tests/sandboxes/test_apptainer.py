"""What only Apptainer sandboxes do: writable layers, instances that leave nothing, a root user inside."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.apptainer.program import find_program
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions, instance_name, search
from rollyard_pipeline.sandboxes.errors import SandboxLost
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_testing.pace import patience

pytestmark = pytest.mark.apptainer
PROGRAM = shutil.which("apptainer") or "singularity"


def listed(run_dir: Path) -> list[str]:
    """Return the instances that Apptainer itself knows of in this run folder."""
    done = subprocess.run(
        [PROGRAM, "instance", "list", "--json"],
        env={**os.environ, "APPTAINER_CONFIGDIR": str(run_dir / "apptainer")},
        capture_output=True, text=True, timeout=patience(30), check=True,
    )  # fmt: skip
    return [entry["instance"] for entry in json.loads(done.stdout)["instances"]]


def alive(run_dir: Path, sandbox_id: str) -> list[int]:
    """Return the processes of a sandbox that its record names and that run."""
    record = SandboxFolder(run_dir).load(sandbox_id)
    known = [record.root, record.monitor, *record.helpers]
    return [process.pid for process in known if process is not None and process.alive()]


def orphaned_helpers() -> set[int]:
    """Return processes that serve a file system of Apptainer's and have lost the one that started them."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line, stat = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
                parent = int(stat[stat.rindex(")") + 2 :].split()[1])
                if parent == 1 and b"fuse" in line and b"mnt/session" in line:
                    found.add(int(entry.name))
    return found


async def test_it_is_an_instance(kit: Any, apptainer: NodeProvider, run_dir: Path) -> None:
    async with await kit.acquire(apptainer) as sandbox:
        name = instance_name(sandbox.handle.id)
        assert listed(run_dir) == [name]
        record = SandboxFolder(run_dir).load(sandbox.handle.id)
        # Helpers outside mount a SIF; the record names them, so that they can be ended.
        assert any("squashfuse" in Path(f"/proc/{h.pid}/cmdline").read_text() for h in record.helpers)
    await apptainer.release(sandbox.handle)
    assert listed(run_dir) == []
    assert [str(path) for path in (run_dir / "apptainer" / "instances").rglob("*") if path.is_file()] == []


async def test_nothing_of_the_host_leaks(
    kit: Any, sif: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "leaked")
    monkeypatch.setenv("APPTAINERENV_INJECTED", "leaked")
    monkeypatch.setenv("APPTAINER_BIND", "/etc:/mnt")
    provider = kit.open("apptainer", run_dir, str(sif))
    await provider.start()
    try:
        async with await kit.acquire(provider) as sandbox:
            _, seen = await kit.sh(sandbox, "env; cat /proc/1/environ | tr '\\0' '\\n'; ls /mnt 2>&1")
            assert "leaked" not in seen
            assert "hostname" not in seen
            user = getpass.getuser()
            assert (await kit.sh(sandbox, f"grep -c '^{user}:' /etc/passwd"))[1] == "0"
            assert (await kit.sh(sandbox, f"ls -d {Path.home()}"))[0] != 0
            assert (await kit.sh(sandbox, "ls /sys"))[1] == ""
            assert "appinit" not in (await kit.sh(sandbox, "cat /proc/[0-9]*/comm"))[1]
    finally:
        await kit.clean(provider)


async def test_a_full_or_closed_home_is_no_matter(
    kit: Any, sif: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("HOME", str(tmp_path))
    provider = kit.open("apptainer", run_dir, str(sif))
    await provider.start()
    try:
        async with await kit.acquire(provider) as sandbox:
            assert await kit.sh(sandbox, "echo $HOME; touch $HOME/x && ls") == (0, "/work\nx")
        assert list(tmp_path.iterdir()) == []
    finally:
        await kit.clean(provider)
        tmp_path.chmod(0o700)


async def test_changes_stay_in_a_layer_of_their_own(
    kit: Any, apptainer: NodeProvider, root_folder: Path
) -> None:
    image = str(root_folder)
    async with (
        await kit.acquire(apptainer, "r-1", image=image) as first,
        await kit.acquire(apptainer, "r-2", image=image) as second,
    ):
        # The folder is this user's: inside, its files may be changed.
        assert await kit.sh(
            first, "echo changed > /etc/image-name; rm /usr/bin/seq; touch /usr/new; echo ok"
        ) == (0, "ok")
        assert (await kit.sh(first, "cat /etc/image-name"))[1] == "changed"
        assert await kit.sh(second, "cat /etc/image-name; ls /usr; seq 1") == (0, "made-by-test\nbin\n1")
    assert (root_folder / "etc/image-name").read_text() == "made-by-test\n"
    assert not (root_folder / "usr/new").exists()


async def test_layer_is_of_the_size_that_was_asked_for(
    kit: Any, apptainer: NodeProvider, root_folder: Path
) -> None:
    if not (await find_program()).takes_config:
        pytest.skip("a set-user-id installation: only its administrator sizes the layer")
    async with await kit.acquire(apptainer, image=str(root_folder), disk_bytes=48 << 20) as sandbox:
        _, output = await kit.sh(sandbox, "head -c 30M /dev/zero > /usr/big; stat -c %s /usr/big")
        assert output == str(30 << 20)
    async with await kit.acquire(apptainer, image=str(root_folder), disk_bytes=24 << 20) as sandbox:
        _, output = await kit.sh(sandbox, "head -c 100M /dev/zero > /usr/big; stat -c %s /usr/big")
        assert "No space left on device" in output
        assert 16 << 20 <= int(output.splitlines()[-1]) <= 24 << 20
        assert await kit.sh(sandbox, "rm /usr/big; echo ok > /usr/small; cat /usr/small") == (0, "ok")


async def test_fresh_evaluation_sees_no_process_of_the_run(kit: Any, apptainer: NodeProvider) -> None:
    async with await kit.acquire(apptainer) as sandbox:
        watcher = "while :; do cat /work/hidden 2>/dev/null && touch /tmp/seen; done"
        await sandbox.client.bash(
            f"(setsid bash -c '{watcher}' &) ; {watcher} & disown", timeout=patience(20)
        )
        await sandbox.client.kill_all()
        await sandbox.client.write_file("/work/hidden", b"tests")
        # Process 1 is the server; the rest is the command that asks.
        _, others = await kit.sh(
            sandbox, "for p in /proc/[0-9]*; do [ ${p#/proc/} = 1 ] || cat $p/comm; done"
        )
        assert set(others.split()) <= {"bash", "cat"}
        assert (await kit.sh(sandbox, "test -e /tmp/seen"))[0] == 1


async def test_stopped_by_an_administrator(kit: Any, apptainer: NodeProvider, run_dir: Path) -> None:
    async with await kit.acquire(apptainer) as sandbox:
        handle = sandbox.handle
        done = await asyncio.to_thread(
            subprocess.run,
            [PROGRAM, "instance", "stop", instance_name(handle.id)],
            env={**os.environ, "APPTAINER_CONFIGDIR": str(run_dir / "apptainer")},
            capture_output=True, text=True, timeout=patience(30),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        await kit.until(lambda: alive(run_dir, handle.id) == [])
    with pytest.raises(SandboxLost, match="is gone"):
        await apptainer.attach(handle)
    assert await apptainer.sweep() == [handle.id]
    assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}


@pytest.mark.parametrize("victim", ["keeper", "process 1", "helpers", "all"])
async def test_killed_from_outside_leaves_nothing(
    kit: Any, apptainer: NodeProvider, run_dir: Path, victim: str
) -> None:
    async with await kit.acquire(apptainer) as sandbox:
        record = SandboxFolder(run_dir).load(sandbox.handle.id)
        assert record.root is not None
        assert record.monitor is not None
        every = {
            "keeper": [record.monitor],
            "process 1": [record.root],
            "helpers": record.helpers,
            "all": [record.monitor, record.root, *record.helpers],
        }
        for process in every[victim]:
            # Apptainer's start command is one of the helpers as long as it runs.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    await apptainer.release(sandbox.handle)
    everybody = [record.monitor, record.root, *record.helpers]
    assert [process.pid for process in everybody if process.alive()] == []
    assert search(instance_name(sandbox.handle.id)) == []
    assert listed(run_dir) == []
    assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}


async def test_sweep_ends_a_start_whose_worker_died(kit: Any, sif: Path, run_dir: Path) -> None:
    """The worker is killed between the instance's start and its first record of the processes."""
    code = (
        "import asyncio, os, signal, sys\n"
        "from rollyard_crds.lease import LeaseRef\n"
        "from rollyard_pipeline.sandboxes import open_provider\n"
        "from rollyard_pipeline.sandboxes.apptainer import starter\n"
        "from rollyard_pipeline.sandboxes.interface import SandboxRequest\n"
        "async def die(*args):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "starter.ApptainerStarter._filed = die\n"
        "async def main():\n"
        "    options = starter.ApptainerOptions(default_image=sys.argv[2])\n"
        "    provider = open_provider('apptainer', run_dir=sys.argv[1], node='n', apptainer=options)\n"
        "    await provider.start()\n"
        "    await provider.acquire(SandboxRequest(memory_bytes=192 << 20), LeaseRef(rollout='r', token=1))\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", code, str(run_dir), str(sif)]
    done = await asyncio.to_thread(subprocess.run, command, timeout=patience(50))
    assert done.returncode == -signal.SIGKILL
    (sandbox_id,) = SandboxFolder(run_dir).ids()
    name = instance_name(sandbox_id)
    assert search(name)
    provider = kit.open("apptainer", run_dir, str(sif))
    await provider.start()
    try:
        assert search(name) == []
        assert kit.processes_naming(name) == []
        assert listed(run_dir) == []
        assert kit.left_behind(run_dir) == {"folders": [], "mounts": [], "sockets": []}
    finally:
        await kit.clean(provider)


async def test_start_cancelled_at_any_moment_leaves_nothing(
    kit: Any, apptainer: NodeProvider, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: list[str] = []
    new_id = SandboxFolder.new_id

    def noted() -> str:
        ids.append(new_id())
        return ids[-1]

    monkeypatch.setattr(SandboxFolder, "new_id", staticmethod(noted))
    before = orphaned_helpers()
    for step in range(14):
        start = asyncio.create_task(kit.acquire(apptainer))
        await asyncio.sleep(0.02 * step)
        start.cancel()
        (result,) = await asyncio.gather(start, return_exceptions=True)
        if not isinstance(result, asyncio.CancelledError):
            await result.close()
            await apptainer.release(result.handle)
        # Helpers bear no name of the sandbox. Those of other instances on this machine have a parent.
        await kit.until(lambda: orphaned_helpers() <= before)
        assert listed(run_dir) == []
        assert [search(instance_name(made)) for made in ids] == [[]] * len(ids)
    assert len(ids) > 10


async def test_instances_without_a_folder_are_ended(kit: Any, sif: Path, run_dir: Path) -> None:
    first = kit.open("apptainer", run_dir, str(sif))
    await first.start()
    async with await kit.acquire(first) as sandbox:
        name = instance_name(sandbox.handle.id)
        record = SandboxFolder(run_dir).load(sandbox.handle.id)
    assert record is not None
    shutil.rmtree(run_dir / "sandboxes" / sandbox.handle.id)
    await first.aclose()
    assert listed(run_dir) == [name]
    second = kit.open("apptainer", run_dir, str(sif))
    await second.start()
    try:
        assert listed(run_dir) == []
        everybody = [record.monitor, record.root, *record.helpers]
        assert [process for process in everybody if process and process.alive()] == []
    finally:
        await kit.clean(second)


async def test_paths_with_commas_and_spaces(kit: Any, sif: Path, run_dir: Path) -> None:
    odd = run_dir / 'a, "b" c'
    odd.mkdir()
    image = odd / "x, y.sif"
    image.symlink_to(sif)
    provider = kit.open("apptainer", odd, str(image))
    await provider.start()
    try:
        async with await kit.acquire(provider) as sandbox:
            assert await kit.sh(sandbox, "cat /etc/image-name") == (0, "made-by-test")
    finally:
        await kit.clean(provider)


async def test_root_of_the_image(kit: Any, sif: Path, run_dir: Path) -> None:
    options = ApptainerOptions(default_image=str(sif), fakeroot=True)
    provider = open_provider("apptainer", run_dir=run_dir, node=kit.NODE, apptainer=options)
    assert isinstance(provider, NodeProvider)
    await provider.start()
    try:
        async with await kit.acquire(provider) as sandbox:
            assert await kit.sh(sandbox, "id -u; touch /usr/x /etc/x && echo changed") == (0, "0\nchanged")
            for script in (
                "mount -t tmpfs none /mnt", "umount /proc/sys", "touch /.rollyard/x", "unshare -m true",
                "echo x > /proc/sys/kernel/core_pattern", "mknod /tmp/sda b 8 0", "hostname other",
            ):  # fmt: skip
                code, output = await kit.sh(sandbox, script)
                assert code not in (0, 127), (script, output)
            _, bomb = await kit.sh(sandbox, "head -c 100M /dev/zero > /work/big; rm /work/big")
            assert "No space left on device" in bomb
            assert (await kit.sh(sandbox, "grep -c '' /proc/net/dev"))[1] == "3"
    finally:
        await kit.clean(provider)
