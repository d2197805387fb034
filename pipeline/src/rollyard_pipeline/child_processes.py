"""Child processes for computations that may never end. Each handles one request at a time.

A regular expression, a simplification of a formula or a function of a user cannot be interrupted in a thread.
What exceeds its limit is therefore ended with its process. A child writes the line `ready`, which may be
followed by a JSON object, and then answers each line of JSON with one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
from typing import Any, Final

from rollyard_pipeline.errors import ChildFailed, ChildTimeout

_LINE: Final = 1 << 20  # The limit of an answer in bytes.
_START_SECONDS: Final = 60.0  # Importing large libraries takes long on a busy machine.
_PR_SET_PDEATHSIG: Final = 1


class ChildProcesses:
    """A bounded set of children, which are started when first needed and kept.

    Args:
        module: The module that the children run.
        arguments: The arguments of the module.
        what: The name of a child, for messages.
        failed: The reason of the exception for a child that could not be started or died.
        timeout: The reason of the exception for a request that was not answered in time.
        count: The number of children, and therefore of simultaneous requests.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        what: str,
        failed: str,
        timeout: str,
        count: int = 2,
    ) -> None:
        self._command = (sys.executable, "-P", "-m", module, *arguments)
        self._what = what
        self._failed = failed
        self._timeout = timeout
        self._places = asyncio.Semaphore(count)
        self._idle: list[asyncio.subprocess.Process] = []
        self._greeting: dict[str, Any] | None = None
        self._closed = False

    async def greeting(self) -> dict[str, Any]:
        """Return what the first child says about itself, once it has started.

        Raises:
            ChildFailed: The child cannot be started.
        """
        if self._greeting is None:
            async with self._places:
                if self._greeting is None:
                    self._idle.append(await self._start())
        return self._greeting or {}

    async def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return a child's answer. Waiting for a free child does not count against `seconds`.

        Raises:
            ChildTimeout: There is no answer within `seconds`.
            ChildFailed: The child could not be started or died.
        """
        async with self._places:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                answer = await self._answer(child, request, seconds)
            except BaseException:
                await end_child(child)
                raise
            if self._closed:
                await end_child(child)
            else:
                self._idle.append(child)
            return answer

    async def ask_twice(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return a child's answer like `ask`, with a second try in a fresh child if the first one dies."""
        try:
            return await self.ask(request, seconds)
        except ChildTimeout:
            raise
        except ChildFailed:
            return await self.ask(request, seconds)

    async def ask_or_blame(
        self, request: dict[str, Any], seconds: float, *controls: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Return a child's answer like `ask_twice`, or None if it is the request that ends the children.

        The proof is that they answer the controls, which differ from the request by what the policy wrote.

        Raises:
            ChildTimeout: There is no answer within `seconds`.
            ChildFailed: The children cannot be started, or die whatever they are asked.
        """
        try:
            return await self.ask_twice(request, seconds)
        except ChildTimeout:
            raise
        except ChildFailed:
            for control in controls:
                await self.ask_twice(control, seconds)
            return None

    async def close(self) -> None:
        """End every child. One that is at work ends with its answer, and none is kept any more."""
        self._closed = True
        while self._idle:
            await end_child(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                start_new_session=True,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LINE,
            )
        except OSError as error:
            raise self._error(f"cannot be started: {error}") from error
        try:
            async with asyncio.timeout(_START_SECONDS):
                line = await self._line(child)
        except TimeoutError as error:
            await end_child(child)
            raise self._error(f"was not ready within {_START_SECONDS:g} s") from error
        except BaseException:
            await end_child(child)
            raise
        word, _, about = line.partition(b" ")
        if word.strip() != b"ready":
            await end_child(child)
            output = line[:500].decode(errors="replace").strip()
            raise self._error(f"ended at its start: {output or 'is its package installed?'}")
        self._greeting = json.loads(about) if about.strip() else {}
        return child

    async def _answer(
        self, child: asyncio.subprocess.Process, request: dict[str, Any], seconds: float
    ) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                if child.stdin is None:
                    raise self._error("has no input")
                child.stdin.write(json.dumps(request).encode() + b"\n")
                await child.stdin.drain()
                line = await self._line(child)
        except TimeoutError as error:
            raise ChildTimeout(f"{self._what} gave no answer within {seconds:g} s", self._timeout) from error
        except OSError as error:
            raise self._error(f"ended: {error}") from error
        if not line:
            raise self._error("ended without an answer")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self._error("gave an answer that is not JSON") from error
        if not isinstance(answer, dict):
            raise self._error("gave an answer that is not an object")
        return answer

    def _error(self, what: str) -> ChildFailed:
        return ChildFailed(f"{self._what} {what}", self._failed)

    async def _line(self, child: asyncio.subprocess.Process) -> bytes:
        if child.stdout is None:
            raise self._error("has no output")
        try:
            return await child.stdout.readline()
        except ValueError as error:
            raise self._error(f"gave an answer of more than {_LINE} bytes") from error


async def end_child(child: asyncio.subprocess.Process) -> None:
    """End a child, and with it the processes that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    if child.stdin is not None:
        child.stdin.close()
    await child.wait()


def begin_child(memory: int = 0) -> None:
    """Prepare this process to be a child, which ends with its parent.

    Args:
        memory: The limit of the address space in bytes; 0 stands for none.
    """
    import ctypes  # Workers do without it.

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
