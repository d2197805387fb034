"""A command tries to take the place of the exec server, and to answer an evaluation's calls itself."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions
from rollyard_pipeline.sandboxes.errors import SandboxLost
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.runtime import PYTHON
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import SandboxError, SandboxSabotaged
from rollyard_sandbox.frames import encode
from rollyard_testing.adversary.takeover import HEAD, LOOK_INTO, TAKEOVER
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.nodeprovider import node_provider
from rollyard_testing.sandboxes.rootfolder import make_image, make_sif, podman_image

pytestmark = pytest.mark.attack(boundary="exec server", surface="server")


@pytest.fixture
async def provider(bubblewrap_works: None) -> AsyncIterator[NodeProvider]:
    async with node_provider() as started:
        yield started


@pytest.fixture
async def sandbox(provider: NodeProvider) -> AsyncIterator[Sandbox]:
    request = SandboxRequest(memory_bytes=256 << 20, disk_bytes=16 << 20, processes=128)
    async with await provider.acquire(request, LeaseRef(rollout="r-1", token=1)) as found:
        yield found


async def attack(sandbox: Sandbox, program: str) -> str:
    """Run the program by a command of the policy with the sandbox's own Python, and return what it prints."""
    await sandbox.client.write_file("/work/attack.py", program.encode())
    result = await sandbox.client.bash(f"{PYTHON} -I /work/attack.py", timeout=patience(30))
    return result.text()


async def armed(provider: NodeProvider, sandbox: Sandbox) -> Sandbox:
    """Return a new connection, once the attack has done all it can; a fake server says so, too."""
    async with asyncio.timeout(patience(20)):
        while True:
            try:
                found = await provider.attach(sandbox.handle)
            except SandboxLost:
                continue  # The process has just been stopped.
            try:
                async with asyncio.timeout(1):
                    await found.client.read_file("/work/armed")
            except (TimeoutError, SandboxError):
                await found.close()
            else:
                return found


@pytest.mark.attack(
    "take its listening socket, freeze it, and answer Eval in its place",
    stopped_by="it cannot be traced; filter of system calls; commands run in namespaces without it",
)
async def test_a_stolen_socket_answers_no_evaluation(provider: NodeProvider, sandbox: Sandbox) -> None:
    await sandbox.client.write_file("/work/attack.py", TAKEOVER.encode())
    running = await sandbox.client.start(f"exec {PYTHON} -I /work/attack.py", timeout=patience(60))
    await running.wait_for_output(b"stolen ")
    await sandbox.client.write_file("/work/go", b"")
    async with await armed(provider, sandbox) as other:
        await other.client.begin_eval()
        result = await other.client.run(["false"])
        assert result.exit_code == 1, "a command has answered in the server's name"


@pytest.mark.attack("read its memory, descriptors and environment", stopped_by="it is not dumpable")
async def test_no_command_looks_into_the_server(sandbox: Sandbox) -> None:
    worked = json.loads((await attack(sandbox, LOOK_INTO)).splitlines()[-1])
    assert worked == []
    assert (await sandbox.client.run(["true"])).exit_code == 0


SYSTEM_CALLS = pytest.mark.attack(
    "ptrace, pidfd_getfd, process_vm_*, bpf, keyctl, io_uring, mounts, vsock",
    stopped_by="filter of system calls in every command",
)


@SYSTEM_CALLS
async def test_refused_calls(sandbox: Sandbox) -> None:
    """Every call of the filter fails with EPERM in bash's children, in programs and in the kernel."""
    from rollyard_sandbox.isolation import seccomp

    numbers = seccomp.refused_calls(os.uname().machine)
    program = (
        HEAD
        + f"""
answers = {{name: call(number, 0, 0, 0, 0, 0, 0)[1] for name, number in {numbers!r}.items()}}
answers["clone3"] = call(435, 0, 0)[1]
new_user, new_time = 0x10000000, 0x80
answers["unshare"] = call(272 if X86 else 97, new_user)[1]
answers["unshare time"] = call(272 if X86 else 97, new_time)[1]
answers["clone"] = call(56 if X86 else 220, new_user | 17, 0, 0, 0, 0)[1]
try:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    answers["vsock"] = 0
except OSError as error:
    answers["vsock"] = error.errno
print(json.dumps(answers))
"""
    )
    expected = dict.fromkeys([*numbers, "unshare", "unshare time", "clone"], errno.EPERM)
    expected |= {"clone3": errno.ENOSYS, "vsock": errno.EAFNOSUPPORT}
    assert json.loads(await attack(sandbox, program)) == expected
    ran = await sandbox.client.run([PYTHON, "-I", "/work/attack.py"])
    assert json.loads(ran.text()) == expected
    cell = await sandbox.client.ipython(program, timeout=patience(90))
    assert json.loads(cell.text()) == expected


@SYSTEM_CALLS
async def test_threads_and_children_still_work(sandbox: Sandbox) -> None:
    program = (
        HEAD
        + """
import subprocess
threads = [threading.Thread(target=lambda: None) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
print(subprocess.run(["sh", "-c", "echo child | cat"], capture_output=True, text=True).stdout.strip())
a, b = socket.socketpair(); a.send(b"x"); print(b.recv(1).decode())
"""
    )
    assert await attack(sandbox, program) == "child\nx\n"


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer as a server in another's place does: it agrees to everything, and knows no secret."""
    fields = {
        "version": 1, "pid": 1, "count": 1, "proof": "00" * 64,
        "folder": "/tmp", "home": "/tmp", "tmp": "/tmp", "reward_file": "/tmp/r",
    }  # fmt: skip
    try:
        while True:
            head, body = struct.unpack("!II", await reader.readexactly(8))
            request = json.loads(await reader.readexactly(head))
            await reader.readexactly(body)
            writer.write(encode({**fields, "id": request["id"]}))
    except asyncio.IncompleteReadError:
        writer.close()


A_SERVER_IN_ITS_PLACE = pytest.mark.attack(
    "a server in its place that agrees to everything",
    surface="connection at Eval",
    stopped_by="the server proves that it knows a secret of its sandbox",
)


@A_SERVER_IN_ITS_PLACE
async def test_who_does_not_know_the_secret_is_found_out(provider: NodeProvider, sandbox: Sandbox) -> None:
    """Nobody but the server can answer for it, even without protections and with the socket taken."""
    path = Path(sandbox.handle.address.removeprefix("unix:"))
    async with await provider.attach(sandbox.handle):
        pass
    path.rename(path.with_name("real"))
    fake = await asyncio.start_unix_server(answer_all, path)
    try:
        with pytest.raises(SandboxSabotaged, match="does not know its secret"):
            await provider.attach(sandbox.handle)
        # A connection that was made without a proof may not begin an evaluation either.
        async with await ExecClient.connect(f"unix:{path}") as client:
            client.secret = bytes.fromhex(json.loads((path.parent / "sandbox.json").read_bytes())["secret"])
            with pytest.raises(SandboxSabotaged):
                await client.begin_eval()
    finally:
        fake.close()
        path.with_name("real").rename(path)
    async with await provider.attach(sandbox.handle) as other:
        await other.client.begin_eval()


@A_SERVER_IN_ITS_PLACE
async def test_the_secret_is_out_of_reach(provider: NodeProvider, sandbox: Sandbox) -> None:
    file = Path(sandbox.handle.address.removeprefix("unix:")).with_name("sandbox.json")
    assert file.stat().st_mode & 0o777 == 0o600
    secret = bytes.fromhex(json.loads(file.read_bytes())["secret"])
    assert len(secret) == 32
    script = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ; ls -l /proc/[0-9]*/fd; cat /proc/[0-9]*/fd/8"
    shown = (await sandbox.client.bash(f"{{ {script}; }} < /dev/null 2>&1", timeout=patience(20))).output
    assert shown.startswith(
        b"init\0"
    )  # The first process is seen, and nothing of the server's memory is in it.
    assert b"bash\0--norc" in shown
    for form in (secret, secret.hex().encode(), repr(secret)[2:-1].encode()):
        assert form not in shown
    hidden = await sandbox.client.bash(f"test -e {file.parent}")
    assert hidden.exit_code == 1


FINDING_THE_SERVER = pytest.mark.attack(
    "find it in /proc, or by any number of a process",
    stopped_by="commands have pid, mount and user namespaces in which it does not exist",
)


@FINDING_THE_SERVER
async def test_the_server_does_not_exist_for_commands(sandbox: Sandbox) -> None:
    assert (await sandbox.client.info()).pid == 1
    result = await sandbox.client.run(["bash", "-c", "cat /proc/[0-9]*/comm; id -u"])
    # The first process only reaps. Neither the server nor the process that keeps the sandbox has a number.
    assert result.text().split() == ["init", "bash", "1000"]
    # Not even an open /proc of the server's helps: what is below this one stays covered.
    assert (await sandbox.client.run(["bash", "-c", "umount -l /proc; ls -d /proc/[0-9]*"])).exit_code == 0
    assert (await sandbox.client.bash("cat /proc/1/comm")).text() == "init\n"


@FINDING_THE_SERVER
async def test_new_namespaces_take_the_place_of_killed_ones(sandbox: Sandbox) -> None:
    async def namespace() -> str:
        return (await sandbox.client.bash("readlink /proc/self/ns/pid; echo $$ > /tmp/mine")).text()

    before = await namespace()
    assert await namespace() == before
    assert (await sandbox.client.bash("kill -9 1; kill -15 1; sleep 0.1; echo alive")).text() == "alive\n"
    for _ in range(3):
        # This is the shell; the process that only keeps the sandbox does not count.
        assert await sandbox.client.kill_all() == 1
        after = await namespace()
        assert after != before
        before = after


@FINDING_THE_SERVER
@pytest.mark.apptainer
@pytest.mark.parametrize("fakeroot", [False, True])
async def test_an_apptainer_instance_keeps_its_server(
    apptainer_works: None, tmp_path: Path, fakeroot: bool
) -> None:
    """The server stays safe also where commands are root of the image."""
    options = ApptainerOptions(default_image=str(make_sif(make_image(tmp_path / "root"))), fakeroot=fakeroot)
    async with node_provider("apptainer", apptainer=options) as provider:
        await keeps_its_server(provider, 0 if fakeroot else 1000)


@FINDING_THE_SERVER
@pytest.mark.podman
@pytest.mark.nightly
async def test_a_container_keeps_its_server(podman_works: None, tmp_path: Path) -> None:
    """A container's process 1, which has received the secret, is as far away as the server."""
    with podman_image(make_image(tmp_path / "root")) as image:
        async with node_provider("podman", default_image=image) as provider:
            await keeps_its_server(provider, 1000)


async def keeps_its_server(provider: NodeProvider, user: int) -> None:
    request = SandboxRequest(memory_bytes=256 << 20, disk_bytes=16 << 20, processes=128)
    async with await provider.acquire(request, LeaseRef(rollout="r-1", token=1)) as sandbox:
        assert json.loads((await attack(sandbox, LOOK_INTO)).splitlines()[-1]) == []
        await sandbox.client.write_file("/work/attack.py", TAKEOVER.encode())
        running = await sandbox.client.start(f"exec {PYTHON} -I /work/attack.py", timeout=patience(60))
        await running.wait_for_output(b"stolen 0")
        await sandbox.client.write_file("/work/go", b"")
        async with await armed(provider, sandbox) as other:
            await other.client.begin_eval()
            result = await other.client.run(["bash", "-c", "echo $UID; exit 1"])
            assert (result.text(), result.exit_code) == (f"{user}\n", 1)
