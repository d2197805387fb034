"""What all loops of one operator share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

import httpx

from rollyard_operator.admission import Admissions
from rollyard_operator.kube import Kube
from rollyard_operator.objectcache import Key, ObjectCache, PodCache
from rollyard_operator.plan import PoolState, Profile
from rollyard_operator.plane import Plane
from rollyard_operator.recorder import EventRecorder
from rollyard_operator.settings import OperatorSettings
from rollyard_operator.workertoken import WorkerToken

DRIVER: Final = "kubernetes"
"""What `spec.placement` calls the operator."""


def utc_now() -> datetime:
    """The time."""
    return datetime.now(UTC)


@dataclass(slots=True)
class Yard:
    """One installation: its cluster, its control plane, and what was seen of both."""

    settings: OperatorSettings
    profile: Profile
    kube: Kube
    recorder: EventRecorder
    plane: Plane
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
    denied: set[str] = field(default_factory=set)
    """Namespaces that the API server will not let us list: nothing is known of what is there."""
    now: Callable[[], datetime] = utc_now
