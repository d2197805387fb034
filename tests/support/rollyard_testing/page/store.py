"""A control plane's store that is filled with ended rollouts in the way in which its own code ends them.

Rollouts are queued by `jobs.create`, ended by `transitions.apply` and moved into the trajectory store by the
archive. Whatever these keep for the page, such as counters, is therefore kept of the rollouts here as well.
Only the work of the stages is left out: their results are written into the rows.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import sqlalchemy as sa
from msgspec.structs import replace
from rollyard_api.backends import pools
from rollyard_api.core.codec import dumps, pack
from rollyard_api.core.limits import Quota
from rollyard_api.jobs import jobs, manifests
from rollyard_api.jobs.tasks import TaskRow
from rollyard_api.machine import events
from rollyard_api.machine.rollout import Rejection, Transition, decide
from rollyard_api.machine.rollout import Rollout as RolloutRow
from rollyard_api.machine.states import RolloutState
from rollyard_api.rollouts import transitions
from rollyard_api.settings import Settings
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import pools as pool_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import Database, Transaction, upgrade
from rollyard_api.storage.schema import pools as pool_table
from rollyard_api.storage.schema import weight_updates
from rollyard_api.trajectories import traces
from rollyard_api.trajectories.archive import Archive
from rollyard_api.trajectories.object_store import open_store
from rollyard_api.trajectories.packed import of_segments
from rollyard_crds.backendpool import BackendPool
from rollyard_crds.rolloutjob import STAGES, RolloutJob, StageName
from rollyard_crds.token_arrays import PackedSegment

from rollyard_testing.crds.segments import kept as kept_record
from rollyard_testing.manifests import job_manifest, pool_manifest

BATCH: Final = 1024
"""The number of rollouts that are ended in one transaction."""
_QUOTA: Final = Quota(1 << 40, 1 << 40)


class Recorded(NamedTuple):
    """What Run recorded, as the database keeps it."""

    record: bytes
    segments: bytes


def recorded(record: Mapping[str, Any]) -> Recorded:
    """Return a record of Run with segments as the database keeps it."""
    segments = of_segments(PackedSegment.of(**segment) for segment in record["segments"])
    return Recorded(pack(dumps(kept_record(record))), segments)


@dataclass(frozen=True, slots=True)
class Result:
    """How one rollout has ended. Its reward is a number if and only if `state` is SUCCEEDED."""

    state: RolloutState = RolloutState.SUCCEEDED
    reward: float | None = 1.0
    ended_at: float = 0.0
    """When it ended, in seconds since the epoch."""
    seconds: tuple[float, float, float] = (0.1, 1.0, 0.1)
    """How long Init, Run and Eval worked on it."""
    queued: tuple[float, float, float] = (0.5, 0.1, 0.05)
    """How long it waited for each of them."""
    model: float = 0.6
    """The part of Run in which the model sampled, in seconds."""
    tools: float = 0.3
    """The part of Run in which tools worked, in seconds."""
    recorded: Recorded | None = None
    """What Run recorded."""
    tokens: int = 0
    """The number of sampled tokens."""
    policy_index: int = 0
    worker: str = "worker-0"
    node: str = "node-0"
    backend: str | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    reward_reason: str | None = None
    reward_output: str | None = None
    stage: StageName = "eval"
    """The stage in which it ended."""
    reason: str | None = None
    message: str | None = None
    attempts: bytes | None = None
    """The attempts that did not end well, as `attempts.added` returns them."""

    @property
    def timings(self) -> str:
        """The timings as the rollout's row keeps them, with the times at which it entered its states."""
        document: dict[str, Any] = {}
        now = self.ended_at - sum(self.queued) - sum(self.seconds)
        before, since = RolloutState.QUEUED_INIT, now
        for stage, queued, active in zip(STAGES, self.queued, self.seconds, strict=True):
            document[stage] = {"queued_seconds": queued, "active_seconds": active, "attempts": 1}
            for state, at in ((RolloutState.queued(stage), now), (RolloutState.leased(stage), now + queued)):
                if state is not before:
                    traces.note(document, before, since, state, at)
                    before, since = state, at
            now += queued + active
            if stage == self.stage:
                break
        own = max(0.0, round(self.seconds[1] - self.model - self.tools, 6))
        worked = {"model_seconds": self.model, "tool_seconds": self.tools, "own_seconds": own}
        return dumps(document | worked).decode()


Rollout = tuple[int, int]
"""The number of a group and the number of a sample in it."""
Results = Callable[[int, int], Result]
"""A function from the number of a group and of a sample to the result."""


def plain_tasks(count: int, prefix: str = "task") -> list[TaskRow]:
    """Return rows of short tasks with the ids `PREFIX-00000` and so on."""
    return [task_row(f"{prefix}-{number:05d}") for number in range(count)]


def task_row(task_id: str, prompt: str = "Count the lines with willow.") -> TaskRow:
    """Return the row of a task. Its id is not checked, so it may be one that no request could bring."""
    return TaskRow(task_id, pack(dumps({"id": task_id, "prompt": prompt})))


class Store:
    """An open database and its archive, to be filled before a control plane serves them."""

    def __init__(self, database: Database, archive: Archive) -> None:
        self._database = database
        self._archive = archive

    async def pool(self, name: str, model: Path, versions: Sequence[str] = ()) -> None:
        """Register a pool whose tokenizer is in the folder of its model. It has no server that answers.

        Args:
            name: The name of the pool.
            model: The folder of its model.
            versions: The labels of the weights that it has had, whose policy_index counts from 1.
        """
        document = pool_manifest(
            name,
            {
                "model": str(model),
                "tokenizer": str(model),
                "engine": {"type": "external", "external": {"urls": ["http://127.0.0.1:9"]}},
            },
        )
        pool = BackendPool.model_validate(document)

        def create(tx: Transaction) -> None:
            pools.create(tx, pool)
            row = pool_rows.find(tx.conn, pool.metadata.namespace, name)
            for index, version in enumerate(versions, 1):
                _updated(tx, row.id, version, index)

        await self._database.write(create)

    async def job(
        self,
        name: str,
        tasks: Sequence[TaskRow],
        samples: int,
        results: Results,
        order: Sequence[Rollout],
        *,
        began: float,
        pool: str | None = None,
        namespace: str = "default",
    ) -> None:
        """Make a job, end some of its rollouts, and put their records into the trajectory store.

        Args:
            name: The name of the job.
            tasks: One group is made of each.
            samples: The rollouts of each group.
            results: The result of each rollout that ends.
            order: The rollouts that end, in the order in which they do. Others stay queued.
            began: When the job was created, in seconds since the epoch.
            pool: The pool that the job names.
            namespace: The namespace of the job.
        """
        document = job_manifest(
            name,
            {
                "tasks": {"inline": [{"id": "task", "prompt": "p"}]},
                "handler": "shell",
                "agent": {"type": "oracle"},
                "samplesPerTask": samples,
                **({} if pool is None else {"backendRef": {"name": pool}}),
            },
            namespace=namespace,
        )
        new = dataclasses.replace(manifests.prepare(RolloutJob.model_validate(document)), tasks=tasks)

        def create(tx: Transaction) -> tuple[int, str]:
            tx.now = began
            jobs.create(tx, new, _QUOTA)
            job = job_rows.find(tx.conn, namespace, name)
            return job.id, f"{name}-{job.uid[:8]}"

        job_id, prefix = await self._database.write(create)
        for batch in _batches(order):
            some = [(f"{prefix}-{no}-{sample}", no, results(no, sample)) for no, sample in batch]
            await self._database.write(partial(_end, job_id=job_id, ended=some))
            while await self._archive.flush():
                pass
        finished = len(order) == len(tasks) * samples
        # This is what a driver writes.
        status: dict[str, Any] = {
            "phase": "Succeeded" if finished else "Run",
            "observedGeneration": 1,
            "conditions": [],
        }
        await self._database.write(lambda tx: jobs.put_status(tx, namespace, name, status))


def _batches(order: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    left = iter(order)
    while batch := list(islice(left, BATCH)):
        yield batch


def _updated(tx: Transaction, pool_id: int, version: str, index: int) -> None:
    """Record an update of a pool's weights that has succeeded."""
    tx.conn.execute(
        sa.insert(weight_updates).values(
            pool_id=pool_id,
            policy_version=version,
            policy_index=index,
            request=b"{}",
            state="Succeeded",
            verified=True,
            verified_by="",
            message="",
            progress=b"{}",
            created_at=tx.now,
            finished_at=tx.now,
        )
    )
    values = {"policy_version": version, "policy_index": index}
    tx.conn.execute(sa.update(pool_table).where(pool_table.c.id == pool_id).values(**values))


def _end(tx: Transaction, job_id: int, ended: Sequence[tuple[str, int, Result]]) -> None:
    """Write what the stages would have left in the rows, and end the rollouts.

    Results that ended at the same time are ended together, because an end has the time of its transaction.
    """
    results = {name: result for name, _, result in ended}
    rollout_rows.change(tx, [{"b_id": name, **_work(result)} for name, result in results.items()])
    kept = [
        {"rollout_id": name, "trajectory": result.recorded.record, "segments": result.recorded.segments}
        for name, result in results.items()
        if result.recorded is not None
    ]
    rollout_rows.keep(tx, kept)
    rows = rollout_rows.named(tx, results)
    at: dict[float, list[transitions.Decided]] = {}
    for name, result in results.items():
        at.setdefault(result.ended_at, []).append((rows[name], _transition(rows[name], result)))
    for now, decided in at.items():
        tx.now = now
        transitions.apply(tx, decided)


def _work(result: Result) -> dict[str, Any]:
    """Return what the stages leave in a row, which enters its last state when it ends."""
    stage = result.stage
    failed = result.state == RolloutState.FAILED
    return {
        # A rollout that fails in a queue gets no further attempt beside those of the result.
        "state": RolloutState.queued(stage) if failed else RolloutState.leased(stage),
        "since": result.ended_at,
        "token": 3,
        "settled": "c1 c2",
        "timings": result.timings,
        "worker": result.worker,
        "backend": result.backend,
        "policy_index": result.policy_index,
        "sampled_tokens": result.tokens,
        "attempts": result.attempts,
    }


def _transition(row: RolloutRow, result: Result) -> Transition:
    """Return the transition with which a rollout ends."""
    event: events.Event = events.Cancelled(result.reason or "Cancelled")
    if result.reward is not None:
        components = dumps(dict(result.components)) if result.components else None
        event = events.Scored(
            row.token, result.reward, components, result.reward_reason, result.reward_output
        )
    elif result.state == RolloutState.FAILED:
        event = events.BackendAwaited(result.message or "", result.reason or "")
    decision = decide(row, event, None, result.ended_at)
    if isinstance(decision, Rejection):
        # Only a wait for Init or Run can be for a backend. The other failures look the same afterwards.
        decision = decide(replace(row, state=RolloutState.QUEUED_RUN), event, None, result.ended_at)
    assert isinstance(decision, Transition)
    return replace(decision, changes=decision.changes | {"message": result.message})


@asynccontextmanager
async def opened(state: Path) -> AsyncIterator[Store]:
    """Open the store of a state folder, which no control plane may serve at the same time."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    settings = Settings(state_dir=state)
    database = Database(settings.database_url)
    await asyncio.to_thread(upgrade, database.writer)
    archive = Archive(database, open_store(settings.trajectories_url, 60.0), 60.0)
    database.start(lambda _committed: None)
    try:
        await archive.open()
        yield Store(database, archive)
    finally:
        archive.close()
        await database.close()
