"""The annotations with which the control plane and the drivers inform each other about jobs and pools."""

from __future__ import annotations

from typing import Final

CLOSED: Final = "rollyard.dev/closed"
"""The annotation of a job to which no task will be added: every batch job, and a closed stream."""
CANCEL_REASON: Final = "rollyard.dev/cancel-reason"
"""The annotation of a job that takes no part in leasing any more: `Cancelled`, `DeadlineExceeded`, `Deleted`,
`TargetMet` or `TargetNotMet`."""
DELETE_REQUESTED: Final = "rollyard.dev/delete-requested"
"""The annotation of a pool that is to be removed, which is meant for the driver that owns its object."""
OBJECT_UID: Final = "rollyard.dev/object-uid"
"""The annotation with the uid of the Kubernetes object for which a job or pool is registered."""
