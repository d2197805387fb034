"""The objects that all loops of one operator share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import httpx
from rollyard_drivers.reconcile.plan import PoolState, Profile

from rollyard_operator.controllers.admission import Admissions
from rollyard_operator.controllers.control_plane_view import ControlPlaneView
from rollyard_operator.controllers.ready_pool import ReadyPool
from rollyard_operator.controllers.worker_token import WorkerToken
from rollyard_operator.kube.event_recorder import EventRecorder
from rollyard_operator.kube.interface import Kube
from rollyard_operator.kube.namespace_access import NamespaceAccess
from rollyard_operator.kube.object_cache import Key, ObjectCache, PodCache
from rollyard_operator.settings import OperatorSettings

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
    kube: Kube
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
