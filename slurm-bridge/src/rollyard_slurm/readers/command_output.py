"""Readers of the output of Slurm's commands. This module is pure.

They read the text formats and not the output of `--json`. The text formats are the same from Slurm 20.11
on, while the JSON differs between releases (it gives exit codes as raw wait statuses and, for `sacct`,
SUCCESS for jobs that failed). The readers use durations instead of absolute times, because the clocks of
nodes may differ. Times of submission are only tested for equality.
"""

from __future__ import annotations

import re
from typing import Final

from rollyard_slurm.errors import SlurmUnavailable
from rollyard_slurm.readers.jobs import JobDetails, QueuedJob

QUEUE_FORMAT: Final = "%A|%T|%r|%N|%M|%L|%l|%V|%j|%k"
"""The format for `squeue -o`.

Its fields are job, state, reason, nodes, time used, time left, time limit, time of submission, name and
comment.
"""
_DURATION: Final = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})(?:\.\d+)?")
_FIELD: Final = r"(?:^|\s){}=(\S+)"


def duration_seconds(text: str) -> float | None:
    """Return a duration such as `1-12:00:00` or `30:00` in seconds.

    The result is None for UNLIMITED and for any other text that is not a duration.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    days = int(match["days"] or 0)
    if days:  # The form is D-HH, D-HH:MM or D-HH:MM:SS.
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:  # The text has minutes alone.
        parts = [0, *parts, 0]
    while len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, secs = parts
    return float(((days * 24 + hours) * 60 + minutes) * 60 + secs)


def queue(text: str) -> list[QueuedJob]:
    """Read the jobs that `squeue --noheader -o QUEUE_FORMAT` lists.

    Raises:
        SlurmUnavailable: A line has too few fields, or does not begin with the number of a job.
    """
    jobs = []
    for line in text.splitlines():
        if not line.strip():
            continue
        parts = line.split("|", 9)
        if len(parts) < 10 or not parts[0].strip().isdigit():
            raise SlurmUnavailable(f"squeue printed {line!r:.200}")
        job, state, reason, nodes, used, left, limit, submitted, name, comment = (
            part.strip() for part in parts
        )
        jobs.append(
            QueuedJob(
                id=int(job),
                state=state.rstrip("+"),
                reason=reason,
                nodes=nodes,
                used=duration_seconds(used) or 0.0,
                left=duration_seconds(left),
                limit=duration_seconds(limit),
                name=name,
                comment="" if comment == "(null)" else comment,
                submitted=submitted,
            )
        )
    return jobs


def _field(text: str, name: str) -> str:
    """Return the value of a field in the output of scontrol. It is empty if there is no such field."""
    match = re.search(_FIELD.format(re.escape(name)), text)
    return match[1] if match is not None else ""


def _exit(text: str) -> tuple[int, int]:
    """Read an exit code such as `0:15`, and return an exit status and a signal number."""
    status, _, number = text.partition(":")
    return (int(status) if status.isdigit() else 0, int(number) if number.isdigit() else 0)


def details(text: str) -> JobDetails:
    """Read the job that `scontrol show job` prints.

    Raises:
        SlurmUnavailable: The text does not describe a job.
    """
    job, state = _field(text, "JobId"), _field(text, "JobState")
    if not job.isdigit() or not state:
        raise SlurmUnavailable(f"scontrol printed {text!r:.200}")
    status, number = _exit(_field(text, "ExitCode"))
    restarts = _field(text, "Restarts")
    return JobDetails(
        id=int(job),
        state=state,
        reason=_field(text, "Reason"),
        exit_status=status,
        exit_signal=number,
        used=duration_seconds(_field(text, "RunTime")) or 0.0,
        limit=duration_seconds(_field(text, "TimeLimit")),
        restarts=int(restarts) if restarts.isdigit() else None,
    )


ACCOUNTING_FORMAT: Final = "JobIDRaw,State,ExitCode,ElapsedRaw,Timelimit"
"""The format for `sacct -o`."""


def accounted(text: str) -> dict[int, JobDetails]:
    """Read the jobs that `sacct -X -n -P -o ACCOUNTING_FORMAT` lists, keyed by their numbers."""
    jobs = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 5 or not parts[0].isdigit():
            continue
        status, number = _exit(parts[2])
        state, _, by = parts[1].partition(" ")  # The field may be `CANCELLED by 1000`.
        jobs[int(parts[0])] = JobDetails(
            id=int(parts[0]),
            state=state.rstrip("+"),
            reason=by,
            exit_status=status,
            exit_signal=number,
            used=float(parts[3]) if parts[3].isdigit() else 0.0,
            limit=duration_seconds(parts[4]),
        )
    return jobs


_RESPONDING: Final = frozenset({"allocated", "completing", "idle", "maint", "mixed", "planned", "reserved"})


def nodes_respond(text: str) -> bool:
    """Return whether all nodes that `sinfo --noheader -o %T` lists answer the controller and are in order.

    A node may have been drained because its processes could not be killed. The result is False if no node
    is listed.
    """
    states = [line.strip() for line in text.splitlines() if line.strip()]
    # The suffix "*" marks a node that does not answer. Others mark reservations and plans.
    return bool(states) and all(state.rstrip("+$-") in _RESPONDING for state in states)


_SUBMITTED: Final = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)


def submitted(text: str) -> int:
    """Read the number of the job that `sbatch --parsable` submitted.

    A site's filter may print other lines before the number.

    Raises:
        SlurmUnavailable: No line holds the number of a job.
    """
    numbers = _SUBMITTED.findall(text)
    if not numbers:
        raise SlurmUnavailable(f"sbatch printed {text!r:.200}", unsure=True)
    return int(numbers[-1])
