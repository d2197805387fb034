"""A rollout whose backend failed is moved to another one, and the backend is blamed once for each lease."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from rollyard_crds.lease import NoBackend, RouteRequest

from rollyard_api.backends import circuits
from rollyard_api.backends.assignment import ACTIVE, RETRY_SECONDS, Routers, lock
from rollyard_api.backends.router import Backend, Router
from rollyard_api.machine.events import Blamed, Event, Moved
from rollyard_api.machine.rollout import Rejection, Rollout, decide
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import transitions
from rollyard_api.storage import groups as group_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Transaction

_OVERLOADED: Final = re.compile(r"\banswered 429\b")
"""How a worker reports a busy server, which is not a failure because the server works as it should."""


@dataclass(frozen=True, slots=True)
class Rerouted:
    """The answer to `reroute`.

    The `outcome` is `accepted`, `stale` or `unknown`. The `backend` is None while none is available.
    """

    outcome: str
    backend: dict[str, Any] | None = None
    retry_after: float = RETRY_SECONDS
    reason: NoBackend = ""
    opened: bool = False
    """Whether this failure opened the backend's circuit."""


def reroute(tx: Transaction, asked: RouteRequest) -> Rerouted:
    """Return another backend for a rollout whose backend failed, or the same one if no other has room.

    Only the backend that the rollout is assigned to is blamed, in its own pool and once per token, so a
    lease holder cannot open a circuit by naming another server or by repeating its report.

    A backend's limit holds for rollouts that move, too. If every other backend is full and the failed
    one is not eligible, the rollout has to ask again. Places that become free are kept for such rollouts
    before any are given to the queue (Router.reserved).
    """
    row = rollout_rows.named(tx, [asked.rollout]).get(asked.rollout)
    if row is None:
        return Rerouted("unknown")
    job = rollout_rows.jobs_of(tx, [row.job_id])[row.job_id]
    if row.token != asked.token or row.state != RolloutState.LEASED_RUN or job.pool is None:
        return Rerouted("stale")
    key = (job.namespace, job.pool)
    opened, changed = False, None
    if asked.blame and not _OVERLOADED.search(asked.error):
        changed = _changed(tx, row, Blamed(asked.token, asked.failed_url))
        opened = changed is not None and circuits.failed(tx, row.job_id, asked.failed_url)
        row = changed or row
    lock(tx, [key])
    routers = Routers(tx, tx.conn.execute(ACTIVE).all())
    router = routers.get(key)
    chosen = None if router is None else _elsewhere(tx, router, row, asked.failed_url)
    if chosen is None:
        return Rerouted("accepted", None, routers.retry_after(key, tx.now), routers.why_none(key), opened)
    if chosen.url != row.backend:
        _changed(tx, row, Moved(asked.token, chosen.url))
    return Rerouted("accepted", routers.assignment(key, chosen), opened=opened)


def _changed(tx: Transaction, row: Rollout, event: Event) -> Rollout | None:
    """Apply what follows from an event, and return the rollout with it, or None if it is refused."""
    decision = decide(row, event, None, tx.now)
    if isinstance(decision, Rejection):
        return None
    transitions.apply(tx, [(row, decision)])
    return msgspec.structs.replace(row, **decision.changes)


def _elsewhere(tx: Transaction, router: Router, row: Rollout, failed_url: str) -> Backend | None:
    if row.backend is not None and row.backend != failed_url and row.backend in router.backends:
        # The rollout was moved by an earlier call whose answer was lost.
        return router.backends[row.backend]
    group = group_rows.named(tx.conn, row.job_id, [row.group_no])[row.group_no]
    others = Router.of(router.max_active, [b for url, b in router.backends.items() if url != failed_url])
    chosen = others.choose(None, group.backend, together=group.remaining)
    if chosen is None:
        return router.backends.get(failed_url)
    if group.backend not in others.backends:
        # The group's other samples follow it to the new backend.
        group_rows.stick(tx, row.job_id, row.group_no, chosen.url)
    return chosen
