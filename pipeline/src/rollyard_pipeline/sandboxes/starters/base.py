"""The interface for starting and killing one kind of sandbox. All kinds share the provider around it."""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from rollyard_pipeline.sandboxes.host.cgroups import CgroupLimits, CgroupPlace, enforced, oom_kills
from rollyard_pipeline.sandboxes.host.processes import ProcessRef, Reaper
from rollyard_pipeline.sandboxes.host.records import SandboxRecord
from rollyard_pipeline.sandboxes.interface import SandboxKey
from rollyard_pipeline.sandboxes.starters.launch import LISTEN_FD, READY_FD, SECRET_FD
from rollyard_pipeline.sandboxes.starters.root_folders import PROC_HIDDEN, WORKDIR
from rollyard_pipeline.sandboxes.starters.runtime import EVAL_FOLDER

SANDBOX_ENV: Final = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORKDIR,
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
}
"""The environment of programs inside. An image may have another PATH and add further variables."""
LEASE_SECONDS: Final = 60.0
"""The life of a sandbox that is not renewed, in seconds."""
START_SECONDS: Final = 30.0
BASHES: Final = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")
"""Where an image must have bash."""
NO_BASH: Final = "NoBash"
"""The first word of the message on standard error if it has none; see `needs_bash`."""
EVAL_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class StartedSandbox:
    """The processes of a sandbox that is ready."""

    root: ProcessRef
    monitor: ProcessRef | None
    helpers: tuple[ProcessRef, ...] = ()
    """Outer processes that serve it, such as those of its file systems. They end after `monitor`."""
    cgroups: tuple[Path, ...] = ()
    """The control groups that a container engine has made for it."""


class Starter(ABC):
    """The starter of one kind of sandbox. By default it needs no preparation."""

    name: ClassVar[str]
    fetches: ClassVar[bool] = False
    """Whether images come from elsewhere and may take long to come."""
    starts_ahead = True
    """Whether a start takes long enough that jobs gain from sandboxes which are started in advance."""

    def __init__(self, places: Sequence[CgroupPlace]) -> None:
        self.places = places
        self.bound = enforced(places)
        """Which of memory, pids and cpu control groups limit."""
        self.reaper = Reaper()
        """Reaps the processes that are started here."""

    def workdir(self, folder: Path) -> str:
        """Return the work folder as programs inside see it, for a sandbox whose own folder is `folder`."""
        return WORKDIR

    async def probe(self) -> None:
        """Check that this machine can run such sandboxes.

        Raises:
            SandboxProviderError: This machine cannot run them. The message says what to do.
        """
        return

    async def stand_ready(self) -> None:
        """Prepare what most sandboxes of this machine are started from. It is called after `probe`."""
        return

    @abstractmethod
    def check(self, key: SandboxKey) -> None:
        """Check that a sandbox of this key can be started here.

        Raises:
            ImageNotUsable: It can never be started here.
        """

    async def prepare(self, key: SandboxKey) -> None:
        """Prepare what may take minutes and is shared by many starts, such as an image.

        It raises the same exceptions as `start`.
        """
        return

    async def fetch(self, key: SandboxKey) -> bool:
        """Bring the image of a key to this machine ahead of its first sandbox. Return whether there was room.

        It raises the same exceptions as `start`.
        """
        return True

    @abstractmethod
    async def start(
        self, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox:
        """Start a sandbox whose socket is `folder`/exec.sock and wait until it is ready.

        Its server proves to clients that it knows `secret`, which is visible to nothing else inside.
        """

    def listed_name(self, image: str | None) -> str | None:
        """Return an image as the installer's list of images names it; see `AllowedImages`."""
        return image

    def oom_killed(self, record: SandboxRecord) -> bool:
        """Return whether the kernel killed a process inside for lack of memory. This blocks."""
        return oom_kills([Path(path) for path in record.cgroups]) > 0

    def taken_away(self, record: SandboxRecord) -> bool:
        """Return whether somebody other than a worker has removed a sandbox that has ended. This blocks."""
        return False

    @abstractmethod
    def kill(self, record: SandboxRecord, seconds: float) -> bool:
        """Kill all processes of a sandbox and return whether they are gone. This blocks."""

    def close(self) -> None:
        """Release what the starter holds. Running sandboxes are left running."""
        self.reaper.close()


def command_namespaces(key: SandboxKey, uid: int | None) -> dict[str, object]:
    """Return the arguments of the exec server's NamespaceOptions.

    If `uid` is None, commands run as the image's root.
    """
    size = min(EVAL_BYTES, key.memory_bytes // 8)
    return {"uid": uid, "hidden": list(PROC_HIDDEN), "eval_folder": EVAL_FOLDER, "eval_bytes": size}


def inside(key: SandboxKey, uid: int | None) -> str:
    """Return the Python expression for the namespaces of commands; see `command_namespaces`."""
    return f"NamespaceOptions(**{command_namespaces(key, uid)!r})"


def resource_limits(key: SandboxKey, bound: Collection[str], *, shared: bool = False) -> dict[str, int]:
    """Return the limits of getrlimit(2), by their names, where control groups do not bind.

    RLIMIT_NPROC is counted per user namespace since Linux 5.14, so it must be set inside. RLIMIT_DATA is per
    process.

    Args:
        key: The properties of the sandbox.
        bound: Which of memory, pids and cpu control groups limit.
        shared: Whether the server is one of this machine's ordinary processes.
    """
    limits = {"RLIMIT_CORE": 0}
    if "pids" not in bound and not shared:
        # Without its own user namespace, the limit would count the processes of the whole account.
        limits["RLIMIT_NPROC"] = key.processes
    if "memory" not in bound:
        limits["RLIMIT_DATA"] = key.memory_bytes
    if shared:
        limits["RLIMIT_FSIZE"] = key.disk_bytes
    return limits


def yielding(bound: Collection[str]) -> bool:
    """Return whether commands can run at the lowest priority: they compete with their own server only."""
    return "cpu" in bound


def needs_bash() -> str:
    """Return the line of Python code that ends a start in an image without bash."""
    return (
        f"if not any(os.access(path, os.X_OK) for path in {BASHES!r}): "
        f"sys.exit('{NO_BASH}: looked for ' + ', '.join({BASHES!r}))"
    )


def bind_mount(source: str, target: str) -> str:
    """Return a read-only bind for an option --mount, which is parsed as a line of CSV."""
    line = io.StringIO()
    fields = ["type=bind", f"source={source}", f"destination={target}", "ro"]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def limits_of(key: SandboxKey) -> CgroupLimits:
    """Return the control-group limits of a key, including the outer process and the exec server."""
    return CgroupLimits(cpu=key.cpu, memory_bytes=key.memory_bytes, processes=key.processes + 5)


def server_code(
    key: SandboxKey,
    bound: Collection[str],
    workdir: str,
    path: Sequence[str],
    *,
    inside: str | None,
    first: Sequence[str] = (),
    before: Sequence[str] = (),
) -> list[str]:
    """Return Python's arguments that run the exec server under resource limits, without `site` and argparse.

    Args:
        key: The properties of the sandbox.
        bound: Which of memory, pids and cpu control groups limit.
        workdir: The work folder.
        path: The folders to append to sys.path.
        inside: The namespaces of commands (see `inside`). None means that the server is one of this machine's
            ordinary processes.
        first: Lines of code that bring the descriptors, where the program does not inherit them.
        before: Lines of code that run before the server, after it has read the secret.
    """
    shared = inside is None
    lines = [
        "import resource as r, sys",
        f"sys.path += {list(path)!r}",
        *first,
        # The secret is read first, while nothing but these lines runs.
        "from rollyard_sandbox.proof import read_secret",
        f"secret = read_secret({SECRET_FD})",
        *before,
    ]
    for name, limit in resource_limits(key, bound, shared=shared).items():
        lines.append(f"r.setrlimit(r.{name}, ({limit}, {limit}))")
    lines += [
        "from rollyard_sandbox.isolation.command_namespaces import NamespaceOptions",
        "from rollyard_sandbox.server.exec_server import serve",
        "from rollyard_sandbox.server.options import ServerOptions",
        f"sys.exit(serve(ServerOptions(listen=['fd:{LISTEN_FD}'], ready_fd={READY_FD}, workdir={workdir!r}, "
        f"lease={LEASE_SECONDS!r}, own_pid_namespace={not shared}, filter_calls={not shared}, "
        f"secret=secret, namespaces={inside}, yielding={yielding(bound) and not shared})))",
    ]
    return ["-I", "-S", "-c", "\n".join(lines)]
