"""Groups are admitted to the queues: their rollouts are made, and wait for Init."""

from __future__ import annotations

import sqlalchemy as sa

from rollyard_api.core.wakeups import QUEUE, job_topic
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import jobs, rollouts

_ADD = (
    sa.update(jobs)
    .where(jobs.c.id == sa.bindparam("b_job"))
    .values(total=jobs.c.total + sa.bindparam("b_count"))
)


def admit(tx: Transaction, job_id: int, prefix: str, groups: range, samples: int) -> None:
    """Queue `samples` rollouts for each of the groups with these numbers, and add them to the job's total.

    Args:
        tx: A transaction that has locked the job's row.
        job_id: The job.
        prefix: The beginning of the rollouts' ids, which `prefix_of` returns.
        groups: The numbers of the groups, whose rows exist.
        samples: The rollouts of each group.
    """
    if not groups:
        return
    base = {
        "job_id": job_id,
        "state": RolloutState.QUEUED_INIT,
        "node": "",
        "token": 0,
        "since": tx.now,
        "failures_init": 0,
        "failures_run": 0,
        "failures_eval": 0,
        "expiries": 0,
        "eval_expiries": 0,
        "settled": "",
        "timings": "{}",
    }
    tx.conn.execute(
        sa.insert(rollouts),
        [
            base
            | {
                "id": f"{prefix}-{no}-{sample}",
                "group_no": no,
                "sample": sample,
                "place": no * samples + sample,
            }
            for no in groups
            for sample in range(samples)
        ],
    )
    tx.conn.execute(_ADD, {"b_job": job_id, "b_count": samples * len(groups)})
    tx.wake(QUEUE)
    tx.wake(job_topic(job_id))


def prefix_of(name: str, uid: str) -> str:
    """Return the beginning of the ids of a job's rollouts."""
    return f"{name}-{uid[:8]}"
