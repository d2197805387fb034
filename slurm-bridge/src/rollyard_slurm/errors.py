"""What can go wrong between the bridge and Slurm."""

from __future__ import annotations

from rollyard_drivers.host.errors import HostError


class ProfileInvalid(HostError):
    """A profile file cannot be used; the message names file and field."""

    reason = "ProfileInvalid"


class SlurmError(HostError):
    """A Slurm command did not do what it was asked for."""

    reason = "SlurmError"


class SlurmAway(SlurmError):
    """The controller does not answer, or a command took too long. What was known stays valid.

    Args:
        unsure: the command may have had its effect all the same.
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
        limit: a limit of the site (jobs of a user, of an account): there will be room again.
        by: who said so.
    """

    reason = "SubmitRefused"

    def __init__(self, message: str, limit: bool, by: str = "sbatch") -> None:
        super().__init__(message)
        self.limit = limit
        self.by = by
