"""The objects that all loops of one operator share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import httpx
from rollyard_crds import RolloutJob
from rollyard_drivers.reconcile.plan import PoolState, Profile
from rollyard_drivers.reconcile.reconcile_pass import is_active, rank

from rollyard_operator.controllers.control_plane_view import ControlPlaneView
from rollyard_operator.controllers.ready_pool import ReadyPool
from rollyard_operator.controllers.worker_token import WorkerToken
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.events import EventRecorder
from rollyard_operator.kube.object_cache import Key, ObjectCache, PodCache
from rollyard_operator.kube.reflector import NamespaceAccess
from rollyard_operator.settings import OperatorSettings

Rank = tuple[int, datetime]


class Admissions:
    """The admitted jobs and the waiting jobs of one operator.

    Args:
        limit: The number of jobs that may run at once.
        wake: Called with the key of a job that may be admitted now.
    """

    def __init__(self, limit: int, wake: Callable[[Key], None]) -> None:
        self._limit = limit
        self._wake = wake
        self._active: set[Key] = set()
        self._waiting: dict[Key, Rank] = {}

    def restore(self, key: Key) -> None:
        """Record a job that was admitted before this process started."""
        self._active.add(key)

    def others(self, key: Key, job: RolloutJob) -> int:
        """Return how many jobs count as admitted before this one: admitted ones and those next in order."""
        active = len(self._active - {key})
        mine = rank(job)
        first = sum(other < mine for waiting, other in self._waiting.items() if waiting != key)
        return max(active, self._limit) if active + first >= self._limit else active

    def note(self, key: Key, job: RolloutJob) -> None:
        """Record the state of a job after a pass: admitted, waiting, or neither."""
        active = is_active(job.status)
        admitted = next((c for c in job.status.conditions if c.type == "Admitted"), None)
        queued = admitted is not None and admitted.status == "False" and admitted.reason == "Queued"
        if queued:
            self._waiting[key] = rank(job)
        else:
            self._waiting.pop(key, None)
        if active:
            self._active.add(key)
        else:
            self._free(key)

    def leave(self, key: Key) -> None:
        """Forget a job that no longer exists."""
        self._waiting.pop(key, None)
        self._free(key)

    def _free(self, key: Key) -> None:
        if key not in self._active:
            return
        self._active.discard(key)
        for waiting in sorted(self._waiting, key=self._waiting.__getitem__):
            self._wake(waiting)


DRIVER: Final = "kubernetes"
"""The name of the operator in `spec.placement`."""


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


@dataclass(slots=True)
class OperatorContext:
    """One installation: its cluster, its control plane, and the last observed state of both."""

    settings: OperatorSettings
    profile: Profile
    kube: KubeClient
    recorder: EventRecorder
    plane: ControlPlaneView
    http: httpx.AsyncClient
    """The HTTP client that probes the health of backends."""
    pods: PodCache
    jobs: ObjectCache
    pools: ObjectCache
    admissions: Admissions
    token: WorkerToken
    ready: ReadyPool
    """The stage workers that stand ready."""
    pool_changed: Callable[[Key], None]
    """Called with the key of a pool whose backends came or went. Its jobs then make a new pass."""
    pool_states: dict[Key, PoolState] = field(default_factory=dict)
    access: NamespaceAccess = field(default_factory=NamespaceAccess)
    """The namespaces that the API server does not let the operator read."""
    now: Callable[[], datetime] = utc_now
