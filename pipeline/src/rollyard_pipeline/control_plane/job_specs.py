"""The specs of the jobs whose rollouts are leased here, each fetched once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from rollyard_crds.lease import Lease
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_pipeline.control_plane.calls import TRY_AGAIN, ControlPlaneUnavailable, WorkerCalls


class JobSpecs:
    """Caches specs by job uid. The least recently used are dropped beyond `size`."""

    def __init__(self, control: WorkerCalls, size: int = 256) -> None:
        self._control = control
        self._size = size
        self._specs: OrderedDict[str, RolloutJobSpec] = OrderedDict()
        self._lock = asyncio.Lock()

    async def get(self, lease: Lease) -> RolloutJobSpec:
        """Return the spec of the lease's job. This waits for the control plane as long as the lease allows.

        Raises:
            ControlPlaneRefused: The control plane refuses to return the spec.
        """
        async with self._lock:
            tries = 0
            while lease.job_uid not in self._specs:
                try:
                    spec = await self._control.job_spec(lease.namespace, lease.job, lease.job_uid)
                except ControlPlaneUnavailable as error:
                    tries += 1
                    await asyncio.sleep(TRY_AGAIN.pause(tries, error.retry_after))
                else:
                    self._specs[lease.job_uid] = spec
                    while len(self._specs) > self._size:
                        self._specs.popitem(last=False)
            self._specs.move_to_end(lease.job_uid)
            return self._specs[lease.job_uid]
