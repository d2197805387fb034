"""Attacks of a policy that leaves something behind for those that come next."""

from __future__ import annotations

from rollyard_testing.adversary.attacks import Attack, python

SEGMENTS = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
key = 0x5EC2E7
made = [libc.shmget(key, 4096, 0o1666), libc.semget(key, 1, 0o1666), libc.msgget(key, 0o1666)]
libc.shmat.restype = ctypes.c_void_p
ctypes.memmove(libc.shmat(made[0], None, 0), b"@MARK@", 20)
open("/dev/shm/@MARK@", "w").write("@MARK@")
print("made", sum(number >= 0 for number in made), "of", len(made))
for kind in ("shm", "sem", "msg"):
    print(kind, len(open(f"/proc/sysvipc/{kind}").readlines()) - 1)
"""

ATTACKS = [
    Attack(
        name="immortal_processes",
        tries="processes that ignore signals, are stopped, or detach",
        surface="leftovers",
        stopped_by="the namespace ends with the sandbox",
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
        tries="kill -9 -1",
        boundary="exec server",
        surface="server",
        stopped_by="process 1 of a namespace cannot be killed from inside",
        steps=("kill -9 -1", "echo still here"),
        shows=("still here$",),
    ),
    Attack(
        name="signals_to_the_first_process",
        tries="each signal to process 1",
        boundary="exec server",
        surface="server",
        stopped_by="signals of processes inside are dropped; SIGTERM counts only from outside",
        steps=("for s in {1..64}; do kill -s $s 1; done 2> /dev/null; echo sent", "echo still here"),
        shows=("^sent$", "^still here$"),
    ),
    Attack(
        name="no_leave_to_delete",
        tries="files that cannot be deleted",
        surface="leftovers",
        stopped_by="memory file systems end with the sandbox",
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
