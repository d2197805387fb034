"""A stream that plays the tasks of a trainer's batch, and returns the trajectories of each task.

Trainers whose rollouts are a function (TRL, verl, SkyRL) call this: prompts go in, and whole rollouts come
out.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from rollyard_client.errors import JobFailed, RollyardError

from rollyard.integrations.errors import RolloutsLate, StreamEnded, TrainerMismatch

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds import RolloutJob
    from rollyard_crds.task import Task
    from rollyard_crds.trajectory import Trajectory

MAX_ID: Final = 128
"""The largest number of characters of a task's id."""
PLAY_SECONDS: Final = 1800.0


@dataclass(slots=True)
class _Pending:
    future: Future[list[Trajectory]]
    samples: int
    arrived: list[Trajectory] = field(default_factory=list)


class StreamPlayer:
    """Plays tasks through one stream, again and again, without a restart of its workers.

    The job is submitted when the player is made. If it exists already, the player uses it, unless it takes no
    more tasks. A thread reads the trajectories as they end. Calls may come from several threads.

    Args:
        client: The client of the control plane.
        job: The manifest of a stream, with `spec.tasks.stream: true`. Each task that is played makes
            `spec.samplesPerTask` rollouts.

    Raises:
        TrainerMismatch: The job is not a stream.
        StreamEnded: A job of this name was closed, was cancelled or has ended.
        RollyardError: The control plane refuses the job.
    """

    def __init__(self, client: Client, job: RolloutJob | Mapping[str, Any]) -> None:
        import rollyard_crds as crds
        from rollyard_client.finish import finished
        from rollyard_crds.fields.annotations import CANCEL_REASON, CLOSED

        manifest = crds.RolloutJob.model_validate(job)
        if not manifest.spec.tasks.stream:
            raise TrainerMismatch(
                f"job {manifest.metadata.name}: spec.tasks must be {{stream: true}}, so that each step "
                f"of the trainer can add its tasks"
            )
        self.client = client
        self.job = client.submit(manifest)
        self.name: str = self.job.metadata.name
        self.namespace: str = self.job.metadata.namespace
        # Its first tasks would be refused too, but trainers change the pool's weights before that.
        if finished(self.job) or not {CLOSED, CANCEL_REASON}.isdisjoint(self.job.metadata.annotations):
            raise StreamEnded(
                f"there is a job {self.name!r} of an earlier run, which takes no more tasks (it is "
                f"{self.job.status.phase}): choose another name for this run"
            )
        self.samples: int = self.job.spec.samples_per_task
        # Tasks of an earlier run of the trainer may be in the stream, so ids must differ from theirs.
        self._life = uuid.uuid4().hex[:8]
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._pushed = 0
        self._reader: threading.Thread | None = None
        self._cursor = ""
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, tasks: Sequence[Task | Mapping[str, Any]]) -> list[Future[list[Trajectory]]]:
        """Push tasks, and return a future for each: its trajectories, in the order of their samples.

        A task may be pushed any number of times; each time it gets an id of its own, which `task_id` of the
        trajectories shows. `asyncio.wrap_future` makes the futures awaitable.

        Raises:
            RollyardError: The control plane refuses the tasks.
            StreamEnded: The player was closed.
        """
        import rollyard_crds as crds

        pushed = []
        entries: list[tuple[str, _Pending]] = []
        with self._lock:
            if self._closed:
                raise StreamEnded(f"the player of job {self.name} was closed")
            for task in tasks:
                model = crds.Task.model_validate(task)
                self._pushed += 1
                name = f"{model.id[: MAX_ID - 24]}:{self._life}-{self._pushed}"
                pushed.append(model.model_copy(update={"id": name}))
                entries.append((name, _Pending(Future(), self.samples)))
            self._pending.update(entries)
        try:
            self.client.push_tasks(self.name, pushed, self.namespace)
        except BaseException:
            self._drop([pending.future for _, pending in entries])
            raise
        self._read()
        return [pending.future for _, pending in entries]

    def play(
        self, tasks: Sequence[Task | Mapping[str, Any]], *, timeout: float = PLAY_SECONDS
    ) -> list[list[Trajectory]]:
        """Push tasks, wait until all their rollouts have ended, and return the trajectories of each task.

        Failed and cancelled rollouts are among them.

        Raises:
            RolloutsLate: Rollouts have not ended within `timeout` seconds. They stay in the job.
            StreamEnded: The job ended before they did.
            RollyardError: The control plane refuses the tasks, or does not answer any more.
        """
        futures = self.start(tasks)
        end = time.monotonic() + timeout
        try:
            return [future.result(max(0.0, end - time.monotonic())) for future in futures]
        except TimeoutError:
            late = [future for future in futures if not future.done()]
            self._drop(late)
            raise RolloutsLate(
                f"{len(late)} of {len(futures)} tasks of job {self.name} have not ended within {timeout:.0f} "
                f"s; `rollyard describe {self.name}` says where they are"
            ) from None

    def play_each(self, tasks: Sequence[Task], *, timeout: float = PLAY_SECONDS) -> list[Trajectory]:
        """Play a batch in which each task occurs once for each of its samples, and return a rollout for each.

        Entries with the same id are played as groups of `spec.samplesPerTask`.

        Raises:
            TrainerMismatch: The number of entries of a task is not a multiple of that.
            RolloutsLate: Rollouts have not ended within `timeout` seconds. They stay in the job.
            StreamEnded: The job ended before they did.
            RollyardError: The control plane refuses the tasks, or does not answer any more.
        """
        indexes: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            indexes.setdefault(task.id, []).append(index)
        batch: list[Task] = []
        for name, of in indexes.items():
            groups, rest = divmod(len(of), self.samples)
            if rest:
                raise TrainerMismatch(
                    f"task {name} stands {len(of)} times in this process's batch, and the job's "
                    f"samplesPerTask is {self.samples}: make the trainer's number of samples a multiple of it"
                )
            batch += [tasks[of[0]]] * groups
        rows: dict[int, Trajectory] = {}
        for task, group in zip(batch, self.play(batch, timeout=timeout), strict=True):
            for trajectory in group:
                rows[indexes[task.id].pop(0)] = trajectory
        return [rows[index] for index in range(len(tasks))]

    def close(self) -> None:
        """Close the stream. Rollouts in progress run to their end, but their futures are cancelled."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = list(self._pending.values())
            self._pending.clear()
        for pending in left:
            pending.future.cancel()
        self.client.close_stream(self.name, self.namespace)

    def _drop(self, futures: Sequence[Future[list[Trajectory]]]) -> None:
        dropped = set(map(id, futures))
        with self._lock:
            self._pending = {
                name: pending for name, pending in self._pending.items() if id(pending.future) not in dropped
            }

    def _read(self) -> None:
        with self._lock:
            if self._reader is None or not self._reader.is_alive():
                self._reader = threading.Thread(target=self._follow, name=f"{self.name}-reader", daemon=True)
                self._reader.start()

    def _follow(self) -> None:
        try:
            # Only one reader runs at a time, so each begins where the one before it ended.
            results = self.client.trajectories(
                self.name, follow=True, timeout=None, cursor=self._cursor, namespace=self.namespace
            )
            for trajectory in results:
                self._cursor = results.cursor
                self._take(trajectory)
                if self._closed:
                    return
            error: Exception = StreamEnded(f"job {self.name} has ended")
        except JobFailed as problem:
            error = StreamEnded(str(problem))
        except RollyardError as problem:
            error = problem
        except Exception as problem:
            # Otherwise, a page that cannot be read would leave all callers waiting.
            error = StreamEnded(f"the trajectories of job {self.name} cannot be read: {problem}")
        with self._lock:
            left = list(self._pending.values())
            self._pending.clear()
            self._reader = None
        for pending in left:
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(error)

    def _take(self, trajectory: Trajectory) -> None:
        with self._lock:
            pending = self._pending.get(trajectory.task_id)
            if pending is None:
                return
            pending.arrived.append(trajectory)
            if len(pending.arrived) < pending.samples:
                return
            del self._pending[trajectory.task_id]
        pending.arrived.sort(key=lambda sample: sample.sample_index)
        if pending.future.set_running_or_notify_cancel():
            pending.future.set_result(pending.arrived)
