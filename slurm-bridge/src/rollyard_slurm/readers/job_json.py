"""Jobs as slurmrestd tells of them, as data. Pure.

Two shapes: v0.0.38 (Slurm 22.05) gives plain numbers, a state as one word and exit codes as raw wait
statuses; later versions `{"set": …, "infinite": …, "number": …}`, states as lists of a state and flags,
and from v0.0.40 on exit codes taken apart. Both are read wherever they stand. Times are absolute here,
and are compared with the controller's own clock alone.
"""

from __future__ import annotations

from typing import Any

from rollyard_slurm.readers.command_output import JobDetails, QueuedJob, Unreadable

_NO_VALUE = 0xFFFFFFFC
"""Slurm's markers of "not set" and "infinite" (32 bits), and what lies above them."""
_FIRST = (
    "COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD",
    "SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING",
)  # fmt: skip
"""Flags that squeue shows in place of the state, as it chooses among several."""


def number(value: Any) -> int | None:
    """A number of either shape; None: not set, or infinite."""
    if isinstance(value, dict):
        if not value.get("set") or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if value >= _NO_VALUE else int(value)


def state(value: Any) -> str:
    """A job's state as squeue says it."""
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    flags = [word for word in _FIRST if word in words]
    return (flags or words or [""])[0]


def exit_of(value: Any) -> tuple[int, int]:
    """Exit status and signal."""
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
    """Seconds that it has run, as squeue counts them.

    Args:
        now: seconds since the epoch, on the controller's clock.
    """
    start, end = number(job.get("start_time")) or 0, number(job.get("end_time")) or 0
    before, resumed = number(job.get("pre_sus_time")) or 0, number(job.get("suspend_time")) or 0
    if not start or word == "PENDING":
        return 0.0
    if word == "SUSPENDED":
        return float(before)
    # Of a live job the end is the one that its time limit gives.
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
    """One user's jobs that have not ended, of the answer to `GET /jobs`, which has everybody's.

    Raises:
        Unreadable: it is no list of jobs.
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
    """One job of the answer to `GET /job/NUMBER`; None: it is not in it.

    Raises:
        Unreadable: it is no list of jobs.
    """
    for job in _jobs(document):
        if _id(job) != wanted:
            continue
        word = state(job.get("job_state"))
        if not word:
            raise Unreadable("slurmrestd tells of a job without a state")
        status, signal = exit_of(job.get("exit_code"))
        made = JobDetails(wanted, word, _reason(job), status, signal, 0.0, _limit(job))
        used = _used(job, word, now, made.live)
        return JobDetails(wanted, word, made.reason, status, signal, used, made.limit)
    return None


def addresses(document: Any) -> list[str]:
    """Where the nodes of the answer to `GET /nodes` are reached."""
    nodes = document.get("nodes") if isinstance(document, dict) else None
    return [_text(one, "address") for one in nodes or () if isinstance(one, dict) and _text(one, "address")]


def submitted(document: Any) -> int | None:
    """The job in the answer to `POST /job/submit`; None: there is none."""
    if not isinstance(document, dict):
        return None
    inner = document.get("result")
    for place in (document, inner if isinstance(inner, dict) else {}):
        found = number(place.get("job_id"))
        if found:
            return found
    return None


def troubles(document: Any) -> tuple[list[int], str]:
    """Slurm's error numbers in an answer, and its words in one line; empty: there are none."""
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
