"""A policy that takes what the kernel counts for a user or for the machine, and not for a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.host.cgroups import enforced, find_places
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_testing.adversary.attacklab import PYTHON, Lab
from rollyard_testing.adversary.attacks import Attack, cases, python

pytestmark = pytest.mark.attack(boundary="sandbox", surface="what a user shares")


TAKING = """
import ctypes, os, signal, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.sigqueue.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])

def taken(take, most):
    for count in range(most):
        if take() < 0:
            return f"{count} {os.strerror(ctypes.get_errno())}"
    return f"all {most}"

def inotify():
    return libc.inotify_init1(0)

def queued():
    return libc.sigqueue(os.getpid(), signal.SIGRTMIN, None)

def locked():
    return libc.shmctl(libc.shmget(0, 16384, 0o1600), 11, None)  # SHM_LOCK
"""
"""How to take one of each resource that is counted for the user of the machine and for the sandbox, too."""

FILES_WITHOUT_CONTENT = {
    "tries": "files without content, whose number no size bounds",
    "surface": "files",
    "stopped_by": "one file for each page of a memory file system",
}

ATTACKS = [
    Attack(
        name="contexts_of_asynchronous_io",
        tries="contexts of asynchronous I/O, which all processes of the machine share",
        stopped_by="filter of system calls; `ENOSYS`, as in a kernel without them",
        steps=(
            python("""
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 206, "aarch64": 0}[platform.machine()]
print("io_setup", libc.syscall(number, 65535, ctypes.byref(ctypes.c_ulong())), ctypes.get_errno())
"""),
        ),
        shows=("^io_setup -1 38$",),
    ),
    Attack(
        name="posix_message_queues",
        tries="POSIX message queues, by call or by folder",
        stopped_by="`RLIMIT_MSGQUEUE` is 0",
        steps=(
            python("""
import ctypes, os
queues = ctypes.CDLL("librt.so.1", use_errno=True)
made = queues.mq_open(b"/queue", os.O_CREAT | os.O_RDWR, 0o600, None)
print("mq_open", made, os.strerror(ctypes.get_errno()))
try:
    os.close(os.open("/dev/mqueue/queue", os.O_CREAT | os.O_RDWR))
    print("WON")
except OSError as error:
    print("refused", error.strerror)
"""),
        ),
        shows=("^mq_open -1 Too many open files$", "^refused "),
        hides=("^WON",),
    ),
    Attack(
        name="descriptors_in_flight",
        tries="more descriptors in flight on sockets than the worker may have",
        stopped_by=(
            "`RLIMIT_NOFILE` is 4,096 in sandboxes, and as large as permitted in the worker; "
            "other sandboxes are not protected"
        ),
        steps=(
            python("""
import os, socket
held, sent = [], 0
null = os.open("/dev/null", os.O_RDONLY)
try:
    while sent < 100_000:
        here, there = socket.socketpair()
        held += [here, there]
        here.setblocking(False)
        try:
            while True:
                socket.send_fds(here, [b"x"], [null] * 250)
                sent += 250
        except BlockingIOError:
            continue
    print("WON", sent)
except OSError as error:
    print("refused after", sent, error.strerror)
"""),
        ),
        # Those of other sandboxes count, too.
        shows=(r"^refused after [0-4]?\d{0,3} Too many references",),
        hides=("^WON",),
    ),
    Attack(
        name="files_without_content",
        goal="Take the memory of the kernel by millions of files that no size bounds.",
        **FILES_WITHOUT_CONTENT,
        steps=(
            python("""
import os
for folder in ("/work", "/tmp", "/dev/shm"):
    made = 0
    try:
        while made < 50_000:
            os.close(os.open(f"{folder}/{made}", os.O_CREAT | os.O_WRONLY))
            made += 1
        print("WON", folder)
    except OSError as error:
        print("refused after", made, error.strerror)
"""),
        ),
        shows=(r"(^refused after \d{4} No space left on device\n?){3}",),
        hides=("^WON",),
    ),
]


@pytest.mark.parametrize("attack", cases(ATTACKS))
def test_what_the_kernel_shares_is_refused_or_bounded(lab: Lab, attack: Attack) -> None:
    lab.attack(attack)


@pytest.mark.attack(
    "hold all inotify instances, queued signals and locked segments that there are",
    stopped_by="bounds that hold in each user namespace; a neighbour gets its own",
)
def test_a_neighbour_has_its_share(lab: Lab) -> None:
    """A sandbox that holds all it can get leaves the same to the next one of the same user."""
    hog = Attack(
        name="hog",
        goal="Leave no notifications of files, queued signals and locked memory to other sandboxes.",
        steps=(),
    )
    victim = Attack(
        name="beside_a_hog", goal="Solve the task.", steps=(), test_script="[ -e solved ]", reward=1.0
    )
    hold = f"{TAKING}\nfor take in (inotify, queued, locked): print(taken(take, 200_000), flush=True)\n"
    hold += "open('held', 'w').close(); time.sleep(300)"
    use = f"{TAKING}\nfor take in (inotify, queued, locked): print(taken(take, 3))\nopen('solved', 'w')"
    with lab.dictated(hog) as greedy, lab.dictated(victim) as other:
        shown = greedy.bash(
            f"cat > hog.py <<'END'\n{hold}\nEND\n"
            "(@PY@ hog.py @MARK@ > shown 2>&1 &); until [ -e held ]; do sleep 0.01; done; cat shown"
        )
        assert shown.splitlines() == [
            "16 Too many open files", "1024 Resource temporarily unavailable", "4 Cannot allocate memory",
        ]  # fmt: skip
        assert other.bash(python(use)).splitlines() == ["all 3"] * 3
        lab.judge(victim, other.submit())
        lab.judge(hog, greedy.submit())


SOCKETS = """
import select, socket
listener, held, total = socket.create_server(("127.0.0.1", 0)), [], 0
for _ in range(48):
    caller = socket.create_connection(listener.getsockname())
    held += [caller, listener.accept()[0]]
    caller.setblocking(False)
    while select.select([], [caller], [], 0.02)[1]:
        try:
            total += caller.send(bytes(1 << 16))
        except BlockingIOError:
            continue
print("held", total >> 20, "MiB")
"""


@pytest.mark.attack(
    "48 connections that nobody reads, whose buffers are no process's memory",
    surface="memory",
    stopped_by="`memory.kmem.tcp` of the control group",
)
def test_buffers_of_sockets_are_bounded_by_control_groups(bubblewrap_lab: Lab) -> None:
    if "memory" not in enforced(find_places()):
        pytest.skip("no writable memory control group here")
    bubblewrap_lab.attack(
        Attack(
            name="unread_connections",
            goal="Take the memory of the node by connections that nobody reads.",
            steps=(python(SOCKETS),),
            # The limit is 24 MiB, which each connection may exceed by a buffer.
            shows=(r"^held \d?\d MiB$",),
        )
    )


@pytest.mark.attack(
    FILES_WITHOUT_CONTENT["tries"], surface="files", stopped_by=FILES_WITHOUT_CONTENT["stopped_by"]
)
async def test_files_without_content_are_bounded_in_each_way_to_start(
    bubblewrap_works: None, tmp_path: Path
) -> None:
    """The number of files is bounded without control groups, and with folders that no template has."""
    provider = open_provider("bubblewrap", run_dir=tmp_path, node="n", find_places=list)
    assert isinstance(provider, NodeProvider)
    await provider.start()
    try:
        await _count_files(provider, ())
        await _count_files(provider, ("/data/set",))
    finally:
        await provider.aclose()


async def _count_files(provider: NodeProvider, folders: tuple[str, ...]) -> None:
    request = SandboxRequest(memory_bytes=192 << 20, disk_bytes=4 << 20, processes=64, folders=folders)
    names = ("/work", "/tmp", *folders)
    code = f"""
import os
for folder in {names!r}:
    info = os.statvfs(folder)
    print(folder, info.f_files, info.f_blocks * info.f_frsize)
"""
    sandbox = await provider.acquire(request, LeaseRef(rollout="r", token=1))
    try:
        shown = await sandbox.client.run([PYTHON, "-c", code])
        expected = [f"{name} {(4 << 20) // 4096} {4 << 20}" for name in names]
        assert shown.text().splitlines() == expected
    finally:
        await provider.release(sandbox.handle)
