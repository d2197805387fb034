"""What all loops of one operator share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import httpx
from rollyard_drivers.reconcile.plan import PoolState, Profile

from rollyard_operator.controllers.admission import Admissions
from rollyard_operator.controllers.control_plane_view import ControlPlaneView
from rollyard_operator.controllers.worker_token import WorkerToken
from rollyard_operator.kube.client import Kube
from rollyard_operator.kube.event_recorder import EventRecorder
from rollyard_operator.kube.namespace_access import NamespaceAccess
from rollyard_operator.kube.object_cache import Key, ObjectCache, PodCache
from rollyard_operator.settings import OperatorSettings

DRIVER: Final = "kubernetes"
"""What `spec.placement` calls the operator."""


def utc_now() -> datetime:
    """The time."""
    return datetime.now(UTC)


@dataclass(slots=True)
class OperatorContext:
    """One installation: its cluster, its control plane, and what was seen of both."""

    settings: OperatorSettings
    profile: Profile
    kube: Kube
    recorder: EventRecorder
    plane: ControlPlaneView
    http: httpx.AsyncClient
    """For the health of backends."""
    pods: PodCache
    jobs: ObjectCache
    pools: ObjectCache
    admissions: Admissions
    token: WorkerToken
    pool_changed: Callable[[Key], None]
    """Called with the key of a pool whose backends came or went: its jobs look again."""
    pool_states: dict[Key, PoolState] = field(default_factory=dict)
    access: NamespaceAccess = field(default_factory=NamespaceAccess)
    """Which namespaces the API server does not let the operator read."""
    now: Callable[[], datetime] = utc_now
