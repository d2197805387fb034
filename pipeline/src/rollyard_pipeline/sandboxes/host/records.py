"""The sandboxes of a node as its run folder records them, with one private folder for each.

    <run dir>/sandboxes/<id>/sandbox.json   the record below, replaced atomically
    <run dir>/sandboxes/<id>/exec.sock      the control socket of that sandbox
    <run dir>/sandboxes/.oom-<id>           a claimed sandbox that died after the kernel had killed inside it
                                            for lack of memory, and that a sweep has removed
    <run dir>/sandboxes/.crash-<id>         the same of one whose exec server ended by itself

Every worker of the node reads all records. The worker that started a sandbox writes its record until the
sandbox is claimed, and no process writes it after that. Each file that is made costs far more than what is
in it, so the secret stands in the record, and a sandbox that starts for a rollout is claimed from the start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import orjson
from rollyard_process.private_folder import make_private_folder
from rollyard_sandbox import folders
from rollyard_sandbox.proof import SECRET_BYTES

from rollyard_pipeline.sandboxes.errors import NodeDiskFull, NodeUnusable
from rollyard_pipeline.sandboxes.host.disk_room import is_full
from rollyard_pipeline.sandboxes.host.processes import ProcessRef

SOCKET_NAME: Final = "exec.sock"
_RECORD_NAME: Final = "sandbox.json"
# sockaddr_un.sun_path holds 108 bytes, of which the last is 0 (unix(7)).
SOCKET_PATH_MAX: Final = 107
ID_LENGTH: Final = 12
_MAX_KNOWN: Final = 4096
_REMEMBERED_SECONDS: Final = 6 * 3600
"""The time for which a death is remembered: longer than a rollout waits for its Eval."""
Death = Literal["oom", "crash"]
"""Why a sandbox has ended by itself: its memory ran out, or its exec server crashed."""
_STATES: Final = ("starting", "warm", "claimed")


@dataclass(frozen=True, slots=True)
class SandboxRecord:
    """The record of one sandbox, with which any process of the node can use or remove it."""

    id: str
    provider: str
    state: Literal["starting", "warm", "claimed"]
    worker: ProcessRef
    """The worker that started the sandbox."""
    created: float
    """The time of creation as Unix time in seconds."""
    owner: str | None = None
    """The rollout that claimed the sandbox or, in state `warm`, the rollout whose Eval uses it alone."""
    root: ProcessRef | None = None
    """The process whose end kills everything inside."""
    monitor: ProcessRef | None = None
    """The outer process that maintains it (bubblewrap's, Apptainer's), which ends by itself after `root`."""
    helpers: tuple[ProcessRef, ...] = ()
    """Further processes outside, which end after `monitor`."""
    cgroups: tuple[str, ...] = ()
    workdir: str = "/work"
    secret: str = field(default="", repr=False)
    """What the server must prove to know, in hexadecimal digits. It is never visible inside."""
    env: Mapping[str, str] = field(default_factory=dict)

    def alive(self) -> bool:
        """Return whether its processes run. A starting sandbox is alive as long as its worker."""
        if self.root is None:
            return self.worker.alive()
        return self.root.alive()

    @classmethod
    def from_json(cls, text: bytes) -> SandboxRecord:
        """Return the record that `sandbox.json` holds.

        Raises:
            ValueError: The file holds no record, or only a part of one.
        """
        try:
            document = orjson.loads(text)
            fields = {
                **document,
                "worker": _process(document["worker"]),
                "root": document["root"] and _process(document["root"]),
                "monitor": document["monitor"] and _process(document["monitor"]),
                "helpers": tuple(_process(each) for each in document["helpers"]),
                "cgroups": tuple(map(str, document["cgroups"])),
                "env": dict(document["env"]),
            }
            if document["state"] not in _STATES:
                raise ValueError(f"state {document['state']!r}")
            if len(bytes.fromhex(document["secret"])) != SECRET_BYTES:
                # Any peer can prove that it knows an empty secret.
                raise ValueError(f"secret: must have {SECRET_BYTES} bytes")
            return cls(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no record of a sandbox: {error}") from error


def _process(document: Any) -> ProcessRef:
    return ProcessRef(int(document["pid"]), int(document["started"]))


class SandboxFolder:
    """The `sandboxes` folder of a run folder."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir.absolute()
        self.path = self.run_dir / "sandboxes"
        # Every lease request of Init counts the sandboxes of the node, so unchanged records are kept.
        self._known: dict[str, tuple[tuple[int, int, int], SandboxRecord]] = {}

    def prepare(self) -> None:
        """Make the run folder and its `sandboxes` folder, which no other user can access or replace.

        Raises:
            NodeUnusable: The path is too long for a socket, is not writable, or could be accessed or
                replaced by another user of the machine.
        """
        length = len(os.fsencode(self.socket_path("0" * ID_LENGTH)))
        if length > SOCKET_PATH_MAX:
            room = SOCKET_PATH_MAX - (length - len(os.fsencode(self.run_dir)))
            raise NodeUnusable(
                f"run dir {self.run_dir} is too long for Unix sockets: "
                f"{len(os.fsencode(self.run_dir))} bytes, at most {room}; choose a shorter --run-dir",
                "RunDirUnusable",
            )
        try:
            make_private_folder(self.run_dir)
            make_private_folder(self.path)
        except OSError as error:
            raise NodeUnusable(f"run dir {self.run_dir} cannot be used: {error}", "RunDirUnusable") from error

    @staticmethod
    def new_id() -> str:
        """Return a new random id for a sandbox."""
        return secrets.token_hex(ID_LENGTH // 2)

    @staticmethod
    def new_secret() -> str:
        """Return a new random secret for a record."""
        return secrets.token_hex(SECRET_BYTES)

    def create(self, record: SandboxRecord) -> None:
        """Make a sandbox's private folder with its first record.

        Both appear atomically, so no sweep ever sees a folder without a record.

        Raises:
            NodeDiskFull: There is no room on the run folder's disk.
        """
        hidden = self._hidden(record.id)
        with self._disk():
            hidden.mkdir(mode=0o700)
            _write(hidden / _RECORD_NAME, record)
            hidden.rename(self.folder(record.id))

    def save(self, record: SandboxRecord) -> None:
        """Replace the record.

        Raises:
            FileNotFoundError: The sandbox was removed in the meantime.
            NodeDiskFull: There is no room on the run folder's disk. The old record is unchanged.
        """
        temporary = self.folder(record.id) / f".{secrets.token_hex(4)}"
        with self._disk():
            try:
                _write(temporary, record)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            temporary.rename(self.folder(record.id) / _RECORD_NAME)

    def load(self, sandbox_id: str) -> SandboxRecord | None:
        """Return the record, or None if there is no such sandbox or its record is unreadable."""
        if not _is_id(sandbox_id):
            return None
        path = f"{self.path}/{sandbox_id}/{_RECORD_NAME}"
        try:
            # A record is never written in place, so a file with the same inode, time and size is the same.
            info = os.stat(path)
            stamp = (info.st_ino, info.st_mtime_ns, info.st_size)
            known = self._known.get(sandbox_id)
            if known is not None and known[0] == stamp:
                return known[1]
            record = SandboxRecord.from_json(Path(path).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            self._known.pop(sandbox_id, None)
            return None
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[sandbox_id] = (stamp, record)
        return record

    def ids(self) -> list[str]:
        """Return the ids of all sandbox folders on this node, sorted."""
        try:
            return sorted(name for name in os.listdir(self.path) if _is_id(name))
        except FileNotFoundError:
            return []

    def remove_abandoned(self, now: float) -> None:
        """Remove the folders of starts that died before their record was written, and old memories of deaths.

        The folders must be older than a minute, the memories than six hours.
        """
        for name in os.listdir(self.path):
            path = self.path / name
            with contextlib.suppress(OSError):
                if name.startswith(".new-") and now - path.stat().st_mtime > 60:
                    folders.remove(str(path))
                elif (
                    name.startswith((".oom-", ".crash-")) and now - path.stat().st_mtime > _REMEMBERED_SECONDS
                ):
                    path.unlink()

    def remember_death(self, sandbox_id: str, death: Death) -> None:
        """Remember why a sandbox has ended, which can be seen only until its removal.

        Raises:
            OSError: The file cannot be made, for example because no inode is left.
        """
        self._death(sandbox_id, death).touch(mode=0o600)

    def died_of(self, sandbox_id: str, death: Death) -> bool:
        """Return whether a removed sandbox is remembered as one that ended for this reason."""
        return _is_id(sandbox_id) and self._death(sandbox_id, death).exists()

    def remove(self, sandbox_id: str) -> None:
        """Remove the folder with everything in it. A missing folder is not an error."""
        if _is_id(sandbox_id):
            for folder in (self.folder(sandbox_id), self._hidden(sandbox_id)):
                with contextlib.suppress(OSError):
                    folders.remove(str(folder))

    def folder(self, sandbox_id: str) -> Path:
        """Return the path of a sandbox's own folder, which need not exist."""
        return self.path / sandbox_id

    def socket_path(self, sandbox_id: str) -> Path:
        """Return the path of a sandbox's control socket, which need not exist."""
        return self.folder(sandbox_id) / SOCKET_NAME

    @contextmanager
    def sweeping(self) -> Iterator[bool]:
        """Hold the node's sweep lock. The value is False if another process is sweeping now."""
        fd = os.open(self.path / ".sweep", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(fd)

    def _death(self, sandbox_id: str, death: Death) -> Path:
        return self.path / f".{death}-{sandbox_id}"

    def _hidden(self, sandbox_id: str) -> Path:
        return self.path / f".new-{sandbox_id}"

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if is_full(error):
                words = f"no room left on the disk of run dir {self.run_dir}: {error.strerror}"
                raise NodeDiskFull(words) from error
            raise


def _write(path: Path, record: SandboxRecord) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, orjson.dumps(record))
    finally:
        os.close(fd)


def _is_id(name: str) -> bool:
    return len(name) == ID_LENGTH and all(letter in "0123456789abcdef" for letter in name)
