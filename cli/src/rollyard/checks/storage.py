"""The checks of the folder that jobs on other nodes share: its file system, locks and free space."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard.checks.finding import TIMEOUT_SECONDS, Finding

NETWORKED: Final = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb3",
    "afs",
    "9p",
    "fuse.sshfs",
    "fuse.glusterfs",
    "fuse.ceph-fuse",
    "panfs",
    "pvfs2",
    "orangefs",
    "wekafs",
    "vastfs",
    "daos",
}
LEAST_FREE: Final = 1 << 30
PROBE_BYTES: Final = 1 << 20
_TRY_LOCK: Final = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        (fcntl.flock if sys.argv[2] == "flock" else fcntl.lockf)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(3)
"""


@dataclass(frozen=True, slots=True)
class MountPoint:
    """The mount point of a path, with the kind of the file system and its options."""

    point: str
    kind: str
    options: frozenset[str]


def mount_of(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> MountPoint:
    """Return the mount that holds a path, or the last one mounted if there are several."""
    mount = MountPoint("/", "unknown", frozenset())
    real = str(path.resolve())
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, more = before.split(), after.split()
        point = fields[4].encode().decode("unicode_escape")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(mount.point):
            options = {*fields[5].split(","), *(more[2].split(",") if len(more) > 2 else [])}
            mount = MountPoint(point, more[0], frozenset(options))
    return mount


def nearest(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_kind(path: Path, slurm: bool, mount: MountPoint | None = None) -> Finding:
    """Check which file system a folder is on, and whether that has known limits."""
    name = "shared storage"
    mount = mount or mount_of(path)
    where = f"{path} is on {mount.kind} ({mount.point})"
    if mount.kind == "lustre" and not mount.options & {"flock", "localflock"}:
        return Finding(
            name,
            "missing",
            f"{where}, mounted without locks",
            "ask the administrator for the mount option flock; until then set ROLLYARD_HOME elsewhere",
        )
    if mount.kind in ("nfs", "nfs4") and mount.options & {"nolock", "local_lock=all", "local_lock=flock"}:
        return Finding(
            name,
            "optional",
            f"{where}, whose locks hold on one node only",
            "builds of images on several nodes at once are not deduplicated; ask for NFSv4 with locks",
        )
    if mount.kind in NETWORKED:
        return Finding(
            name,
            "ok",
            where,
            "the control plane's SQLite is safer on a local disk: make `state` in the home a link to one",
        )
    advice = "jobs on other nodes must see it: check with `srun -N2 ls`" if slurm else ""
    return Finding(name, "ok", f"{where}, a local file system", advice)


def check_locks(folder: Path) -> Finding:
    """Check that a lock of this process excludes another process of this node."""
    import fcntl

    name = "locks"
    broken = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rollyard-doctor-") as file:
            for kind, lock in (("flock", fcntl.flock), ("fcntl", fcntl.lockf)):
                try:
                    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    broken.append(f"{kind}: {error.strerror}")
                    continue
                command = [sys.executable, "-I", "-c", _TRY_LOCK, file.name, kind]
                process = subprocess.run(command, capture_output=True, timeout=TIMEOUT_SECONDS)
                if process.returncode != 3:
                    broken.append(f"{kind}: two processes held it at once")
                lock(file, fcntl.LOCK_UN)
    except subprocess.TimeoutExpired:
        return Finding(
            name, "missing", f"a lock in {folder} hangs", "its lock service is away; inform the administrator"
        )
    except OSError as error:
        return Finding(name, "missing", f"{folder} cannot be written: {error.strerror}", _space_advice(error))
    if broken:
        return Finding(
            name,
            "missing",
            f"in {folder}: {'; '.join(broken)}",
            "set ROLLYARD_HOME to a folder whose locks work (Lustre: mount option flock; NFS: rpc.statd)",
        )
    return Finding(name, "ok", f"flock and fcntl locks in {folder} keep others out")


def check_space(folder: Path) -> Finding:
    """Check that the folder can be written within its quota, and how much space the file system has left."""
    name = "space"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rollyard-doctor-") as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            # Network file systems report an exhausted quota only when data reaches the server.
            os.fsync(file.fileno())
        free = os.statvfs(folder)
    except OSError as error:
        return Finding(name, "missing", f"{folder}: {error.strerror}", _space_advice(error))
    left = free.f_bavail * free.f_frsize
    words = f"{left / (1 << 30):.1f} GiB free at {folder}"
    if left < LEAST_FREE:
        return Finding(name, "missing", words, "images and logs need some; set ROLLYARD_HOME elsewhere")
    return Finding(name, "ok", words)


def _space_advice(error: OSError) -> str:
    if error.errno in (errno.EDQUOT, errno.ENOSPC):
        return "free some space or ask for more quota, or set ROLLYARD_HOME to another file system"
    return "set ROLLYARD_HOME to a folder that you can write to"


def examine(folder: Path, slurm: bool) -> Iterator[Finding]:
    """Run all checks of this module for the folder, or for the nearest existing folder above it."""
    existing = nearest(folder)
    yield check_kind(existing, slurm)
    yield check_locks(existing)
    yield check_space(existing)
