"""Events that tell the author of a job what keeps its sandboxes from being made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rollyard_operator.kube.interface import Kube
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.object_cache import uid_of

EVENT_PAUSE_SECONDS = 300.0
"""The minimum time between two events with the same reason for the same job, in seconds."""


class JobEvents:
    """Creates events about jobs, at most one per job and reason in EVENT_PAUSE_SECONDS.

    Args:
        jobs: Returns the RolloutJob object for a namespace and a name, as it is in the cluster.
    """

    def __init__(self, kube: Kube, jobs: Callable[[str, str], Object | None]) -> None:
        self._kube = kube
        self._jobs = jobs
        self._created: dict[tuple[str, str], float] = {}

    async def warn(self, namespace: str, job: str, reason: str, message: str) -> None:
        """Create an event `SandboxFailed` for the job. Raises KubeError."""
        obj = self._jobs(namespace, job)
        if obj is None:
            return
        key, now = (uid_of(obj), reason), asyncio.get_running_loop().time()
        if now - self._created.get(key, -EVENT_PAUSE_SECONDS) < EVENT_PAUSE_SECONDS:
            return
        self._created = {one: at for one, at in self._created.items() if now - at < EVENT_PAUSE_SECONDS}
        self._created[key] = now
        await self._kube.event(obj, "Warning", "SandboxFailed", f"{reason}: {message}"[:1024])
