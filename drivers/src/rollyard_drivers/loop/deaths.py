"""The deaths of stage workers, which a driver reports to the control plane before it starts successors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rollyard_crds.workers import WorkerDeath, WorkerDied

from rollyard_drivers.reconcile.plan import ObservedWorkload, Owner

Report = Callable[[WorkerDied], Awaitable[WorkerDeath]]
"""Reports a death."""


class Deaths:
    """A record of the dead workers that one driver has reported, as long as it observes them.

    The control plane takes back the leases of a dead worker at once and answers whether the worker completed
    any stage. A worker that did is not crash-looping.
    """

    def __init__(self) -> None:
        self._useful: dict[Owner, dict[str, bool]] = {}

    async def noted(
        self, owner: Owner, workloads: Sequence[ObservedWorkload], report: Report
    ) -> tuple[ObservedWorkload, ...]:
        """Report the workers of a job that have died since the last call, and return all workloads.

        A dead worker that completed a stage of a rollout is returned as `useful`.

        Raises:
            Exception: What `report` raised. The next call reports the same death again.
        """
        before, known = self._useful.pop(owner, {}), {}
        dead = [seen.worker for seen in workloads if seen.state == "exited" and seen.worker]
        try:
            for worker in dead:
                known[worker] = (
                    before[worker] if worker in before else await _is_useful(owner, worker, report)
                )
        finally:
            if known:
                self._useful[owner] = known
        return tuple(
            replace(seen, useful=True) if seen.state == "exited" and known.get(seen.worker) else seen
            for seen in workloads
        )


async def _is_useful(owner: Owner, worker: str, report: Report) -> bool:
    answer = await report(WorkerDied(namespace=owner.namespace, job=owner.name, worker=worker))
    return answer.completed
