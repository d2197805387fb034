"""The lab of scripts/slurm-lab, and methods to break its parts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollyard_testing import sharedlab
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[4]
LAB = ROOT / "scripts" / "slurm-lab"
IN_USE = Path("/tmp/rollyard-slurm-lab.use")
START_SECONDS = patience(600.0)
"""The longest start, in seconds: the first one on a machine installs packages."""
COMMAND_SECONDS = patience(120.0)
HEAL_SECONDS = patience(240.0)


class CommandFailed(AssertionError):
    """A command ended with another status than 0; the text is its output."""

    def __init__(self, command: Sequence[str], done: subprocess.CompletedProcess[str]) -> None:
        super().__init__(f"{shlex.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        self.output = done.stdout + done.stderr


def end_left() -> None:
    """End the Slurm that an interrupted run of tests has left."""
    sharedlab.end_left(IN_USE, lambda: lab_command("stop"))


def lab_command(*words: str, timeout: float = COMMAND_SECONDS) -> str:
    command = [sys.executable, str(LAB), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise CommandFailed(command, done)
    return done.stdout


@dataclass
class Slurm:
    """The lab, and methods to break its parts."""

    conf: Path
    """The path of slurm.conf, which root's commands need in SLURM_CONF."""
    home: Path
    """The user's home, shared between the login node and all nodes."""
    user: str
    uid: int
    gid: int
    nodes: tuple[str, ...]
    node_tmp: Mapping[str, Path]
    """The path of each node's own /tmp on this machine."""
    env: dict[str, str] = field(repr=False)
    """The environment for Slurm's commands outside the lab, as root."""

    def command(
        self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command line that runs one as the ordinary user on the login node.

        `cwd` is the user's home if None. `env` is added to the user's own few variables; nothing else is
        passed.
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
        """Run a command as the ordinary user on the login node; `timeout` is in seconds.

        Raises:
            CommandFailed: Its exit status is not 0, and `check` is set.
            subprocess.TimeoutExpired: It lasted longer.
        """
        command = self.command(argv, cwd=cwd, env=env)
        stdin = {"input": input} if input is not None else {"stdin": subprocess.DEVNULL}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **stdin)
        if check and done.returncode != 0:
            raise CommandFailed(argv, done)
        return done

    def popen_as_user(
        self,
        argv: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command as the ordinary user; its pid is the command's own."""
        return subprocess.Popen(self.command(argv, cwd=cwd, env=env), **popen)

    def sbatch(self, script: str, *options: str) -> int:
        """Submit a script as the ordinary user, and return the job's number."""
        told = self.run_as_user(["sbatch", "--parsable", *options], input=script).stdout
        return int(told.strip().split(";")[0])

    def state(self, job: int) -> str:
        """Return the state of a job, such as RUNNING; empty where Slurm does not know it."""
        # To enter the lab as its user takes several times as long as the question.
        command = ["squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        return done.stdout.strip()

    def wait_state(self, job: int, *states: str, seconds: float = 120.0) -> str:
        """Wait until a job is in one of these states, and return which.

        Raises:
            AssertionError: It is in none of them in time.
        """
        deadline = time.monotonic() + patience(seconds)
        while (seen := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {seen!r}, not {states}"
            time.sleep(0.1)
        return seen

    def node_states(self) -> dict[str, str]:
        """Return the state of each node, such as idle; a `*` at its end means that it does not answer."""
        command = ["sinfo", "-h", "-N", "-p", "debug", "-o", "%N %T"]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        return dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}

    def kill_slurmd(self, node: str) -> None:
        """Send SIGKILL to a node's slurmd; the jobs on it keep running."""
        lab_command("kill", node)

    @contextmanager
    def altered_node(self, node: str, *changes: str) -> Iterator[Slurm]:
        """Start an idle node's slurmd again with these options of `slurm-lab restart`, for a while.

        Yields:
            It yields the lab, with the node's own /tmp where it lies then.
        """
        lab_command("end", node)
        lab_command("restart", node, *changes)
        try:
            pid = (self.conf.parents[1] / "run" / f"{node}.pid").read_text().split()[0]
            self._wait_idle(node)
            yield replace(self, node_tmp={**self.node_tmp, node: Path(f"/proc/{pid}/root/tmp")})
        finally:
            lab_command("end", node)
            lab_command("restart", node)

    @contextmanager
    def disk(self, folder: Path, mebibytes: int) -> Iterator[Path]:
        """Make a disk of so many MiB at `folder`, for the user on the login node alone.

        Yields:
            It yields the folder as this process sees it.
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
        """End slurmctld. Without `saving` it dies, and knows nothing of its last seconds when it is back."""
        lab_command("end" if saving else "kill", "slurmctld")

    def start_controller(self) -> None:
        """Start slurmctld again unless it runs; it knows its jobs from disk."""
        lab_command("restart", "slurmctld")

    @contextmanager
    def accounting(self) -> Iterator[None]:
        """Run the controller with accounts for a while.

        Their limits count, and it soon forgets what has ended.
        """
        self.stop_controller()
        try:
            lab_command("restart", "slurmctld", "--accounting", timeout=START_SECONDS)
            self.heal()
            yield
            self.heal()
        finally:
            if self.node_states():
                self.stop_controller()
            self.start_controller()
            self.heal()

    def sacctmgr(self, *words: str) -> str:
        """Return what an administrator's command about accounts prints."""
        command = ["sacctmgr", "--immediate", "--noheader", "--parsable2", *words]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        if done.returncode != 0:
            raise CommandFailed(command, done)
        return done.stdout

    def job_processes(self) -> dict[int, str]:
        """Return command lines of the user's processes in control groups of Slurm's jobs, by pid."""
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
        """Return command lines of the ordinary user's processes, by pid; what has ended is not counted."""
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
                continue  # It has ended in between.
            found[int(entry.name)] = line.strip()
        return found

    def heal_nodes(self) -> None:
        """Start every slurmd and slurmctld that does not run."""
        lab_command("restart", "slurmctld")
        for node in self.nodes:
            lab_command("restart", node)

    def heal(self) -> None:
        """Wait until everything runs, nothing is queued, and all nodes are idle.

        Raises:
            AssertionError: This takes longer than HEAL_SECONDS.
        """
        self.heal_nodes()
        deadline = time.monotonic() + HEAL_SECONDS
        while True:
            subprocess.run(
                ["scancel", "--user", self.user], env=self.env, capture_output=True, timeout=patience(30)
            )
            states = self.node_states()
            if set(states) == set(self.nodes) and set(states.values()) == {"idle"}:
                queued = subprocess.run(
                    ["squeue", "-h"], env=self.env, capture_output=True, timeout=patience(30)
                )
                if queued.returncode == 0 and not queued.stdout:
                    return
            assert time.monotonic() < deadline, f"the lab does not heal: {states}"
            time.sleep(0.2)
