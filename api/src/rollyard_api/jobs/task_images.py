"""The images that the tasks of waiting rollouts name. Workers bring them before Init needs them."""

from __future__ import annotations

from typing import Final

import orjson
import sqlalchemy as sa
from rollyard_crds.harbor.dockerfiles import DOCKERFILE_IMAGE
from sqlalchemy.engine import Connection

from rollyard_api.core.codec import unpack
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.schema import groups, rollouts

AHEAD: Final = 64
"""The number of tasks, from the front of the queue of Init, whose images are named."""
_ROLLOUTS: Final = 4096
"""The number of rollouts that are looked at for these tasks."""
_QUEUE: Final = (
    sa.select(rollouts.c.group_no)
    .where(
        rollouts.c.job_id == sa.bindparam("b_job"),
        rollouts.c.state == RolloutState.QUEUED_INIT,
        rollouts.c.node == "",
    )
    .order_by(rollouts.c.place)
    .limit(_ROLLOUTS)
)
_TASK: Final = sa.select(groups.c.task).where(
    groups.c.job_id == sa.bindparam("b_job"), groups.c.no == sa.bindparam("b_no")
)


def waiting(conn: Connection, namespace: str, name: str, uid: str | None, max_bytes: int) -> list[str]:
    """Return the images of the next tasks in a job's queue of Init, each once, in the order of the queue.

    Images that are built of Dockerfiles are left out, because the files come with the leases.

    Args:
        conn: The database.
        namespace: The namespace of the job.
        name: The name of the job.
        uid: The uid that the job must have, or None for any.
        max_bytes: The size of the tasks that are looked at, in bytes. At least one is.

    Raises:
        NotFound: There is no such job, or another job of this name has replaced it.
    """
    job = job_rows.find(conn, namespace, name, uid=uid)
    numbers = dict.fromkeys(conn.execute(_QUEUE, {"b_job": job.id}).scalars())
    found: dict[str, None] = {}
    size = 0
    for number in list(numbers)[:AHEAD]:
        if size > max_bytes:
            break
        task = unpack(conn.execute(_TASK, {"b_job": job.id, "b_no": number}).scalar_one())
        size += len(task)
        image = (orjson.loads(task).get("sandbox") or {}).get("image")
        if isinstance(image, str) and not image.startswith(DOCKERFILE_IMAGE):
            found[image] = None
    return list(found)
