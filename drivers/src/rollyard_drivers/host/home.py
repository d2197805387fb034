"""The home folder of a local installation: its layout, its lock, and the context file that clients read."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollyard_process.private_folder import make_private_folder

from rollyard_drivers.host.errors import HostError
from rollyard_drivers.host.processes import ProcessIdentity, identify, is_alive

MAX_RUN_PATH: Final = 64
"""The longest path in bytes. A sandbox's socket path adds about 35 bytes, and the kernel accepts at most
107."""


def default_home(env: Mapping[str, str] = os.environ) -> Path:
    """Return `$ROLLYARD_HOME` if it is set, and `~/.local/state/rollyard` otherwise."""
    folder = env.get("ROLLYARD_HOME")
    return Path(folder).expanduser() if folder else Path.home() / ".local" / "state" / "rollyard"


@dataclass(frozen=True, slots=True)
class Home:
    """The folder in which a local installation keeps all of its files."""

    root: Path
    command: str = "rollyard up"
    """The command that runs on this home, for messages. The same command with `down` stops it."""

    @property
    def state(self) -> Path:
        """The folder of the control plane's database, tokens and trajectories."""
        return self.root / "state"

    @property
    def run(self) -> Path:
        """The folder of this machine's sandboxes.

        It lies outside the home if its path would be too long for Unix sockets.
        """
        path = self.root / "run"
        if len(os.fsencode(path)) <= MAX_RUN_PATH:
            return path
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"rollyard-{os.getuid()}-{digest}"

    @property
    def logs(self) -> Path:
        """The folder of the log files. Each child process has one, which is bounded in size."""
        return self.root / "logs"

    @property
    def pids(self) -> Path:
        """The folder of the pid files. Each living child has one, which `sweep` reads after a crash."""
        return self.root / "pids"

    @property
    def context_file(self) -> Path:
        """The file from which clients read the URL and the path of the token file."""
        return self.root / "context.json"

    @property
    def supervisor_file(self) -> Path:
        """The file that identifies the running supervisor, for `rollyard down`."""
        return self.root / "supervisor.json"

    @property
    def backends_file(self) -> Path:
        """The file in which the supervisor records how the start of its backends is going.

        It holds an object: `ready` is true once one takes requests, and `trouble` says why one has ended.
        """
        return self.root / "backends.json"

    def worker_token_file(self, workload: str) -> Path:
        """Return the path of the file with a stage worker's token, which serves the worker's job only."""
        return self.state / "worker-tokens" / workload

    def make(self) -> None:
        """Create the folders, which only the user can read.

        Raises:
            HostError: A folder cannot be created, or other users could reach or replace the folder of the
                sandboxes.
        """
        for folder in (self.root, self.state, self.logs, self.pids):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise HostError(
                    f"{folder} cannot be made: {error.strerror}", reason="HomeUnusable"
                ) from error
        try:
            make_private_folder(self.run)
        except OSError as error:
            raise HostError(
                f"{self.run}, the folder of the sandboxes, cannot be used: {error.strerror or error}; "
                "choose another --home",
                reason="HomeUnusable",
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of the home folder for one supervisor.

        Raises:
            HostError: Another process holds the lock.
        """
        self.make()
        descriptor = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self.supervisor()
                who = f" (process {holder.pid})" if holder else ""
                stop = f"{self.command.removesuffix('up')}down"
                raise HostError(
                    f"another `{self.command}`{who} runs on {self.root}; "
                    f"stop it with `{stop}`, or choose another folder with --home",
                    reason="HomeInUse",
                ) from None
            yield
        finally:
            os.close(descriptor)

    def supervisor(self) -> ProcessIdentity | None:
        """Return the supervisor that runs on this home, or None if there is none."""
        document = read_json(self.supervisor_file)
        if document is None:
            return None
        identity = ProcessIdentity.from_json(document)
        return identity if identity is not None and is_alive(identity) else None

    def write_supervisor(self, pid: int) -> None:
        """Record the supervisor for `rollyard down`."""
        identity = identify(pid)
        if identity is not None:
            write_json(self.supervisor_file, identity.to_json())

    def context_files(self) -> tuple[Path, ...]:
        """Return the files that clients read.

        One lies in the home. For the default home, another one lies in the user's configuration.
        """
        if self.root != default_home().expanduser().resolve() or os.environ.get("ROLLYARD_HOME"):
            return (self.context_file,)
        from rollyard_client.context import context_path

        return (self.context_file, context_path(os.environ))

    def write_context(self, url: str, tokens_file: Path) -> None:
        """Write where the control plane and its tokens are to the files that this user's clients read."""
        for path in self.context_files():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, {"url": url, "token_file": str(tokens_file)})

    def remove_context(self) -> None:
        """Remove the files that clients read, because nothing runs on this home any more."""
        for path in self.context_files():
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if the file cannot be read or holds no object."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file atomically, with mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(document, file)
    temporary.replace(path)
