"""Brings images of tasks that wait in the queue of Init to the node before their rollouts are leased."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Final

from rollyard_crds.lease import Lease
from rollyard_crds.rolloutjob import RolloutJobSpec, SandboxSpec
from rollyard_crds.task import TaskSandbox

from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable, WorkerCalls
from rollyard_pipeline.errors import ControlPlaneRefused
from rollyard_pipeline.sandboxes.errors import DiskFull, SandboxProviderError
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest

log = logging.getLogger(__name__)

AT_ONCE: Final = 2
"""The number of images that are brought at the same time. A cache has more places, which Init can use."""
LOOK_SECONDS: Final = 10.0
"""The pause after a look at the queue that has found nothing new to bring."""
FULL_SECONDS: Final = 60.0
"""The pause after an image for which there was no room."""
REST_SECONDS: Final = 60.0
"""How long a job whose waiting tasks name no image is left alone."""
_TRIES: Final = 3
_MAX_JOBS: Final = 256


class ImagesAhead:
    """Brings images ahead of the queue, a few at a time, as far as the provider has room for them.

    A job is looked after from its first Init lease until no task in its queue names an image. A later Init
    lease begins this again. An image that cannot be brought is left to Init, which reports it.

    Args:
        control: The control plane.
        provider: The provider of sandboxes, or None for a worker without one.
        look_seconds: See `LOOK_SECONDS`.
        full_seconds: See `FULL_SECONDS`.
    """

    def __init__(
        self,
        control: WorkerCalls,
        provider: SandboxProvider | None,
        look_seconds: float = LOOK_SECONDS,
        full_seconds: float = FULL_SECONDS,
    ) -> None:
        self._control = control
        self._provider = provider if provider is not None and provider.fetches else None
        self._look_seconds, self._full_seconds = look_seconds, full_seconds
        self._places = asyncio.Semaphore(AT_ONCE)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._resting: dict[str, float] = {}
        """When jobs that need nothing may be looked at again, by uid."""

    def note(self, lease: Lease) -> None:
        """Begin to look after the job of an Init lease, unless that has begun."""
        uid = lease.job_uid
        if self._provider is None or uid in self._jobs or self._resting.get(uid, 0.0) > time.monotonic():
            return
        if len(self._jobs) < _MAX_JOBS:
            self._jobs[uid] = asyncio.create_task(self._look_after(lease), name=f"images of {lease.job}")

    async def close(self) -> None:
        """End all of it. A build in progress ends, and leaves nothing."""
        tasks = list(self._jobs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self, lease: Lease) -> None:
        try:
            await self._bring(lease)
        except ControlPlaneRefused as error:
            # The job is over, for example.
            log.info("no images of %s are brought ahead: %s", lease.job, error)
        except Exception:
            log.exception("no images of %s are brought ahead", lease.job)
        finally:
            now = time.monotonic()
            self._resting = {uid: until for uid, until in self._resting.items() if until > now}
            self._resting[lease.job_uid] = now + REST_SECONDS
            self._jobs.pop(lease.job_uid, None)

    async def _bring(self, lease: Lease) -> None:
        """Bring images until no task that waits names one.

        Raises:
            ControlPlaneRefused: The control plane does not say what the job's tasks need.
        """
        tries: dict[str, int] = {}
        spec: RolloutJobSpec | None = None
        while True:
            pause = self._look_seconds
            with contextlib.suppress(ControlPlaneUnavailable):
                if spec is None:
                    spec = await self._control.job_spec(lease.namespace, lease.job, lease.job_uid)
                named = await self._control.waiting_images(lease.namespace, lease.job, lease.job_uid)
                if not named:
                    return
                if not await self._fetched(spec.sandbox, named, tries):
                    pause = self._full_seconds
            await asyncio.sleep(pause)

    async def _fetched(self, spec: SandboxSpec, named: Iterable[str], tries: dict[str, int]) -> bool:
        """Bring those images that were not tried often enough. Return whether there was room for all."""
        full = False

        async def bring(image: str) -> None:
            nonlocal full
            async with self._places:
                if full:
                    return
                assert self._provider is not None
                tries[image] = tries.get(image, 0) + 1
                try:
                    full |= not await self._provider.fetch(SandboxRequest.of(spec, TaskSandbox(image=image)))
                    tries[image] = 0 if full else _TRIES
                except SandboxProviderError as error:
                    full |= isinstance(error, DiskFull)
                    if not error.retryable:
                        tries[image] = _TRIES
                    log.info("the image %s is not brought ahead: %s", image, error)

        async with asyncio.TaskGroup() as group:
            for image in named:
                if tries.get(image, 0) < _TRIES:
                    group.create_task(bring(image))
        return not full
