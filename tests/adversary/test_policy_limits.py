"""A policy that uses up resources harms its own sandbox only, and is scored."""

from __future__ import annotations

import os
import signal

import pytest
from rollyard_pipeline.sandboxes.host.cgroups import enforced, find_places
from rollyard_testing.adversary.attacklab import TOOLS, Lab
from rollyard_testing.adversary.attacks import Attack, cases, edit, ipython, python
from rollyard_testing.adversary.policyserver import calling

pytestmark = pytest.mark.attack(boundary="sandbox")


IMPATIENT = {"agent": {"type": "oracle", "tools": TOOLS, "toolTimeoutSeconds": 1}}
"""With these options a tool call ends after a second."""

DEEP_PATHS = {
    "tries": (
        "a path of 1,000 folders to make, or a chain of 1,500 links to follow, ends the server, so that the "
        "rollout begins again"
    ),
    "surface": "exec server",
    "stopped_by": (
        "folders are made and removed without recursion, and 40 links are followed; no exception "
        "of a request ends the server"
    ),
}

ATTACKS = [
    Attack(
        name="fork_bomb",
        tries="fork bomb",
        surface="processes",
        stopped_by="limit of processes of the sandbox",
        steps=(
            python("""
import os, time
made = 0
try:
    while made < 2000:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
        made += 1
except OSError as error:
    print("refused after", made, error.strerror)
"""),
            "echo still here",
        ),
        shows=(r"^refused after \d?\d Resource temporarily unavailable$", "^still here$"),
    ),
    Attack(
        name="thread_bomb",
        tries="thread bomb",
        surface="processes",
        stopped_by="threads count as processes",
        steps=(
            python("""
import os, threading
stop = threading.Event()
made = 0
try:
    while made < 2000:
        threading.Thread(target=stop.wait, daemon=True).start()
        made += 1
except RuntimeError as error:
    print("refused after", made, error)
os._exit(0)
"""),
            "echo still here",
        ),
        shows=(r"^refused after \d?\d can't start new thread", "^still here$"),
    ),
    Attack(
        name="zombie_flood",
        tries="orphans that become zombies",
        surface="processes",
        stopped_by="the exec server reaps them",
        steps=(
            python("""
import os
for _ in range(300):
    if (child := os.fork()) == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.waitpid(child, 0)
print("made them")
"""),
            # A new process needs a place, and only those that were reaped have left one.
            "for i in {1..100}; do bash -c : || break; done; echo made $i more",
        ),
        shows=("^made them$", "^made 100 more$"),
    ),
    Attack(
        name="memory_bomb",
        tries="one process allocates",
        surface="memory",
        stopped_by="limit of memory; the rollout is scored as truncated",
        steps=(python('block = bytearray(600 << 20)\nprint("WON", len(block))'),),
        shows=("MemoryError|Killed",),
        hides=("^WON",),
    ),
    Attack(
        name="memory_bomb_in_ipython",
        tries="the notebook kernel allocates",
        surface="memory",
        stopped_by="limit of memory; the rollout is scored as truncated",
        steps=(ipython('block = bytearray(600 << 20)\nprint("WON", len(block))'),),
        hides=("^WON",),
    ),
    Attack(
        name="disk_filler",
        tries="fill `/work`, `/tmp`, `/dev/shm`",
        surface="disk",
        stopped_by="memory file systems of fixed sizes",
        steps=(
            "for d in /work /tmp /dev/shm; do head -c 100M /dev/zero > $d/big; stat -c %s $d/big; done",
            "echo still here",
        ),
        shows=("No space left on device", "^still here$"),
        hides=("^104857600$",),
    ),
    Attack(
        name="full_memory_file_systems",
        tries="fill every memory file system, then allocate",
        surface="memory",
        stopped_by="they leave a part of the memory; scored with `SandboxSabotaged`",
        steps=(
            "for d in /work /tmp /dev/shm; do head -c 500M /dev/zero > $d/big; done",
            python('block = bytearray(600 << 20)\nprint("WON", len(block))'),
        ),
        spec={"sandbox": {"resources": {"memory": "192Mi", "disk": "1Gi", "processes": 64}, "warm": 0}},
        shows=("No space left on device",),
        hides=("^WON",),
    ),
    Attack(
        name="sparse_file",
        tries="a sparse file of a petabyte",
        surface="disk",
        stopped_by="nothing is copied at the end",
        steps=(
            python("""
import os
with open("sparse", "wb") as file:
    try:
        os.truncate(file.fileno(), 1 << 50)
    except OSError as error:
        print(error.strerror)
print("tried")
"""),
        ),
        shows=("^tried$",),
    ),
    Attack(
        name="deep_folders",
        tries="10,000 levels of folders",
        surface="clean-up",
        stopped_by="file systems end with the mount namespace; nothing is walked",
        steps=(
            python("""
import os
made = 0
try:
    while made < 10_000:
        os.mkdir("d" * 200)
        os.chdir("d" * 200)
        made += 1
except OSError as error:
    print(error.strerror)
print("made", made)
"""),
        ),
        shows=(r"^made \d{4,}$",),
    ),
    Attack(
        name="deep_path",
        goal="End the exec server by a path for which it makes a folder inside a folder.",
        **DEEP_PATHS,
        steps=(edit(command="create", path="a/" * 1000 + "x", file_text="deep"), "echo still here"),
        shows=("^created ", "^still here$"),
    ),
    Attack(
        name="link_chain",
        goal="End the exec server by a path at which it follows link after link.",
        **DEEP_PATHS,
        steps=(
            "for i in {1..1500}; do ln -s $((i+1)) $i; done; touch 1501",
            edit(command="create", path="1", file_text="far"),
            "echo still here",
        ),
        shows=("Too many levels of symbolic links", "^still here$"),
    ),
    Attack(
        name="strange_names",
        tries="names of any bytes and of full length",
        surface="clean-up",
        stopped_by="file systems end with the mount namespace; nothing is walked",
        steps=(
            python("""
import os
names = [b"x" * 255, b"\\xff\\xfe", b"-rf", b"a\\nb", b"$(touch @MARK@)", b"\\x1b[2J", b" ", b"..."]
for name in names:
    for folder in (b"/work/", b"/tmp/", b"/dev/shm/"):
        os.mkdir(folder + name)
print("made", len(names))
"""),
        ),
        shows=("^made 8$",),
    ),
    Attack(
        name="locked_folders",
        tries="folders without permissions",
        surface="clean-up",
        stopped_by="file systems end with the mount namespace; nothing is walked",
        steps=("mkdir -p a/b/c && touch a/b/c/file && chmod 000 a/b/c a/b a && echo locked",),
        shows=("^locked$",),
    ),
    Attack(
        name="open_files",
        tries="open files without end",
        surface="descriptors",
        stopped_by="limit of open files, for each process",
        steps=(
            python("""
import os
held = []
try:
    while len(held) < 2_000_000:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print("refused:", error.strerror)
"""),
            "echo still here",
        ),
        shows=("^refused: Too many open files$", "^still here$"),
    ),
    Attack(
        name="pseudo_terminals",
        tries="all pseudo-terminals of the node, without which no shell starts",
        surface="terminals",
        stopped_by=(
            "a sandbox has 64 of its own under bubblewrap and Apptainer; pods share those of "
            "their node, whose `kernel.pty.max` is the only limit there"
        ),
        steps=(
            python("""
import os, time
made, refused = 0, ""
read, write = os.pipe()
while not refused and made < 4000:
    if os.fork() == 0:
        held = 0
        try:
            while held < 500:
                os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
                held += 1
            os.write(write, b"500 ")
        except OSError as error:
            os.write(write, f"{held} {error.strerror}".encode())
        time.sleep(300)
    count, refused = os.read(read, 100).decode().split(" ", 1)
    made += int(count)
print("took", made, "of them:", refused)
"""),
            "echo still here",
        ),
        shows=(r"^took \d{1,2} of them: No space left on device$", "^still here$"),
    ),
    Attack(
        name="output_flood",
        tries="300 MB from one command",
        surface="output",
        stopped_by="head and tail are kept, the rest is dropped while it is read",
        steps=("yes 0123456789abcdef0123456789abcdef | head -c 300000000; echo; echo end",),
        shows=("^end$",),
    ),
    Attack(
        name="output_without_end",
        tries="output without end",
        surface="output",
        stopped_by="the tool's time limit",
        steps=("yes", "echo still here"),
        spec=IMPATIENT,
        shows=("^still here$",),
    ),
    Attack(
        name="strange_messages",
        tries=(
            "a notebook kernel sends messages that are none of a kernel's, or sends without end, so that "
            "a tool's time limit is not kept"
        ),
        surface="exec server",
        stopped_by=(
            "no field is taken for what the protocol says it is, and what comes after the limit is bounded"
        ),
        steps=(
            ipython("k = get_ipython().kernel; k.session.send(k.iopub_socket, 'stream', {'nope': 1})"),
            ipython("import time; time.sleep(1000)"),
            "echo still here",
        ),
        spec=IMPATIENT,
        shows=("timed out", "^still here$"),
    ),
    Attack(
        name="huge_environment",
        tries="an environment of 3 MB, kept over a restart of the shell",
        surface="start of programs",
        stopped_by="only commands of that session fail",
        steps=(
            "export HUGE=$(head -c 3000000 /dev/zero | tr '\\0' x); ls",
            "exit 0",
            "echo ${#HUGE} characters",
        ),
        shows=("Argument list too long", r"^\d+ characters$"),
    ),
    Attack(
        name="huge_arguments",
        tries="2 MB of arguments",
        surface="start of programs",
        stopped_by="the command fails, and the session continues",
        steps=('ls $(for i in {1..200000}; do printf "argument "; done)', "echo still here"),
        shows=("Argument list too long", "^still here$"),
    ),
    Attack(
        name="busy_loops",
        tries="busy loops that outlive the rollout",
        surface="processes",
        stopped_by="they end with their namespace",
        steps=("for i in {1..8}; do (exec -a @MARK@ bash -c 'while :; do :; done') & done; echo started",),
        shows=("^started$",),
    ),
    Attack(
        name="raised_limits",
        tries="setrlimit, nice, real-time scheduling, OOM score",
        surface="limits",
        stopped_by="hard limits; no capability",
        steps=(
            python("""
import os, resource
def attempt(name, call, *arguments):
    try:
        call(*arguments)
    except (OSError, ValueError) as error:
        print("refused", name, error)
    else:
        print("WON", name)
for name in ("RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_DATA", "RLIMIT_CORE"):
    which = getattr(resource, name)
    hard = resource.getrlimit(which)[1]
    if hard != resource.RLIM_INFINITY:
        attempt(name, resource.setrlimit, which, (hard + 1, hard + 1))
attempt("nice", os.nice, -5)
attempt("real time", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))
score = int(open("/proc/self/oom_score_adj").read())
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
except OSError as error:
    print("refused oom_score_adj", error.strerror)
else:
    print("WON oom_score_adj", score)
"""),
        ),
        shows=("^refused nice", "^refused real time", "^refused oom_score_adj"),
        hides=("^WON",),
    ),
]


@pytest.mark.parametrize("attack", cases(ATTACKS))
def test_a_greedy_policy_is_scored(lab: Lab, attack: Attack) -> None:
    outcome = lab.attack(attack)
    assert all(len(text) < 64 << 10 for text in outcome.observations)


MANY_EATERS = Attack(
    name="memory_bomb_of_many",
    tries="many processes, each below the limit",
    surface="memory",
    stopped_by="memory control group (where the worker may make one)",
    steps=(
        python("""
import os, select, time
read, write = os.pipe()
for _ in range(8):
    if os.fork() == 0:
        block = bytearray(60 << 20)
        os.write(write, b"x")
        time.sleep(300)
got = b""
while len(got) < 8 and os.waitpid(-1, os.WNOHANG) == (0, 0):
    if select.select([read], [], [], 0.05)[0]:
        got += os.read(read, 8)
print("got", len(got))
"""),
    ),
    hides=("^got [5-8]$",),
)
KERNEL_EATER = Attack(
    name="memory_bomb_of_shared_segments",
    tries="memfds and segments that belong to no process",
    surface="memory",
    stopped_by="memory control group (where the worker may make one)",
    steps=(
        python("""
import os
held = 0
for _ in range(10):
    descriptor = os.memfd_create("held")
    os.set_inheritable(descriptor, True)
    for _ in range(32):
        held += os.write(descriptor, bytes(1 << 20))
print("WON", held)
"""),
    ),
    hides=("^WON",),
)


@pytest.mark.parametrize("attack", cases([MANY_EATERS, KERNEL_EATER]))
def test_memory_is_bounded_by_control_groups(bubblewrap_lab: Lab, attack: Attack) -> None:
    if "memory" not in enforced(find_places()):
        pytest.skip("no writable memory control group here")
    bubblewrap_lab.attack(attack)


BUSY = Attack(
    name="busy_fork_bomb",
    tries=(
        "hundreds of processes that fork and never rest, so that the exec server does not answer and the "
        "rollout begins again"
    ),
    surface="processes",
    stopped_by=(
        "commands have the lowest priority in the sandbox's control group, and an interrupt "
        "reads nothing for which they could keep it waiting"
    ),
    steps=(
        python("""
import os
while True:
    try:
        if os.fork() == 0:
            os.setsid()
    except OSError:
        pass
"""),
        "echo still here",
    ),
    spec={
        **IMPATIENT,
        "sandbox": {"resources": {"memory": "1Gi", "disk": "16Mi", "processes": 512}, "warm": 0},
    },
    shows=("timed out",),
)


STOPPER = Attack(
    name="stopped_starts",
    tries=(
        "each new process is stopped (SIGSTOP) before it has become a program, while the exec server "
        "waits for that"
    ),
    surface="processes",
    stopped_by=(
        "the exec server kills a child that was stopped so after a second; the command has not started"
    ),
    steps=(
        python("""
import os, signal, sys
if os.fork():
    sys.exit(print("stopping"))
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_IGN)
own = os.getpid()
for one in range(3):
    os.fork()
while True:
    last = int(open("/proc/loadavg").read().split()[-1]) if os.path.exists("/proc/loadavg") else own
    for pid in range(max(2, last - 2), last + 12):
        if pid not in (own, os.getpid()) and not own <= pid <= own + 8:
            try:
                os.kill(pid, signal.SIGSTOP)
            except OSError:
                pass
"""),
        *("kill -9 $$", "echo again") * 6,
    ),
    spec={
        **IMPATIENT,
        "sandbox": {"resources": {"memory": "1Gi", "disk": "16Mi", "processes": 64}, "warm": 0},
    },
    shows=("stopping",),
)


@pytest.mark.parametrize("attack", cases([BUSY, STOPPER]))
def test_busy_processes_keep_no_exec_server_from_answering(bubblewrap_lab: Lab, attack: Attack) -> None:
    bubblewrap_lab.attack(attack)


@pytest.mark.attack(
    "a bug of the exec server is used to end it, each time that a rollout goes badly",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="the first crash of a rollout is an infrastructure failure, which is logged as a bug "
    "(`SandboxCrashed`); from the second one on the rollout scores 0. Where no control group binds the "
    "memory of a sandbox, a server that the kernel ends because the whole node is out of memory counts as "
    "crashed, too",
)
def test_an_exec_server_that_crashes_gives_one_further_try(bubblewrap_lab: Lab) -> None:
    """No command reaches the server. A policy that knew a bug of it could end it as often as it likes."""
    attack = Attack(name="crashes", goal="Begin again as often as it likes.", steps=())
    with bubblewrap_lab.dictated(attack) as rollout:
        for _ in range(2):
            assert rollout.bash("echo here") == "here"
            (server,) = bubblewrap_lab.first_processes(rollout.mark)
            os.kill(server, signal.SIGKILL)
            rollout.say_last(calling("bash", {"command": "echo lost"}))
        found = rollout.outcome().trajectory
    assert (found.status, found.reward, found.reward_reason) == ("succeeded", 0.0, "SandboxCrashed")
    assert (found.attempt, found.truncated_reason) == (1, "SandboxCrashed")
    assert [(one.stage, one.reason, one.counted) for one in found.attempts] == [
        ("eval", "SandboxCrashed", True)
    ]
    assert "this is a bug" in bubblewrap_lab.log()
