"""The settings of git repositories: recorded when Init ends, and put back before each evaluation.

The settings of a repository can have git start any program: as a hook, a pager, an external diff, a filter,
and by keys whose names nobody can list. Therefore none is switched off by name. The settings of a repository
that Init made are put back as they were, and one that Run made keeps what git needs to read it. Nothing here
depends on a git in the sandbox, and a repository that an evaluation makes for itself is left alone.

What Run left is hostile: no link is followed to a file that is read or written, and the number of files and
folders that are looked at is limited.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import suppress

from rollyard_sandbox import folders
from rollyard_sandbox.errors import FileError, file_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Final

    Settings = Mapping[str, tuple[int, bytes]]
    """The permission bits and the content of the files with settings, by their paths in the repository."""

MAX_FOLDERS: Final = 200_000
MAX_ENTRIES: Final = 2_000_000
"""How many folders, and how many entries of folders, are looked at for repositories."""
_MAX_FILE: Final = 1 << 20  # bytes of one file with settings
_MAX_RECORDED: Final = 16 << 20  # bytes of all of them

_SHARED: Final = ("/tmp", "/var/tmp", "/dev/shm")
_FILES: Final = ("config", "config.worktree", "commondir")
_HOOKS, _ATTRIBUTES = "hooks", "info/attributes"
_SAMPLE: Final = ".sample"  # Git never runs such a hook.
_TELLING: Final = frozenset({"HEAD", "objects", "refs", "commondir"})

_HEADER: Final = re.compile(rb"\s*\[\s*([-.\w]+)")
_FURTHER: Final = re.compile(rb"(\s*\[[^\]]*\])?\s*(?:hookspath|attributesfile)\s*=", re.IGNORECASE)
_VALUE: Final = re.compile(rb"\s*(\w+)\s*=\s*([-./\w]+)\s*")
_NEEDED: Final = {
    b"core": (b"repositoryformatversion", b"bare", b"filemode", b"worktree"),
    b"extensions": (b"objectformat", b"refstorage", b"relativeworktrees"),
}
"""The keys without which git would misread a repository. None of them names a program."""


class GitSettings:
    """The settings of the repositories in the folders to which programs of one sandbox may write.

    Args:
        workdir: The sandbox's work folder.
        own_folders: Whether the sandbox has folders such as /tmp for itself. If not, only the work folder is
            looked at.
    """

    def __init__(self, workdir: str, *, own_folders: bool) -> None:
        self._workdir = workdir
        self._own_folders = own_folders
        self._roots = self._written(())
        self._recorded: dict[str, Settings] = {}
        self._links: dict[str, tuple[int, bytes]] = {}

    def record(self, further: Iterable[str]) -> None:
        """Record the settings of every repository there is.

        Args:
            further: Folders outside of the work folder in which there may be repositories, too.

        Raises:
            FileError: There are too many files, or their settings are too large.
        """
        self._roots = self._written(further)
        git_paths = _GitPaths(self._roots)
        self._recorded = {path: _settings(path) for path in git_paths.repositories}
        self._links = {path: content for path in git_paths.links if (content := _link(path)) is not None}
        size = sum(len(data) for each in self._recorded.values() for _, data in each.values())
        if size > _MAX_RECORDED:
            raise FileError(
                f"the settings and hooks of git repositories have {size} bytes, at most {_MAX_RECORDED} can "
                "be kept for the evaluation",
                reason="FileTooLarge",
            )

    def put_back(self) -> None:
        """Put back the recorded settings, and reduce those of other repositories to what git needs.

        No process of the sandbox may be alive.

        Raises:
            FileError: There are too many files, or the sandbox has no room for the settings.
        """
        git_paths = _GitPaths(self._roots)
        known = {identity for path in git_paths.repositories if (identity := _identity(path)) is not None}
        for path in git_paths.repositories:
            settings = self._recorded.get(path)
            try:
                _write(path, _needed(path, known) if settings is None else settings)
            except OSError as error:
                raise file_error(error, path) from None
        for path in git_paths.links:
            try:
                self._check_link(path, known)
            except OSError as error:
                raise file_error(error, path) from None

    def _check_link(self, path: str, known: set[tuple[int, int]]) -> None:
        """Put back what was in place of a `.git` that leads to an unknown repository."""
        content = _link(path)
        recorded = self._links.get(path)
        if (content is not None and content == recorded) or _identity(_target(path)) in known:
            return
        folders.remove(path)
        if recorded is not None and stat.S_ISLNK(recorded[0]):
            os.symlink(recorded[1], path)
        elif recorded is not None:
            folders.make_file(path, stat.S_IMODE(recorded[0]), recorded[1])

    def _written(self, further: Iterable[str]) -> list[str]:
        """Return the folders to look at, without those that lie in another one on the same disk."""
        paths = [self._workdir]
        if self._own_folders:
            own = [os.environ.get(name, "/") for name in ("HOME", "TMPDIR")]
            paths += [*further, *(path for path in own if path != "/"), *_SHARED]
        roots: dict[str, int | None] = {}
        for path in sorted({os.path.realpath(path) for path in paths if path.startswith("/")}):
            device = None  # It may be made later.
            with suppress(OSError):
                device = os.stat(path).st_dev
            if device is None or not any(
                path.startswith(f"{root.rstrip('/')}/") and roots[root] == device for root in roots
            ):
                roots[path] = device
        return list(roots)


class _GitPaths:
    """The repositories below some folders, and what stands in for one: a `.git` that is not a folder.

    Raises:
        FileError: There are too many files or folders, or one that no path can reach.
    """

    def __init__(self, roots: Iterable[str]) -> None:
        self.repositories: list[str] = []
        self.links: list[str] = []
        self._folders = 0
        self._entries = 0
        for root in roots:
            self._walk(root)

    def _walk(self, root: str) -> None:
        device = None
        # Each entry has the path above it in common with its neighbours, so that this takes little memory.
        waiting = [(root, "")]
        while waiting:
            path = os.path.join(*waiting.pop()).rstrip("/") or "/"
            try:
                folder = _opened(path)
                try:
                    info = os.fstat(folder)
                    if device in (None, info.st_dev):  # Otherwise something else is mounted here.
                        device = info.st_dev
                        waiting += [(path, name) for name in self._look(path, folder)]
                finally:
                    os.close(folder)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                continue  # It is not one of this sandbox's own folders.
            except OSError as error:
                raise file_error(error, _shown(path)) from None

    def _look(self, path: str, folder: int) -> list[str]:
        """Note what an open folder is or holds, and return the names of the folders in it."""
        inner, telling = [], set()
        with os.scandir(folder) as entries:
            for entry in entries:
                self._entries += 1
                if entry.name in _TELLING:
                    telling.add(entry.name)
                if entry.is_dir(follow_symlinks=False):
                    self._folders += 1
                    inner.append(entry.name)
                elif entry.name == ".git":
                    self.links.append(os.path.join(path, entry.name))
                if self._entries > MAX_ENTRIES or self._folders > MAX_FOLDERS:
                    raise FileError(
                        f"{_shown(path)}: more than {MAX_FOLDERS} folders or {MAX_ENTRIES} entries, in which "
                        "no repository of git can be looked for",
                        reason="TooManyEntries",
                    )
        # Git uses the settings of a folder named .git even if the rest of the repository is missing.
        if path.endswith(".git") or (
            "HEAD" in telling and ("commondir" in telling or {"objects", "refs"} <= telling)
        ):
            self.repositories.append(path)
        return inner


def _settings(path: str) -> Settings:
    """Return the settings of a repository that Init made, where links may be followed.

    What makes git read further files is left out, because Run may write to them.

    Raises:
        FileError: One of the files is too large.
    """
    names = [*_FILES, _ATTRIBUTES]
    with suppress(OSError):  # A repository needs no folder with hooks.
        names += [f"{_HOOKS}/{name}" for name in os.listdir(f"{path}/{_HOOKS}") if not name.endswith(_SAMPLE)]
    settings = {}
    for name in names:
        content = _read(f"{path}/{name}", follow=True)
        if content is None:
            continue
        if len(content[1]) > _MAX_FILE:
            raise FileError(f"{_shown(f'{path}/{name}')}: more than {_MAX_FILE} bytes", reason="FileTooLarge")
        settings[name] = (content[0], _without_further_files(content[1])) if name in _FILES[:2] else content
    return settings


def _without_further_files(config: bytes) -> bytes:
    section, lines = b"", []
    for line in config.splitlines(keepends=True):
        if header := _HEADER.match(line):
            section = header[1].lower()
        if section in (b"include", b"includeif"):
            continue
        if section == b"core" and (further := _FURTHER.match(line)):
            line = (further[1] or b"") + b"\n"
        lines.append(line)
    return b"".join(lines)


def _needed(path: str, known: set[tuple[int, int]]) -> Settings:
    """Return the settings that a repository of Run's keeps."""
    settings: dict[str, tuple[int, bytes]] = {}
    config = _read(f"{path}/config")
    if config is not None:
        section, lines = b"", []
        for line in config[1].splitlines():
            if header := _HEADER.match(line):
                section = header[1].lower()
            elif (value := _VALUE.fullmatch(line)) and value[1].lower() in _NEEDED.get(section, ()):
                lines.append(b"[%b]\n\t%b = %b\n" % (section, value[1], value[2]))
        settings["config"] = (0o644, b"".join(lines))
    common = _read(f"{path}/commondir")
    if common is not None and _identity(_joined(path, common[1])) in known:
        settings["commondir"] = (0o644, common[1])
    return settings


def _write(path: str, settings: Settings) -> None:
    """Give a repository these settings, and no others.

    Raises:
        OSError: They cannot be written.
    """
    if _is_so(path, settings):
        return
    folder = folders.opened(path)
    try:
        for name in (*_FILES, _HOOKS):
            _clear(name, folder)
        info = os.path.dirname(_ATTRIBUTES)
        if not _is_folder(f"{path}/{info}"):
            _clear(info, folder)
        for name in (_HOOKS, info):
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=folder)
        inner = folders.opened(info, folder)
        try:
            _clear(os.path.basename(_ATTRIBUTES), inner)
        finally:
            os.close(inner)
        for name, (mode, data) in settings.items():
            folders.make_file(name, mode, data, folder)
    finally:
        os.close(folder)


def _is_so(path: str, settings: Settings) -> bool:
    """Return whether a repository has exactly these settings."""
    for name in (_HOOKS, os.path.dirname(_ATTRIBUTES)):
        if os.path.lexists(f"{path}/{name}") and not _is_folder(f"{path}/{name}"):
            return False
    try:
        with os.scandir(f"{path}/{_HOOKS}") as entries:
            for entry in entries:
                name = f"{_HOOKS}/{entry.name}"
                if name not in settings and not name.endswith(_SAMPLE):
                    return False
    except OSError as error:
        if error.errno != errno.ENOENT:
            return False
    for name in {*_FILES, _ATTRIBUTES, *settings}:
        expected = settings.get(name)
        if _read(f"{path}/{name}") != expected or (expected is None and os.path.lexists(f"{path}/{name}")):
            return False
    return True


def _target(path: str) -> str | None:
    """Return the folder to which a `.git` that is not a folder leads, or None if it leads nowhere."""
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            return path
    except OSError:
        return None
    content = _read(path, follow=True)
    if content is None or not content[1].startswith(b"gitdir: "):
        return None
    return _joined(os.path.dirname(path), content[1].removeprefix(b"gitdir: "))


def _joined(folder: str, name: bytes) -> str:
    return os.path.join(folder, os.fsdecode(name.rstrip(b"\r\n")))


def _identity(path: str | None) -> tuple[int, int] | None:
    """Return what distinguishes a folder from every other one, whatever its path."""
    try:
        info = os.stat(path or "")
    except (OSError, ValueError):  # Whatever wrote the path may have put a NUL into it.
        return None
    return (info.st_dev, info.st_ino)


def _link(path: str) -> tuple[int, bytes] | None:
    """Return the mode and the content of a file, or the target of a link. It is None for anything else."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return mode, os.readlink(os.fsencode(path))
    except OSError:
        return None
    content = _read(path)
    return None if content is None or len(content[1]) > _MAX_FILE else (mode, content[1])


def _read(path: str, *, follow: bool = False) -> tuple[int, bytes] | None:
    """Return the permission bits of a regular file and its content, or the first part of a long one."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags)
        try:
            info = os.fstat(file)
            if not stat.S_ISREG(info.st_mode):
                return None
            return stat.S_IMODE(info.st_mode), folders.read_at_most(file, _MAX_FILE + 1)
        finally:
            os.close(file)
    except OSError:
        return None


def _clear(name: str, folder: int) -> None:
    try:
        folders.remove(name, parent=folder)
    except FileNotFoundError:
        return


def _is_folder(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


def _opened(path: str) -> int:
    try:
        return os.open(path, folders.FOLDER_FLAGS)
    except PermissionError:
        return folders.opened(path)  # A program of the sandbox may have locked its own folder.


def _shown(path: str) -> str:
    return os.fsencode(path)[:200].decode("utf-8", "backslashreplace")
