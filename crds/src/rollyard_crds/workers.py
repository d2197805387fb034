"""What drivers, workers and the control plane send each other about workers as processes.

Drivers report workers that have died, and offer jobs to ready workers.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from rollyard_crds.trajectory import Record

MAX_ARGUMENTS: Final = 64
"""The largest number of arguments of an assignment."""
Label = Annotated[str, Field(min_length=1, max_length=63)]
Argument = Annotated[str, Field(max_length=4096)]


class WaitingImages(Record):
    """The control plane's answer to a worker that asks what the next tasks of a job need."""

    images: list[str]
    """The images that the tasks at the front of the Init queue name, each once and in their order."""


class WorkerDied(Record):
    """A driver's report that the process of a stage worker has ended, however it ended."""

    namespace: Label
    job: Label
    """The name of the job that the worker worked for."""
    worker: Annotated[str, Field(min_length=1, max_length=253)]
    """The name under which the worker leased rollouts. No later worker may have the same name."""


class WorkerDeath(Record):
    """The control plane's answer to such a report."""

    returned: Annotated[int, Field(ge=0)]
    """The number of leases that the worker still held and that were taken back."""
    completed: bool
    """Whether the worker completed at least one stage of a rollout."""


class AssignmentOffer(Record):
    """A driver's offer of a job to one ready worker. Repeating an offer changes nothing."""

    namespace: Label
    worker: Label
    """The name of the ready worker. No other ready worker ever has the same name in the namespace."""
    job: Label
    """The name of the job, which is in the same namespace."""
    uid: Annotated[str, Field(min_length=1, max_length=128)]
    """`metadata.uid` of the job or of its Kubernetes object."""
    arguments: Annotated[list[Argument], Field(max_length=MAX_ARGUMENTS)]
    """The command-line arguments that make the ready worker a worker of the job."""


class AssignmentOffered(Record):
    """The control plane's answer to an offer."""

    taken: bool
    """Whether the ready worker has fetched its assignment."""


class AssignmentRequest(Record):
    """A ready worker asks for its assignment. The call waits up to `wait` seconds for an offer."""

    namespace: Label
    worker: Label
    driver: Annotated[str, Field(max_length=63)] = ""
    """The driver that started the worker, such as `kubernetes`."""
    wait: Annotated[float, Field(ge=0, le=60)] = 0.0


class Assignment(Record):
    """The job that a ready worker is handed. It is handed out once."""

    namespace: Label
    job: Label
    arguments: Annotated[list[Argument], Field(max_length=MAX_ARGUMENTS)]
    token: Annotated[str, Field(min_length=1, max_length=1024)]
    """The token of the workers of this job."""

    def __repr__(self) -> str:
        return f"Assignment({self.namespace}/{self.job})"
