"""The exceptions of the bridge, each with a stable reason."""

from __future__ import annotations

from rollyard_drivers.host.errors import HostError


class ProfileInvalid(HostError):
    """A profile cannot be used; the message names the file and the field."""

    reason = "ProfileInvalid"


class SlurmError(HostError):
    """A call to Slurm failed."""

    reason = "SlurmError"


class SlurmUnavailable(SlurmError):
    """The controller does not answer, or a call took too long; what was known before stays valid.

    Args:
        unsure: The call may nevertheless have had its effect.
    """

    reason = "SlurmAway"

    def __init__(self, message: str, unsure: bool = False) -> None:
        super().__init__(message)
        self.unsure = unsure


class ScriptInvalid(SlurmError):
    """No batch script can be made of a workload; the message names the variable or option at fault."""

    reason = "ScriptInvalid"


class SubmitRefused(SlurmError):
    """sbatch, or slurmrestd, refused a job.

    Args:
        limit: The job was refused for a limit of the site, such as the jobs of a user: it may be accepted
            later.
        by: The program that refused it.
    """

    reason = "SubmitRefused"

    def __init__(self, message: str, limit: bool, by: str = "sbatch") -> None:
        super().__init__(message)
        self.limit = limit
        self.by = by
