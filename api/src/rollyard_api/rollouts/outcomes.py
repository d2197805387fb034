"""Workers report that leases are complete or have failed; the fencing token decides what is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollyard_api.backends.assignment import without_backend
from rollyard_api.machine import events
from rollyard_api.machine.events import BACKEND_UNAVAILABLE
from rollyard_api.machine.rollout import Rejection, decide
from rollyard_api.rollouts import staleness, transitions
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.rollouts import JobOfRollouts


def report(tx: Transaction, reports: Sequence[tuple[str, events.Report]]) -> list[dict[str, str]]:
    """Accept reports of the current holders of leases, and return one outcome for each, in their order.

    A failed rollout returns to a queue while it has attempts left; otherwise it ends. Rollouts that have left
    Run and are too old for Eval are taken back.

    Args:
        tx: The transaction.
        reports: The ids of rollouts, each with what a worker reports of it. Of several reports of one rollout
            the first that is accepted counts.
    """
    rows = rollout_rows.named(tx, (name for name, _ in reports))
    failures = [
        (rows[name].job_id, event.reason)
        for name, event in reports
        if isinstance(event, events.Failed) and name in rows
    ]
    jobs = rollout_rows.jobs_of(tx, {job_id for job_id, _ in failures}) if failures else {}
    down = _without_backend(tx, jobs, {reason for _, reason in failures})
    accepted: dict[str, transitions.Decided] = {}
    outcomes = []
    for name, event in reports:
        outcome, row = "unknown", rows.get(name)
        if row is not None:
            if row.job_id in down and isinstance(event, events.Failed):
                event = msgspec.structs.replace(event, pool_is_down=True)
            limits = jobs[row.job_id].limits if row.job_id in jobs else None
            decision = decide(row, event, limits, tx.now)
            if isinstance(decision, Rejection):
                outcome = decision.value
            elif name in accepted:
                outcome = Rejection.REPEATED.value
            else:
                accepted[name] = row, decision
                outcome = "accepted"
        outcomes.append({"rollout": name, "outcome": outcome})
    transitions.apply(tx, accepted.values())
    ran = [
        row.id
        for row, transition in accepted.values()
        if isinstance(transition.event, events.RunDone) and row.policy_index is not None
    ]
    if ran:
        staleness.enforce_among(tx, ran)
    return outcomes


def _without_backend(tx: Transaction, jobs: dict[int, JobOfRollouts], reasons: set[str]) -> set[int]:
    """Return the jobs whose pool has no ready backend, if a Run failed because its backend did not answer."""
    if BACKEND_UNAVAILABLE not in reasons:
        return set()
    keys = {job_id: (job.namespace, job.pool) for job_id, job in jobs.items() if job.pool is not None}
    lost = without_backend(tx, set(keys.values()))
    return {job_id for job_id, key in keys.items() if key in lost}
