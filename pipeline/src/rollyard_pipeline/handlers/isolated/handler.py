"""A handler of an installed package, whose calls run in processes of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollyard_crds.task import Task
from rollyard_sandbox.client import ExecClient

from rollyard_pipeline.errors import HandlerFailed
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.isolated.messages import HandlerOutcome
from rollyard_pipeline.handlers.isolated.process import HandlerProcess
from rollyard_pipeline.handlers.tables import words
from rollyard_pipeline.registry import HANDLERS, Registry


class HandlerProcesses:
    """The processes of a handler: one for each call in progress, which later calls use again.

    Args:
        name: The name of the handler.
        target: Its class, as MODULE:CLASS.
    """

    def __init__(self, name: str, target: str) -> None:
        self._what = f"handler '{name}'"
        self._target = target
        self._idle: list[HandlerProcess] = []

    async def load(self) -> None:
        """Load the handler in a process, which the first call uses.

        Raises:
            HandlerFailed, PermanentFailure: See `HandlerProcess.start`.
        """
        self._idle.append(await HandlerProcess.start(self._what, self._target))

    async def call(
        self, method: str, task: Task, context: StageContext, sandboxes: Sequence[ExecClient]
    ) -> HandlerOutcome:
        """Call a method of the handler, and return the outcome; see `HandlerProcess.call`.

        If it is cancelled, the process ends. A note of the `CancelledError` says where its code was blocked.
        """
        while self._idle and not self._idle[-1].alive:
            await self._idle.pop().end()
        process = self._idle.pop() if self._idle else await HandlerProcess.start(self._what, self._target)
        keep = False
        try:
            outcome = await process.call(method, task, context, sandboxes)
            keep = True
        except asyncio.CancelledError as error:
            location = await process.stopped_at()
            if location:
                error.add_note(f"{self._what} was blocked at {location}")
            raise
        except HandlerFailed:
            raise
        except Exception:
            keep = True  # The method raised it, and the process can still be used.
            raise
        finally:
            if keep:
                self._idle.append(process)
            else:
                await process.end()
        return outcome

    async def close(self) -> None:
        """End every process that performs no call."""
        while self._idle:
            await self._idle.pop().end()


class IsolatedHandler(Handler):
    """A handler whose `init`, `run` and `eval` run in a process of their own.

    Args:
        handler: The handler. In this process it answers questions about tasks.
        processes: The processes for its calls.
    """

    def __init__(self, handler: Handler, processes: HandlerProcesses) -> None:
        self._handler = handler
        self._processes = processes
        # These are attributes of the class, which an instance can only hide.
        names = words(
            "needs_sandbox needs_tokens judges_answers reward_range components eval_sandbox fetches",
            "dockerfile eval_apart eval_hosts artifacts check judges_answer changes folder",
        )
        # What the base class does needs no process.
        own = [name for name in ("init", "run") if getattr(type(handler), name) is getattr(Handler, name)]
        vars(self).update({name: getattr(handler, name) for name in (*names, *own)})

    def for_task(self, task: Task) -> Handler:
        """Return the handler of this task, which runs in the worker if it is one of Rollyard's own."""
        handler = self._handler.for_task(task)
        if handler is self._handler:
            return self
        ours = type(handler).__module__.startswith("rollyard_pipeline.")
        return handler if ours else IsolatedHandler(handler, self._processes)

    async def init(self, ctx: StageContext) -> None:
        """Prepare the sandbox."""
        await self._call("init", ctx)

    async def run(self, ctx: StageContext) -> None:
        """Play the episode."""
        await self._call("run", ctx)

    async def eval(self, ctx: StageContext) -> Evaluation:
        """Return the score of the episode."""
        outcome = await self._call("eval", ctx)
        return Evaluation(outcome.reward, outcome.components or {}, outcome.reason)

    async def close(self) -> None:
        """End the processes."""
        await self._processes.close()
        await self._handler.close()

    async def _call(self, method: str, ctx: StageContext) -> HandlerOutcome:
        sandboxes = () if ctx.client is None else (ctx.client,)
        outcome = await self._processes.call(method, ctx.task, ctx, sandboxes)
        ctx.carry = outcome.carry or {}
        return outcome


def loaded_handler(extensions: Registry, name: str, processes: HandlerProcesses | None = None) -> Handler:
    """Return a new handler of this name. A handler of another package is isolated.

    Args:
        extensions: Finds the handler.
        name: The name of the handler.
        processes: The processes of one that is isolated. The default is a new set.

    Raises:
        PermanentFailure: It is not installed here, or cannot be imported.
    """
    handler: Handler = extensions.load(HANDLERS, name)()
    if extensions.is_ours(HANDLERS, name):
        return handler
    return IsolatedHandler(handler, processes or HandlerProcesses(name, extensions.target(HANDLERS, name)))


async def tried_handler(extensions: Registry, name: str) -> Handler:
    """Return `loaded_handler`, after a process has shown that loading the handler does not block.

    Raises:
        PermanentFailure: It is not installed here, or cannot be imported.
        HandlerFailed: A process cannot load it.
    """
    if extensions.is_ours(HANDLERS, name):
        return loaded_handler(extensions, name)
    processes = HandlerProcesses(name, extensions.target(HANDLERS, name))
    await processes.load()
    try:
        return loaded_handler(extensions, name, processes)
    except BaseException:
        await processes.close()
        raise
