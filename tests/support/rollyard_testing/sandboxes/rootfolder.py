"""Images made of this machine's own programs, without a registry: root folders, SIF files, Podman's."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollyard_testing.pace import patience

_SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
_PROGRAMS = ("bash", "cat", "ls", "id", "env", "mkdir", "sleep", "touch", "stty", "head", "tail", "rm")
# These are called by the tests of all kinds of sandboxes.
_MORE_PROGRAMS = (
    "chmod", "chroot", "cut", "find", "grep", "hostname", "mknod", "mount", "readlink", "seq", "setsid",
    "sort", "stat", "tr", "tty", "umount", "unshare", "wc",
)  # fmt: skip


def make_root(folder: Path, *further: str) -> Path:
    """Make a root folder with bash, a few programs and the libraries they load, and without a Python."""
    (folder / "usr/bin").mkdir(parents=True)
    (folder / "bin").symlink_to("usr/bin")
    (folder / "etc").mkdir()
    (folder / "etc/image-name").write_text("made-by-test\n")
    (folder / "opt/tool").mkdir(parents=True)
    for name in (*_PROGRAMS, *further):
        program = Path(shutil.which(name, path=_SYSTEM_PATH) or f"/bin/{name}").resolve()
        shutil.copy(program, folder / "usr/bin" / name)
        listing = subprocess.run(
            ["ldd", program], capture_output=True, text=True, timeout=patience(20), check=True
        )
        for word in listing.stdout.split():
            if word.startswith("/"):
                target = folder / word.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(word, target)
    (folder / "usr/bin/sh").symlink_to("bash")
    return folder


def make_image(folder: Path, *further: str) -> Path:
    """Make a root folder with all that the tests call, and a user as most images lack one."""
    root = make_root(folder, *_MORE_PROGRAMS, *further)
    for name in ("home", "root", "tmp", "work", "var/tmp", "proc", "sys", "dev"):
        (root / name).mkdir(parents=True)
    (root / "opt/tool").rmdir()
    users = [("root", 0), ("sandbox", 1000), ("nobody", 65534)]
    (root / "etc/passwd").write_text("".join(f"{name}:x:{uid}:{uid}::/:/bin/bash\n" for name, uid in users))
    (root / "etc/group").write_text("".join(f"{name}:x:{uid}:\n" for name, uid in users))
    return root


def make_sif(root: Path) -> Path:
    """Make the same as a SIF file, beside the root folder."""
    target = root.parent / "image.sif"
    program = shutil.which("apptainer") or "singularity"
    done = subprocess.run(
        [program, "build", str(target), str(root)],
        env={**os.environ, "APPTAINER_CACHEDIR": str(root.parent / "cache")},
        capture_output=True, text=True, timeout=patience(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return target


@contextmanager
def podman_image(root: Path) -> Iterator[str]:
    """Yield the name of the same as an image of Podman, which is removed at the end."""
    name = f"localhost/rollyard-test-{secrets.token_hex(4)}"
    packed = subprocess.run(
        ["tar", "-C", str(root), "-cf", str(root.parent / "image.tar"), "."],
        capture_output=True, text=True, timeout=patience(60),
    )  # fmt: skip
    assert packed.returncode == 0, packed.stderr
    done = subprocess.run(
        ["podman", "import", str(root.parent / "image.tar"), name],
        capture_output=True, text=True, timeout=patience(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    try:
        yield name
    finally:
        subprocess.run(["podman", "rmi", "--force", name], capture_output=True, timeout=patience(60))
