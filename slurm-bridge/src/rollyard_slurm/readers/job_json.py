"""Readers of the jobs in slurmrestd's JSON. This module is pure.

The JSON has two shapes. v0.0.38 (Slurm 22.05) gives plain numbers, one word as the state, and exit codes as
raw wait statuses. Later versions give numbers as `{"set": …, "infinite": …, "number": …}` and states as lists
of a state and its flags. v0.0.40 and later split exit codes into their parts. Each field may have either
shape. The times in the JSON are absolute, and are compared only with the controller's own clock.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from rollyard_slurm.errors import SlurmUnavailable
from rollyard_slurm.readers.jobs import JobDetails, QueuedJob

_NO_VALUE: Final = 0xFFFFFFFC
"""The smallest of the 32-bit numbers by which Slurm marks a value as "not set" or "infinite"."""
_FIRST: Final = (
    *("COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("SPECIAL_EXIT", "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING"),
)
"""The flags that squeue shows in place of the state. If a job has several, squeue shows the first of them."""


def number(value: Any) -> int | None:
    """Read a number of either shape. Return None if the number is not set or is infinite."""
    if isinstance(value, dict):
        if not value.get("set") or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return None if value >= _NO_VALUE else int(value)


def state(value: Any) -> str:
    """Return the state of a job as the word that squeue shows for it."""
    words = [str(word) for word in (value if isinstance(value, list) else [value])]
    flags = [word for word in _FIRST if word in words]
    return (flags or words or [""])[0]


def exit_of(value: Any) -> tuple[int, int]:
    """Read an exit code of either shape, and return an exit status and a signal number."""
    if isinstance(value, dict) and ("return_code" in value or "signal" in value):
        signal = value.get("signal")
        if isinstance(signal, dict):
            signal = number(signal.get("id", signal.get("signal_id")))
        return number(value.get("return_code")) or 0, number(signal) or 0
    raw = number(value) or 0
    return raw >> 8 & 0xFF, raw & 0x7F


def _text(job: dict[str, Any], name: str) -> str:
    """Return the text of a field. It is empty if the field holds no text."""
    value = job.get(name)
    return value if isinstance(value, str) else ""


def _limit(job: dict[str, Any]) -> float | None:
    """Return the time limit of a job in seconds, or None if it has none."""
    minutes = number(job.get("time_limit"))
    return None if minutes is None else minutes * 60.0


def _used(job: dict[str, Any], word: str, now: float, live: bool) -> float:
    """Return the number of seconds for which a job has run, as squeue counts them.

    Args:
        job: The job as slurmrestd describes it.
        word: The state of the job.
        now: The present time on the controller's clock, in seconds since the epoch.
        live: Whether the job has not ended.
    """
    start, end = number(job.get("start_time")) or 0, number(job.get("end_time")) or 0
    before, resumed = number(job.get("pre_sus_time")) or 0, number(job.get("suspend_time")) or 0
    if not start or word == "PENDING":
        return 0.0
    if word == "SUSPENDED":
        return float(before)
    # Until a job has ended, its end time is the latest one that its time limit allows.
    until = min(now, end) if word == "COMPLETING" and end else now if live else end
    return max(0.0, float(before + until - resumed if resumed else until - start))


def _reason(job: dict[str, Any]) -> str:
    """Return the reason why a job is pending, or the word `None`."""
    return _text(job, "state_description") or _text(job, "state_reason") or "None"


def _jobs(document: Any) -> list[dict[str, Any]]:
    """Return the list of jobs in an answer.

    Raises:
        SlurmUnavailable: The answer has no such list.
    """
    jobs = document.get("jobs") if isinstance(document, dict) else None
    if not isinstance(jobs, list) or not all(isinstance(job, dict) for job in jobs):
        raise SlurmUnavailable("slurmrestd answered without a list of jobs")
    return jobs


def _id(job: dict[str, Any]) -> int:
    """Return the number of a job.

    Raises:
        SlurmUnavailable: The job has no number.
    """
    job_id = number(job.get("job_id"))
    if not job_id:
        raise SlurmUnavailable("slurmrestd lists a job without a number")
    return job_id


def queue(document: Any, uid: int, now: float) -> list[QueuedJob]:
    """Read the jobs of one user that have not ended from the answer to `GET /jobs`.

    The answer lists the jobs of all users.

    Args:
        document: The decoded answer.
        uid: The numeric id of the user.
        now: The present time on the controller's clock, in seconds since the epoch.

    Raises:
        SlurmUnavailable: The answer is not a list of jobs.
    """
    jobs = []
    for job in _jobs(document):
        if number(job.get("user_id")) != uid:
            continue
        word = state(job.get("job_state"))
        details = JobDetails(_id(job), word, "", 0, 0, 0.0, None)
        if not details.live:
            continue
        limit, used = _limit(job), _used(job, word, now, True)
        jobs.append(
            QueuedJob(
                id=details.id,
                state=word,
                reason=_reason(job),
                nodes=_text(job, "nodes"),
                used=used,
                left=None if limit is None else max(0.0, limit - used),
                limit=limit,
                name=_text(job, "name"),
                comment=_text(job, "comment"),
                submitted=str(number(job.get("submit_time")) or ""),
            )
        )
    return jobs


def details(document: Any, job_id: int, now: float) -> JobDetails | None:
    """Read one job from the answer to `GET /job/NUMBER`. Return None if the answer does not contain it.

    Raises:
        SlurmUnavailable: The answer is not a list of jobs, or the job has no state.
    """
    for job in _jobs(document):
        if _id(job) != job_id:
            continue
        word = state(job.get("job_state"))
        if not word:
            raise SlurmUnavailable("slurmrestd describes a job without a state")
        status, signal = exit_of(job.get("exit_code"))
        read = JobDetails(
            job_id, word, _reason(job), status, signal, 0.0, _limit(job), number(job.get("restart_cnt"))
        )
        return replace(read, used=_used(job, word, now, read.live))
    return None


def addresses(document: Any) -> list[str]:
    """Read the addresses of the nodes from the answer to `GET /nodes`."""
    nodes = document.get("nodes") if isinstance(document, dict) else None
    return [
        _text(node, "address") for node in nodes or () if isinstance(node, dict) and _text(node, "address")
    ]


_RESPONDING: Final = frozenset(
    {"ALLOCATED", "COMPLETING", "IDLE", "MAINTENANCE", "MIXED", "PLANNED", "RESERVED"}
    | {"CLOUD", "DYNAMIC_FUTURE", "DYNAMIC_NORM"}
)


def nodes_respond(document: Any) -> bool:
    """Read from the answer to `GET /node/NAME` whether the node answers the controller and is in order.

    A node may have been drained because its processes could not be killed.
    """
    nodes = document.get("nodes") if isinstance(document, dict) else None
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        return False
    words: list[str] = []
    for node in nodes:
        state, flags = node.get("state"), node.get("state_flags")
        words += [str(word) for word in (state if isinstance(state, list) else [state])]
        words += [str(word) for word in (flags if isinstance(flags, list) else [])]
    return all(word.upper() in _RESPONDING for word in words)


def submitted(document: Any) -> int | None:
    """Read the number of the job from the answer to `POST /job/submit`. Return None if it has no number."""
    if not isinstance(document, dict):
        return None
    inner = document.get("result")
    for part in (document, inner if isinstance(inner, dict) else {}):
        job_id = number(part.get("job_id"))
        if job_id:
            return job_id
    return None


def troubles(document: Any) -> tuple[list[int], str]:
    """Return the error numbers in an answer of Slurm, and its error messages joined to one line."""
    listed = document.get("errors") if isinstance(document, dict) else None
    numbers: list[int] = []
    words: list[str] = []
    for error in listed or () if isinstance(listed, list) else ():
        if not isinstance(error, dict):
            continue
        code = number(error.get("error_number", error.get("error_code")))
        texts = [_text(error, "description"), _text(error, "error")]
        if not code and not any(texts):
            continue
        numbers.append(code or 0)
        # The description often ends with the error. The error is then not repeated.
        words += [word for word in texts if word and word != "Unspecified error" and word not in words[-1:]]
        if len(words) > 1 and words[-1] in words[-2]:
            words.pop()
    return numbers, "; ".join(dict.fromkeys(words))[:500]
