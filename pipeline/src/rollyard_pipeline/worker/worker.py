"""The stage worker, with three independent pools, one outbox and one heartbeat.

It brings images of tasks that wait in the queue of Init to the node before their rollouts are leased.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollyard_crds.lease import MAX_BATCH, Lease, LeaseRequest, StageFailure, StageTimes
from rollyard_crds.rolloutjob import STAGES, RolloutJobSpec, SandboxSpec, StageName
from rollyard_crds.task import TaskSandbox
from rollyard_crds.trajectory import TokensMissing
from rollyard_inference.errors import BackendError
from rollyard_process.telemetry.export import SpanExport
from rollyard_process.telemetry.scope import RolloutScope, entered
from rollyard_process.waiting import first_of
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.control_plane.calls import (
    TRY_AGAIN,
    ControlPlaneUnavailable,
    WorkerCalls,
    persistent,
)
from rollyard_pipeline.control_plane.leases import HeldLease, LeaseTable
from rollyard_pipeline.errors import ControlPlaneRefused, JobEnded, PipelineError
from rollyard_pipeline.handlers.isolated.places import message_of
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.errors import DiskFull, SandboxProviderError
from rollyard_pipeline.sandboxes.interface import SandboxProvider, SandboxRequest
from rollyard_pipeline.stages.contexts import SandboxUse
from rollyard_pipeline.stages.sandbox_places import SandboxPlaces
from rollyard_pipeline.stages.stages import Stages
from rollyard_pipeline.trajectories.sanitize import clean_text
from rollyard_pipeline.worker.heartbeat import Heartbeat
from rollyard_pipeline.worker.outbox import Outbox

AT_ONCE: Final = 2
"""The number of images that are brought at the same time. A cache has more places, which Init can use."""
LOOK_SECONDS: Final = 10.0
"""The pause after a look at the queue that has found nothing new to bring."""
FULL_SECONDS: Final = 60.0
"""The pause after an image for which there was no room."""
REST_SECONDS: Final = 60.0
"""How long a job whose waiting tasks name no image is left alone."""
_TRIES: Final = 3
_MAX_JOBS: Final = 256


log = logging.getLogger(__name__)

_LAST_REPORT_SECONDS: Final = 10.0
"""How long a drained worker retries reports to a control plane that does not answer, in seconds."""
_MESSAGE_LIMIT: Final = 4096  # StageFailure has the same limit.
POLL_SECONDS: Final = 20.0
GATHER_SECONDS: Final = 0.015
"""How long a free place waits for others while there is other work in this stage, in seconds. One request
then leases for all of them."""
PACE_SECONDS: Final = 0.05
"""The shortest time from an answer to the next request while there is other work in this stage, in seconds.
Where stages are short, one request then leases for several places. A pool whose work has ended does not wait
for it, because its places would stand idle."""
_ROOM_CHECK: Final = (
    1.0  # The time between two checks for room that another process may have made, in seconds.
)
UNKNOWN_PLACES: Final = 64
"""The places of a pool for which sandboxes are prepared until the control plane has said how many it has."""
SANDBOX_MEMORY: Final = 64 << 20
"""The memory of a node that a sandbox takes beyond the first `UNKNOWN_PLACES`, in bytes. With a shell, one of
bubblewrap takes 4 MiB, and with IPython 80 MiB."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of a worker."""

    worker: str
    """The worker's name, which is unique among the live workers."""
    node: str
    """The node's name. The sandboxes of a node are reached by the workers of that node."""
    concurrency: Mapping[StageName, int]
    """The number of places per stage. A stage that is left out has no pool in this worker."""
    job: str | None = None
    namespace: str | None = None
    max_sandboxes: int | None = None
    """The number of sandboxes on the node beyond which Init waits (see `stages.sandbox_places`).

    If it is None, `sandbox_limit()` applies.
    """
    memory: int | None = None
    """The memory of the node that its sandboxes share, in bytes, or None if they are elsewhere."""
    sandboxes_end: bool = False
    """Whether the sandboxes that the worker starts end with it, as those of a batch job do."""
    trouble_file: Path | None = None
    """The file in which the worker explains why it takes no Init work.

    It exists only while there is a reason.
    """
    drain_seconds: float = 30.0
    backend_budget: float = 60.0
    eval_grace: float = 30.0
    extensions: Registry = field(default_factory=Registry)
    formats: FormatCache = field(default_factory=FormatCache)
    egress: Egress = field(default_factory=Egress)
    """The network of sandboxes whose jobs ask for one."""
    plugin_folder: Path | None = None
    """Where the plugins of jobs are put, which no sandbox has; see `stages.plugins`."""
    traces: SpanExport | None = None
    """The export of spans, or None if nothing is traced."""

    def sandbox_limit(self, pool_places: int = UNKNOWN_PLACES) -> int:
        """Return a limit that keeps Run and Eval busy while Init prepares the next sandboxes.

        A higher limit would only use more memory. Where the node has too little, Run is not as busy.

        Args:
            pool_places: The number of rollouts that the job's pool takes at once.
        """
        if self.max_sandboxes is not None:
            return self.max_sandboxes
        if self.memory is not None:
            pool_places = min(pool_places, max(UNKNOWN_PLACES, self.memory // SANDBOX_MEMORY))
        places = dict(self.concurrency)
        later = min(places.get("run", 0), pool_places) + places.get("eval", 0)
        return later + 2 * places.get("init", 0) if later else 4096


class Worker:
    """A worker, which runs until it is drained or, if it serves one job, until that job is over.

    Args:
        control: The control plane.
        backends: A backend client that has been entered as a context manager.
        provider: A started sandbox provider. If it is None, rollouts that need a sandbox fail on this worker.
    """

    def __init__(
        self,
        control: WorkerCalls,
        backends: BackendClient,
        provider: SandboxProvider | None,
        options: WorkerOptions,
    ) -> None:
        self._control = control
        self._options = options
        self._provider = provider
        self._sandbox_use: SandboxUse = "run"
        self._table = LeaseTable()
        self._places = SandboxPlaces(
            provider,
            usual=options.sandbox_limit(),
            limit=options.max_sandboxes,
            evals=options.concurrency.get("eval", 0),
        )
        self._stages = Stages(
            control,
            backends,
            provider,
            options.extensions,
            backend_budget=options.backend_budget,
            eval_grace=options.eval_grace,
            places=self._places,
            formats=options.formats,
            egress=options.egress,
            plugin_folder=options.plugin_folder,
        )
        self._images = ImagesAhead(control, provider)
        self._outbox = Outbox(control, options.worker, self._reported, self._table.any_working)
        self._heartbeat = Heartbeat(
            control,
            self._table,
            provider,
            worker=options.worker,
            node=options.node,
            sandboxes_end=options.sandboxes_end,
        )
        self._trouble = ""
        self._draining = asyncio.Event()
        self._handing_over = asyncio.Event()
        self._polls: list[asyncio.Task[None]] = []
        self._group: asyncio.TaskGroup | None = None
        self._pools: dict[StageName, StagePool] = {
            stage: StagePool(
                control,
                options,
                stage,
                self._start,
                self._room if stage == "init" and provider is not None else None,
                self._known_places,
            )
            for stage in STAGES
            if options.concurrency.get(stage, 0) > 0
        }

    def drain(self) -> None:
        """Take no more leases, finish held ones within `drain_seconds`, and hand over the rest."""
        self._draining.set()
        # At once: a pool that could still request leases would keep them from other workers.
        self._stop_polls()
        if self._provider is not None:
            self._provider.drain()

    def hand_over(self) -> None:
        """Drain, and hand over the held leases at once."""
        self._handing_over.set()
        self.drain()

    async def run(self) -> None:
        """Work until the job is over or the worker is drained."""
        try:
            async with asyncio.TaskGroup() as services:
                background = [
                    services.create_task(self._heartbeat.run()),
                    services.create_task(self._outbox.run()),
                ]
                try:
                    await self._work()
                finally:
                    for task in background:
                        task.cancel()
            await self._heartbeat.last()
        finally:
            self._write_trouble("")
            await self._images.close()
            await self._stages.close()

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as leases:
            self._group = leases
            async with asyncio.TaskGroup() as polls:
                self._polls = [polls.create_task(pool.run()) for pool in self._pools.values()]
                if "init" in self._pools and self._options.job is not None and self._provider is not None:
                    self._polls.append(polls.create_task(self._look_at(self._options.job)))
                if self._draining.is_set():
                    self._stop_polls()
            await self._finish()
        await self._last_reports()

    def _stop_polls(self) -> None:
        for poll in self._polls:
            poll.cancel()

    async def _finish(self) -> None:
        """Let held leases finish: within `drain_seconds` in a drain, without a limit if the job is over."""
        await first_of(self._draining.wait(), self._table.empty())
        if len(self._table):
            log.info("draining: %d rollouts held", len(self._table))
            await first_of(self._handing_over.wait(), self._emptied(self._options.drain_seconds))
        for holding in self._table:
            holding.end("drained")

    async def _last_reports(self) -> None:
        """Wait for the last reports.

        Every lease's task has ended, but its outcome may still be on its way.
        """
        await first_of(self._draining.wait(), self._table.empty())
        if not await self._emptied(_LAST_REPORT_SECONDS):
            log.error("%d outcomes could not be reported; their leases will expire", len(self._table))

    async def _emptied(self, seconds: float) -> bool:
        """Wait up to `seconds` until no lease is held. Return whether that happened in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._table.empty()
        except TimeoutError:
            return False
        return True

    async def _look_at(self, job: str) -> None:
        """Find out where the rollouts of the job have sandboxes. Until then, Init waits for room for them."""
        try:
            namespace = self._options.namespace or "default"
            spec = await persistent(lambda: self._control.job_spec(namespace, job))
            self._sandbox_use = await self._stages.sandbox_use(spec, namespace, job)
        except Exception as error:
            # The rollouts will fail in the same way, and their reports say more.
            log.info("it is not known where the rollouts of %s have sandboxes: %s", job, error)

    def _room(self) -> int:
        if self._provider is None or self._sandbox_use == "none":
            return MAX_BATCH
        trouble = self._provider.trouble()
        self._tell(trouble)
        if trouble:
            return 0
        if self._sandbox_use == "eval":
            return MAX_BATCH
        # Rollouts in Init that have no sandbox yet are about to claim one.
        coming = sum(holding.lease.stage == "init" and holding.sandbox is None for holding in self._table)
        return self._places.room(coming)

    def _known_places(self, places: int) -> None:
        """Prepare as many sandboxes as the job's pool takes rollouts at once."""
        self._places.usual = self._options.sandbox_limit(places)

    def _tell(self, trouble: str) -> None:
        """Report what keeps this node from starting sandboxes, once for each change."""
        if trouble == self._trouble:
            return
        if trouble:
            log.warning("no Init work is taken: %s", trouble)
        else:
            log.info("Init work is taken again (it was not: %s)", self._trouble)
        self._trouble = trouble
        self._write_trouble(trouble)

    def _write_trouble(self, trouble: str) -> None:
        file = self._options.trouble_file
        if file is None:
            return
        try:
            if trouble:
                scratch = file.with_name(f".{file.name}")
                scratch.write_text(trouble)
                scratch.replace(file)
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("--trouble-file %s: %s", file, error)

    def _start(self, lease: Lease) -> None:
        if self._group is None:
            raise RuntimeError("a lease came before the worker ran")
        holding = HeldLease(lease, scope=self._scope(lease))
        self._table.add(holding)
        if lease.stage == "init":
            self._images.note(lease)
        holding.task = self._group.create_task(self._hold(holding), name=f"{lease.stage} {lease.rollout}")

    async def _hold(self, holding: HeldLease) -> None:
        """Work on one lease from its start to its report, and free its place at the end."""
        times = StageTimes()
        with entered(holding.scope):
            try:
                try:
                    holding.begun = True
                    if holding.stop is not None:
                        raise asyncio.CancelledError
                    result = await self._stages.work(holding, times)
                except asyncio.CancelledError:
                    if holding.stop is None:
                        raise
                    if (task := asyncio.current_task()) is not None:
                        task.uncancel()
                    await self._stopped(holding, times)
                except Exception as error:
                    self._failed(holding, stage_failure(holding.lease, error, times), error)
                else:
                    holding.done_with_sandbox |= holding.lease.stage == "eval"
                    self._outbox.put(holding, result)
            finally:
                self._pools[holding.lease.stage].release()

    def _scope(self, lease: Lease) -> RolloutScope:
        traces = self._options.traces
        return RolloutScope(
            namespace=lease.namespace,
            job=lease.job,
            rollout=lease.rollout,
            stage=lease.stage,
            token=lease.token,
            attempt=lease.attempt,
            sink=traces if traces is not None and traces.takes(lease.rollout) else None,
        )

    async def _stopped(self, holding: HeldLease, times: StageTimes) -> None:
        """Handle a lease that was stopped from outside by a cancellation, by fencing or by a drain."""
        lease = holding.lease
        if holding.stop == "drained":
            holding.done_with_sandbox = lease.stage != "eval"
            self._outbox.put(holding, hand_over(lease, times))
            return
        # A lost Eval may continue under another worker of this node, in the same sandbox.
        if holding.stop == "cancelled" or lease.stage != "eval":
            await self._release(holding)
        await self._table.remove(holding)

    def _failed(self, holding: HeldLease, failure: StageFailure, error: Exception) -> None:
        # The traceback of a user's code is a note of the exception.
        expected = failure.reason != "InternalError" and not hasattr(error, "__notes__")
        log.warning(
            "%s of %s failed: %s: %s",
            failure.stage,
            failure.rollout,
            failure.reason,
            failure.message,
            exc_info=None if expected else error,
        )
        keeps = failure.stage == "eval" and failure.retryable and failure.return_to is None
        holding.done_with_sandbox = not keeps
        self._outbox.put(holding, failure)

    async def _release(self, holding: HeldLease) -> None:
        handle = holding.sandbox or holding.lease.sandbox
        if handle is None or self._provider is None:
            return
        try:
            await self._provider.release(handle)
        except SandboxProviderError as error:
            # The sandbox has no owner any more, so a later heartbeat reports it as an orphan.
            log.warning("sandbox %s: %s", handle.id, error)

    async def _reported(self, holding: HeldLease, outcome: str) -> None:
        lease = holding.lease
        with entered(holding.scope):
            if outcome in ("stale", "cancelled", "unknown"):
                log.info("%s of %s: the outcome is %s", lease.stage, lease.rollout, outcome)
            # Nobody continues a rollout that was cancelled. A heartbeat would find its sandbox only while it
            # lives, and none may follow where the worker ends.
            if holding.done_with_sandbox or outcome in ("cancelled", "unknown"):
                await self._release(holding)
            await self._table.remove(holding)


def stage_failure(lease: Lease, error: Exception, times: StageTimes) -> StageFailure:
    """Return the failure to report for `error`. An unforeseen error is an `InternalError` and is retried."""
    retryable, return_to, counts = True, _same_stage(lease), True
    match error:
        case PipelineError():
            reason, retryable, counts = error.reason, error.retryable, error.counts
            if error.return_to is not None and (error.return_to != "init" or lease.stage != "init"):
                return_to = error.return_to
            message = str(error)
        case BackendError() | TokensMissing():
            reason, retryable, message = error.reason, error.retryable, str(error)
        case ExecError():
            # A fresh sandbox may succeed where the exec server failed.
            reason, return_to, message = error.reason, "init", str(error)
        case _:
            reason, message = "InternalError", message_of(error)
    return StageFailure(
        rollout=lease.rollout,
        token=lease.token,
        stage=lease.stage,
        reason=reason[:128],
        message=clean_text(message, _MESSAGE_LIMIT),
        retryable=retryable,
        return_to=return_to,
        counts=counts,
        times=times,
    )


def hand_over(lease: Lease, times: StageTimes) -> StageFailure:
    """Return the report that passes the rollout to another worker. It does not count as a failure."""
    return StageFailure(
        rollout=lease.rollout,
        token=lease.token,
        stage=lease.stage,
        reason="WorkerDrained",
        message="the worker stopped before the stage was done",
        return_to=_same_stage(lease),
        counts=False,
        times=times,
    )


def _same_stage(lease: Lease) -> StageName | None:
    """Return where the next attempt starts. A Run that used its sandbox starts again from a fresh one."""
    return "init" if lease.stage == "run" and lease.sandbox is not None else None


class StagePool:
    """The places of one stage.

    Args:
        options: The options of the worker, with the number of rollouts that may be worked on at once.
        stage: The stage: init, run or eval.
        start: Begins work on a lease. Its place is free again when `release` is called.
        room: Returns how many more rollouts the node can take now. Sandboxes limit this for Init.
        places: Called with the number of rollouts that the job's pool takes at once, when an answer says it.
    """

    def __init__(
        self,
        control: WorkerCalls,
        options: WorkerOptions,
        stage: StageName,
        start: Callable[[Lease], None],
        room: Callable[[], int] | None = None,
        places: Callable[[int], None] | None = None,
    ) -> None:
        self._control = control
        self._options = options
        self._start = start
        self._room = room
        self._pool_places = places
        self._busy = 0
        self._freed = asyncio.Event()
        self._idle = asyncio.Event()
        self._answered = -PACE_SECONDS
        self.stage: StageName = stage
        self.places = options.concurrency[stage]

    @property
    def busy(self) -> int:
        """Return the number of places in use."""
        return self._busy

    def release(self) -> None:
        """Free the place of a rollout that has ended."""
        self._busy -= 1
        self._freed.set()
        if self._busy == 0:
            self._idle.set()

    async def run(self) -> None:
        """Lease rollouts until cancelled, or until the control plane reports that the job is over."""
        tries = 0
        while True:
            free = await self._free()
            request = LeaseRequest(
                worker=self._options.worker,
                node=self._options.node,
                capacity={self.stage: free},
                job=self._options.job,
                namespace=self._options.namespace,
                wait=POLL_SECONDS,
            )
            try:
                answer = await self._control.lease(request)
            except JobEnded as error:
                log.info("%s: no more leases: %s", self.stage, error)
                return
            except (ControlPlaneUnavailable, ControlPlaneRefused) as error:
                tries += 1
                if tries in (1, 10, 100):
                    log.warning("%s: no lease: %s", self.stage, error)
                retry_after = error.retry_after if isinstance(error, ControlPlaneUnavailable) else None
                await asyncio.sleep(TRY_AGAIN.pause(tries, retry_after))
                continue
            tries = 0
            self._answered = time.monotonic()
            if answer.places is not None and self._pool_places is not None:
                self._pool_places(answer.places)
            for lease in answer.leases:
                self._busy += 1
                self._start(lease)
            if answer.draining and not answer.leases and self._options.job is not None:
                return

    async def _free(self) -> int:
        while True:
            if self._busy > 0:
                await asyncio.sleep(GATHER_SECONDS)
                await self._paced()
            self._freed.clear()
            free = min(self.places - self._busy, MAX_BATCH)
            if free > 0 and self._room is not None:
                free = min(free, await asyncio.to_thread(self._room))
            if free > 0:
                return free
            try:
                async with asyncio.timeout(_ROOM_CHECK if self._busy < self.places else None):
                    await self._freed.wait()
            except TimeoutError:
                continue

    async def _paced(self) -> None:
        """Wait until a request may follow the last answer, or no work is left in this stage."""
        left = self._answered + PACE_SECONDS - time.monotonic()
        if self._busy > 0 and left > 0:
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._idle.wait()


class ImagesAhead:
    """Brings images ahead of the queue, a few at a time, as far as the provider has room for them.

    A job is looked after from its first Init lease until no task in its queue names an image. A later Init
    lease begins this again. An image that cannot be brought is left to Init, which reports it.

    Args:
        control: The control plane.
        provider: The provider of sandboxes, or None for a worker without one.
        look_seconds: See `LOOK_SECONDS`.
        full_seconds: See `FULL_SECONDS`.
    """

    def __init__(
        self,
        control: WorkerCalls,
        provider: SandboxProvider | None,
        look_seconds: float = LOOK_SECONDS,
        full_seconds: float = FULL_SECONDS,
    ) -> None:
        self._control = control
        self._provider = provider if provider is not None and provider.fetches else None
        self._look_seconds, self._full_seconds = look_seconds, full_seconds
        self._places = asyncio.Semaphore(AT_ONCE)
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._resting: dict[str, float] = {}
        """When jobs that need nothing may be looked at again, by uid."""

    def note(self, lease: Lease) -> None:
        """Begin to look after the job of an Init lease, unless that has begun."""
        uid = lease.job_uid
        if self._provider is None or uid in self._jobs or self._resting.get(uid, 0.0) > time.monotonic():
            return
        if len(self._jobs) < _MAX_JOBS:
            self._jobs[uid] = asyncio.create_task(self._look_after(lease), name=f"images of {lease.job}")

    async def close(self) -> None:
        """End all of it. A build in progress ends, and leaves nothing."""
        tasks = list(self._jobs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self, lease: Lease) -> None:
        try:
            await self._bring(lease)
        except ControlPlaneRefused as error:
            # The job is over, for example.
            log.info("no images of %s are brought ahead: %s", lease.job, error)
        except Exception:
            log.exception("no images of %s are brought ahead", lease.job)
        finally:
            now = time.monotonic()
            self._resting = {uid: until for uid, until in self._resting.items() if until > now}
            self._resting[lease.job_uid] = now + REST_SECONDS
            self._jobs.pop(lease.job_uid, None)

    async def _bring(self, lease: Lease) -> None:
        """Bring images until no task that waits names one.

        Raises:
            ControlPlaneRefused: The control plane does not say what the job's tasks need.
        """
        tries: dict[str, int] = {}
        spec: RolloutJobSpec | None = None
        while True:
            pause = self._look_seconds
            with contextlib.suppress(ControlPlaneUnavailable):
                if spec is None:
                    spec = await self._control.job_spec(lease.namespace, lease.job, lease.job_uid)
                named = await self._control.waiting_images(lease.namespace, lease.job, lease.job_uid)
                if not named:
                    return
                if not await self._fetched(spec.sandbox, named, tries):
                    pause = self._full_seconds
            await asyncio.sleep(pause)

    async def _fetched(self, spec: SandboxSpec, named: Iterable[str], tries: dict[str, int]) -> bool:
        """Bring those images that were not tried often enough. Return whether there was room for all."""
        full = False

        async def bring(image: str) -> None:
            nonlocal full
            async with self._places:
                if full:
                    return
                assert self._provider is not None
                tries[image] = tries.get(image, 0) + 1
                try:
                    full |= not await self._provider.fetch(SandboxRequest.of(spec, TaskSandbox(image=image)))
                    tries[image] = 0 if full else _TRIES
                except SandboxProviderError as error:
                    full |= isinstance(error, DiskFull)
                    if not error.retryable:
                        tries[image] = _TRIES
                    log.info("the image %s is not brought ahead: %s", image, error)

        async with asyncio.TaskGroup() as group:
            for image in named:
                if tries.get(image, 0) < _TRIES:
                    group.create_task(bring(image))
        return not full
