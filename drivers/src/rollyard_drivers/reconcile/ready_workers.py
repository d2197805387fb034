"""Stage workers that stand ready before there is a job: how many are made, and which one is assigned next."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

START_SECONDS: Final = 300.0
"""A ready worker that does not run after this many seconds is replaced, unless it waits for a place."""
JOB_OVER: Final = ("JobEnded", "JobNotFound")
"""The reasons of refused offers that concern the job. Its workers end with it, as those of any job do."""
ReadyState = Literal["starting", "running", "ended", "leaving"]


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that stands ready, as its driver observes it."""

    namespace: str
    name: str
    uid: str
    """The identity of its pod or batch job, which no other one has."""
    shape: str
    """A digest of all that the worker was started with."""
    state: ReadyState
    created_at: datetime
    pending: bool = False
    """Whether a starting worker waits for a place. The limit on the start time does not apply yet."""


@dataclass(frozen=True, slots=True)
class ReadyPlan:
    """The ready workers to make and to delete now."""

    create: Mapping[str, int]
    """The number of workers to make, by namespace."""
    delete: tuple[ReadyWorker, ...]
    broken: frozenset[str]
    """The namespaces in which a ready worker ended or did not start although nobody had assigned it."""


def plan_ready(
    observed: Iterable[ReadyWorker],
    namespaces: Collection[str],
    count: int,
    shape: str,
    now: datetime,
    resting: Collection[str] = (),
) -> ReadyPlan:
    """Return the steps to `count` ready workers of the present shape in each namespace, and none elsewhere.

    Args:
        observed: The workers that stand ready, without those that were assigned.
        namespaces: The namespaces in which workers stand ready.
        count: The number of ready workers in each of them.
        shape: The digest of all that a ready worker is started with now.
        resting: The namespaces in which none is made now, because making them failed a moment ago.
    """
    delete: list[ReadyWorker] = []
    by_namespace: dict[str, list[ReadyWorker]] = {namespace: [] for namespace in namespaces}
    broken: set[str] = set()
    for worker in sorted(observed, key=_preference):
        if worker.state == "leaving":
            continue
        age = (now - worker.created_at).total_seconds()
        late = worker.state == "starting" and not worker.pending and age > START_SECONDS
        current = worker.namespace in by_namespace and worker.shape == shape
        if current and (late or worker.state == "ended"):
            broken.add(worker.namespace)
        good = current and not late and worker.state != "ended"
        if good and len(by_namespace[worker.namespace]) < count:
            by_namespace[worker.namespace].append(worker)
        else:
            delete.append(worker)
    missing = {
        namespace: count - len(there)
        for namespace, there in by_namespace.items()
        if len(there) < count and namespace not in broken and namespace not in resting
    }
    return ReadyPlan(missing, tuple(delete), frozenset(broken))


def choose(
    observed: Iterable[ReadyWorker], namespace: str, shape: str, without: Collection[str] = ()
) -> ReadyWorker | None:
    """Return the ready worker that is assigned next, or None if there is none that runs.

    Args:
        without: The uids of workers that another driver has taken in the meantime.
    """
    fit = [
        worker
        for worker in observed
        if worker.namespace == namespace
        and worker.state == "running"
        and worker.shape == shape
        and worker.uid not in without
    ]
    return min(fit, key=_preference, default=None)


def _preference(worker: ReadyWorker) -> tuple[bool, datetime, str]:
    return worker.state != "running", worker.created_at, worker.name
