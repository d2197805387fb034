"""The driver's calls to the control plane.

A call that fails affects only the current pass; the driver continues to run.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from rollyard_client import DriverClient, Retry, RollyardError
from rollyard_crds import (
    BackendPool,
    BackendPoolStatus,
    BackendStatus,
    RolloutJob,
    RolloutJobStatus,
)
from rollyard_crds.workers import AssignmentOffer, WorkerDeath, WorkerDied

from rollyard_drivers.loop.driver import StoreTrouble
from rollyard_drivers.reconcile.ready_workers import JOB_OVER

T = TypeVar("T")

WATCH_SECONDS: Final = 30.0
"""The duration of one long poll, in seconds."""
AGAIN_SECONDS: Final = 2.0
"""The pause in seconds after a call that the control plane did not answer, since it may be restarting."""


class RestStore:
    """The store of a driver, reached over REST.

    Args:
        url: The base URL of the control plane.
        token: The bearer token of the driver role.
        tls: The certificate authorities to trust for `https:` URLs. The default is the file that
            ROLLYARD_CA_FILE names, or the usual authorities if it is not set.
    """

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        # The next pass is the retry. A pass that waits for long would notice late that child processes have
        # ended.
        self._client = DriverClient(url, token, timeout=10.0, retry=Retry(attempts=2), tls=tls)

    async def _ask(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RollyardError as error:
            raise StoreTrouble(f"{error.reason}: {error}") from error

    async def jobs(self) -> Sequence[RolloutJob]:
        """Return the jobs that concern the driver."""
        return await self._ask(self._client.jobs())

    async def pools(self) -> Sequence[BackendPool]:
        """Return the pools that concern the driver."""
        return await self._ask(self._client.pools())

    async def put_job_status(self, job: RolloutJob, status: RolloutJobStatus) -> None:
        """Write the driver's part of a job's status."""
        await self._ask(self._client.put_job_status(job, status))

    async def put_pool_status(self, pool: BackendPool, status: BackendPoolStatus) -> None:
        """Write the driver's part of a pool's status."""
        await self._ask(self._client.put_pool_status(pool, status))

    async def put_backends(self, pool: BackendPool, backends: Sequence[BackendStatus]) -> None:
        """Report the backends of a pool."""
        await self._ask(self._client.put_backends(pool, backends))

    async def cancel(self, job: RolloutJob) -> None:
        """Cancel a job."""
        await self._ask(self._client.cancel(job))

    async def worker_died(self, report: WorkerDied) -> WorkerDeath:
        """Report the death of a worker, so that its leases return at once."""
        return await self._ask(self._client.worker_died(report))

    async def offer(self, offered: AssignmentOffer) -> str:
        """Offer a job to a worker that stands ready, and return why the worker cannot have it, or nothing.

        A job that is over is no reason, because its workers are stopped anyway.
        """
        try:
            await self._client.offer(offered)
        except RollyardError as error:
            message = f"{error.reason}: {error}"
            if error.status is None or error.status >= 500 or error.status == 429:
                raise StoreTrouble(message) from error
            return "" if error.reason in JOB_OVER else message
        return ""

    async def create_pool(self, pool: BackendPool) -> None:
        """Create a pool."""
        await self._ask(self._client.create_pool(pool))

    async def delete_pool(self, namespace: str, name: str) -> None:
        """Delete a pool."""
        await self._ask(self._client.delete_pool(namespace, name))

    async def watch(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever a job was added, ended, or changed in anything but its rollouts.

        This method never returns. While the control plane does not answer, the request is repeated.
        """
        revision: int | None = None
        while True:
            try:
                unfinished = await self._client.unfinished(revision, WATCH_SECONDS)
            except RollyardError:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if unfinished.revision != revision:
                revision = unfinished.revision
                wake()

    async def close(self) -> None:
        """Close the HTTP client."""
        await self._client.aclose()
