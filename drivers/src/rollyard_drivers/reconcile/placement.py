"""Functions that say which driver a job or a pool belongs to, if one control plane has several drivers.

They are pure.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final

from rollyard_crds import BackendPool, BackendPoolStatus, RolloutJob, RolloutJobStatus
from rollyard_crds.base import PlacementName

from rollyard_drivers.reconcile import reconcile_pass

UNSPOKEN_SECONDS: Final = 10.0
"""The time in seconds within which a running driver reports on its jobs and pools."""
REASON: Final = "NoDriver"
_WHO: Final[dict[PlacementName, str]] = {
    "kubernetes": "a control plane that the Helm chart installed has one",
    "slurm": "`rollyard slurm-bridge up --join URL --namespace NAMESPACE` starts one",
    "local": "the control plane of `rollyard up` has one",
}


def is_for(thing: RolloutJob | BackendPool, driver: PlacementName, default: bool = True) -> bool:
    """Return whether a driver runs an object.

    Args:
        thing: The job or pool.
        driver: The name of the driver.
        default: Whether the driver belongs to the control plane. Such a driver also runs the objects that
            name no driver.
    """
    return thing.spec.placement == driver or (default and thing.spec.placement is None)


def is_unspoken(thing: RolloutJob | BackendPool, now: datetime) -> bool:
    """Return whether no driver has reported on an object for longer than a running driver would need."""
    created = thing.metadata.creation_timestamp
    return not thing.status.conditions and (
        created is None or (now - created).total_seconds() >= UNSPOKEN_SECONDS
    )


def _text(placement: PlacementName) -> str:
    return f"spec.placement: no driver {placement!r} has reported on it yet; {_WHO[placement]}"


def unserved_job(job: RolloutJob, now: datetime) -> RolloutJobStatus:
    """Return the status that the control plane's own driver gives a job whose driver does not run.

    The first report of that driver replaces it.
    """
    assert job.spec.placement is not None
    return reconcile_pass.refused(
        job.status, job.metadata.generation or 0, REASON, _text(job.spec.placement), now
    )


def unserved_pool(pool: BackendPool, now: datetime) -> BackendPoolStatus:
    """Return the status that the control plane's own driver gives a pool whose driver does not run."""
    assert pool.spec.placement is not None
    return reconcile_pass.refused_pool(
        pool.status, pool.metadata.generation or 0, REASON, _text(pool.spec.placement), now
    )
