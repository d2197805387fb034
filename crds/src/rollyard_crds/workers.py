"""The wire between drivers and the control plane about stage workers that have died."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollyard_crds.trajectory import Record


class WorkerDied(Record):
    """A driver's report that the process of a stage worker has ended, however it ended."""

    namespace: Annotated[str, Field(min_length=1, max_length=63)]
    job: Annotated[str, Field(min_length=1, max_length=63)]
    """The name of the job that the worker worked for."""
    worker: Annotated[str, Field(min_length=1, max_length=253)]
    """The name under which the worker leased rollouts. No later worker may have the same name."""


class WorkerDeath(Record):
    """The control plane's answer to such a report."""

    returned: Annotated[int, Field(ge=0)]
    """The number of leases that the worker still held and that were taken back."""
    completed: bool
    """Whether the worker completed at least one stage of a rollout."""
