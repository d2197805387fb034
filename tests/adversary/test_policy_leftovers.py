"""A policy that leaves something behind: for its own evaluation, for the next sandbox, for the host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from attacklab import Lab, until
from attacks import Attack, ipython, python

pytestmark = pytest.mark.real

SEGMENTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
key = 0x5EC2E7
made = [libc.shmget(key, 4096, 0o1666), libc.semget(key, 1, 0o1666), libc.msgget(key, 0o1666)]
libc.shmat.restype = ctypes.c_void_p
ctypes.memmove(libc.shmat(made[0], None, 0), b"@MARK@", 20)
libc.mq_open = ctypes.CDLL("librt.so.1", use_errno=True).mq_open
made.append(libc.mq_open(b"/@MARK@", os.O_CREAT | os.O_RDWR, 0o666, None))
open("/dev/shm/@MARK@", "w").write("@MARK@")
print("made", sum(number >= 0 for number in made), "of", len(made))
for kind in ("shm", "sem", "msg"):
    print(kind, len(open(f"/proc/sysvipc/{kind}").readlines()) - 1)
"""

ATTACKS = [
    Attack(
        name="immortal_processes",
        goal="Keep a process alive after the end of the rollout.",
        steps=(
            "(trap '' TERM INT HUP QUIT; exec -a @MARK@ sleep 1000) > /dev/null 2>&1 & disown; "
            "setsid bash -c 'trap \"\" TERM INT HUP; exec -a @MARK@ sleep 1000' > /dev/null 2>&1 & "
            "(exec -a @MARK@ bash -c 'kill -STOP $$; sleep 1000') & disown; echo started",
            python("""
import os, signal, time
if os.fork():
    raise SystemExit
os.setsid()
if os.fork():
    os._exit(0)
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
os.close(0), os.close(1), os.close(2)
while True:
    time.sleep(1000)
"""),
            "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep -c '^@MARK@$'",
        ),
        shows=("started$", "^[4-9]$"),
    ),
    Attack(
        name="killing_everything",
        goal="End the exec server, and with it the evaluation that is to come.",
        steps=("kill -9 -1", "echo still here"),
        shows=("still here$",),
    ),
    Attack(
        name="signals_to_the_first_process",
        goal="End or stop the exec server by each signal there is.",
        steps=(
            "for s in {1..64}; do kill -s $s 1; done 2> /dev/null; echo sent",
            "echo still here",
        ),
        shows=("^sent$", "^still here$"),
    ),
    Attack(
        name="no_leave_to_delete",
        goal="Leave what the worker may not delete: no permissions, odd modes, a socket, a pipe.",
        steps=(
            python("""
import os, socket
os.mkdir("locked")
for number in range(200):
    open(f"locked/{number}", "w").close()
listener = socket.socket(socket.AF_UNIX)
listener.bind("/work/socket")
os.mkfifo("/work/pipe")
os.symlink("..", "/work/up")
os.chmod("locked", 0o1000)
for folder in ("/tmp", "/dev/shm"):
    os.mkdir(f"{folder}/locked", 0o000)
print("left")
"""),
        ),
        shows=("^left$",),
    ),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_nothing_outlives_a_rollout(lab: Lab, attack: Attack) -> None:
    lab.attack(attack)


def test_the_first_process_ends_by_a_signal_from_outside(lab: Lab) -> None:
    """What commands cannot do, the container's runtime can."""
    attack = Attack(name="ended_from_outside", goal="None: it is the installer who ends it.", steps=())
    with lab.dictated(attack) as rollout:
        assert rollout.bash("kill -TERM 1; kill -INT 1; echo still here") == "still here"
        (root,) = lab.first_processes(rollout.mark)
        os.kill(root, signal.SIGTERM)
        until(lambda: not Path(f"/proc/{root}").exists(), "the end of the exec server")


def test_segments_and_queues_stay_in_their_sandbox(lab: Lab) -> None:
    """Shared memory, semaphores and message queues: neither the host nor the next sandbox has them."""
    before = _host_segments()
    lab.attack(
        Attack(
            name="shared_segments",
            goal="Leave shared memory, semaphores and message queues to the host.",
            steps=(python(SEGMENTS), ipython("print('and from a notebook')")),
            shows=("^made 4 of 4$", "^shm 1$", "^sem 1$", "^msg 1$"),
        )
    )
    assert _host_segments() - before == set()
    lab.attack(
        Attack(
            name="segments_of_the_one_before",
            goal="Read the shared memory of the sandbox that was here before.",
            steps=("tail -qn +2 /proc/sysvipc/{shm,sem,msg}; ls -A /dev/shm; echo end",),
            shows=(r"\Aend$",),
        )
    )


def test_nothing_written_is_seen_by_the_next_sandbox(lab: Lab) -> None:
    """Caches of Python and pip, temporary folders, home: whatever can be written is the sandbox's own."""
    lab.attack(
        Attack(
            name="poison",
            goal="Write something that the next sandbox will run or read.",
            steps=(
                python("""
import os
poisoned = []
for top in ("/", "/dev/shm", "/dev/mqueue", "/tmp", "/work", "/.rollyard"):
    for folder, folders, _ in os.walk(top):
        folders[:] = [name for name in folders if not (folder == "/" and name in ("proc", "sys"))]
        try:
            open(f"{folder}/poisoned.pth", "w").write("import os")
            poisoned.append(folder)
        except OSError:
            pass
print("poisoned", sorted(set(poisoned)))
"""),
            ),
            shows=(r"^poisoned \[.*'/tmp'.*'/work'",),
        )
    )
    lab.attack(
        Attack(
            name="poisoned",
            goal="Be the next sandbox.",
            steps=(
                python("""
import os
found = []
for top in ("/", "/dev/shm", "/dev/mqueue", "/tmp", "/work", "/.rollyard"):
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not (folder == "/" and name in ("proc", "sys"))]
        found += [folder] if "poisoned.pth" in files else []
print("found", found)
"""),
            ),
            shows=(r"^found \[\]$",),
        )
    )


def _host_segments() -> set[str]:
    """What the host's own lists of shared memory, semaphores and queues hold that may come from an attack."""
    found = {
        f"{kind} {line.split()[0]}"
        for kind in ("shm", "sem", "msg")
        for line in Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
        if line.split()[0] == str(0x5EC2E7)
    }
    folders = [folder for folder in ("/dev/shm", "/dev/mqueue") if os.path.isdir(folder)]
    return found | {f"{folder}/{name}" for folder in folders for name in os.listdir(folder) if "rya-" in name}
