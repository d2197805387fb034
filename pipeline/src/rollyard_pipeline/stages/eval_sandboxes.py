"""Eval's fresh sandbox: it is started, prepared as Init prepares one, given the carry, and released."""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

from rollyard_crds.fields.eval_carry import EvalCarry
from rollyard_crds.lease import Lease
from rollyard_crds.rolloutjob import EvalSandbox, RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_sandbox.errors import ConnectionLost
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import CarryRefused, EvalSandboxEnded, PipelineError
from rollyard_pipeline.handlers.base import FolderChanges, Handler, StageContext
from rollyard_pipeline.handlers.isolated.places import blocked
from rollyard_pipeline.sabotage import CRASHED, reward_reason
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.errors import SandboxLost, SandboxProviderError
from rollyard_pipeline.sandboxes.interface import Sandbox, SandboxProvider
from rollyard_pipeline.sandboxes.start_span import sandbox_started
from rollyard_pipeline.stages import eval_carry
from rollyard_pipeline.stages.contexts import eval_network, narrowed, pins_of, prepare, sandbox_request
from rollyard_pipeline.stages.inert_files import LeftBehind
from rollyard_pipeline.stages.sandbox_places import SandboxPlaces

log = logging.getLogger(__name__)

CARRIES_AT_ONCE: Final = 4
"""The number of rollouts whose carried files may be in the worker's memory at the same time."""


Attach = Callable[[Lease], AbstractAsyncContextManager[Sandbox | None]]


def carries(spec: RolloutJobSpec, handler: Handler, task: Task) -> bool:
    """Return whether a fresh sandbox of Eval gets anything that Run left."""
    return (
        spec.stages.eval.carry is not None
        or handler.eval_apart(task) is not None
        or handler.changes(task, "/") is not None
        or bool(handler.artifacts(task))
    )


def reaches(spec: RolloutJobSpec, handler: Handler, task: Task) -> bool:
    """Return whether anything from the policy gets into a fresh sandbox of Eval: files, or an answer."""
    return carries(spec, handler, task) or handler.judges_answer(task)


def eval_sandbox(spec: RolloutJobSpec, handler: Handler, task: Task) -> EvalSandbox:
    """Return which sandbox Eval uses.

    A task that must have a sandbox of its own gets it. Otherwise the job's own setting comes first. Without
    one, Eval gets a fresh sandbox if the job has a carry, or the task's tests have a network, and otherwise
    the kind that the handler prefers.

    Raises:
        TaskInvalid: The tests need a network that the job does not give them.
    """
    stage = spec.stages.eval
    if not handler.needs_sandbox:
        return "shared"  # This handler does not use a sandbox.
    if handler.eval_apart(task) is not None:
        return "fresh"
    if stage.sandbox is not None:
        return stage.sandbox
    networked = bool(eval_network(spec, handler, task).host_rules)
    return "fresh" if stage.carry is not None or networked else handler.eval_sandbox


class EvalSandboxes:
    """Provides fresh sandboxes for Eval, one for each rollout that is being evaluated.

    Run's sandbox is kept until the outcome is reported, which allows another worker to repeat Eval from what
    Run left. The fresh sandbox belongs to this process and is released in every case.

    Args:
        attach: Opens a connection to Run's sandbox.
        egress: The network of sandboxes, which `handler.init` has. That of the evaluation begins later.
    """

    def __init__(
        self, provider: SandboxProvider, places: SandboxPlaces, attach: Attach, egress: Egress
    ) -> None:
        self._provider = provider
        self._places = places
        self._attach = attach
        self._egress = egress
        self._carries = asyncio.Semaphore(CARRIES_AT_ONCE)
        self._releases: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def fresh(
        self, holding: HeldLease, spec: RolloutJobSpec, handler: Handler, context: StageContext
    ) -> AsyncIterator[Sandbox]:
        """Provide the sandbox in which `handler.eval` works, and release it afterwards.

        Args:
            context: The context of Eval. `handler.init` gets its own context with a copy of the JSON carry.
                If its purpose is "control", nothing of Run's is carried.

        Raises:
            CarryRefused: What Run left cannot be carried. The policy is to blame.
            EvalSandboxEnded: With the carried files or the answer, the evaluation used up the sandbox's
                memory, or ended its exec server once more. The policy is to blame.
            PermanentFailure: The job's Init makes the carry impossible.
            SandboxLost: Run's sandbox is gone, and the job has a carry.
            PipelineError: The fresh sandbox could not be prepared, or was lost, and Eval can be repeated.
                Or `handler.init` failed, or the provider failed in a way that no further attempt can fix.
        """
        networked = bool(eval_network(spec, handler, context.task).host_rules)
        left = LeftBehind() if networked else None
        async with self._places.for_eval(holding):
            holding.started = time.monotonic()  # Waiting for a place counts against no limit.
            try:
                async with await self._prepared(holding, spec, handler, context, left) as sandbox:
                    try:
                        yield sandbox
                    except (SandboxLost, ExecError) as error:
                        lost = isinstance(error, SandboxLost | ConnectionLost)
                        reached = context.purpose != "control" and reaches(spec, handler, context.task)
                        end = await self._provider.own_end(sandbox.handle) if lost and reached else ""
                        if end and (end != CRASHED or holding.lease.attempt):
                            raise EvalSandboxEnded(f"{error.reason}: {error}", end) from error
                        raise _failed(error) from error
            finally:
                context.show("" if left is None else str(left))
                await self._release(holding)

    async def _prepared(
        self,
        holding: HeldLease,
        spec: RolloutJobSpec,
        handler: Handler,
        context: StageContext,
        left: LeftBehind | None,
    ) -> Sandbox:
        carried = context.purpose != "control" and carries(spec, handler, context.task)
        async with self._attach(holding.lease) if carried else nullcontext() as run:
            if run is not None:
                await run.client.kill_all()
            used = None if run is None else _Used(run, left)
            return await self._started(holding, spec, handler, context, used)

    async def _started(
        self,
        holding: HeldLease,
        spec: RolloutJobSpec,
        handler: Handler,
        context: StageContext,
        used: _Used | None,
    ) -> Sandbox:
        seconds = spec.stages.init.timeout_seconds
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await self._start(holding, spec, handler, context, used, limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            words = f"Eval's sandbox took longer than stages.init.timeoutSeconds ({seconds} s)"
            words = ": ".join(filter(None, (words, blocked(error))))
            raise PipelineError(words, "EvalSandboxFailed") from error
        except SandboxProviderError as error:
            if not error.retryable or not error.counts:
                raise
            raise _failed(error) from error
        except ExecError as error:
            if used is not None and not await _answers(used.sandbox):
                raise SandboxLost(f"Run's sandbox was lost on the way to Eval's: {error}") from error
            raise _failed(error) from error

    async def _start(
        self,
        holding: HeldLease,
        spec: RolloutJobSpec,
        handler: Handler,
        context: StageContext,
        used: _Used | None,
        limit: asyncio.Timeout,
    ) -> Sandbox:
        task = holding.lease.task
        apart = handler.eval_apart(task)
        network = narrowed(spec.sandbox, task.sandbox if apart is None else apart)
        request = sandbox_request(spec, handler, task, apart)
        sandbox = await sandbox_started(self._provider, request, holding.ref, for_eval=True)
        holding.eval_sandbox = sandbox.handle
        try:
            async with self._egress.lent(sandbox, network, context.rollout, context.env, pins_of(spec)):
                own = StageContext(
                    task=context.task,
                    spec=spec,
                    rollout=context.rollout,
                    sample_index=context.sample_index,
                    timeout=float(spec.stages.init.timeout_seconds),
                    client=sandbox.client,
                    workdir=sandbox.workdir,
                    env=context.env,
                    carry=copy.deepcopy(context.carry),
                    for_eval=True,
                    purpose="control" if context.purpose == "control" else "eval",
                )
                await prepare(handler, own)
            if used is not None:
                async with place_within(self._carries, limit):
                    if apart is None:
                        # Work folders may have different paths.
                        folders = [handler.changes(task, each.workdir) for each in (used.sandbox, sandbox)]
                        await _carry(used, sandbox, spec.stages.eval.carry, folders)
                    paths = handler.artifacts(task)
                    await eval_carry.bring(used.sandbox.client, sandbox.client, paths, used.left)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def _release(self, holding: HeldLease) -> None:
        handle = holding.eval_sandbox
        if handle is None:
            return
        # A separate task completes the release even if a second cancellation interrupts this one.
        release = asyncio.ensure_future(self._provider.release(handle))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)
        try:
            await asyncio.shield(release)
        except SandboxProviderError as error:
            log.warning("Eval's sandbox %s: %s", handle.id, error)
        finally:
            holding.eval_sandbox = None


@dataclass(frozen=True, slots=True)
class _Used:
    """The sandbox that Run used, and where Eval has a network, which of its files are left behind."""

    sandbox: Sandbox
    left: LeftBehind | None


async def _carry(
    used: _Used, fresh: Sandbox, carry: EvalCarry | None, folders: Sequence[FolderChanges | None]
) -> None:
    # Init's processes may still write to the folder that is compared.
    await fresh.client.kill_all()
    run, empty = (
        sandbox.client.work_folder(None if changes is None else changes.folder)
        for sandbox, changes in zip((used.sandbox, fresh), folders, strict=True)
    )
    changes = folders[1]
    try:
        if changes is not None:
            most = changes.max_bytes if carry is None else carry.max_bytes
            carried = await eval_carry.take_changes(run, empty, most, changes.protected, used.left)
        elif carry is None:
            return
        elif carry.diff:
            carried = await eval_carry.take_changes(run, empty, carry.max_bytes, left=used.left)
        else:
            carried = await eval_carry.take_files(run, carry, used.left)
        await eval_carry.put(empty, carried, used.left)
    except ExecError as error:
        if reward_reason(error):
            raise CarryRefused(f"{error.reason}: {error}") from error
        raise


@asynccontextmanager
async def place_within(places: asyncio.Semaphore, limit: asyncio.Timeout) -> AsyncIterator[None]:
    """Hold a place. Waiting for it does not count against the limit of what surrounds this context."""
    clock, end = asyncio.get_running_loop().time, limit.when()
    begun = clock()
    limit.reschedule(None)
    async with places:
        limit.reschedule(None if end is None else end + clock() - begun)
        yield


async def _answers(sandbox: Sandbox) -> bool:
    try:
        await sandbox.client.info()
    except ExecError:
        return False
    return True


def _failed(error: SandboxProviderError | ExecError) -> PipelineError:
    return PipelineError(f"{error.reason}: {error}", "EvalSandboxFailed")
