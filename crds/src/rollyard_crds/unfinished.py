"""The jobs that drivers have to handle, in few bytes: drivers wait on this list between two full passes."""

from __future__ import annotations

from rollyard_crds.trajectory import Record


class UnfinishedJob(Record):
    """One job that has not ended, or whose object is to be deleted."""

    namespace: str
    name: str
    uid: str
    generation: int
    cancel_reason: str = ""
    """It is empty where the job is not cancelled."""


class UnfinishedJobs(Record):
    """All unfinished jobs, oldest first."""

    revision: int
    """Sent with the next call, which then waits for a change."""
    jobs: list[UnfinishedJob]
