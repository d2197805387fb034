"""Batches of groups, as a GRPO or DAPO trainer takes them for one step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from rollyard_client.call import Call, Steps
from rollyard_client.errors import Invalid, JobFailed, NotFound
from rollyard_client.finish import check_success, deleted, late
from rollyard_client.paging import LONG_POLL, begin_at
from rollyard_client.requests import cursors, jobs, pools, results
from rollyard_client.requests.results import Group
from rollyard_client.training.packed import GroupArrays, TrajectoryArrays, group_page

if TYPE_CHECKING:
    from rollyard_crds.trajectory import Trajectory
    from rollyard_crds.weights import WeightUpdate

    from rollyard_client.training.arrays import Arrays

G = TypeVar("G", Group, GroupArrays)
B = TypeVar("B")

MAX_GROUPS: Final = 65_536
"""The most groups of one batch."""
PAGE_GROUPS: Final = 16
BACKLOG_SECONDS: Final = 60.0
"""How long groups that have already ended are read after the time of a call is up."""


@dataclass(frozen=True, slots=True)
class GroupBatch(Generic[G]):
    """What `Batch` and `ArrayBatch` share; G is the type of a group."""

    groups: list[G]
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

    def arrays(self, *, pad_id: int = 0) -> Arrays:
        """Return the batch as padded numpy arrays, one row for each segment.

        Raises:
            RollyardError: numpy is not installed.
        """
        from rollyard_client.training.arrays import numpy_arrays

        return numpy_arrays(self.groups, pad_id)

    def tensors(self, *, pad_id: int = 0, device: Any = None) -> Arrays:
        """Return the batch as padded torch tensors on `device`, one row for each segment.

        Raises:
            RollyardError: numpy or torch is not installed.
        """
        from rollyard_client.training.arrays import torch_tensors

        return torch_tensors(self.groups, pad_id, device)


@dataclass(frozen=True, slots=True)
class Batch(GroupBatch[Group]):
    """Whole groups for one step of a trainer.

    A trainer that is done with a batch keeps `cursor`, in its checkpoint or by `Client.acknowledge`, and
    takes the next batch from there. Nothing is lost if it dies before that: the next call from `start`
    returns the same groups again, unless weight updates have made them too old in the meantime.
    """

    @property
    def trajectories(self) -> list[Trajectory]:
        """The trajectories of all groups, group by group."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@dataclass(frozen=True, slots=True)
class ArrayBatch(GroupBatch[GroupArrays]):
    """Whole groups for one step of a trainer, like a `Batch`, but with token lists that are numpy arrays."""

    @property
    def trajectories(self) -> list[TrajectoryArrays]:
        """The trajectories of all groups, group by group."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The arguments of a call for a batch, which `Client.batch` explains.

    Raises:
        Invalid: An argument is wrong.
    """

    job: str
    groups: int
    max_lag: int | None
    cursor: str | None
    consumer: str | None
    informative: bool
    timeout: float
    namespace: str

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= MAX_GROUPS:
            raise Invalid(f"groups: must be from 1 to {MAX_GROUPS} (got {self.groups})")
        if self.max_lag is not None and self.max_lag < 0:
            raise Invalid(f"max_lag: must be at least 0, or None for any (got {self.max_lag})")
        if self.cursor is not None and self.consumer is not None:
            raise Invalid("give 'cursor' or 'consumer', not both")
        if not self.timeout >= 0:
            raise Invalid(f"timeout: must be at least 0 seconds (got {self.timeout})")


@dataclass(frozen=True, slots=True)
class BatchForm(Generic[G, B]):
    """How the pages of a batch are read, and what is made of them."""

    kind: Callable[..., B]
    page: Callable[..., Call[Any]]
    """Returns the call that reads a page of groups, without those that were dropped."""
    groups: Callable[[Any], list[G]]
    """Returns the groups of a page."""
    versions: Callable[[G], set[str]]
    """Returns the policy versions of a group's sampled tokens."""


class WeightHistory:
    """The weights that a pool has had, by their policy version.

    Failed updates do not count, because no token was kept that was sampled with their weights.

    Args:
        updates: The pool's weight updates, the newest first, as `Client.weight_updates` returns them.
    """

    def __init__(self, updates: Sequence[WeightUpdate]) -> None:
        versions = [update.policy_version for update in updates if update.state != "Failed"]
        self.newest = versions[0] if versions else ""
        """The version of the newest weights, or "" before the first update."""
        self._oldest = len(versions)
        # Weights that were loaded again have several updates, and the newest counts.
        self._lags = {version: lag for lag, version in reversed(list(enumerate(versions)))}

    def lag(self, versions: Iterable[str]) -> int:
        """Return the number of updates since the oldest of these versions, which is 0 if there are none.

        A version without an update is that of the servers' first weights, or older than all updates that the
        control plane lists. It counts as older than all of them.
        """
        return max((self._lags.get(version, self._oldest) for version in versions), default=0)


def versions_of(group: Group) -> set[str]:
    """Return the policy versions of a group's sampled tokens."""
    versions: set[str] = set()
    for trajectory in group.trajectories:
        for segment in trajectory.segments:
            versions.update(segment.policy_versions)
    versions.discard("")
    return versions


def _versions_of_arrays(group: GroupArrays) -> set[str]:
    segments = [segment for trajectory in group.trajectories for segment in trajectory.segments]
    return {version for segment in segments for version, _ in segment.policy_versions if version}


MODELS: Final = BatchForm(
    Batch,
    partial(results.groups, dropped=False),
    lambda page: [results.group(line) for line in page.lines],
    versions_of,
)
"""Groups of `Trajectory`."""
RAW_ARRAYS: Final = BatchForm(ArrayBatch, group_page, lambda page: page.groups, _versions_of_arrays)
"""Groups whose token lists are arrays."""


class _Gathered(Generic[G]):
    """The groups that were read so far, and the counts of those left out because they are too old."""

    def __init__(self, start: str, count: int, max_lag: int | None) -> None:
        self.start = self.cursor = start
        self.count = count
        self.max_lag = max_lag
        self.groups: list[tuple[G, set[str]]] = []
        self.finished = False
        self.stale_groups = self.stale_rollouts = 0
        self.history = WeightHistory([])

    @property
    def missing(self) -> int:
        return 0 if self.finished else self.count - len(self.groups)

    def take(self, groups: Sequence[tuple[G, set[str]]], cursor: str, finished: bool) -> None:
        self.groups += groups
        self.cursor, self.finished = cursor, finished
        self.drop_stale()

    def drop_stale(self) -> None:
        if self.max_lag is None:
            return
        fresh = [item for item in self.groups if self.history.lag(item[1]) <= self.max_lag]
        self.stale_groups += len(self.groups) - len(fresh)
        self.stale_rollouts += sum(len(group.trajectories) for group, _ in self.groups)
        self.stale_rollouts -= sum(len(group.trajectories) for group, _ in fresh)
        self.groups = fresh

    def batch(self, kind: Callable[..., B]) -> B:
        limited = self.max_lag is not None
        return kind(
            groups=[group for group, _ in self.groups],
            start=self.start,
            cursor=self.cursor,
            finished=self.finished,
            stale_groups=self.stale_groups,
            stale_rollouts=self.stale_rollouts,
            lags=[self.history.lag(versions) for _, versions in self.groups] if limited else [],
            policy_version=self.history.newest,
        )


def gather(form: BatchForm[G, B], request: BatchRequest) -> Steps[B]:
    """Yield the calls that read a batch, and return it.

    Raises:
        Invalid: `max_lag` is given for a job without a pool.
        JobFailed: The job has ended without success, and has fewer groups.
        WaitTimeout: Not enough groups have ended in time.
    """
    job, namespace, max_lag = request.job, request.namespace, request.max_lag
    end = time.monotonic() + request.timeout
    cursor = request.cursor
    if cursor is None:
        cursor = "" if request.consumer is None else (yield from _resumed(job, namespace, request.consumer))
    gathered: _Gathered[G] = _Gathered(cursor, request.groups, max_lag)
    pool = None if max_lag is None else (yield from _pool_of(job, namespace))
    seen = pool is not None
    while True:
        # The weights may have been updated while groups were waited for.
        if pool is not None:
            gathered.history = WeightHistory((yield pools.weight_updates(pool, namespace)))
            gathered.drop_stale()
        if not gathered.missing:
            if len(gathered.groups) < request.groups:
                yield from _check_end(request, len(gathered.groups))
            return gathered.batch(form.kind)
        while gathered.missing:
            left = end - time.monotonic()
            # The first page shows that the job is there, so that its end is not mistaken for a wrong name.
            wait = max(0.0, min(LONG_POLL, left)) if seen else 0.0
            limit = min(PAGE_GROUPS, gathered.missing)
            before = gathered.cursor
            call = form.page(
                job, namespace, cursor=before, wait=wait, limit=limit, informative=request.informative
            )
            try:
                page = yield call
            except NotFound as error:
                if not seen:
                    raise
                raise deleted(job) from error
            seen = True
            read = [(group, form.versions(group)) for group in form.groups(page)]
            gathered.take(read, page.cursor, page.finished)
            if gathered.missing and left <= 0 and (gathered.cursor == before or left <= -BACKLOG_SECONDS):
                older = (
                    f", and {gathered.stale_groups} more are older than max_lag"
                    if max_lag is not None
                    else ""
                )
                kind = " with a signal" if request.informative else ""
                text = (
                    f"RolloutJob {job!r}: {len(gathered.groups)} of {request.groups} groups{kind} have ended "
                    f"within {request.timeout:g} s{older}"
                )
                again = "; nothing was acknowledged, so the next call begins with the same groups"
                yield from late(text, job, namespace, end=again)


def _check_end(request: BatchRequest, groups: int) -> Steps[None]:
    try:
        yield from check_success(request.job, request.namespace)
    except JobFailed as error:
        raise JobFailed(
            f"{error}; {groups} of {request.groups} groups had ended, which `groups` with the same cursor "
            "still returns",
            reason=error.reason,
        ) from error


def _resumed(job: str, namespace: str, consumer: str) -> Steps[str]:
    try:
        position = yield cursors.acknowledged(job, namespace, consumer)
    except NotFound as error:
        return begin_at(error)
    return str(position.cursor)


def _pool_of(job: str, namespace: str) -> Steps[str]:
    manifest = yield jobs.job(job, namespace)
    reference = manifest.spec.backend_ref
    if reference is None:
        raise Invalid(f"max_lag: RolloutJob {job!r} has no spec.backendRef, so its tokens have no weights")
    return str(reference.name)
