"""Readers of the jobs in slurmrestd's JSON. This module is pure.

There are two shapes. v0.0.38 (Slurm 22.05) gives plain numbers, one word as the state, and exit codes as raw
wait statuses. Later versions give numbers as `{"set": …, "infinite": …, "number": …}` and states as lists
of a state and its flags; v0.0.40 and later take exit codes apart. Either shape is read wherever it stands.
Times are absolute here, and are compared with the controller's own clock only.
"""

from __future__ import annotations

from typing import Any

from rollyard_slurm.readers.jobs import JobDetails, QueuedJob, Unreadable

_NO_VALUE = 0xFFFFFFFC
"""This number and those above it are Slurm's markers for "not set" and "infinite" (32 bits)."""
_FIRST = (
    "COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
    "SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING",
)  # fmt: skip
"""The flags that squeue shows in place of the state, in its order of preference."""


def number(value: Any) -> int | None:
    """Reads a number of either shape; returns None where it is not set or is infinite."""
    if isinstance(value, dict):
        if not value.get("set") or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if value >= _NO_VALUE else int(value)


def state(value: Any) -> str:
    """Returns the state of a job in the word that squeue uses for it."""
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    flags = [word for word in _FIRST if word in words]
    return (flags or words or [""])[0]


def exit_of(value: Any) -> tuple[int, int]:
    """Reads an exit code of either shape as an exit status and a signal."""
    if isinstance(value, dict) and ("return_code" in value or "signal" in value):
        signal = value.get("signal")
        if isinstance(signal, dict):
            signal = number(signal.get("id", signal.get("signal_id")))
        return number(value.get("return_code")) or 0, number(signal) or 0
    raw = number(value) or 0
    return raw >> 8 & 0xFF, raw & 0x7F


def _text(job: dict[str, Any], name: str) -> str:
    value = job.get(name)
    return value if isinstance(value, str) else ""


def _limit(job: dict[str, Any]) -> float | None:
    minutes = number(job.get("time_limit"))
    return None if minutes is None else minutes * 60.0


def _used(job: dict[str, Any], word: str, now: float, live: bool) -> float:
    """Returns the seconds for which a job has run, as squeue counts them.

    Args:
        now: Seconds since the epoch on the controller's clock.
    """
    start, end = number(job.get("start_time")) or 0, number(job.get("end_time")) or 0
    before, resumed = number(job.get("pre_sus_time")) or 0, number(job.get("suspend_time")) or 0
    if not start or word == "PENDING":
        return 0.0
    if word == "SUSPENDED":
        return float(before)
    # While a job lives, its end time is the one that its time limit gives.
    until = min(now, end) if word == "COMPLETING" and end else now if live else end
    return max(0.0, float(before + until - resumed if resumed else until - start))


def _reason(job: dict[str, Any]) -> str:
    return _text(job, "state_description") or _text(job, "state_reason") or "None"


def _jobs(document: Any) -> list[dict[str, Any]]:
    jobs = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise Unreadable("slurmrestd answered without a list of jobs")
    return jobs


def _id(job: dict[str, Any]) -> int:
    found = number(job.get("job_id"))
    if not found:
        raise Unreadable("slurmrestd lists a job without a number")
    return found


def queue(document: Any, uid: int, now: float) -> list[QueuedJob]:
    """Reads the living jobs of one user from the answer to `GET /jobs`, which lists every user's.

    Raises:
        Unreadable: The answer is not a list of jobs.
    """
    found = []
    for job in _jobs(document):
        if number(job.get("user_id")) != uid:
            continue
        word = state(job.get("job_state"))
        one = JobDetails(_id(job), word, "", 0, 0, 0.0, None)
        if not one.live:
            continue
        limit, used = _limit(job), _used(job, word, now, True)
        found.append(
            QueuedJob(
                id=one.id,
                state=word,
                reason=_reason(job),
                nodes=_text(job, "nodes"),
                used=used,
                left=None if limit is None else max(0.0, limit - used),
                limit=limit,
                name=_text(job, "name"),
                comment=_text(job, "comment"),
            )
        )
    return found


def details(document: Any, wanted: int, now: float) -> JobDetails | None:
    """Reads one job from the answer to `GET /job/NUMBER`; returns None where the answer does not hold it.

    Raises:
        Unreadable: The answer is not a list of jobs.
    """
    for job in _jobs(document):
        if _id(job) != wanted:
            continue
        word = state(job.get("job_state"))
        if not word:
            raise Unreadable("slurmrestd describes a job without a state")
        status, signal = exit_of(job.get("exit_code"))
        made = JobDetails(wanted, word, _reason(job), status, signal, 0.0, _limit(job))
        used = _used(job, word, now, made.live)
        return JobDetails(wanted, word, made.reason, status, signal, used, made.limit)
    return None


def addresses(document: Any) -> list[str]:
    """Reads the addresses of the nodes from the answer to `GET /nodes`."""
    nodes = document.get("nodes") if isinstance(document, dict) else None
    return [_text(one, "address") for one in nodes or () if isinstance(one, dict) and _text(one, "address")]


def submitted(document: Any) -> int | None:
    """Reads the job's number from the answer to `POST /job/submit`; returns None where there is none."""
    if not isinstance(document, dict):
        return None
    inner = document.get("result")
    for place in (document, inner if isinstance(inner, dict) else {}):
        found = number(place.get("job_id"))
        if found:
            return found
    return None


def troubles(document: Any) -> tuple[list[int], str]:
    """Returns Slurm's error numbers in an answer, and its messages as one line."""
    listed = document.get("errors") if isinstance(document, dict) else None
    numbers: list[int] = []
    words: list[str] = []
    for one in listed or () if isinstance(listed, list) else ():
        if not isinstance(one, dict):
            continue
        code = number(one.get("error_number", one.get("error_code")))
        said = [_text(one, "description"), _text(one, "error")]
        if not code and not any(said):
            continue
        numbers.append(code or 0)
        # The description often ends with the error itself.
        words += [word for word in said if word and word != "Unspecified error" and word not in words[-1:]]
        if len(words) > 1 and words[-1] in words[-2]:
            words.pop()
    return numbers, "; ".join(dict.fromkeys(words))[:500]
