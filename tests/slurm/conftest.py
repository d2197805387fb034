"""A real Slurm of four nodes with real rootless Apptainer, used as an ordinary user: scripts/slurm-lab's.

It is one for all processes of a machine. Whoever finds it down starts it; the last session to end stops it
again if a session of tests had started it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from kubelab import cluster, images

__all__ = ["cluster", "images"]
ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "scripts" / "slurm-lab"
IN_USE = Path("/tmp/rollyard-slurm-lab.use")
START_SECONDS = 600.0
"""The first start on a machine installs packages."""
COMMAND_SECONDS = 120.0
HEAL_SECONDS = 240.0


class CommandFailed(AssertionError):
    """A command ended with another status than 0; its words."""

    def __init__(self, command: Sequence[str], done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{shlex.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        self.output = done.stdout + done.stderr


def _lab(*words: str, timeout: float = COMMAND_SECONDS) -> str:
    command = [sys.executable, str(LAB), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise CommandFailed(command, done)
    return done.stdout


@dataclass
class Slurm:
    """The lab, and hands to break its parts with."""

    conf: Path
    """slurm.conf; root's commands need it in SLURM_CONF."""
    home: Path
    """The user's home, shared between the login node and all nodes."""
    user: str
    uid: int
    gid: int
    nodes: tuple[str, ...]
    node_tmp: Mapping[str, Path]
    """Where each node's own /tmp lies on this machine."""
    env: dict[str, str] = field(repr=False)
    """For Slurm's commands outside the lab, as root."""

    def command(
        self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command line that runs one as the ordinary user on the login node.

        `cwd`: the user's home if None. `env`: beside the user's own few variables; nothing else is handed on.
        """
        words = [sys.executable, str(LAB), "run", "--chdir", str(cwd or self.home)]
        for name, value in (env or {}).items():
            words += ["--env", f"{name}={value}"]
        return [*words, "--", *argv]

    def run_as_user(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        input: str | None = None,
        timeout: float = COMMAND_SECONDS,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command as the ordinary user on the login node; `timeout` in seconds.

        Raises:
            CommandFailed: its exit status is not 0, and `check`.
            subprocess.TimeoutExpired: it lasted longer.
        """
        command = self.command(argv, cwd=cwd, env=env)
        stdin = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **stdin)  # type: ignore[call-overload]
        if check and done.returncode != 0:
            raise CommandFailed(argv, done)
        return done  # type: ignore[no-any-return]

    def popen_as_user(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Starts a command as the ordinary user; its pid is the command's own."""
        return subprocess.Popen(self.command(argv, cwd=cwd, env=env), **popen)

    def sbatch(self, script: str, *options: str) -> int:
        """Submits a script as the ordinary user; the job's number."""
        told = self.run_as_user(["sbatch", "--parsable", *options], input=script).stdout
        return int(told.strip().split(";")[0])

    def state(self, job: int) -> str:
        """Of a job, such as RUNNING; empty where Slurm does not know it."""
        done = self.run_as_user(["squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T"], check=False)
        return done.stdout.strip()

    def wait_state(self, job: int, *states: str, seconds: float = 120.0) -> str:
        """Waits until a job is in one of these states; which.

        Raises:
            AssertionError: it is in none of them in time.
        """
        deadline = time.monotonic() + seconds
        while (seen := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {seen!r}, not {states}"
            time.sleep(0.1)
        return seen

    def node_states(self) -> dict[str, str]:
        """Of each node, such as idle; a `*` at its end: it does not answer."""
        command = ["sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL to a node's slurmd; the jobs on it run on."""
        _lab("kill", node)

    def start_slurmd(self, node: str) -> None:
        """Starts a node's slurmd again unless it runs."""
        _lab("restart", node)

    @contextmanager
    def altered_node(self, node: str, *changes: str) -> Iterator[Slurm]:
        """An idle node whose slurmd is started again with these options of `slurm-lab restart`, for a while.

        Yields:
            The lab, with the node's own /tmp where it lies then.
        """
        _lab("end", node)
        _lab("restart", node, *changes)
        try:
            pid = (self.conf.parents[1] / "run" / f"{node}.pid").read_text().split()[0]
            self._wait_idle(node)
            yield replace(self, node_tmp={**self.node_tmp, node: Path(f"/proc/{pid}/root/tmp")})
        finally:
            _lab("end", node)
            _lab("restart", node)

    @contextmanager
    def disk(self, folder: Path, mebibytes: int) -> Iterator[Path]:
        """A disk of so many MiB at `folder`, for the user on the login node alone.

        Yields:
            The folder as this process sees it.
        """
        pid = (self.conf.parents[1] / "run" / "namespace.pid").read_text().split()[0]
        inside = ["nsenter", "-t", pid, "--mount", "--"]
        options = f"mode=700,uid={self.uid},gid={self.gid},size={mebibytes}m"
        self.run_as_user(["mkdir", "-p", str(folder)])
        mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        subprocess.run([*inside, *mount], check=True, timeout=COMMAND_SECONDS)
        try:
            yield Path(f"/proc/{pid}/root{folder}")
        finally:
            subprocess.run([*inside, "umount", "-l", str(folder)], check=True, timeout=COMMAND_SECONDS)

    def _wait_idle(self, node: str) -> None:
        deadline = time.monotonic() + HEAL_SECONDS
        while self.node_states().get(node) != "idle":
            assert time.monotonic() < deadline, f"{node} is {self.node_states().get(node)!r}, not idle"
            time.sleep(0.1)

    def stop_controller(self, saving: bool = True) -> None:
        """Ends slurmctld. Not `saving`: it dies, and knows nothing of its last seconds when it is back."""
        _lab("end" if saving else "kill", "slurmctld")

    def start_controller(self) -> None:
        """Starts slurmctld again unless it runs; it knows its jobs from disk."""
        _lab("restart", "slurmctld")

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """The controller with accounts, whose limits count, for a while; it soon forgets what has ended."""
        self.stop_controller()
        try:
            _lab("restart", "slurmctld", "--accounting", timeout=START_SECONDS)
            self.heal()
            yield
            self.heal()
        finally:
            if self.node_states():
                self.stop_controller()
            self.start_controller()
            self.heal()

    def sacctmgr(self, *words: str) -> str:
        """What an administrator's command about accounts prints."""
        command = ["sacctmgr", "--immediate", "--noheader", "--parsable2", *words]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        if done.returncode != 0:
            raise CommandFailed(command, done)
        return done.stdout

    def job_processes(self) -> dict[int, str]:
        """Command lines of the user's processes in control groups of Slurm's jobs, by pid."""
        found = {}
        for pid, line in self.user_processes().items():
            try:
                groups = Path(f"/proc/{pid}/cgroup").read_text()
            except OSError:
                continue
            if "slurm" in groups:
                found[pid] = line
        return found

    def user_processes(self) -> dict[int, str]:
        """Command lines of what runs as the ordinary user, by pid; what has ended is not counted."""
        found = {}
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            try:
                if entry.stat().st_uid != self.uid:
                    continue
                if Path(entry.path, "stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                    continue
                line = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            found[int(entry.name)] = line.strip()
        return found

    def heal_nodes(self) -> None:
        """Every slurmd and slurmctld runs, or has been started."""
        _lab("restart", "slurmctld")
        for node in self.nodes:
            _lab("restart", node)

    def heal(self) -> None:
        """Everything runs, nothing is queued, all nodes are idle.

        Raises:
            AssertionError: not within HEAL_SECONDS.
        """
        self.heal_nodes()
        deadline = time.monotonic() + HEAL_SECONDS
        while True:
            subprocess.run(["scancel", "--user", self.user], env=self.env, capture_output=True, timeout=30)
            states = self.node_states()
            if set(states) == set(self.nodes) and set(states.values()) == {"idle"}:
                queued = subprocess.run(["squeue", "-h"], env=self.env, capture_output=True, timeout=30)
                if queued.returncode == 0 and not queued.stdout:
                    return
            assert time.monotonic() < deadline, f"the lab does not heal: {states}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def slurm_lab(missing: Callable[[str], NoReturn]) -> Iterator[Slurm]:
    """The lab, running."""
    if os.geteuid() != 0:
        missing("no Slurm: scripts/slurm-lab needs root")
    with IN_USE.open("a+") as in_use:
        # Exclusive while it is started or stopped, shared while it is used.
        fcntl.flock(in_use, fcntl.LOCK_EX)
        try:
            ran = subprocess.run([sys.executable, str(LAB), "status"], capture_output=True, timeout=60)
            if ran.returncode != 0:
                _lab("start", timeout=START_SECONDS)
                in_use.truncate(0)
                in_use.write("stop")
                in_use.flush()
            told = json.loads(_lab("info"))
        except (CommandFailed, subprocess.TimeoutExpired) as error:
            missing(f"no Slurm: {error}")
        fcntl.flock(in_use, fcntl.LOCK_SH)
        yield Slurm(
            conf=Path(told["conf"]),
            home=Path(told["home"]),
            user=told["user"],
            uid=told["uid"],
            gid=told["gid"],
            nodes=tuple(told["nodes"]),
            node_tmp={node: Path(path) for node, path in told["node_tmp"].items()},
            env=told["env"],
        )
        try:
            fcntl.flock(in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # others use it still; the last of them stops it
        in_use.seek(0)
        if in_use.read() == "stop":
            in_use.truncate(0)
            _lab("stop")


@pytest.fixture
def slurm(slurm_lab: Slurm) -> Iterator[Slurm]:
    """The lab for one test: whatever the test broke runs again afterwards, and its jobs are gone."""
    yield slurm_lab
    slurm_lab.heal()


@pytest.fixture
def shared(slurm_lab: Slurm, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A fresh folder of the user's in the shared home, removed after the test."""
    path = Path(_made(slurm_lab, "mktemp", "-d", str(slurm_lab.home / "t-XXXXXX")))
    yield path
    _made(slurm_lab, "rm", "-rf", "--", str(path))


def _made(lab: Slurm, *argv: str) -> str:
    return lab.run_as_user(argv).stdout.strip()


_PROGRAMS = (
    "bash", "awk", "basename", "cat", "chmod", "cp", "cut", "date", "dirname", "env", "expr", "find", "grep",
    "head", "id", "ls", "mkdir", "mv", "printf", "rm", "sed", "seq", "sleep", "sort", "tail", "tee", "touch",
    "tr", "uniq", "wc", "xargs",
)  # fmt: skip
_BUILD_SECONDS = 500.0


@pytest.fixture(scope="session")
def sif(slurm_lab: Slurm) -> Iterator[Path]:
    """An image for sandboxes: bash, some programs and the libraries they load, built by the user."""
    folder = Path(_made(slurm_lab, "mktemp", "-d", str(slurm_lab.home / "image-XXXXXX")))
    files = set()
    for name in _PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None, f"no {name} on this machine"
        files.add((f"usr/bin/{name}", str(Path(found).resolve())))
        listing = subprocess.run(["ldd", found], capture_output=True, text=True, timeout=20, check=True)
        files |= {(word.lstrip("/"), word) for word in listing.stdout.split() if word.startswith("/")}
    lines = ["set -e", f"cd {folder}", "mkdir -p root/usr/bin root/etc root/tmp root/proc root/sys root/dev"]
    lines += ["ln -s usr/bin root/bin", "mkdir -p root/home root/root root/var/tmp root/work"]
    for target, source in sorted(files):
        lines.append(f"mkdir -p root/{Path(target).parent} && cp -L {shlex.quote(source)} root/{target}")
    lines += ["ln -s bash root/usr/bin/sh", "echo root:x:0:0::/root:/bin/bash > root/etc/passwd"]
    lines += ["echo root:x:0: > root/etc/group", "apptainer -s build image.sif root", "rm -rf root"]
    slurm_lab.run_as_user(["sh", "-c", "\n".join(lines)], timeout=_BUILD_SECONDS)
    yield folder / "image.sif"
    _made(slurm_lab, "rm", "-rf", "--", str(folder))
