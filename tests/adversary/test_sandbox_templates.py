"""Sandboxes that were forked from one template: none inherits anything of another one or of the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes.connection import connect
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.runtime import PYTHON
from rollyard_sandbox.errors import SandboxSabotaged
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.nodeprovider import node_provider

pytestmark = pytest.mark.attack(boundary="exec server", surface="template of sandboxes")


MARK = "the-secret-of-the-first-sandbox"
NAMESPACES = ("user", "mnt", "pid", "ipc", "net", "uts")
# The program looks for the template and the neighbour in everything that a command can reach.
LOOK = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name in sorted(os.listdir("/proc"), key=len):
    if name.isdigit() and int(name) != os.getpid():
        for part in ("environ", "mem", "maps", "root/work/left"):
            try:
                if {MARK!r}.encode() in open(f"/proc/{{name}}/{{part}}", "rb").read(1 << 20):
                    print("WON", name, part)
            except OSError:
                pass
        try:
            if found := os.listdir(f"/proc/{{name}}/fd"):
                print("WON descriptors", name, found)
        except OSError:
            pass
for folder in ("/work", "/tmp", "/dev/shm", "/dev/pts", "/run"):
    if found := set(os.listdir(folder)) - {{"attack.py", "ptmx"}}:
        print("WON", folder, found)
for target in ("/proc", "/work", "/tmp", "/dev/shm", "/dev/pts"):
    if libc.umount2(target.encode(), 2) == 0:
        print("WON umount", target)
for number in range(3, 64):
    try:
        print("WON descriptor", number, os.fstat(number))
    except OSError:
        pass
print("looked", sorted(int(name) for name in os.listdir("/proc") if name.isdigit())[:1])
"""


@pytest.fixture
async def provider(bubblewrap_works: None) -> AsyncIterator[NodeProvider]:
    async with node_provider() as found:
        yield found


async def acquire(provider: NodeProvider, owner: str, **env: str) -> Sandbox:
    request = SandboxRequest(memory_bytes=256 << 20, disk_bytes=16 << 20, processes=128, env=env)
    return await provider.acquire(request, LeaseRef(rollout=owner, token=1))


def folder_of(sandbox: Sandbox) -> SandboxFolder:
    return SandboxFolder(Path(sandbox.handle.address.removeprefix("unix:")).parents[2])


def secret_of(sandbox: Sandbox) -> bytes:
    record = folder_of(sandbox).load(sandbox.handle.id)
    assert record is not None
    assert record.secret
    return bytes.fromhex(record.secret)


def server(sandbox: Sandbox) -> int:
    """Return the process id of the exec server, as this machine sees it."""
    record = folder_of(sandbox).load(sandbox.handle.id)
    assert record is not None
    assert record.root is not None
    return record.root.pid


def template(sandbox: Sandbox) -> int:
    """Return the process id of the template from which a sandbox was forked."""
    line = Path(f"/proc/{server(sandbox)}/stat").read_text()
    return int(line[line.rindex(")") + 2 :].split()[1])


def opened(pid: int) -> set[tuple[int, int]]:
    """Return device and inode of the files, pipes and sockets that a process has opened."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        info = os.stat(entry)
        # The kernel gives all epolls and the like one inode.
        if not stat.S_ISCHR(info.st_mode) and not os.readlink(entry).startswith("anon_inode:"):
            found.add((info.st_dev, info.st_ino))
    return found


def memory_holds(pid: int, text: bytes) -> bool:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            if "r" not in line.split()[1] or "[v" in line:
                continue
            memory.seek(first)
            if text in (memory.read(last - first) or b""):
                return True
    return False


@pytest.mark.attack(
    "a server that was forked from it holds a secret, a variable, a descriptor or memory of another "
    "sandbox or of the worker",
    stopped_by="a template runs no command and reads no secret; a forked process keeps only its own "
    "descriptors, which came with its request, and reads its own secret",
)
@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may read the memory of a process that is not dumpable"
)
async def test_a_forked_server_holds_nothing_of_another_one(provider: NodeProvider) -> None:
    async with await acquire(provider, "r-1", MARKED=MARK) as first:
        assert MARK in (await first.client.bash("echo $MARKED")).text()
        secret = secret_of(first)
        async with await acquire(provider, "r-2") as second:
            forked = template(first)
            assert forked == template(second) != os.getpid()
            assert all(memory_holds(server(first), each) for each in (secret, MARK.encode()))
            for pid in (server(second), forked):
                assert not memory_holds(pid, secret)
                assert not memory_holds(pid, MARK.encode())
            other = secret_of(second)
            assert other is not None
            assert other != secret
            assert not any(memory_holds(pid, other) for pid in (server(first), forked))
            # Programs and libraries are mapped, and no file is open in two of them: no socket, pipe or log.
            seen = [opened(pid) for pid in (server(first), server(second), forked)]
            assert all(seen)
            assert len(set().union(*seen)) == sum(len(each) for each in seen)


@pytest.mark.attack(
    "sandboxes of one template share a namespace, or a server proves to know another one's secret",
    stopped_by="each forked process makes every namespace itself, a user namespace among them",
)
async def test_forked_sandboxes_share_no_namespace(provider: NodeProvider) -> None:
    async with await acquire(provider, "r-1") as first, await acquire(provider, "r-2") as second:
        processes = (server(first), server(second), template(first), os.getpid())
        for name in NAMESPACES:
            seen = [os.readlink(f"/proc/{pid}/ns/{name}") for pid in processes]
            # The template stays in this machine's pid namespace, in which its sandboxes cannot see it.
            assert len(set(seen)) == (3 if name == "pid" else 4), (name, seen)
        with pytest.raises(SandboxSabotaged):
            await connect(second.handle.address, 10, secret=secret_of(first))


@pytest.mark.attack(
    "find it or a neighbour by /proc, pseudo-terminals, memory file systems or below mounts",
    stopped_by="/proc, /dev/pts and all that can be written are mounted afresh, and the template's own "
    "/proc belongs to a pid namespace that has ended",
)
async def test_a_command_finds_neither_the_template_nor_its_neighbour(provider: NodeProvider) -> None:
    async with await acquire(provider, "r-1", MARKED=MARK) as first:
        await first.client.bash("echo $MARKED | tee /work/left /tmp/left /dev/shm/left")
        async with await acquire(provider, "r-2") as second:
            await second.client.write_file("/work/attack.py", LOOK.encode())
            result = await second.client.run([PYTHON, "-I", "/work/attack.py"], timeout=patience(30))
            said = result.output.decode()
            assert "looked [1]" in said
            assert "WON" not in said


@pytest.mark.attack(
    "its end takes sandboxes away from their evaluation",
    stopped_by="no sandbox lies below it in any namespace but the user's",
)
async def test_the_end_of_a_template_harms_no_sandbox(provider: NodeProvider) -> None:
    async with await acquire(provider, "r-1") as first:
        ended = template(first)
        descriptor = os.pidfd_open(ended)
        try:
            os.kill(ended, signal.SIGKILL)
            loop, gone = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            async with asyncio.timeout(patience(10)):
                await gone.wait()
            loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)
        assert (await first.client.bash("echo alive")).text().strip() == "alive"
        # The start that finds the template gone is made alone, and the next sandbox has a new template.
        async with await acquire(provider, "r-2") as second, await acquire(provider, "r-3") as third:
            for sandbox in (second, third):
                assert (await sandbox.client.bash("echo works")).text().strip() == "works"
            assert template(third) not in (ended, template(second))


def layout(pid: int) -> str:
    """Return the address at which a process has its program."""
    return Path(f"/proc/{pid}/maps").read_text().partition("-")[0]


WHAT_SERVERS_SHARE = pytest.mark.attack(
    "learn in one sandbox the address layout or the hash seed of its exec server, which all servers of "
    "one template share, and use it in another one",
    stopped_by="nothing inside can read a server, and commands and notebook kernels are programs that are "
    "started afresh; what a policy learned would only help it against its own server, and a command that "
    "needs a neighbour's must first leave its sandbox. Python cannot change the seed of a process that "
    "runs; `--no-sandbox-templates` of the worker, `rollyard up` and `rollyard slurm-bridge up` starts "
    "each server with its own",
)


@WHAT_SERVERS_SHARE
async def test_what_is_learned_of_one_server_does_not_hold_for_commands(provider: NodeProvider) -> None:
    """Servers of one template have one address layout and one hash seed. No command has theirs."""
    first, second = [await acquire(provider, f"r-{number}") for number in (1, 2)]
    code = "print(open('/proc/self/maps').readline().partition('-')[0], hash('any text'))"
    seen = [layout(server(first))]
    hashes = []
    for sandbox in (first, first, second):
        result = await sandbox.client.run([PYTHON, "-c", code], timeout=patience(20))
        address, number = result.output.decode().split()
        seen.append(address)
        hashes.append(number)
    assert len(set(seen)) == 4
    assert len(set(hashes)) == 3
    assert layout(server(first)) == layout(server(second)), "what the switch is for"
    for sandbox in (first, second):
        await sandbox.close()


@WHAT_SERVERS_SHARE
async def test_without_templates_no_two_servers_are_alike(bubblewrap_works: None) -> None:
    async with node_provider(templates=False) as provider:
        first, second = [await acquire(provider, f"r-{number}") for number in (1, 2)]
        assert layout(server(first)) != layout(server(second))
        for sandbox in (first, second):
            await sandbox.close()
