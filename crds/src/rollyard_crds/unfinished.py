"""Which jobs drivers have to do with, in few bytes: what a driver waits on between two whole looks."""

from __future__ import annotations

from rollyard_crds.trajectory import Record


class UnfinishedJob(Record):
    """One job that has not ended, or whose object is to be deleted."""

    namespace: str
    name: str
    uid: str
    generation: int
    cancel_reason: str = ""
    """Empty: it is not cancelled."""


class UnfinishedJobs(Record):
    """All of them, oldest first."""

    revision: int
    """Give it with the next call, which then waits for a change."""
    jobs: list[UnfinishedJob]
