"""What works on this machine: each check says what it found, and what to do if it is missing."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
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


def check_sandboxes(run_dir: Path) -> list[Finding]:
    """User namespaces, bubblewrap, limits and the run folder, as the sandboxes' own checks see them."""
    import asyncio

    from rollyard_pipeline.sandboxes.doctor import sandbox_checks

    return [
        Finding(check.name, "ok" if check.ok else "missing", check.meaning, check.remedy)
        for check in asyncio.run(sandbox_checks(run_dir))
    ]


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
    return Finding("gpu", "optional", "none", "the embedded engine needs none; vLLM's CPU build is for tests")


def check_vllm() -> Finding:
    """vLLM, for `rollyard up --engine vllm` and pools with `engine.type: vllm`."""
    path = shutil.which("vllm")
    if path is not None:
        gpus = _run("nvidia-smi", "-L")
        seen = "a GPU is seen" if gpus[0] == 0 and gpus[1].startswith("GPU") else "no GPU is seen"
        return Finding("vllm", "ok", f"{path}; {seen}")
    advice = "`pip install rollyard[vllm]`, or name another environment: --vllm-python, spec.engine.command"
    if find_spec("vllm") is not None:
        return Finding(
            "vllm", "ok", "importable; no command `vllm` on PATH", f"--vllm-python {sys.executable}"
        )
    return Finding("vllm", "optional", "not installed here", advice)


def check_cluster() -> Finding:
    """Access to a Kubernetes cluster."""
    if shutil.which("kubectl") is None:
        return Finding("kubernetes", "optional", "no kubectl", "only needed to run on Kubernetes")
    advice = "only needed to run on Kubernetes; set KUBECONFIG to reach a cluster"
    code, context = _run("kubectl", "config", "current-context")
    if code != 0:
        # Without a context kubectl falls back to localhost:8080, whose refusal says nothing.
        return Finding("kubernetes", "optional", "kubectl is there, no cluster is configured", advice)
    code, text = _run("kubectl", "version", "--request-timeout=5s", "-o", "json")
    if code == 0:
        return Finding("kubernetes", "ok", f"the cluster of context {context!r} answers")
    return Finding("kubernetes", "optional", f"context {context!r} does not answer: {text[:120]}", advice)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_model,
    check_gpu,
    check_vllm,
    check_apptainer,
    check_slurm,
    check_cluster,
)


def examine(run_dir: Path) -> Iterator[Finding]:
    """Every check, most important first."""
    yield check_python()
    yield from check_sandboxes(run_dir)
    for check in CHECKS:
        yield check()
