"""The checks of `rollyard doctor`. Each reports what it found, and what to do if something is missing."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rollyard.checks import slurm, storage
from rollyard.checks.finding import Finding, Verdict
from rollyard.checks.finding import run as _run
from rollyard.extras import missing

FAR_SECONDS: Final = 5.0
"""A difference that makes logs hard to read. Rollyard itself measures durations only."""
_UNSYNCHRONISED: Final = 0x0040
_TIMEX_BYTES: Final = 512
_STATUS_OFFSET: Final = 40 if ctypes.sizeof(ctypes.c_long) == 8 else 20


def check_python() -> Finding:
    """Report the version of Python and of the operating system."""
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.release()}")


def check_sandboxes(run_dir: Path) -> list[Finding]:
    """Check user namespaces, bubblewrap, limits and the run folder with the sandboxes' own checks."""
    import asyncio

    from rollyard_pipeline.sandboxes.doctor import sandbox_checks

    return [
        Finding(check.name, "ok" if check.ok else "missing", check.meaning, check.remedy)
        for check in asyncio.run(sandbox_checks(run_dir))
    ]


def check_containers(on_slurm: bool) -> list[Finding]:
    """Check Apptainer sandboxes. Only a Slurm cluster needs them."""
    import asyncio

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


def check_installation() -> Finding:
    """Check that the packages which `rollyard up` and the quickstart need are installed."""
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
    code, text = _run("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
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
        gpus = _run("nvidia-smi", "-L")
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
    code, context = _run("kubectl", "config", "current-context")
    if code != 0:
        # Without a context, kubectl tries localhost:8080, whose refusal would explain nothing.
        return Finding("kubernetes", "optional", "kubectl is there, no cluster is configured", advice)
    code, text = _run("kubectl", "version", "--request-timeout=5s", "-o", "json")
    if code == 0:
        return Finding("kubernetes", "ok", f"the cluster of context {context!r} answers")
    return Finding("kubernetes", "optional", f"context {context!r} does not answer: {text[:120]}", advice)


CHECKS: Final[tuple[Callable[[], Finding], ...]] = (check_model, check_gpu, check_vllm)


def examine(run_dir: Path, profile: Path | None = None) -> Iterator[Finding]:
    """Run every check, the most important first. `profile` is the profile of a Slurm site."""
    on_slurm = slurm.is_slurm_machine()
    yield check_python()
    yield check_installation()
    rootless = check_containers(on_slurm)
    # On clusters, Apptainer makes the sandboxes. Bubblewrap is rarely installed there and is not needed.
    contained = on_slurm and all(finding.verdict != "missing" for finding in rootless)
    for finding in check_sandboxes(run_dir):
        if finding.name == "user namespaces" and finding.verdict == "ok":
            continue  # The check of containers reports them below, where it tries them without bubblewrap.
        if contained and finding.name == "bubblewrap" and finding.verdict == "missing":
            finding = replace(finding, verdict="optional", advice="Apptainer serves instead")
        yield finding
    yield from rootless
    yield from slurm.examine()
    rest = slurm.check_slurmrestd(profile)
    if rest is not None:
        yield rest
    yield from storage.examine(run_dir.parent, on_slurm)
    yield check_clocks(storage.nearest(run_dir.parent))
    for check in CHECKS:
        yield check()
    yield check_cluster()


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
    """Check the clock by the kernel's state and by the time stamps of a folder's file server."""
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
