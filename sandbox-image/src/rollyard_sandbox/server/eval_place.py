"""The private place of an evaluation: a folder that no program of Run could write to.

The place is made after every process of Run has been killed, in the first folder that has room for it. Its
name cannot be guessed, and no process that could see it is alive. If it cannot be made, the cause is judged:
a folder that could be used when the server started, and that the sandbox itself has filled or locked since,
is sabotage.
"""

from __future__ import annotations

import errno
import os
import stat
from time import monotonic

from rollyard_sandbox import folders
from rollyard_sandbox.errors import SandboxSabotaged, file_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Final

    from rollyard_sandbox.isolation.command_namespaces import CommandNamespaces

_NAME_BYTES: Final = 16
_ROOM: Final = 1 << 20  # bytes that must be free
_INODES: Final = 64
_TRACE: Final = 64 << 10  # bytes; a folder with less room counts as full for every purpose
_TRACE_INODES: Final = 16
_CHANGED: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_LOOK_SECONDS: Final = 2.0  # The time allowed for adding up what the sandbox's own files take on a full disk.


class PrivatePlace:
    """The folders of an evaluation; the fields are those of `client.results.EvalPlace`."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.home = f"{folder}/home"
        self.tmp = f"{folder}/tmp"
        self.reward_file = f"{folder}/reward"

    def fill(self) -> None:
        """Make the two folders and the empty reward file.

        Raises:
            OSError: One of them cannot be made.
        """
        os.mkdir(self.home, 0o700)
        os.mkdir(self.tmp, 0o700)
        os.close(os.open(self.reward_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


class Candidate:
    """A folder in which a place may be made, with its state when the server started."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.mode = 0
        self.usable = False
        try:
            self.mode = stat.S_IMODE(os.stat(path).st_mode)
            check_room(path)
            self.usable = os.access(path, os.W_OK | os.X_OK)
        except OSError:
            return  # The folder is missing or has no room, so what happens to it later proves nothing.


class EvalPlaces:
    """The maker of the evaluation places of one sandbox, of which one exists at a time.

    Args:
        workdir: The sandbox's work folder, which is tried last.
        own_folders: Whether the memory file systems that are visible here belong to this sandbox alone. If
            so, a full one was filled by the sandbox.
        namespaces: The namespaces in which a place of a fixed size can be mounted, which the state of no
            folder can prevent. None means that places cannot be mounted here.
    """

    def __init__(self, workdir: str, *, own_folders: bool, namespaces: CommandNamespaces | None) -> None:
        paths = (os.environ.get("TMPDIR") or "/tmp", "/tmp", "/dev/shm", workdir)
        self._candidates = [Candidate(path) for path in dict.fromkeys(paths)]
        self._own_folders = own_folders
        self._namespaces = namespaces
        self._mounted = False
        self._current: str | None = None

    def make(self) -> PrivatePlace:
        """Return a fresh place after removing the one before. No process of the sandbox may be alive.

        Raises:
            SandboxSabotaged: The sandbox itself has made it impossible.
            FileError: It is impossible for another reason.
        """
        self.remove()
        if self._namespaces is not None:
            place = PrivatePlace(self._namespaces.mount_place())
            self._mounted = True
            place.fill()
            return place
        problems: list[tuple[Candidate, OSError]] = []
        for candidate in self._candidates:
            try:
                return self._make_in(candidate.path)
            except OSError as error:
                problems.append((candidate, error))
        evidence = [words for problem in problems if (words := self._evidence(*problem))]
        if evidence:
            raise SandboxSabotaged("no private place can be made for the evaluation: " + "; ".join(evidence))
        candidate, first = problems[0]
        raise file_error(first, candidate.path)

    def sabotage(self) -> list[str]:
        """Return the evidence that programs of the sandbox have filled or locked folders, one text for each.

        A place can still be made in another folder. However, a test that writes where it has always written
        would fail, or would leave in that place what the policy put there.
        """
        evidence = []
        for candidate in self._candidates:
            try:
                check_room(candidate.path, _TRACE, _TRACE_INODES)
                probe = os.path.join(candidate.path, f".eval-{os.urandom(_NAME_BYTES).hex()}")
                os.mkdir(probe, 0o700)
                os.rmdir(probe)
            except OSError as error:
                evidence.append(self._evidence(candidate, error))
        return [words for words in evidence if words]

    def remove(self) -> None:
        """Remove the current place, if there is one."""
        if self._namespaces is not None and self._mounted:
            self._mounted = False
            self._namespaces.remove_place()
        if self._current is not None:
            folder, self._current = self._current, None
            try:
                folders.remove(folder)
            except OSError:
                return  # What is left does no harm: the next place has a name of its own.

    def _make_in(self, parent: str) -> PrivatePlace:
        check_room(parent)
        place = PrivatePlace(os.path.join(parent, f".eval-{os.urandom(_NAME_BYTES).hex()}"))
        os.mkdir(place.folder, 0o700)
        self._current = place.folder
        try:
            place.fill()
        except OSError:
            self.remove()
            raise
        return place

    def _evidence(self, candidate: Candidate, error: OSError) -> str:
        """Return the evidence that the sandbox itself has made this folder unusable, "" if there is none."""
        if not candidate.usable:
            return ""
        path = candidate.path
        if error.errno in _CHANGED:
            try:
                mode = stat.S_IMODE(os.stat(path).st_mode)
            except OSError as unseen:
                return f"{path} could be written to at the start, and now cannot be seen ({unseen.strerror})"
            return f"{path} had mode {candidate.mode:04o} at the start, now {mode:04o} ({error.strerror})"
        if error.errno in _FULL:
            return self._filled(path)
        return ""

    def _filled(self, path: str) -> str:
        try:
            info = os.statvfs(path)
            size, device = info.f_blocks * info.f_frsize, os.stat(path).st_dev
        except OSError:
            return ""
        if self._own_folders and _is_memory(device):
            used = size - info.f_bavail * info.f_frsize
            files = info.f_files - info.f_ffree
            return f"{path} had room at the start, and is full now ({used} of {size} bytes, {files} files)"
        if path != self._candidates[-1].path:
            # Others use this disk, too. Only what lies in the work folder certainly belongs to the sandbox.
            return ""
        own = _bytes_below(path)
        if own * 2 >= size:
            return f"{path} is full, and the sandbox's own files take {own} of the disk's {size} bytes"
        return ""


def check_room(path: str, room: int = _ROOM, inodes: int = _INODES) -> None:
    """Check that `path` has free space of `room` bytes and `inodes` files, by default what a place needs.

    Raises:
        OSError: There is less room than that.
    """
    info = os.statvfs(path)
    # A file system without a fixed number of files reports 0.
    if info.f_bavail * info.f_frsize < room or (info.f_files and info.f_favail < inodes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def _is_memory(device: int) -> bool:
    """Return whether the file system with this device number is one in memory."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
            lines: Sequence[str] = file.read().splitlines()
    except OSError:
        return False
    kinds = [line.partition(" - ")[2].split(" ", 1)[0] for line in lines if line.split(" ", 3)[2] == number]
    return bool(kinds) and all(kind == "tmpfs" for kind in kinds)


def _bytes_below(path: str) -> int:
    """Return how many bytes the files below `path` take on their disk, as far as counted in two seconds."""
    total, deadline = 0, monotonic() + _LOOK_SECONDS
    for info in folders.sizes(path):
        if not stat.S_ISDIR(info.st_mode):
            total += info.st_blocks * 512 // max(1, info.st_nlink)
        if monotonic() > deadline:
            break
    return total
