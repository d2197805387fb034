"""The stage worker, with three independent pools, one outbox and one heartbeat."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rollyard_crds.lease import Lease, StageFailure, StageTimes
from rollyard_crds.rolloutjob import STAGES, StageName
from rollyard_process.telemetry.export import SpanExport
from rollyard_process.telemetry.scope import RolloutScope, entered
from rollyard_process.waiting import first_of

from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.control_plane.calls import WorkerCalls
from rollyard_pipeline.control_plane.leases import HeldLease, LeaseTable
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.errors import SandboxProviderError
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.stages.sandbox_places import SandboxPlaces
from rollyard_pipeline.stages.stages import Stages
from rollyard_pipeline.worker.failures import hand_over, stage_failure
from rollyard_pipeline.worker.heartbeat import Heartbeat
from rollyard_pipeline.worker.images_ahead import ImagesAhead
from rollyard_pipeline.worker.outbox import Outbox
from rollyard_pipeline.worker.stage_pool import StagePool, WorkerIdentity

log = logging.getLogger(__name__)

_LAST_REPORT_SECONDS: Final = 10.0
"""How long a drained worker retries reports to a control plane that does not answer, in seconds."""


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

    If it is None, `sandbox_limit` applies.
    """
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
    traces: SpanExport | None = None
    """The export of spans, or None if nothing is traced."""

    @property
    def sandbox_limit(self) -> int:
        """Return a limit that keeps Run and Eval busy while Init prepares the next sandboxes.

        A higher limit would only use more memory.
        """
        if self.max_sandboxes is not None:
            return self.max_sandboxes
        places = dict(self.concurrency)
        later = places.get("run", 0) + places.get("eval", 0)
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
        self._options = options
        self._provider = provider
        self._table = LeaseTable()
        self._places = SandboxPlaces(
            provider,
            usual=options.sandbox_limit,
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
        identity = WorkerIdentity(options.worker, options.node, options.job, options.namespace)
        self._pools: dict[StageName, StagePool] = {
            stage: StagePool(
                control,
                identity,
                stage,
                options.concurrency[stage],
                self._start,
                self._room if stage == "init" and provider is not None else None,
            )
            for stage in STAGES
            if options.concurrency.get(stage, 0) > 0
        }

    def drain(self) -> None:
        """Take no more leases, finish held ones within `drain_seconds`, and hand over the rest."""
        self._draining.set()
        # At once: a pool that got to request leases before would keep them from other workers.
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
        for held in self._table:
            held.end("drained")

    async def _last_reports(self) -> None:
        """Wait for the last reports.

        Every lease's task has ended, but its outcome may still be on its way.
        """
        await first_of(self._draining.wait(), self._table.empty())
        if not await self._emptied(_LAST_REPORT_SECONDS):
            log.error("%d outcomes could not be reported; their leases will expire", len(self._table))

    async def _emptied(self, seconds: float) -> bool:
        """Wait up to `seconds` until no lease is held. Return whether that came in time."""
        try:
            async with asyncio.timeout(seconds):
                await self._table.empty()
        except TimeoutError:
            return False
        return True

    def _room(self) -> int:
        if self._provider is None:
            return self._options.sandbox_limit
        trouble = self._provider.trouble()
        self._tell(trouble)
        if trouble:
            return 0
        # Rollouts in Init that have no sandbox yet are about to claim one.
        coming = sum(held.lease.stage == "init" and held.sandbox is None for held in self._table)
        return self._places.room(coming)

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
        held = HeldLease(lease, scope=self._scope(lease))
        self._table.add(held)
        if lease.stage == "init":
            self._images.note(lease)
        held.task = self._group.create_task(self._hold(held), name=f"{lease.stage} {lease.rollout}")

    async def _hold(self, held: HeldLease) -> None:
        """Work on one lease from its start to its report, and free its place at the end."""
        with entered(held.scope):
            await self._held(held)

    async def _held(self, held: HeldLease) -> None:
        times = StageTimes()
        try:
            try:
                held.begun = True
                if held.stop is not None:
                    raise asyncio.CancelledError
                result = await self._stages.work(held, times)
            except asyncio.CancelledError:
                if held.stop is None:
                    raise
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
                await self._stopped(held, times)
            except Exception as error:
                self._failed(held, stage_failure(held.lease, error, times), error)
            else:
                held.done_with_sandbox = held.lease.stage == "eval"
                self._outbox.put(held, result)
        finally:
            self._pools[held.lease.stage].release()

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

    async def _stopped(self, held: HeldLease, times: StageTimes) -> None:
        """Handle a lease that was stopped from outside by a cancellation, by fencing or by a drain."""
        lease = held.lease
        if held.stop == "drained":
            held.done_with_sandbox = lease.stage != "eval"
            self._outbox.put(held, hand_over(lease, times))
            return
        # A lost Eval may continue under another worker of this node, in the same sandbox.
        if held.stop == "cancelled" or lease.stage != "eval":
            await self._release(held)
        await self._table.remove(held)

    def _failed(self, held: HeldLease, failure: StageFailure, error: Exception) -> None:
        expected = failure.reason != "InternalError"
        log.warning(
            "%s of %s failed: %s: %s",
            failure.stage, failure.rollout, failure.reason, failure.message,
            exc_info=None if expected else error,
        )  # fmt: skip
        keeps = failure.stage == "eval" and failure.retryable and failure.return_to is None
        held.done_with_sandbox = not keeps
        self._outbox.put(held, failure)

    async def _release(self, held: HeldLease) -> None:
        handle = held.sandbox or held.lease.sandbox
        if handle is None or self._provider is None:
            return
        try:
            await self._provider.release(handle)
        except SandboxProviderError as error:
            # The sandbox has no owner any more, so a later heartbeat reports it as an orphan.
            log.warning("sandbox %s: %s", handle.id, error)

    async def _reported(self, held: HeldLease, outcome: str) -> None:
        with entered(held.scope):
            await self._answered(held, outcome)

    async def _answered(self, held: HeldLease, outcome: str) -> None:
        lease = held.lease
        if outcome in ("stale", "cancelled", "unknown"):
            log.info("%s of %s: the outcome is %s", lease.stage, lease.rollout, outcome)
        # Nobody continues a rollout that was cancelled. A heartbeat would find its sandbox only while it
        # lives, and none may follow where the worker ends.
        if held.done_with_sandbox or outcome in ("cancelled", "unknown"):
            await self._release(held)
        await self._table.remove(held)
