"""The checks of `rollyard doctor`. Each reports what it found, and what to do if something is missing."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from rollyard.extras import missing

if TYPE_CHECKING:
    from rollyard_slurm.profile import RestProfile

Verdict = Literal["ok", "missing", "optional"]
TIMEOUT_SECONDS: Final = 10.0
Runner = Callable[..., tuple[int, str]]
"""A function that runs a command, given word by word, and returns its exit status and its last line.

The status is 127 if there is no such program, and 124 if the program did not end in time."""
FAR_SECONDS: Final = 5.0
"""A difference that makes logs hard to read. Rollyard itself measures durations only."""
_UNSYNCHRONISED: Final = 0x0040
_TIMEX_BYTES: Final = 512
_STATUS_OFFSET: Final = 40 if ctypes.sizeof(ctypes.c_long) == 8 else 20
PROGRAMS: Final = ("sbatch", "squeue", "scontrol", "scancel")
OLDEST: Final = (20, 11)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.\S+)?")
SOCKETS: Final = (Path("/run/slurmrestd/slurmrestd.socket"), Path("/run/slurmrestd.socket"))
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
class Finding:
    """One line of `rollyard doctor`. `optional` means that it is missing, and that only some uses need it."""

    name: str
    verdict: Verdict
    state: str
    advice: str = ""


def run(*command: str) -> tuple[int, str]:
    """Run a program for ten seconds at most, and return its exit status and the last line of its output."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return 127, f"{command[0]}: not found"
    except PermissionError:
        return 126, f"{command[0]}: permission denied"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]}: no answer within {TIMEOUT_SECONDS:.0f} s"
    lines = (process.stdout + process.stderr).strip().splitlines()
    return process.returncode, lines[-1] if lines else ""


def check_python() -> Finding:
    """Report the version of Python and of the operating system."""
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def check_sandboxes(run_dir: Path) -> list[Finding]:
    """Check user namespaces, bubblewrap, limits and the run folder with the sandboxes' own checks."""
    from rollyard_pipeline.sandboxes.doctor import sandbox_checks

    return [
        Finding(check.name, "ok" if check.ok else "missing", check.meaning, check.remedy)
        for check in asyncio.run(sandbox_checks(run_dir))
    ]


def check_containers(on_slurm: bool) -> list[Finding]:
    """Check Apptainer sandboxes. Only a Slurm cluster needs them."""
    from rollyard_pipeline.sandboxes.doctor import apptainer_checks

    findings = []
    for check in asyncio.run(apptainer_checks()):
        if check.ok:
            # A check that succeeds and has a remedy found something that works in part.
            verdict: Verdict = "optional" if check.remedy else "ok"
        else:
            needed = on_slurm or check.name == "user namespaces"
            verdict = "missing" if needed else "optional"
        findings.append(Finding(check.name, verdict, check.meaning, check.remedy))
    return findings


def check_engines() -> list[Finding]:
    """Check the sandboxes of container engines, which are one choice among several."""
    from rollyard_pipeline.sandboxes.doctor import engine_checks

    return [
        Finding(
            check.name, "ok" if check.ok and not check.remedy else "optional", check.meaning, check.remedy
        )
        for check in asyncio.run(engine_checks())
    ]


def check_installation() -> Finding:
    """Check that the packages that `rollyard up` and the quickstart need are installed."""
    absent = missing("api", "worker", "sandbox")
    if not absent:
        return Finding("installation", "ok", "control plane, workers and sandboxes")
    advice = "`pip install 'rollyard[local]'`; the client alone is enough for a control plane elsewhere"
    return Finding("installation", "missing", f"no {', '.join(absent)}", advice)


def check_model() -> Finding:
    """Check that the embedded engine and its shipped model are installed."""
    from rollyard.errors import LookupFailed
    from rollyard.local.options import shipped_model

    absent = missing("engine")
    if absent:
        advice = "`pip install 'rollyard[engine]'`, or use a running server: --backend URL"
        return Finding("embedded engine", "missing", f"no {', '.join(absent)}", advice)
    try:
        return Finding("embedded engine", "ok", str(shipped_model()))
    except LookupFailed as error:
        return Finding("embedded engine", "missing", "no shipped model", str(error))


def check_gpu() -> Finding:
    """Check NVIDIA GPUs and their driver, which `--nv` makes available in containers."""
    code, text = run("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if code == 0 and text:
        return Finding("gpu", "ok", f"{text} (name, memory, driver)")
    advice = "the embedded engine needs none; vLLM's CPU build is for tests"
    if code == 127:
        return Finding("gpu", "optional", "none", advice)
    usual = "on a login node that is usual; on a node with GPUs ask the administrator for NVIDIA's driver"
    return Finding("gpu", "optional", f"nvidia-smi does not work: {text}", usual)


def check_vllm() -> Finding:
    """Check vLLM, which `rollyard up --engine vllm` and pools with `engine.type: vllm` need."""
    from rollyard_drivers.host.installed_vllm import installed_version
    from rollyard_drivers.reconcile.vllm_version import MINIMUM_TEXT, is_too_old

    path = shutil.which("vllm")
    version = installed_version(path or sys.executable)
    if is_too_old(version):
        return Finding(
            "vllm", "optional", f"{version} is too old", f"Rollyard needs vLLM {MINIMUM_TEXT} or newer"
        )
    if path is not None:
        gpus = run("nvidia-smi", "-L")
        visible = "a GPU is seen" if gpus[0] == 0 and gpus[1].startswith("GPU") else "no GPU is seen"
        return Finding("vllm", "ok", f"{path}; {visible}")
    advice = "`pip install 'rollyard[vllm]'`, or name another environment: --vllm-python, spec.engine.command"
    if find_spec("vllm") is not None:
        return Finding(
            "vllm", "ok", "importable; no command `vllm` on PATH", f"--vllm-python {sys.executable}"
        )
    return Finding("vllm", "optional", "not installed here", advice)


def check_cluster() -> Finding:
    """Check the access to a Kubernetes cluster."""
    if shutil.which("kubectl") is None:
        return Finding("kubernetes", "optional", "no kubectl", "only needed to run on Kubernetes")
    advice = "only needed to run on Kubernetes; set KUBECONFIG to reach a cluster"
    code, context = run("kubectl", "config", "current-context")
    if code != 0:
        # Without a context, kubectl tries localhost:8080, whose refusal would explain nothing.
        return Finding("kubernetes", "optional", "kubectl is there, no cluster is configured", advice)
    code, text = run("kubectl", "version", "--request-timeout=5s", "-o", "json")
    if code == 0:
        return Finding("kubernetes", "ok", f"the cluster of context {context!r} answers")
    return Finding("kubernetes", "optional", f"context {context!r} does not answer: {text[:120]}", advice)


def is_slurm_machine(env: Mapping[str, str] = os.environ, runner: Runner = run) -> bool:
    """Return whether this machine is a node of a Slurm cluster or submits jobs to one."""
    if "SLURM_JOB_ID" in env:
        return True
    return shutil.which("sbatch") is not None and not _unconfigured(runner)


def _unconfigured(runner: Runner) -> bool:
    """Return whether Slurm's commands are installed without a cluster.

    Such commands have no configuration, and they do not even print their version.
    """
    code, text = runner("sbatch", "--version")
    return code != 0 and "configuration source" in text


def check_slurm(env: Mapping[str, str] = os.environ, runner: Runner = run) -> Finding:
    """Check Slurm's commands and their version."""
    if not is_slurm_machine(env, runner):
        if shutil.which("sbatch") is not None:
            return Finding(
                "slurm",
                "optional",
                "commands are there, no cluster is configured",
                "only needed to run on a Slurm cluster; SLURM_CONF names its slurm.conf",
            )
        return Finding("slurm", "optional", "not installed", "only needed to run on a Slurm cluster")
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    where = (
        f"inside job {env['SLURM_JOB_ID']} on {env.get('SLURMD_NODENAME', 'a node')}"
        if "SLURM_JOB_ID" in env
        else ""
    )
    if lacking and where:
        return Finding(
            "slurm", "ok", f"{where}; no {', '.join(lacking)} here, only the login node needs them"
        )
    if lacking:
        return Finding(
            "slurm",
            "missing",
            f"no {', '.join(lacking)} on PATH",
            "try `module load slurm`, or another login node",
        )
    _, text = runner("sbatch", "--version")
    match = _VERSION.search(text)
    if match is None:
        return Finding(
            "slurm", "missing", f"sbatch --version answers {text!r}", "is this Slurm's own sbatch?"
        )
    if (int(match[1]), int(match[2])) < OLDEST:
        return Finding("slurm", "missing", text, f"Slurm {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return Finding("slurm", "ok", f"{text}; {where}" if where else text)


def check_controller(runner: Runner = run) -> Finding:
    """Check that slurmctld answers, and list the partitions that it offers this user."""
    name = "slurmctld"
    code, text = runner("scontrol", "ping")
    if code != 0 or "UP" not in text:
        return Finding(
            name,
            "missing",
            f"does not answer: {text[:200]}",
            "running jobs continue, but nothing new starts; SLURM_CONF must name the site's slurm.conf; "
            "else ask the administrator",
        )
    code, text = runner("sh", "-c", 'sinfo -h -o "%P" | tr "\\n" " "')
    if code != 0 or not text.strip():
        return Finding(name, "missing", "answers, but shows no partition", "ask for access to a partition")
    return Finding(name, "ok", f"answers; partitions {', '.join(text.split())} (* is the default)")


def check_tracking(runner: Runner = run) -> Finding:
    """Check that Slurm ends all processes that a job has started."""
    name = "job cleanup"
    code, text = runner("sh", "-c", "scontrol show config | grep -i '^ProctrackType'")
    kind = text.partition("=")[2].strip()
    if code != 0 or not kind:
        return Finding(name, "optional", "scontrol does not say how processes are tracked")
    if kind == "proctrack/cgroup":
        return Finding(name, "ok", "proctrack/cgroup: a cancelled job leaves no process")
    return Finding(
        name,
        "optional",
        f"{kind}: a cancelled job may leave container processes",
        "workers sweep what earlier ones left; ask the administrator for ProctrackType=proctrack/cgroup",
    )


def check_limits(runner: Runner = run) -> Finding:
    """Check that a job's memory limit is enforced, because it also limits the memory of sandboxes."""
    name = "job limits"
    code, text = runner("sh", "-c", "scontrol show config | grep -i '^TaskPlugin '")
    plugins = text.partition("=")[2].strip()
    if code != 0 or not plugins:
        return Finding(name, "optional", "scontrol does not say how limits are kept")
    if "task/cgroup" in plugins:
        return Finding(name, "ok", f"{plugins}: CPUs and memory of a job can be enforced")
    return Finding(
        name,
        "optional",
        f"{plugins}: nothing keeps a job within its memory",
        "a sandbox may take the node's memory; ask the administrator for TaskPlugin=task/cgroup",
    )


def slurm_checks() -> Iterator[Finding]:
    """Run the checks of Slurm, or only the first if there is no Slurm."""
    first = check_slurm()
    yield first
    if is_slurm_machine() and shutil.which("scontrol") is not None:
        yield check_controller()
        yield check_tracking()
        yield check_limits()


def check_slurmrestd(profile: Path | None, sockets: Iterable[Path] = SOCKETS) -> Finding | None:
    """Check that slurmrestd answers. Return None if no profile names one and no socket of it exists."""
    from rollyard_slurm.errors import BridgeError
    from rollyard_slurm.profile import RestProfile, load

    try:
        rest = load(profile).rest if profile is not None else None
    except BridgeError as error:
        return Finding("slurm profile", "missing", str(error))
    if rest is not None:
        return _check_server(rest, needed=True)
    for path in sockets:
        if path.is_socket():
            return _check_server(RestProfile(url=f"unix:{path}"), needed=False)
    return None


def _check_server(rest: RestProfile, needed: bool) -> Finding:
    from rollyard_slurm.calls.protocol import CallCounts
    from rollyard_slurm.calls.slurmrestd import SlurmrestdClient
    from rollyard_slurm.errors import SlurmError

    server = SlurmrestdClient(rest, TIMEOUT_SECONDS, CallCounts())
    try:
        server.check()
        api = asyncio.run(server.api())
    except SlurmError as error:
        advice = "a token is renewed with `scontrol token`" if rest.token_file is not None else ""
        if not needed:
            advice = "only needed where Slurm's commands are not; `doctor --profile FILE` tries a profile's"
        return Finding("slurmrestd", "missing" if needed else "optional", str(error), advice)
    how = "signals batch scripts itself" if api.signals_batch else "batch scripts hear by a file in the home"
    advice = "" if needed else f"where Slurm's commands are missing: --rest-url {rest.url}"
    return Finding("slurmrestd", "ok", f"{rest.url} has v0.0.{api.version}; {how}", advice)


@dataclass(frozen=True, slots=True)
class MountPoint:
    """The mount point of a path, with the type of the file system and its options."""

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


def storage_checks(folder: Path, slurm: bool) -> Iterator[Finding]:
    """Run the checks of storage for the folder, or for the nearest existing folder above it."""
    existing = nearest(folder)
    yield check_kind(existing, slurm)
    yield check_locks(existing)
    yield check_space(existing)


def is_synchronised() -> bool | None:
    """Return whether the kernel's clock is synchronised (adjtimex(2)), or None if that is not known."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    except AttributeError:
        return None
    if state < 0:
        return None
    status = ctypes.c_int.from_buffer(buffer, _STATUS_OFFSET).value
    return not status & _UNSYNCHRONISED


def storage_offset(folder: Path) -> float | None:
    """Return the seconds by which the file server's clock is ahead of this machine's clock.

    The result is None if nothing can be written to the folder.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".rollyard-doctor-") as file:
            before = time.time()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            after = time.time()
            written = os.stat(file.name).st_mtime
    except OSError:
        return None
    if before <= written <= after:
        return 0.0
    return written - (after if written > after else before)


def check_clocks(
    folder: Path,
    synchronised: Callable[[], bool | None] = is_synchronised,
    offset: Callable[[Path], float | None] = storage_offset,
) -> Finding:
    """Check the clock by the kernel's state and by the timestamps of a folder's file server."""
    name = "clock"
    ahead = offset(folder)
    if ahead is not None and abs(ahead) > FAR_SECONDS:
        side = "behind" if ahead > 0 else "ahead of"
        return Finding(
            name,
            "missing",
            f"{abs(ahead):.0f} s {side} the server of {folder}",
            "ask the administrator for chrony or NTP on this node; leases go by durations and hold all the "
            "same, but time stamps of different nodes cannot be compared",
        )
    state = synchronised()
    if state:
        return Finding(name, "ok", "kept right by NTP or the like")
    words = "nothing keeps it right (NTP, chrony)" if state is False else "the kernel does not say"
    return Finding(
        name, "optional", words, "time stamps of different nodes may differ; nothing else depends on them"
    )


CHECKS: Final[tuple[Callable[[], Finding], ...]] = (check_model, check_gpu, check_vllm)


def examine(run_dir: Path, profile: Path | None = None) -> Iterator[Finding]:
    """Run every check, the most important first. `profile` is the profile of a Slurm site."""
    on_slurm = is_slurm_machine()
    yield check_python()
    yield check_installation()
    rootless = check_containers(on_slurm)
    # On clusters, Apptainer makes the sandboxes. Bubblewrap is rarely installed there and is not needed.
    contained = on_slurm and all(finding.verdict != "missing" for finding in rootless)
    for finding in check_sandboxes(run_dir):
        if finding.name == "user namespaces" and finding.verdict == "ok":
            continue  # The check of containers below reports them, where it tries them without bubblewrap.
        if contained and finding.name == "bubblewrap" and finding.verdict == "missing":
            finding = replace(finding, verdict="optional", advice="Apptainer serves instead")
        yield finding
    yield from rootless
    if not on_slurm:
        yield from check_engines()
    yield from slurm_checks()
    rest = check_slurmrestd(profile)
    if rest is not None:
        yield rest
    yield from storage_checks(run_dir.parent, on_slurm)
    yield check_clocks(nearest(run_dir.parent))
    for check in CHECKS:
        yield check()
    yield check_cluster()
