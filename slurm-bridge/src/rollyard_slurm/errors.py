"""The exceptions of the bridge: one tree, each with a stable `reason`."""

from __future__ import annotations

from rollyard_drivers.host.errors import HostError


class BridgeError(HostError):
    """The base class of every exception of the bridge.

    The reason is ProfileInvalid if a profile cannot be used. The message then names the file and the field.
    """

    reason: str = "BridgeError"


class SlurmError(BridgeError):
    """A call to Slurm failed.

    The reason is ScriptInvalid if no batch script can be made from a workload. The message then names the
    variable or option at fault.
    """

    reason = "SlurmError"


class SlurmUnavailable(SlurmError):
    """The controller does not answer, its answer cannot be read, or a call took too long.

    What was known before stays valid.

    Args:
        unsure: Whether the call may have had its effect in spite of the failure.
    """

    reason = "SlurmAway"

    def __init__(self, message: str, unsure: bool = False) -> None:
        super().__init__(message)
        self.unsure = unsure


class SubmitRefused(SlurmError):
    """sbatch, or slurmrestd, refused a job.

    Args:
        limit: Whether the reason is a limit of the site, such as the number of jobs of a user. Slurm may
            accept such a job later.
        by: The program that refused it.
    """

    reason = "SubmitRefused"

    def __init__(self, message: str, limit: bool, by: str = "sbatch") -> None:
        super().__init__(message)
        self.limit = limit
        self.by = by
