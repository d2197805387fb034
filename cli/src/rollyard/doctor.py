"""What works on this machine: each check says what it found, and what to do if it is missing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "missing", "optional"]
TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `rollyard doctor`. `optional`: absent, and only some uses need it."""

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


def _run(*command: str) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return 127, f"{command[0]}: not found"
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]}: no answer within {TIMEOUT_SECONDS:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, lines[-1] if lines else ""


def check_python() -> Finding:
    """Python and the machine."""
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def check_user_namespaces() -> Finding:
    """Whether unprivileged user namespaces may be made."""
    code, text = _run("unshare", "--user", "--map-root-user", "true")
    if code == 0:
        return Finding("user namespaces", "ok", "allowed")
    return Finding(
        "user namespaces",
        "missing",
        text,
        "as root: sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000 "
        "(Ubuntu 24.04 also kernel.apparmor_restrict_unprivileged_userns=0); "
        "in a container: allow unshare in its seccomp profile",
    )


def check_bubblewrap() -> Finding:
    """Whether bubblewrap makes a sandbox of the kind that we use."""
    if shutil.which("bwrap") is None:
        return Finding("bubblewrap", "missing", "not installed", "apt-get install bubblewrap")
    code, text = _run(
        *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/"),
        *("--proc", "/proc", "--dev", "/dev", "true"),
    )
    if code == 0:
        return Finding("bubblewrap", "ok", _run("bwrap", "--version")[1])
    return Finding(
        "bubblewrap",
        "missing",
        text,
        "user namespaces are needed (see there); `--sandbox process` runs without isolation",
    )


def check_cgroups() -> Finding:
    """Whether limits can be set by control groups; without them, by rlimits."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers")
    base = Path("/sys/fs/cgroup") if v2.exists() else Path("/sys/fs/cgroup/memory")
    kind = "v2" if v2.exists() else "v1"
    if base.is_dir() and os.access(base, os.W_OK):
        return Finding("cgroups", "ok", f"{kind}, writable")
    return Finding(
        "cgroups",
        "optional",
        f"{kind}, not writable" if base.is_dir() else "not mounted",
        "limits then bind each process; `systemd-run --user --scope -p Delegate=yes rollyard up` "
        "lets them bind the whole sandbox",
    )


def check_model() -> Finding:
    """Whether the embedded engine and its shipped model are there."""
    from rollyard.errors import NotFound
    from rollyard.local.options import shipped_model

    try:
        return Finding("embedded engine", "ok", str(shipped_model()))
    except NotFound as error:
        return Finding("embedded engine", "missing", "no shipped model", str(error))


def check_apptainer() -> Finding:
    """Apptainer or SingularityCE, for sandboxes with images on Slurm."""
    for name in ("apptainer", "singularity"):
        if shutil.which(name):
            return Finding("apptainer", "ok", _run(name, "--version")[1])
    return Finding("apptainer", "optional", "not installed", "only sandboxes with SIF images need it")


def check_slurm() -> Finding:
    """Slurm's commands."""
    if shutil.which("sbatch"):
        code, text = _run("sinfo", "--version")
        return Finding("slurm", "ok" if code == 0 else "optional", text)
    return Finding("slurm", "optional", "not installed", "only needed to run on a Slurm cluster")


def check_gpu() -> Finding:
    """NVIDIA GPUs."""
    code, text = _run("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
    if code == 0 and text:
        return Finding("gpu", "ok", text)
    return Finding("gpu", "optional", "none", "the embedded engine needs none; for vLLM use --backend URL")


def check_cluster() -> Finding:
    """Access to a Kubernetes cluster."""
    if shutil.which("kubectl") is None:
        return Finding("kubernetes", "optional", "no kubectl", "only needed to run on Kubernetes")
    code, text = _run("kubectl", "version", "--request-timeout=5s", "-o", "name")
    if code == 0:
        return Finding("kubernetes", "ok", "the cluster answers")
    return Finding("kubernetes", "optional", text[:120], "set KUBECONFIG to reach a cluster")


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_user_namespaces,
    check_bubblewrap,
    check_cgroups,
    check_model,
    check_gpu,
    check_apptainer,
    check_slurm,
    check_cluster,
)
