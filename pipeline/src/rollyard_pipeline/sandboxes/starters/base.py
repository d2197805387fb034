"""How one kind of sandbox is started and killed; the provider around it is common to all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollyard_pipeline.sandboxes.host.cgroups import CgroupLimits, CgroupPlace, enforced
from rollyard_pipeline.sandboxes.host.processes import ProcessRef
from rollyard_pipeline.sandboxes.host.records import SandboxRecord
from rollyard_pipeline.sandboxes.interface import SandboxKey
from rollyard_pipeline.sandboxes.starters.launch import LISTEN_FD, READY_FD, SECRET_FD
from rollyard_pipeline.sandboxes.starters.root_folders import PROC_HIDDEN, WORKDIR
from rollyard_pipeline.sandboxes.starters.runtime import EVAL_FOLDER

SANDBOX_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": WORKDIR,
    "USER": "sandbox",
    "LOGNAME": "sandbox",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
}
"""The environment of programs inside; an image may have another PATH and add to it."""
LEASE_SECONDS = 60.0
"""Life of a sandbox that nobody renews."""
START_SECONDS = 30.0
EVAL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StartedSandbox:
    """The processes of a sandbox that is ready."""

    root: ProcessRef
    monitor: ProcessRef | None
    helpers: tuple[ProcessRef, ...] = ()
    """Processes outside that serve it, such as those of its file systems; they end after `monitor`."""


class Starter(Protocol):
    """One kind of sandbox."""

    name: str

    def workdir(self, folder: Path) -> str:
        """The work folder as programs inside see it, for a sandbox whose own folder is `folder`."""
        ...

    async def probe(self) -> None:
        """Raises a SandboxError with what to do where this machine cannot run such sandboxes."""
        ...

    def check(self, key: SandboxKey) -> None:
        """Raises ImageNotUsable for a key that can never be started here."""
        ...

    async def prepare(self, key: SandboxKey) -> None:
        """Gets ready what may take minutes and many starts share, such as an image; raises as `start`."""
        ...

    async def start(
        self, key: SandboxKey, folder: Path, cgroups: Sequence[Path], secret: bytes
    ) -> StartedSandbox:
        """Starts a sandbox whose socket is `folder`/exec.sock and waits until it is ready.

        Its server proves to know `secret`, which nothing else inside ever sees.
        """
        ...

    def kill(self, record: SandboxRecord, seconds: float) -> bool:
        """Kills all processes of a sandbox. Blocking; returns whether they are gone."""
        ...

    def close(self) -> None:
        """Frees what the starter holds; running sandboxes are left running."""
        ...


def inside(key: SandboxKey, uid: int | None) -> str:
    """Python's expression for the namespaces of commands; `uid` None: they are the image's root."""
    size = min(EVAL_BYTES, key.memory_bytes // 8)
    place = f"eval_folder={EVAL_FOLDER!r}, eval_bytes={size}"
    return f"NamespaceOptions(uid={uid!r}, hidden={PROC_HIDDEN!r}, {place})"


def limits_of(key: SandboxKey) -> CgroupLimits:
    """The control-group limits of a key. What keeps it and the exec server count too."""
    return CgroupLimits(cpu=key.cpu, memory_bytes=key.memory_bytes, processes=key.processes + 5)


def server_code(
    key: SandboxKey,
    places: Sequence[CgroupPlace],
    workdir: str,
    path: Sequence[str],
    *,
    inside: str | None,
    before: Sequence[str] = (),
) -> list[str]:
    """Python's arguments that run the exec server under resource limits, without `site` and argparse.

    Where control groups do not bind, resource limits do (getrlimit(2)): RLIMIT_NPROC is
    counted per user namespace since Linux 5.14, so it must be set inside; RLIMIT_DATA is per
    process. `path` goes at the end of sys.path. `inside`: the namespaces of commands (see
    `inside`); None: the server lives among this machine's other processes. `before`: lines that run first.
    """
    shared = inside is None
    bound = enforced(places)
    lines = [
        "import resource as r, sys",
        f"sys.path += {list(path)!r}",
        # First of all, while nothing but these lines runs.
        "from rollyard_sandbox.proof import read_secret",
        f"secret = read_secret({SECRET_FD})",
        *before,
        "r.setrlimit(r.RLIMIT_CORE, (0, 0))",
    ]
    if "pids" not in bound and not shared:
        # Without a user namespace of its own the count would be that of the whole account.
        lines.append(f"r.setrlimit(r.RLIMIT_NPROC, ({key.processes}, {key.processes}))")
    if "memory" not in bound:
        lines.append(f"r.setrlimit(r.RLIMIT_DATA, ({key.memory_bytes}, {key.memory_bytes}))")
    if shared:
        lines.append(f"r.setrlimit(r.RLIMIT_FSIZE, ({key.disk_bytes}, {key.disk_bytes}))")
    lines += [
        "from rollyard_sandbox.isolation.command_namespaces import NamespaceOptions",
        "from rollyard_sandbox.server.exec_server import serve",
        "from rollyard_sandbox.server.options import Options",
        f"sys.exit(serve(Options(listen=['fd:{LISTEN_FD}'], ready_fd={READY_FD}, workdir={workdir!r}, "
        f"lease={LEASE_SECONDS!r}, own_pid_namespace={not shared}, filter_calls={not shared}, "
        f"secret=secret, namespaces={inside})))",
    ]
    return ["-I", "-S", "-c", "\n".join(lines)]
