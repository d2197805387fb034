"""A policy beside another one: neither can be seen, reached, harmed or robbed."""

from __future__ import annotations

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import Attack, cases, python

pytestmark = pytest.mark.attack(boundary="sandbox", surface="sandboxes side by side")


VICTIM = Attack(
    name="victim",
    goal="Solve the task, whatever the neighbours do.",
    steps=(),
    test_script='[ "$(cat result.txt)" = 42 ]',
    reward=1.0,
)
SETTLE = """
for folder in /work /tmp /dev/shm; do echo secret-of-@MARK@ > $folder/secret; done
export SECRET=secret-of-@MARK@
(exec -a secret-of-@MARK@ sleep 300) > /dev/null 2>&1 & disown
@PY@ - secret-of-@MARK@ > /dev/null 2>&1 <<'END' &
import ctypes, socket, time
abstract, path, loopback = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX), socket.socket()
abstract.bind("\\0secret")
path.bind("/tmp/listening")
loopback.bind(("127.0.0.1", 4747))
for listener in (abstract, path, loopback):
    listener.listen()
time.sleep(300)
END
disown; until [ -S /tmp/listening ]; do sleep 0.01; done; echo settled
"""

ATTACKS = [
    Attack(
        name="neighbours_files",
        tries="files, environments, command lines, sockets' names",
        stopped_by="mount, pid and network namespaces",
        steps=(
            "cat /work/secret /tmp/secret /dev/shm/secret",
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline > seen 2> /dev/null; grep -ac secret-of- seen",
            "grep -rsal secret-of- /tmp /dev/shm /run /var 2> /dev/null; cat /proc/net/unix; echo looked",
        ),
        shows=("No such file", "^0$", "^looked$"),
        hides=("@secret",),
    ),
    Attack(
        name="neighbours_sockets",
        tries="abstract and named sockets, loopback ports",
        stopped_by="network and mount namespaces",
        steps=(
            python("""
import socket
for family, address in (
    (socket.AF_UNIX, "\\0secret"), (socket.AF_UNIX, "/tmp/listening"), (socket.AF_INET, ("127.0.0.1", 4747)),
):
    try:
        with socket.socket(family) as caller:
            caller.connect(address)
        print("WON", address)
    except OSError as error:
        print("refused", error)
with socket.create_server(("127.0.0.1", 4747)), socket.socket(socket.AF_UNIX) as mine:
    mine.bind("\\0secret")
    print("took the same names")
"""),
        ),
        shows=(r"refused.*\nrefused.*\nrefused", "^took the same names$"),
        hides=("^WON",),
    ),
    Attack(
        name="harm_to_neighbours",
        tries="kill, fill, starve",
        stopped_by="pid namespace and limits of each",
        steps=(
            "kill -9 -1",
            python("""
import os, signal
for number in range(2, 70_000):
    if number != os.getpid():
        try:
            os.kill(number, signal.SIGKILL)
        except OSError:
            pass
"""),
            "for d in /work /tmp /dev/shm; do head -c 100M /dev/zero > $d/big; done",
            python('block = bytearray(600 << 20)\nprint("WON", len(block))'),
        ),
        shows=("No space left",),
        hides=("^WON",),
    ),
]


@pytest.mark.parametrize("attack", cases(ATTACKS))
def test_a_neighbour_notices_nothing(lab: Lab, attack: Attack) -> None:
    with lab.dictated(VICTIM) as victim:
        assert "settled" in victim.bash(SETTLE)
        secrets = {"a secret of its neighbour": f"secret-of-{victim.mark}"}
        with lab.rollout(attack) as rollout:
            lab.judge(attack, rollout.outcome(), secrets)
        assert victim.bash("cat /work/secret") == f"secret-of-{victim.mark}"
        victim.bash("echo 42 > result.txt")
        lab.judge(VICTIM, victim.submit())
