"""bubblewrap's arguments: the view of a sandbox on the file system, built as a plain list (bwrap(1)).

The system is bound piece by piece, read-only. The root, /dev and everything that is not listed are
read-only too. Only /work, /tmp and /dev/shm can be written: the sandbox's first process covers each with a
memory file system of a fixed size, which vanishes with the sandbox. No folder of the run folder is bound.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from rollyard_tasks.harbor.dockerfiles import DOCKERFILE_IMAGE

from rollyard_pipeline.sandboxes.errors import ImageNotUsable
from rollyard_pipeline.sandboxes.interface import SandboxKey
from rollyard_pipeline.sandboxes.starters.runtime import EVAL_FOLDER, INSIDE, Runtime

WORKDIR: Final = "/work"
_SHM_BYTES: Final = 64 << 20
# This is harmless configuration that programs expect. None of it contains accounts, keys or tokens.
_ETC: Final = (
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "crypto-policies",
    "debian_version",
    "fonts",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "lsb-release",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "profile",
    "profile.d",
    "protocols",
    "python3",
    "services",
    "shells",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
_SYSTEM: Final = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_OWN: Final = {"proc", "dev", "sys", "tmp", "run", "work", ".rollyard"}
# These names of /proc reveal facts about the whole machine or act on it.
PROC_HIDDEN: Final = (
    "acpi",
    "asound",
    "cmdline",
    "config.gz",
    "driver",
    "fs",
    "iomem",
    "ioports",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "kmsg",
    "latency_stats",
    "modules",
    "mtrr",
    "sched_debug",
    "scsi",
    "slabinfo",
    "timer_list",
    "vmallocinfo",
)
_RIGHTS: Final = ("CAP_SETFCAP", "CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_RESOURCE")
NAMESPACES: Final = (
    "--unshare-user",
    "--unshare-pid",
    "--unshare-ipc",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
)


def disk_size(key: SandboxKey) -> int:
    """Return the size of /work, and also that of /tmp, in bytes.

    Both are memory, and together they leave a third of it to processes.
    """
    return max(1 << 20, min(key.disk_bytes, key.memory_bytes // 3))


def bwrap_arguments(key: SandboxKey, runtime: Runtime, env: Mapping[str, str]) -> list[str]:
    """Return everything between `bwrap` and the command.

    Raises:
        ImageNotUsable: The image cannot be used; see `check_image`.
    """
    return [
        *NAMESPACES,
        # The exec server is process 1, and in these namespaces it may do what it needs to make others for its
        # commands. Commands themselves have no capabilities and make no user namespaces (see
        # `rollyard_sandbox.isolation.command_namespaces`).
        "--as-pid-1",
        *_process(env),
        *_view(key.image, runtime, memory_folders(key)),
    ]


def template_arguments(image: str | None, runtime: Runtime, env: Mapping[str, str]) -> list[str]:
    """Return everything between `bwrap` and the command of a template, in whose view nothing can be written.

    A template stays in this machine's pid and control group namespaces, so its end harms no sandbox that was
    forked from it. Each of these makes all of its namespaces itself.

    Raises:
        ImageNotUsable: The image cannot be used; see `check_image`.
    """
    inherited = ("--unshare-pid", "--unshare-cgroup-try")
    own = (name for name in NAMESPACES if name not in inherited)
    return [*own, *_process(env), *_view(image, runtime, ("/dev/shm", "/tmp", WORKDIR))]


def memory_folders(key: SandboxKey) -> dict[str, tuple[int, int]]:
    """Return the size in bytes and the mode of each folder that can be written."""
    size = disk_size(key)
    return {
        "/dev/shm": (min(_SHM_BYTES, key.memory_bytes // 8), 0o1777),
        "/tmp": (size, 0o1777),
        WORKDIR: (size, 0o755),
        **dict.fromkeys(key.folders, (size, 0o755)),
    }


def _process(env: Mapping[str, str]) -> list[str]:
    arguments = [
        "--new-session",
        "--cap-drop",
        "ALL",
        "--hostname",
        "sandbox",
        "--clearenv",
        "--uid",
        "0",
        "--gid",
        "0",
        *(part for name in _RIGHTS for part in ("--cap-add", name)),
    ]
    for name, value in env.items():
        arguments += ["--setenv", name, value]
    return arguments


def _view(image: str | None, runtime: Runtime, writable: Iterable[str]) -> list[str]:
    """Return the arguments for a read-only view, with empty folders that can be covered to be written to."""
    arguments = host_system(runtime) if image is None else image_system(check_image(image))
    for folder in (INSIDE, f"{INSIDE}/libs", f"{INSIDE}/site", EVAL_FOLDER):
        arguments += ["--perms", "0755", "--dir", folder]
    for source, target in runtime.binds:
        arguments += ["--ro-bind", source, target]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for folder in (*writable, "/run"):
        arguments += ["--dir", folder]
    return [*arguments, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]


def host_system(runtime: Runtime) -> list[str]:
    """Return arguments for the host's read-only system: programs and libraries, no home, state or secrets."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), name]
        elif path.is_dir():
            arguments += ["--ro-bind", name, name]
    if Path("/nix/store").is_dir():
        arguments += ["--ro-bind", "/nix/store", "/nix/store"]
    arguments += ["--perms", "0755", "--dir", "/etc"]
    for name in _ETC:
        if os.access(f"/etc/{name}", os.R_OK):
            arguments += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
    for source, target in runtime.etc:
        arguments += ["--ro-bind", source, target]
    arguments += ["--symlink", "/proc/self/mounts", "/etc/mtab"]
    for name in ("/home", "/root", "/opt", "/srv", "/mnt", "/var/lib", "/var/log"):
        arguments += ["--dir", name]
    return [*arguments, "--symlink", "/tmp", "/var/tmp"]


def image_system(root: Path) -> list[str]:
    """Return arguments for the root folder, entry by entry, which leaves room for our own mount points."""
    arguments: list[str] = []
    for name in sorted(os.listdir(root)):
        path = root / name
        if name in _OWN:
            continue
        if path.is_symlink():
            arguments += ["--symlink", os.readlink(path), f"/{name}"]
        elif path.is_dir() or path.is_file():
            arguments += ["--ro-bind", str(path), f"/{name}"]
    return arguments


def check_image(image: str, private: Iterable[Path] = ()) -> Path:
    """Return the root folder that `image` names.

    Raises:
        ImageNotUsable: It is not a root folder, has no bash, or would show a folder of `private` (this
            machine's run folder) inside.
    """
    if "://" in image or image.endswith((".sif", ".tar", ".img", ".squashfs")):
        raise ImageNotUsable(
            f"sandbox.image {image!r}: bubblewrap starts no container or SIF images; name a folder that "
            "holds an unpacked root file system (for example from `docker export`), or leave image out "
            "to use this machine's read-only system"
        )
    if image.startswith(DOCKERFILE_IMAGE):
        raise ImageNotUsable(
            f"sandbox.image {image!r}: the task has a Dockerfile, whose image is built for Apptainer only; "
            "build it elsewhere, and name its root folder in sandbox.images of the job"
        )
    root = Path(image)
    if not root.is_absolute():
        raise ImageNotUsable(
            f"sandbox.image {image!r}: not an absolute path; under bubblewrap an image is the absolute path "
            "of a root folder on the worker's machine, or nothing"
        )
    if not root.is_dir():
        raise ImageNotUsable(f"sandbox.image {image!r}: no such folder on this machine")
    root = root.resolve()
    if root == Path("/"):
        raise ImageNotUsable(
            "sandbox.image '/': would show this machine's secrets inside; leave image out to use its "
            "read-only system"
        )
    for folder in private:
        if root == folder or root in folder.parents or folder in root.parents:
            raise ImageNotUsable(
                f"sandbox.image {image!r}: holds, or lies within, the run dir {folder}; use another folder"
            )
    if not any(in_root(root, name) for name in ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")):
        raise ImageNotUsable(f"sandbox.image {image!r}: has no bash (looked for bin/bash and usr/bin/bash)")
    if in_root(root, "/bin/sh") is None:
        raise ImageNotUsable(f"sandbox.image {image!r}: has no bin/sh; link it to bash")
    return root


def in_root(root: Path, name: str) -> Path | None:
    """Return the file that `name` refers to when `root` is the root folder.

    Symbolic links are followed inside `root`.
    """
    parts = [part for part in name.split("/") if part]
    at = root
    for _ in range(256):
        if not parts:
            return at
        part = parts.pop(0)
        if part == "..":
            at = at if at == root else at.parent
            continue
        path = at / part
        if path.is_symlink():
            target = os.readlink(path)
            parts = [piece for piece in target.split("/") if piece and piece != "."] + parts
            at = root if target.startswith("/") else at
        elif path.exists():
            at = path
        else:
            return None
    return None
