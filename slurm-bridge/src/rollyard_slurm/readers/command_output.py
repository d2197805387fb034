"""What Slurm's commands print, as data. Pure.

The text formats are read, not `--json`: they are the same from Slurm 20.11 on, where the JSON of
each release has its own shape (and raw wait statuses as exit codes, and for `sacct` SUCCESS for
jobs that failed). Durations are used, never absolute times: nodes' clocks may differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

QUEUE_FORMAT = "%A|%T|%r|%N|%M|%L|%l|%j|%k"
"""Job, state, reason, nodes, time used, time left, time limit, name, comment: of `squeue -o`."""
LIVE_STATES = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "RUNNING",
        "COMPLETING",
        "SUSPENDED",
        "RESIZING",
        "SIGNALING",
        "STAGE_OUT",
        "STOPPED",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "RESV_DEL_HOLD",
        "SPECIAL_EXIT",
    }
)
_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})(?:\.\d+)?")
_FIELD = r"(?:^|\s){}=(\S+)"


class Unreadable(ValueError):
    """A line that no Slurm of a known kind prints."""


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """One line of squeue."""

    id: int
    state: str
    """`PENDING`, `RUNNING`, `COMPLETING`, …"""
    reason: str
    """Why it is pending; `None` where there is none."""
    nodes: str
    used: float
    """Seconds that it has run."""
    left: float | None
    """Seconds of its time limit that are left; None: unlimited, or not known."""
    limit: float | None
    """Its time limit in seconds."""
    name: str
    comment: str


@dataclass(frozen=True, slots=True)
class JobDetails:
    """What `scontrol show job`, or sacct, says of one job."""

    id: int
    state: str
    reason: str
    exit_status: int
    """What its script exited with."""
    exit_signal: int
    """The signal that ended it; 0: none."""
    used: float
    limit: float | None

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.state in LIVE_STATES


def seconds(text: str) -> float | None:
    """Seconds of `[DAYS-]HOURS:MINUTES:SECONDS` or `MINUTES:SECONDS`; None for UNLIMITED and the like."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        return None
    parts = [int(part) for part in match["clock"].split(":")]
    days = int(match["days"] or 0)
    if days:  # D-HH, D-HH:MM, D-HH:MM:SS
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:  # minutes alone
        parts = [0, *parts, 0]
    while len(parts) < 3:
        parts.insert(0, 0)
    hours, minutes, secs = parts
    return float(((days * 24 + hours) * 60 + minutes) * 60 + secs)


def queue(text: str) -> list[QueuedJob]:
    """The jobs that `squeue --noheader -o QUEUE_FORMAT` lists.

    Raises:
        Unreadable: a line has too few fields.
    """
    jobs = []
    for line in text.splitlines():
        if not line.strip():
            continue
        parts = line.split("|", 8)
        if len(parts) < 9 or not parts[0].strip().isdigit():
            raise Unreadable(f"squeue printed {line!r:.200}")
        job, state, reason, nodes, used, left, limit, name, comment = (part.strip() for part in parts)
        jobs.append(
            QueuedJob(
                id=int(job),
                state=state.rstrip("+"),
                reason=reason,
                nodes=nodes,
                used=seconds(used) or 0.0,
                left=seconds(left),
                limit=seconds(limit),
                name=name,
                comment="" if comment == "(null)" else comment,
            )
        )
    return jobs


def _field(text: str, name: str) -> str:
    match = re.search(_FIELD.format(re.escape(name)), text)
    return match[1] if match is not None else ""


def _exit(text: str) -> tuple[int, int]:
    status, _, number = text.partition(":")
    return (int(status) if status.isdigit() else 0, int(number) if number.isdigit() else 0)


def details(text: str) -> JobDetails:
    """One job of `scontrol show job`.

    Raises:
        Unreadable: there is no job in it.
    """
    job, state = _field(text, "JobId"), _field(text, "JobState")
    if not job.isdigit() or not state:
        raise Unreadable(f"scontrol printed {text!r:.200}")
    status, number = _exit(_field(text, "ExitCode"))
    return JobDetails(
        id=int(job),
        state=state,
        reason=_field(text, "Reason"),
        exit_status=status,
        exit_signal=number,
        used=seconds(_field(text, "RunTime")) or 0.0,
        limit=seconds(_field(text, "TimeLimit")),
    )


ACCOUNTING_FORMAT = "JobIDRaw,State,ExitCode,ElapsedRaw,Timelimit"


def accounted(text: str) -> dict[int, JobDetails]:
    """Jobs of `sacct -X -n -P -o ACCOUNTING_FORMAT`. `CANCELLED by 1000` is CANCELLED."""
    found = {}
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) < 5 or not parts[0].isdigit():
            continue
        status, number = _exit(parts[2])
        state, _, by = parts[1].partition(" ")
        found[int(parts[0])] = JobDetails(
            id=int(parts[0]),
            state=state.rstrip("+"),
            reason=by,
            exit_status=status,
            exit_signal=number,
            used=float(parts[3]) if parts[3].isdigit() else 0.0,
            limit=seconds(parts[4]),
        )
    return found


_SUBMITTED = re.compile(r"^(\d+)(?:;.*)?$", re.MULTILINE)


def submitted(text: str) -> int:
    """The job of `sbatch --parsable`; a site's filter may print lines of its own before.

    Raises:
        Unreadable: no line is a job's number.
    """
    found = _SUBMITTED.findall(text)
    if not found:
        raise Unreadable(f"sbatch printed {text!r:.200}")
    return int(found[-1])
