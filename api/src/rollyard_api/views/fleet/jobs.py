"""Slim rows of jobs, and pages of them: how far each has got, whether it is late, and what it waits for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import sqlalchemy as sa
from pydantic import BaseModel, ConfigDict, StringConstraints
from rollyard_crds.rolloutjob import STAGES, StageName
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import loads
from rollyard_api.jobs.advice import advice_on_harness_quota
from rollyard_api.machine.states import UNFINISHED, RolloutState
from rollyard_api.rollouts.harness_quota import HarnessUse
from rollyard_api.storage.schema import jobs, rollouts
from rollyard_api.storage.view_tables import ended_rollouts, job_statistics
from rollyard_api.views import keyset
from rollyard_api.views.keyset import Page

FINAL: Final = ("Succeeded", "Failed", "Cancelled")
"""The phases that no longer change."""
STUCK_SECONDS: Final = 300.0
"""The seconds without an end of a rollout after which a job that has begun counts as late."""

COLUMNS: Final = (
    *jobs.c["id", "uid", "namespace", "name", "status", "pool", "suspended", "closed", "cancel_reason"],
    *jobs.c["created_at", "started_at", "deadline_at", "finished_at", "outage_began", "limits"],
    *jobs.c["total", "ended", "succeeded", "failed", "cancelled", "reward_sum"],
)
_UNFINISHED: Final = sa.select(jobs.c.id).where(jobs.c.finished_at.is_(None), jobs.c.deleted_at.is_(None))
_WAITING: Final = [state for state in UNFINISHED if state != RolloutState.QUEUED_INIT]
_COUNTS: Final = (
    sa.select(rollouts.c.job_id, rollouts.c.state, sa.func.count().label("n"))
    .where(rollouts.c.job_id.in_(_UNFINISHED), rollouts.c.state.in_(_WAITING))
    .group_by(rollouts.c.job_id, rollouts.c.state)
)
_LAST_ENDS: Final = sa.select(ended_rollouts.c.job_id, ended_rollouts.c.ended_at).join(
    job_statistics,
    sa.and_(
        job_statistics.c.job_id == ended_rollouts.c.job_id,
        job_statistics.c.rollouts == ended_rollouts.c.end_seq,
        job_statistics.c.job_id.in_(_UNFINISHED),
    ),
)


def slim(
    conn: Connection, rows: Sequence[Any], heard: Collection[int], now: float, max_harness_runs: int
) -> dict[int, dict[str, Any]]:
    """Return the slim rows of jobs by their numbers.

    Args:
        conn: The database.
        rows: Rows of COLUMNS.
        heard: The jobs of which a worker was heard from lately. 0 stands for all jobs.
        now: The time, in seconds since the epoch.
        max_harness_runs: The largest number of rollouts of harnesses of a namespace that are in Run at once.
    """
    states: defaultdict[int, dict[RolloutState, int]] = defaultdict(dict)
    for row in conn.execute(_COUNTS):
        states[row.job_id][row.state] = row.n
    # When the last folded rollout of each job ended.
    ends = {row.job_id: row.ended_at for row in conn.execute(_LAST_ENDS)}
    waiting = [row for row in rows if states[row.id].get(RolloutState.QUEUED_RUN)]
    use = HarnessUse.of(conn, waiting, max_harness_runs)
    return {
        row.id: _slim(row, states[row.id], ends.get(row.id), row.id in heard or 0 in heard, now, use)
        for row in rows
    }


def _slim(
    row: Any,
    states: Mapping[RolloutState, int],
    last_end: float | None,
    heard: bool,
    now: float,
    harness_use: HarnessUse,
) -> dict[str, Any]:
    status = loads(row.status)
    stages = {
        stage: {
            "queued": states.get(RolloutState.queued(stage), 0),
            "active": states.get(RolloutState.leased(stage), 0),
        }
        for stage in STAGES
    }
    unscored = states.get(RolloutState.UNSCORED, 0)
    stages["eval"]["queued"] += unscored
    # Those that wait for Init, of which there may be a million, are not counted: they are the rest of the
    # total.
    stages["init"]["queued"] = max(0, row.total - row.ended - sum(states.values()))
    active = sum(counts["active"] for counts in stages.values())
    return {
        "namespace": row.namespace,
        "name": row.name,
        "uid": row.uid,
        "phase": phase(row, status),
        "created_at": row.created_at,
        "started_at": row.started_at,
        "finished_at": row.finished_at,
        "deadline_at": row.deadline_at,
        "pool": row.pool,
        "suspended": bool(row.suspended),
        "total": row.total,
        "succeeded": row.succeeded,
        "failed": row.failed,
        "cancelled": row.cancelled,
        "stages": stages,
        "reward_mean": row.reward_sum / row.succeeded if row.succeeded else None,
        "late": late(row, last_end, now),
        "waits_for": waits_for(row, status, stages, active, heard, unscored, harness_use),
    }


def is_final(job: Mapping[str, Any]) -> bool:
    """Return whether a slim row no longer changes."""
    return job["finished_at"] is not None and job["phase"] in FINAL


def phase(row: Any, status: Mapping[str, Any]) -> str:
    """Return the phase that the driver reported, or what the counts say of a job that has just ended."""
    reported: str = status.get("phase") or "Pending"
    if row.finished_at is None or reported in FINAL:
        return reported
    if row.cancel_reason is not None:
        return "Cancelled"
    return reported


def late(row: Any, last_end: float | None, now: float) -> float | None:
    """Return for how many seconds a job is late, or None.

    A job is late by the time since its deadline, or by the time that it is expected to need beyond it if it
    continues as fast as so far. A job without a deadline that has begun is late once none of its rollouts
    has ended for STUCK_SECONDS.
    """
    if row.finished_at is not None or row.suspended or row.ended >= row.total:
        return None
    if row.deadline_at is not None:
        expected = now
        if row.started_at is not None and row.ended:
            expected += (now - row.started_at) / row.ended * (row.total - row.ended)
        if expected > row.deadline_at:
            return float(expected - row.deadline_at)
    if row.started_at is None:
        return None
    silent = now - max(row.started_at, last_end or 0.0)
    return float(silent) if silent > STUCK_SECONDS else None


def waits_for(
    row: Any,
    status: Mapping[str, Any],
    stages: Mapping[StageName, Mapping[str, int]],
    active: int,
    heard: bool,
    unscored: int = 0,
    harness_use: HarnessUse | None = None,
) -> dict[str, str] | None:
    """Return {reason, message} of what keeps an unfinished job from working, or None if it works.

    Of the rollouts in the queue of Eval, `unscored` wait for the trainer's rewards. `harness_use` says how
    much of the namespace's quota for rollouts of harnesses is in use.
    """
    if row.finished_at is not None or row.cancel_reason is not None:
        return None
    conditions = {condition.get("type"): condition for condition in status.get("conditions") or ()}
    if row.suspended:
        return {"reason": "Suspended", "message": "the job is suspended; resume it to go on"}
    admitted = conditions.get("Admitted")
    if admitted is not None and admitted.get("status") != "True":
        return {"reason": admitted.get("reason") or "NotAdmitted", "message": admitted.get("message") or ""}
    queued = sum(counts["queued"] for counts in stages.values())
    if row.outage_began is not None and stages["run"]["queued"]:
        message = f"no backend of pool {row.pool!r} is ready"
        return {"reason": "NoBackendReady", "message": message}
    if active:
        return None
    if unscored == queued > 0:
        message = f"rollouts that wait for the trainer's rewards: {unscored} (client.rewards hands them in)"
        return {"reason": "RewardsAwaited", "message": message}
    if not queued:
        if row.closed:
            return None
        message = status.get("message") or "the stream is open, and nothing was pushed that is left"
        return {"reason": "NoTasks", "message": message}
    if row.limits.harness and harness_use is not None:
        in_run = harness_use.running.get(row.namespace, 0)
        if advice := advice_on_harness_quota(stages["run"]["queued"], in_run, harness_use.most):
            return advice[0]
    running = conditions.get("Running")
    if running is not None and running.get("status") != "True" and running.get("reason"):
        return {"reason": running["reason"], "message": running.get("message") or ""}
    if admitted is None:
        return {"reason": "NoDriver", "message": "no driver has looked at the job yet"}
    if not heard:
        return {"reason": "WorkersSilent", "message": "no worker of the job was heard lately"}
    return None


JobSort = Literal["late", "created", "-created", "name"]
JobState = Literal["active", "finished", "late"]


class JobFilter(BaseModel):
    """Which jobs are listed, as a request says it; None and "" stand for no restriction."""

    model_config = ConfigDict(frozen=True)

    namespace: Annotated[str | None, StringConstraints(max_length=63)] = None
    state: JobState | None = None
    search: Annotated[str, StringConstraints(max_length=128)] = ""
    """A part of the name or of `namespace/name`, in upper or lower case."""
    sort: JobSort = "late"
    """The order. By `late`, the jobs that have been late for longest come first, then the unfinished ones,
    oldest first, and last those that have finished, newest first."""


def page(jobs: Mapping[int, dict[str, Any]], filters: JobFilter, limit: int, cursor: str) -> Page:
    """Return a page of the slim rows of jobs, by their numbers; `cursor` is the last page's `continue`.

    Raises:
        Malformed: `cursor` is not one of this list.
    """
    part = filters.search.lower()
    chosen = [
        (_key(filters.sort, number, job), job)
        for number, job in jobs.items()
        if filters.namespace in (None, job["namespace"])
        and (filters.state is None or _is(job, filters.state))
        and (not part or part in f"{job['namespace']}/{job['name']}".lower())
    ]
    chosen.sort(key=lambda item: item[0])
    if cursor:
        key = str if filters.sort == "name" else float
        after = tuple(keyset.decode(cursor, filters, (int, key, int)))
        chosen = [item for item in chosen if item[0] > after]
    rows = [job for _, job in chosen[:limit]]
    return rows, None if len(chosen) <= limit else keyset.encode(filters, chosen[limit - 1][0])


def _is(job: Mapping[str, Any], state: JobState) -> bool:
    if state == "late":
        return job["late"] is not None
    return (job["finished_at"] is None) == (state == "active")


def _key(sort: JobSort, number: int, job: Mapping[str, Any]) -> tuple[Any, ...]:
    match sort:
        case "late":
            if job["finished_at"] is not None:
                return (2, -job["finished_at"], number)
            # Lateness grows with time, so its order is that of the moments from which jobs are late.
            return (1, job["created_at"], number) if job["late"] is None else (0, -job["late"], number)
        case "created":
            return (0, job["created_at"], number)
        case "-created":
            return (0, -job["created_at"], -number)
        case "name":
            return (0, f"{job['namespace']}/{job['name']}", number)
