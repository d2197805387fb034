"""The home folder of a local installation: layout, the lock, and the context that clients read."""

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
from typing import Any

from rollyard_crds.security.private_folder import make_private_folder

from rollyard_drivers.host.errors import HomeInUse, HomeUnusable
from rollyard_drivers.host.processes import ProcessIdentity, identify, is_alive

MAX_RUN_PATH = 64
"""Bytes; a sandbox's socket path adds some 35, and the kernel takes 107."""


def default_home(env: Mapping[str, str] = os.environ) -> Path:
    """`$ROLLYARD_HOME`, else `~/.local/state/rollyard`."""
    given = env.get("ROLLYARD_HOME")
    return Path(given).expanduser() if given else Path.home() / ".local" / "state" / "rollyard"


@dataclass(frozen=True, slots=True)
class Home:
    """Where a local installation keeps everything."""

    root: Path
    command: str = "rollyard up"
    """What runs on it, for messages; the same with `down` stops it."""

    @property
    def state(self) -> Path:
        """The control plane's database, tokens and trajectories."""
        return self.root / "state"

    @property
    def run(self) -> Path:
        """Sandboxes of this machine; it is elsewhere if the path would be too long for Unix sockets."""
        path = self.root / "run"
        if len(os.fsencode(path)) <= MAX_RUN_PATH:
            return path
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"rollyard-{os.getuid()}-{digest}"

    @property
    def logs(self) -> Path:
        """One log for each child, bounded in size."""
        return self.root / "logs"

    @property
    def pids(self) -> Path:
        """One file for each living child, for the sweep after a crash."""
        return self.root / "pids"

    @property
    def context_file(self) -> Path:
        """The file with URL and token, as clients read them."""
        return self.root / "context.json"

    @property
    def supervisor_file(self) -> Path:
        """The file that says who runs here, for `rollyard down`."""
        return self.root / "supervisor.json"

    def make(self) -> None:
        """Creates the folders, readable by the user only.

        Raises:
            HomeUnusable: a folder cannot be made, or others could reach or replace that of the sandboxes.
        """
        for folder in (self.root, self.state, self.logs, self.pids):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise HomeUnusable(f"{folder} cannot be made: {error.strerror}") from error
        try:
            make_private_folder(self.run)
        except OSError as error:
            raise HomeUnusable(
                f"{self.run}, the folder of the sandboxes, cannot be used: {error.strerror or error}; "
                "choose another --home"
            ) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the home for one supervisor.

        Raises:
            HomeInUse: another process holds it.
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
                raise HomeInUse(
                    f"another `{self.command}`{who} runs on {self.root}; "
                    f"stop it with `{stop}`, or choose another folder with --home"
                ) from None
            yield
        finally:
            os.close(descriptor)

    def supervisor(self) -> ProcessIdentity | None:
        """The supervisor that runs here, if one does."""
        document = read_json(self.supervisor_file)
        if document is None:
            return None
        identity = ProcessIdentity.from_json(document)
        return identity if identity is not None and is_alive(identity) else None

    def write_supervisor(self, pid: int) -> None:
        """Records the supervisor for `rollyard down`."""
        identity = identify(pid)
        if identity is not None:
            write_json(self.supervisor_file, identity.to_json())

    def context_files(self) -> tuple[Path, ...]:
        """The files that clients read: in the home, and for the default home in the user's configuration."""
        if self.root != default_home().expanduser().resolve() or os.environ.get("ROLLYARD_HOME"):
            return (self.context_file,)
        from rollyard_client.context import context_path

        return (self.context_file, context_path(os.environ))

    def write_context(self, url: str) -> None:
        """Tells clients of this user where the control plane is."""
        for path in self.context_files():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(path, {"url": url, "token_file": str(self.state / "tokens.json")})

    def remove_context(self) -> None:
        """Removes what clients read: nothing runs here any more."""
        for path in self.context_files():
            path.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none that can be read."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Writes a JSON file whole or not at all, mode 0600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(document, file)
    temporary.replace(path)
