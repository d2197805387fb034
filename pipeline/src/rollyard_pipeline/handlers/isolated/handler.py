"""A handler of an installed package. Its calls run in processes of their own, which the worker controls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from rollyard_crds.task import Task
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import SandboxError
from rollyard_sandbox.frames import FrameReader, encode

from rollyard_pipeline.child_processes import end_child
from rollyard_pipeline.errors import HandlerFailed
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.isolated.messages import HandlerCall, HandlerOutcome, exception_of
from rollyard_pipeline.handlers.isolated.places import blocked_at
from rollyard_pipeline.handlers.tables import words
from rollyard_pipeline.registry import HANDLERS, Registry
from rollyard_pipeline.trajectories.sanitize import clean_text

_PROGRAM: Final = "rollyard_pipeline.handlers.isolated.program"
_CHUNK: Final = 1 << 18  # bytes
_REQUESTS: Final = 256
"""The number of requests of one call that are performed at once. Further ones wait."""
_MESSAGE: Final = 4096  # characters
_STACK_BYTES: Final = 1 << 16
_START_SECONDS: Final = 60.0
"""How long the import of a handler may take, in seconds, even on a busy machine."""
_ABORT_SECONDS: Final = 2.0  # How long a process may take to write its stack and end.


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
            "needs_sandbox sandbox_before_eval eval_sandbox fetches",
            "needs_tokens judges_answers reward_range components",
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


@dataclass(slots=True)
class _Request:
    """A call in progress, and what the worker holds for it."""

    context: StageContext | None
    sandboxes: Sequence[ExecClient]
    raised: dict[int, Exception]
    """The exceptions of the agent, by the number of the request."""


class HandlerProcess:
    """A process that performs the calls of a handler, one at a time. See `program`.

    Args:
        name: The name of the handler, for messages.
        process: The process.
        reader: Reads from the socket to it.
        writer: Writes to the socket to it.
        stack: The descriptor of the file to which the process writes where it was when a signal ended it.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        stack: int,
    ) -> None:
        self._name = name
        self._process = process
        self._reader = reader
        self._writer = writer
        self._stack = stack
        self._frames = FrameReader()
        self._ready = 0
        """The number of the request `next` that waits for an answer."""
        self._call = 0

    @classmethod
    async def start(cls, name: str, target: str) -> Self:
        """Return a process that has loaded the handler.

        Args:
            name: The name of the handler, for messages.
            target: Its class, as MODULE:CLASS.

        Raises:
            HandlerFailed: The process cannot be started, ended while it loaded the handler, or took too long.
            PermanentFailure: The class cannot be imported.
            PipelineError: Loading the handler raised another exception.
        """
        ours, its = socket.socketpair()
        stack = os.memfd_create("stack")
        try:
            arguments = (target, its.fileno(), stack, logging.getLogger().getEffectiveLevel())
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                _PROGRAM,
                *map(str, arguments),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(its.fileno(), stack),
                start_new_session=True,
            )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException as error:
            ours.close()
            os.close(stack)
            if isinstance(error, OSError):
                raise HandlerFailed(f"{name}: its process cannot be started: {error}") from error
            raise
        finally:
            its.close()
        started = cls(name, process, reader, writer, stack)
        try:
            async with asyncio.timeout(_START_SECONDS):
                loaded = await started._outcome("being loaded", _Request(None, (), {}))
            started._raise_error(loaded)
        except TimeoutError as error:
            location = await started.stopped_at()
            await started.end()
            where = f", blocked at {location}" if location else ""
            problem = f"{name} was not loaded within {_START_SECONDS:g} s{where}"
            raise HandlerFailed(problem) from error
        except BaseException:
            await started.end()
            raise
        return started

    @property
    def alive(self) -> bool:
        """Return whether the process has not ended yet."""
        return self._process.returncode is None

    async def call(
        self, method: str, task: Task, context: StageContext, sandboxes: Sequence[ExecClient]
    ) -> HandlerOutcome:
        """Call a method of the handler, and return what the process says about the outcome.

        Args:
            method: The name of the method.
            task: The task.
            context: The context of the call.
            sandboxes: The sandboxes that the method may use.

        Raises:
            HandlerFailed: The process died, or sent something that is not an outcome.
            Exception: The method raised it.
        """
        request = _Request(context, sandboxes, {})
        sent = replace(context, client=None, run_agent=None, agent_steps=None)
        call = HandlerCall(
            method=method,
            task=task,
            context=sent,
            agent=context.agent_steps is not None,
            secrets=tuple(sandbox.secret for sandbox in sandboxes),
        )
        self._call += 1
        body = pickle.dumps(call)
        try:
            self._writer.write(encode({"id": self._ready, "call": self._call}, body))
        except SandboxError as error:
            raise HandlerFailed(f"{self._name}: {method} cannot get its context: {error}") from error
        outcome = await self._outcome(method, request)
        context.show(outcome.shown)
        if outcome.raised in request.raised:
            raise request.raised[outcome.raised]
        self._raise_error(outcome)
        complete = outcome.carry is not None and (method != "eval" or outcome.components is not None)
        if outcome.raised is not None or not complete:
            raise HandlerFailed(f"{self._name}: its process reported no outcome of {method}")
        return outcome

    def _raise_error(self, outcome: HandlerOutcome) -> None:
        """Raise the exception that an outcome describes, if there is one."""
        if outcome.error is None:
            return
        try:
            error = exception_of(outcome.error)
        except (ValueError, KeyError, TypeError) as problem:
            raise HandlerFailed(f"{self._name}: its process reported no exception: {problem!r}") from problem
        raise error

    async def _outcome(self, doing: str, request: _Request) -> HandlerOutcome:
        """Serve the process until it asks for its next call, and return the outcome of this one."""
        tasks: dict[int, asyncio.Task[None]] = {}
        stopped = False
        try:
            while data := await self._reader.read(_CHUNK):
                for header, body in self._frames.feed(data):
                    if header["op"] == "next":
                        self._ready = int(header["id"])
                        return HandlerOutcome.model_validate(json.loads(body))
                    await self._begin(header, body, request, tasks)
        except (SandboxError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{self._name}: its process does not keep to the protocol ({doing}): {error!r}"
            raise HandlerFailed(clean_text(problem, _MESSAGE)) from error
        except asyncio.CancelledError:
            stopped = True
            raise
        except OSError:
            pass  # The process has ended.
        finally:
            # If the time is up, whether a sandbox was at work is seen by its unanswered requests. They end
            # with the connection to the sandbox.
            ending = [task for task in tasks.values() if not stopped or task.get_name() != "sandbox"]
            for task in ending:
                task.cancel()
            if ending:
                await asyncio.wait(ending)
        raise HandlerFailed(f"{self._name}: its process ended in {doing}{await self._ending()}")

    async def _begin(
        self, header: dict[str, Any], body: bytes, request: _Request, tasks: dict[int, asyncio.Task[None]]
    ) -> None:
        if header["op"] == "log":
            text = body.decode("utf-8", "replace")
            logging.getLogger(str(header["name"])).log(int(header["level"]), "%s", text)
            return
        if header["op"] == "cancel":
            if (task := tasks.get(header["id"])) is not None:
                task.cancel()
            return
        if header["op"] == "agent" and header["do"] == "say":
            if header["call"] == self._call and request.context and request.context.agent_steps:
                request.context.agent_steps.say(body.decode("utf-8", "surrogatepass"))
            return
        while len(tasks) >= _REQUESTS:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)  # Their own callbacks remove those that have ended.
        number = int(header["id"])
        if number in tasks:
            raise ValueError(f"request {number} is made twice")
        task = asyncio.create_task(self._answer(number, header, body, request), name=header["op"])
        tasks[number] = task
        task.add_done_callback(lambda task: tasks.pop(number, None))

    async def _answer(self, number: int, header: dict[str, Any], body: bytes, request: _Request) -> None:
        answer: dict[str, Any] = {"error": "SandboxError", "message": "the request was cancelled"}
        data = b""
        try:
            if header["call"] != self._call:
                answer = {"error": "SandboxError", "message": "the call of this request has ended"}
            elif header["op"] == "sandbox":
                answer, data = await self._of_sandbox(number, header, body, request)
            else:
                answer = await _of_agent(header, body, request.context)
        except SandboxError as error:
            answer = {"error": error.reason, "message": str(error)[:_MESSAGE]}
        except Exception as error:
            request.raised[number] = error
            answer = {"failed": clean_text(f"{type(error).__name__}: {error}", _MESSAGE)}
        finally:
            self._writer.write(encode({**answer, "id": number}, data))
        with contextlib.suppress(OSError):
            await self._writer.drain()

    async def _of_sandbox(
        self, number: int, header: dict[str, Any], body: bytes, request: _Request
    ) -> tuple[dict[str, Any], bytes]:
        def hear(output: bytes) -> None:
            self._writer.write(encode({"event": "output", "id": number}, output))

        client = request.sandboxes[int(header["sandbox"])]
        fields = dict(header["request"])
        return await client.forward(fields, body, limit=float(header["limit"]), listener=hear)

    async def stopped_at(self) -> str:
        """End the process, and return where its code was, or "" if it was waiting."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGABRT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._process.wait()
        return blocked_at(self._dump())

    async def _ending(self) -> str:
        """Return how the process ended, and where its code was if that is known."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._process.wait()
        status, location = self._process.returncode, blocked_at(self._dump())
        how = ""
        if status is not None:
            how = f" by {signal.Signals(-status).name}" if status < 0 else f" with status {status}"
        return f"{how}{f', at {location}' if location else ''}"

    def _dump(self) -> str:
        return os.pread(self._stack, _STACK_BYTES, 0).decode("utf-8", "replace")

    async def end(self) -> None:
        """Kill the process, and with it the processes that it has started."""
        try:
            await end_child(self._process)
        finally:
            self._writer.transport.abort()
            os.close(self._stack)


async def _of_agent(header: dict[str, Any], body: bytes, context: StageContext | None) -> dict[str, Any]:
    if context is None or context.agent_steps is None or context.run_agent is None:
        raise RuntimeError("the agent plays in Run only")
    if header["do"] == "play":
        await context.run_agent()
        return {}
    seconds = header["seconds"]
    task = Task.model_validate_json(body)
    further = await context.agent_steps.step(task, None if seconds is None else float(seconds))
    return {"further": further}
