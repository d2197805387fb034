"""The output of `rollyard slurm-bridge status`, which describes the bridge of a home and its Slurm jobs."""

from __future__ import annotations

import os

from rollyard_drivers.host.home import Home, read_json

from rollyard_slurm.bridge import rest_of
from rollyard_slurm.calls.command_line import environment
from rollyard_slurm.calls.rest import slurm_calls
from rollyard_slurm.errors import SlurmError
from rollyard_slurm.options import DEFAULT_TIMEOUT
from rollyard_slurm.readers.job_identity import SlurmJobIdentity


async def overview(home: Home) -> list[str]:
    """Return the lines that describe a bridge and its Slurm jobs.

    If Slurm does not answer, one of the lines says so.
    """
    known, running = read_json(home.root / "bridge.json"), home.supervisor()
    if known is None:
        return [f"no bridge has run on {home.root}"]
    where = f"process {running.pid}, {known['url']}" if running is not None else "not running on this host"
    lines = [f"bridge   {where} (home {home.root}, instance {known['instance']})"]
    if "serves" in known:
        lines.append(f"serves   {known['serves']}")
    calls = slurm_calls(rest_of(known), DEFAULT_TIMEOUT, environment(os.environ), home.root, keeps=False)
    try:
        listed = await calls.queue()
    except SlurmError as error:
        return [*lines, f"jobs     not known: {error}"]
    assignments = _given(home)
    rows = [("JOB", "STATE", "TIME LEFT", "NODE OR REASON", "FOR", "WORKLOAD")]
    for job in listed:
        who = SlurmJobIdentity.parse(job.comment)
        if who is None or who.instance != known["instance"]:
            continue
        left = "-" if job.left is None else f"{job.left / 60:.0f} min"
        owner, workload = assignments.get(who.launch, (who.owner, who.workload))
        rows.append((str(job.id), job.state, left, job.nodes or job.reason, owner, workload))
    if len(rows) == 1:
        return [*lines, "jobs     none"]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return lines + [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _given(home: Home) -> dict[str, tuple[str, str]]:
    """Return the owners and workloads of the jobs that stood ready, keyed by their launches.

    The comments of these jobs still say that they belong to no RolloutJob.
    """
    assignments = {}
    for path in (home.root / "submissions").glob("*.json"):
        record = read_json(path) or {}
        if record.get("ready"):
            owner = record["workload"]["owner"]
            job = f"{owner['kind'].lower()}/{owner['namespace']}/{owner['name']}"
            assignments[path.stem] = (job, record["workload"]["name"])
    return assignments
