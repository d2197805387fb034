"""The checks of Slurm, from a login node or from within a job, and of slurmrestd."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard.checks.finding import TIMEOUT_SECONDS, Finding, Runner, run

if TYPE_CHECKING:
    from rollyard_slurm.profile import RestProfile

PROGRAMS: Final = ("sbatch", "squeue", "scontrol", "scancel")
OLDEST: Final = (20, 11)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.\S+)?")
SOCKETS: Final = (Path("/run/slurmrestd/slurmrestd.socket"), Path("/run/slurmrestd.socket"))
NAME: Final = "slurmrestd"


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


def examine() -> Iterator[Finding]:
    """Run all checks of this module, or only the first if there is no Slurm."""
    first = check_slurm()
    yield first
    if is_slurm_machine() and shutil.which("scontrol") is not None:
        yield check_controller()
        yield check_tracking()
        yield check_limits()


def check_slurmrestd(profile: Path | None, sockets: Iterable[Path] = SOCKETS) -> Finding | None:
    """Check that slurmrestd answers. Return None if no profile names one and no socket of it exists."""
    from rollyard_slurm.errors import ProfileInvalid
    from rollyard_slurm.profile import RestProfile, load

    try:
        rest = load(profile).rest if profile is not None else None
    except ProfileInvalid as error:
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
        return Finding(NAME, "missing" if needed else "optional", str(error), advice)
    how = "signals batch scripts itself" if api.signals_batch else "batch scripts hear by a file in the home"
    advice = "" if needed else f"where Slurm's commands are missing: --rest-url {rest.url}"
    return Finding(NAME, "ok", f"{rest.url} has v0.0.{api.version}; {how}", advice)
