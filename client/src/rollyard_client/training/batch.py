"""Batches of groups, as a GRPO or DAPO trainer takes them for one step."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from rollyard_client.call import Call
from rollyard_client.errors import Invalid, NotFound, WaitTimeout
from rollyard_client.paging import LONG_POLL
from rollyard_client.requests import cursors, jobs, results, weights
from rollyard_client.requests.results import Group, Page
from rollyard_client.training.iterators import begin_at
from rollyard_client.training.lag import WeightHistory, versions_of

if TYPE_CHECKING:
    from rollyard_crds.trajectory import Trajectory

    from rollyard_client.training.arrays import Arrays

MAX_GROUPS = 65_536
"""The most groups of one batch."""
PAGE_GROUPS = 16
BACKLOG_SECONDS = 60.0
"""How long groups that have ended already are read after the time of a call is up."""

Steps = Generator[Call[Any], Any, "Batch"]
"""The calls of a batch, each of which is answered with its result. Both clients carry them out."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole groups for one step of a trainer.

    A trainer that is done with a batch keeps `cursor`, in its checkpoint or by `Client.acknowledge`, and
    takes the next batch from there. Nothing is lost if it dies before that: the next call from `start`
    returns the same groups again, unless weight updates have made them too old in the meantime.
    """

    groups: list[Group]
    """The groups in the order in which they ended, each with its trajectories that have a reward."""
    start: str
    """The cursor at which the batch begins."""
    cursor: str
    """The cursor after the batch, at which the next one begins."""
    finished: bool
    """Whether no groups will follow. Such a batch may have fewer groups than were asked for, or none."""
    stale_groups: int = 0
    """The number of groups that were left out because they were older than `max_lag`."""
    stale_rollouts: int = 0
    """The number of trajectories in them."""
    lags: list[int] = field(default_factory=list)
    """For each group, the weight updates since its oldest token; it is empty without `max_lag`."""
    policy_version: str = ""
    """The pool's newest weights, against which the lags were counted; "" before the first update."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all groups, group by group."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def arrays(self, *, pad_id: int = 0) -> Arrays:
        """Return the batch as padded numpy arrays, one row for each segment.

        Raises:
            MissingLibrary: numpy is not installed.
        """
        from rollyard_client.training.arrays import numpy_arrays

        return numpy_arrays(self.groups, pad_id)

    def tensors(self, *, pad_id: int = 0, device: Any = None) -> Arrays:
        """Return the batch as padded torch tensors on `device`, one row for each segment.

        Raises:
            MissingLibrary: numpy or torch is not installed.
        """
        from rollyard_client.training.arrays import torch_tensors

        return torch_tensors(self.groups, pad_id, device)


class _Gathered:
    """The groups that were read so far, and which of them are too old."""

    def __init__(self, start: str, wanted: int, max_lag: int | None) -> None:
        self.start = self.cursor = start
        self.wanted = wanted
        self.max_lag = max_lag
        self.groups: list[tuple[Group, set[str]]] = []
        self.finished = False
        self.stale_groups = self.stale_rollouts = 0
        self.history = WeightHistory([])

    @property
    def missing(self) -> int:
        return 0 if self.finished else self.wanted - len(self.groups)

    def take(self, page: Page) -> None:
        for line in page.lines:
            group = results.group(line)
            self.groups.append((group, versions_of(group)))
        self.cursor, self.finished = page.cursor, page.finished
        self.drop_stale()

    def drop_stale(self) -> None:
        if self.max_lag is None:
            return
        kept = [item for item in self.groups if self.history.lag(item[1]) <= self.max_lag]
        self.stale_groups += len(self.groups) - len(kept)
        self.stale_rollouts += sum(len(group.trajectories) for group, _ in self.groups)
        self.stale_rollouts -= sum(len(group.trajectories) for group, _ in kept)
        self.groups = kept

    def batch(self) -> Batch:
        limited = self.max_lag is not None
        return Batch(
            groups=[group for group, _ in self.groups],
            start=self.start,
            cursor=self.cursor,
            finished=self.finished,
            stale_groups=self.stale_groups,
            stale_rollouts=self.stale_rollouts,
            lags=[self.history.lag(versions) for _, versions in self.groups] if limited else [],
            policy_version=self.history.newest,
        )


def gather(
    job: str,
    namespace: str,
    groups: int,
    *,
    max_lag: int | None,
    cursor: str | None,
    consumer: str | None,
    informative: bool,
    timeout: float,
) -> Steps:
    """Yield the calls that read a batch, and return it. `Client.batch` explains the arguments.

    Raises:
        Invalid: An argument is wrong, or `max_lag` is given for a job without a pool.
        WaitTimeout: Not enough groups have ended in time.
    """
    _check(groups, max_lag, cursor, consumer, timeout)
    end = time.monotonic() + timeout
    if cursor is None:
        cursor = "" if consumer is None else (yield from _resumed(job, namespace, consumer))
    found = _Gathered(cursor, groups, max_lag)
    pool = None if max_lag is None else (yield from _pool_of(job, namespace))
    while True:
        # The weights may have been updated while groups were waited for.
        if pool is not None:
            found.history = WeightHistory((yield weights.weight_updates(pool, namespace)))
            found.drop_stale()
        if not found.missing:
            return found.batch()
        while found.missing:
            left = end - time.monotonic()
            page = partial(results.groups, job, namespace, informative=informative, dropped=False)
            wait, limit = max(0.0, min(LONG_POLL, left)), min(PAGE_GROUPS, found.missing)
            before = found.cursor
            found.take((yield page(cursor=before, wait=wait, limit=limit)))
            if found.missing and left <= 0 and (found.cursor == before or left <= -BACKLOG_SECONDS):
                raise WaitTimeout(
                    f"RolloutJob {job!r}: {len(found.groups)} of {groups} groups"
                    f"{' with a signal' if informative else ''} have ended within {timeout:g} s, "
                    f"and {found.stale_groups} more are older than max_lag; nothing was acknowledged, so the "
                    "next call begins with the same groups"
                )


def _check(
    groups: int, max_lag: int | None, cursor: str | None, consumer: str | None, timeout: float
) -> None:
    if not 1 <= groups <= MAX_GROUPS:
        raise Invalid(f"groups: must be from 1 to {MAX_GROUPS} (got {groups})")
    if max_lag is not None and max_lag < 0:
        raise Invalid(f"max_lag: must be at least 0, or None for any (got {max_lag})")
    if cursor is not None and consumer is not None:
        raise Invalid("give 'cursor' or 'consumer', not both")
    if not timeout >= 0:
        raise Invalid(f"timeout: must be at least 0 seconds (got {timeout})")


def _resumed(job: str, namespace: str, consumer: str) -> Generator[Call[Any], Any, str]:
    try:
        kept = yield cursors.acknowledged(job, namespace, consumer)
    except NotFound as error:
        return begin_at(error)
    return str(kept.cursor)


def _pool_of(job: str, namespace: str) -> Generator[Call[Any], Any, str]:
    found = yield jobs.job(job, namespace)
    reference = found.spec.backend_ref
    if reference is None:
        raise Invalid(f"max_lag: RolloutJob {job!r} has no spec.backendRef, so its tokens have no weights")
    return str(reference.name)
