"""Readers of the reasons why a job is pending or was refused. This module is pure.

They decide whether waiting helps.
"""

from __future__ import annotations

import re
from typing import Final

from rollyard_slurm.readers.jobs import QueuedJob

_BLOCKED: Final = re.compile(
    r"PartitionConfig|PartitionDown|PartitionInactive|PartitionNodeLimit|PartitionTimeLimit|BadConstraints"
    r"|InvalidAccount|InvalidQOS|AccountNotAllowed|QOSNotAllowed|AccountingPolicy|DependencyNeverSatisfied"
    r"|JobHeld(?:Admin|User)|launch failed requeued held|QOSUsageThreshold|QOSTimeLimit|NodeDown"
    r"|\w*(?:PerJob|PerNode|WallDuration)\w*",
    re.IGNORECASE,
)
_SAID: Final = {
    "Resources": "nodes are busy (Resources)",
    "Priority": "jobs of higher priority are ahead (Priority)",
    "PartitionConfig": "no node of the partition can serve the request (PartitionConfig)",
    "PartitionDown": "the partition is down (PartitionDown)",
    "PartitionInactive": "the partition is inactive (PartitionInactive)",
    "PartitionTimeLimit": "the time limit exceeds the partition's (PartitionTimeLimit)",
    "PartitionNodeLimit": "the partition does not give so many nodes (PartitionNodeLimit)",
    "BadConstraints": "no node has what the constraint names (BadConstraints)",
    "JobHeldAdmin": "an administrator holds it (JobHeldAdmin)",
    "JobHeldUser": "it is held (JobHeldUser): `scontrol release` lets it go",
    "BeginTime": "Slurm starts it again in a moment (BeginTime)",
    "NodeDown": "a node that it needs is down (NodeDown)",
    "None": "Slurm has not looked at it yet",
}
_LIMIT: Final = re.compile(
    r"max\w*submit|submit limit|QOSMaxSubmit\w*|AssocMaxSubmit\w*|QOSGrpSubmit\w*|AssocGrpSubmit\w*"
    r"|temporarily unable to accept job|max_array_tasks|job count limit|too many jobs",
    re.IGNORECASE,
)
_UNAVAILABLE: Final = re.compile(
    r"unable to contact slurm controller|socket timed out|connection refused|zero bytes were transmitted"
    r"|communications? connection failure|slurmctld.*(?:not responding|standby)|in standby mode"
    r"|unable to connect|connect failure|transport endpoint|resource temporarily unavailable"
    r"|munge encode failed|munge daemon",
    re.IGNORECASE,
)
_UNSURE: Final = re.compile(r"socket timed out|zero bytes were transmitted|receive", re.IGNORECASE)


def is_blocked(job: QueuedJob) -> bool:
    """Return whether a pending job cannot start until a person changes something."""
    return _BLOCKED.search(job.reason) is not None


def waits(job: QueuedJob) -> str:
    """Return a readable line that says why a job is pending."""
    reason = job.reason.strip("()")
    return f"Slurm job {job.id} is pending: {_SAID.get(reason, reason or 'no reason given')}"


def is_limit(message: str) -> bool:
    """Return whether a job was refused because of a site's limit on the number of jobs.

    `Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)` may also mean that
    the request is too large. This message counts as a limit, and users see it while the bridge retries.
    """
    return _LIMIT.search(message) is not None


def is_unavailable(message: str) -> bool:
    """Return whether a command failed because the controller or munge does not answer."""
    return _UNAVAILABLE.search(message) is not None


def is_unsure(message: str) -> bool:
    """Return whether a command may have had its effect although it failed."""
    return _UNSURE.search(message) is not None


def shorter(stderr: str) -> str:
    """Return the error message of a Slurm command as one line, without the name of the command.

    The line has at most 500 characters.
    """
    lines = [re.sub(r"^\w+: (?:error: )?", "", line.strip()) for line in stderr.splitlines()]
    words = list(dict.fromkeys(line for line in lines if line))
    return "; ".join(words)[:500]
