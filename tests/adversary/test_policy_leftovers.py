"""A policy that leaves something behind: for its own evaluation, for the next sandbox, for the host."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from rollyard_testing.adversary.attacklab import Lab, until
from rollyard_testing.adversary.attacks import Attack, cases, ipython, python
from rollyard_testing.adversary.policy_leftovers import ATTACKS, SEGMENTS
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="sandbox")


@pytest.mark.parametrize("attack", cases(ATTACKS))
def test_nothing_outlives_a_rollout(lab: Lab, attack: Attack) -> None:
    lab.attack(attack)


@pytest.mark.attack(
    "SIGTERM of the container's runtime",
    boundary="exec server",
    surface="server",
    stopped_by="it ends the server",
)
def test_the_first_process_ends_by_a_signal_from_outside(lab: Lab) -> None:
    """The container's runtime can do what commands cannot."""
    attack = Attack(name="ended_from_outside", goal="None: it is the installer who ends it.", steps=())
    with lab.dictated(attack) as rollout:
        assert rollout.bash("kill -TERM 1; kill -INT 1; echo still here") == "still here"
        (root,) = lab.first_processes(rollout.mark)
        os.kill(root, signal.SIGTERM)
        until(
            lambda: not Path(f"/proc/{root}").exists(), "the end of the exec server", seconds=patience(10.0)
        )


@pytest.mark.attack(
    "shared memory, semaphores, message queues", surface="leftovers", stopped_by="ipc namespace"
)
def test_segments_and_queues_stay_in_their_sandbox(lab: Lab) -> None:
    """Neither the host nor the next sandbox has shared memory, semaphores and message queues of this one."""
    before = _host_segments()
    lab.attack(
        Attack(
            name="shared_segments",
            goal="Leave shared memory, semaphores and message queues to the host.",
            steps=(python(SEGMENTS), ipython("print('and from a notebook')")),
            shows=("^made 3 of 3$", "^shm 1$", "^sem 1$", "^msg 1$"),
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


@pytest.mark.attack(
    "System V memory that Run made takes the memory of the hidden test",
    surface="leftovers",
    stopped_by="the exec server removes all objects of the IPC namespace before Eval",
)
def test_segments_of_run_are_gone_in_eval(lab: Lab) -> None:
    """They belong to no process, and would take the memory in which the hidden test runs."""
    lab.attack(
        Attack(
            name="segments_for_eval",
            goal="Leave shared memory, semaphores and message queues to the hidden test, so that it fails.",
            steps=(
                python("""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
for key in range(1, 9):
    segment = libc.shmget(key, 8 << 20, 0o1600)
    ctypes.memset(libc.shmat(segment, None, 0), 1, 8 << 20)
print("made", segment, libc.semget(1, 1, 0o1000), libc.msgget(1, 0o1666))
"""),
                "tail -qn +2 /proc/sysvipc/{shm,sem,msg} | wc -l",
            ),
            # The reward shows whether the test finds any of them.
            test_script='[ "$(tail -qn +2 /proc/sysvipc/{shm,sem,msg} | wc -l)" = 0 ]',
            reward=1.0,
            shows=(r"^made \d+ \d+ \d+$", "^10$"),
        )
    )


@pytest.mark.attack(
    "files in every folder that can be written to",
    surface="warm pool and caches",
    stopped_by="each sandbox is used once and has its own file systems",
)
def test_nothing_written_is_seen_by_the_next_sandbox(lab: Lab) -> None:
    """Whatever can be written is the sandbox's own: caches of Python and pip, temporary folders, home."""
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
    """Return what an attack may have left in the host's lists of shared memory, semaphores and queues."""
    found = {
        f"{kind} {line.split()[0]}"
        for kind in ("shm", "sem", "msg")
        for line in Path("/proc/sysvipc", kind).read_text().splitlines()[1:]
        if line.split()[0] == str(0x5EC2E7)
    }
    folders = [folder for folder in ("/dev/shm", "/dev/mqueue") if os.path.isdir(folder)]
    return found | {f"{folder}/{name}" for folder in folders for name in os.listdir(folder) if "rya-" in name}
