"""The process in which the calls of one handler run, one at a time.

Its arguments are the handler's class, as `imported` takes it, the descriptors of a socket to the worker and
of the file for stacks, and the level of log records. All that a handler may do with its context is a request
to the worker, in the frames of the exec server. The answer to the request `next` is the next call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import pickle
import resource
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from rollyard_crds.task import Task
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.client.wire import ANSWER_LIMIT, Wire
from rollyard_sandbox.errors import SandboxError
from rollyard_sandbox.frames import encode

from rollyard_pipeline.child_processes import begin_child
from rollyard_pipeline.errors import PermanentFailure, WorkerError
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.isolated.messages import HandlerCall, described
from rollyard_pipeline.registry import imported

_NO_LIMIT: Final = 1e8  # The worker limits what the agent does and how long it waits, in seconds.
_LOG_TEXT: Final = 16_384  # characters


class AgentFailed(WorkerError):
    """The agent raised an exception in the worker, which knows it by its number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class WorkerWire(Wire):
    """The connection to the worker."""

    def post(self, header: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame that has no answer. Nothing is sent if the worker is gone."""
        if self._transport is not None and self.lost is None:
            self._transport.write(encode(header, body))


class SandboxWire(Wire):
    """The connection to a sandbox of one call, which the worker holds.

    Args:
        worker: The connection to the worker.
        call: The number of the call. After the call, the worker refuses the requests.
        sandbox: The number of the sandbox among those of the call.
    """

    def __init__(self, worker: WorkerWire, call: int, sandbox: int) -> None:
        super().__init__(asyncio.get_running_loop())
        self._worker = worker
        self._fields = {"call": call, "sandbox": sandbox}

    async def request(
        self,
        header: dict[str, Any],
        body: bytes = b"",
        *,
        limit: float = ANSWER_LIMIT,
        listener: Callable[[bytes], None] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Let the worker send a request, and return header and body of the answer."""
        message = {"op": "sandbox", "request": header, "limit": limit, **self._fields}
        return await self._worker.request(message, body, limit=_NO_LIMIT, listener=listener)

    def fail(self, error: SandboxError) -> None:
        """Leave the connection open, because it is the worker's."""


class AgentOfWorker:
    """The job's agent, which plays in the worker; see `handlers.base.AgentSteps`."""

    def __init__(self, worker: WorkerWire, call: int) -> None:
        self._worker = worker
        self._call = call

    async def play(self) -> None:
        """Play the agent until it ends the episode."""
        await self._request({"do": "play"})

    async def step(self, task: Task, seconds: float | None) -> bool:
        """Play the agent for one step, and return whether a further step may follow."""
        answer = await self._request({"do": "step", "seconds": seconds}, task.model_dump_json().encode())
        return bool(answer["further"])

    def say(self, text: str) -> None:
        """Continue the episode with a user's message."""
        header = {"op": "agent", "call": self._call, "do": "say"}
        self._worker.post(header, text.encode("utf-8", "surrogatepass"))

    async def _request(self, fields: dict[str, Any], body: bytes = b"") -> dict[str, Any]:
        header = {"op": "agent", "call": self._call, **fields}
        answer, _ = await self._worker.request(header, body, limit=_NO_LIMIT)
        if "failed" in answer:
            raise AgentFailed(answer["failed"], answer["id"])
        return answer


class LogToWorker(logging.Handler):
    """Sends log records to the worker, which writes them as its own."""

    def __init__(self, worker: WorkerWire, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._worker = worker
        self._loop = loop
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record, from whichever thread it comes."""
        header = {"op": "log", "name": record.name[:200], "level": record.levelno}
        body = self.format(record)[:_LOG_TEXT].encode("utf-8", "replace")
        if threading.get_ident() == self._thread:
            self._worker.post(header, body)
        else:
            self._loop.call_soon_threadsafe(self._worker.post, header, body)


async def serve(target: str, connection: int, level: int) -> None:
    """Perform calls until the worker closes the connection."""
    loop = asyncio.get_running_loop()
    worker = WorkerWire(loop)
    await loop.create_unix_connection(lambda: worker, sock=socket.socket(fileno=connection))
    logging.basicConfig(level=level, format="%(message)s", handlers=[LogToWorker(worker, loop)])
    try:
        handler = loaded(target)
    except Exception as error:
        worker.post({"op": "next", "id": 0}, json.dumps({"error": described(error)}).encode())
        return
    outcome = b"{}"
    while True:
        try:
            header, body = await worker.request({"op": "next"}, outcome, limit=_NO_LIMIT)
        except SandboxError:
            return
        outcome = await performed(handler, pickle.loads(body), worker, header["call"])
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # The next call belongs to another rollout.


def loaded(target: str) -> Handler:
    """Return a new handler of the class at `target`; see `imported`.

    Raises:
        PermanentFailure: It cannot be imported.
    """
    try:
        handler: type[Handler] = imported(target)
    except (ImportError, AttributeError) as error:
        raise PermanentFailure(f"the handler {target} cannot be loaded: {error}", "UnknownHandler") from error
    return handler()


async def performed(handler: Handler, call: HandlerCall, worker: WorkerWire, number: int) -> bytes:
    """Return the outcome of a call as JSON."""
    clients = [
        ExecClient(SandboxWire(worker, number, index), secret) for index, secret in enumerate(call.secrets)
    ]
    agent = AgentOfWorker(worker, number) if call.agent else None
    context = replace(
        call.context,
        client=clients[0] if clients else None,
        run_agent=agent.play if agent is not None else None,
        agent_steps=agent,
    )
    outcome: dict[str, Any] = {}
    try:
        method = getattr(handler.for_task(call.task), call.method)
        value = await method(context)
        if call.method == "eval":
            outcome |= evaluated(value)
        outcome["carry"] = carried(context)
    except AgentFailed as error:
        outcome["raised"] = error.number
    except BaseException as error:  # SystemExit is an outcome, too, which the worker learns of.
        outcome["error"] = described(error)
    outcome["shown"] = context.shown
    try:
        return json.dumps(outcome, default=repr).encode()
    except (TypeError, ValueError) as error:
        return json.dumps({"error": described(error), "shown": ""}).encode()


def evaluated(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as a part of an outcome."""
    components = {str(name): value for name, value in evaluation.components.items()}
    return {"reward": evaluation.reward, "components": components, "reason": evaluation.reason}


def carried(context: StageContext) -> dict[str, Any]:
    """Return what a handler carries to the next stage.

    Raises:
        PermanentFailure: It is not a JSON object.
    """
    try:
        carry = json.loads(json.dumps(context.carry))
    except (TypeError, ValueError) as error:
        raise PermanentFailure(f"ctx.carry is not JSON: {error}", "HandlerStateInvalid") from error
    if not isinstance(carry, dict):
        raise PermanentFailure("ctx.carry is not a JSON object", "HandlerStateInvalid")
    return carry


def main(target: str, connection: str, stack: str, level: str) -> None:
    """Perform calls. If a signal ends the process, the file of the descriptor `stack` gets its stack."""
    begin_child()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(int(stack), all_threads=False)
    asyncio.run(serve(target, int(connection), int(level)))


if __name__ == "__main__":
    main(*sys.argv[1:])
