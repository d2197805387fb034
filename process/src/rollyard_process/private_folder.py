"""Folders that nobody but their owner can read, write or replace, such as those that hold sockets and tokens.

A folder in a place that others can write to, such as `/tmp`, is private only if nobody else can have made it
beforehand and nobody else can move it away later. Both are checked here from the root folder on, one open
descriptor after the other, so that a link that is put there between two steps is noticed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

_MAX_LINKS: Final = 40  # as the kernel itself allows in one path
_ALL_USERS: Final = "4294967295"
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_private_folder(path: Path) -> None:
    """Make a folder that is private to this user, and the folders on the way to it.

    Raises:
        PermissionError: another user could reach or replace it; the message names the folder at fault.
        OSError: it cannot be made.
    """
    os.close(open_private_folder(path))


def open_private_folder(path: Path) -> int:
    """Return a descriptor of a folder of mode 0700 that belongs to this user, and make it if it is missing.

    Every folder on the way must belong to root or to this user. It may be writable by others only if it is
    sticky, as `/tmp` is, so that others cannot move what is not theirs. Symbolic links on the way must belong
    to root or to this user, and the folder itself must not be a link. A folder of this user that others may
    enter becomes mode 0700.

    Raises:
        PermissionError: another user could reach or replace it; the message names the folder at fault.
        OSError: it cannot be made or opened.
    """
    trusted = _trusted()
    waiting = list(path.absolute().parts[1:])
    links = 0
    folder, descriptor = Path("/"), os.open("/", _OPEN)
    try:
        _check(os.fstat(descriptor), folder, trusted)
        while waiting:
            name = waiting.pop(0)
            entry = _made(name, descriptor)
            if not stat.S_ISLNK(entry.st_mode):
                below = os.open(name, _OPEN, dir_fd=descriptor)
                os.close(descriptor)
                descriptor, folder = below, folder.parent if name == ".." else folder / name
                _check(os.fstat(descriptor), folder, trusted)
                continue
            links += 1
            if entry.st_uid not in trusted or not waiting or links > _MAX_LINKS:
                raise PermissionError(
                    f"{folder / name} is a symbolic link of user {entry.st_uid}; choose another folder"
                )
            target = Path(os.readlink(name, dir_fd=descriptor))
            waiting = [*(target.parts[1:] if target.is_absolute() else target.parts), *waiting]
            if target.is_absolute():
                os.close(descriptor)
                folder, descriptor = Path("/"), os.open("/", _OPEN)
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{folder} belongs to user {status.st_uid}; choose another folder")
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def _made(name: str, descriptor: int) -> os.stat_result:
    """Return what has this name. If there is nothing, make a folder."""
    try:
        return os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    except FileNotFoundError:
        # Another process of this user may be faster, or somebody else, which the checks find out.
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=descriptor)
        return os.stat(name, dir_fd=descriptor, follow_symlinks=False)


def _check(status: os.stat_result, folder: Path, trusted: frozenset[int]) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in trusted:
        raise PermissionError(
            f"{folder} belongs to user {status.st_uid}, who could replace what is in it; choose a folder "
            "whose whole path belongs to root or to you"
        )
    if mode & stat.S_ISVTX:
        return
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _own_group(status.st_gid)):
        raise PermissionError(
            f"{folder} can be written by others (mode {mode:04o}), who could replace what is in it; choose "
            "another folder, or take their right away with chmod go-w"
        )


def _own_group(group: int) -> bool:
    """Return whether this is the group that many systems make for each user, who is its only member."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    members = set(entry.gr_mem)
    return entry.gr_gid == user.pw_gid and entry.gr_name == user.pw_name and members <= {user.pw_name}


def _trusted() -> frozenset[int]:
    """Return the user IDs of this user and of root.

    In a user namespace without a root of its own, root is seen as the overflow user.
    """
    trusted = {0, os.geteuid()}
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            if file.read().split()[2:] != [_ALL_USERS]:
                with open("/proc/sys/kernel/overflowuid", encoding="ascii") as overflow:
                    trusted.add(int(overflow.read()))
    except (OSError, ValueError):
        return frozenset(trusted)
    return frozenset(trusted)
