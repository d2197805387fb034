"""The asyncio client of the exec server.

Example:
    client = await ExecClient.connect("unix:/run/sandbox.sock")
    result = await client.bash("echo hi")
    assert result.text() == "hi\\n" and result.exit_code == 0
    await client.close()
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

from rollyard_sandbox.clientwire import Wire
from rollyard_sandbox.errors import BadRequest, ConnectionLost, SandboxError
from rollyard_sandbox.frames import PROTOCOL_VERSION
from rollyard_sandbox.results import DirEntry, ExecResult, FileContent, ServerInfo

__all__ = ["DirEntry", "ExecClient", "ExecResult", "FileContent", "RunningCommand", "ServerInfo"]

_KERNEL_START = 60.0  # seconds that the first cell may wait for its kernel
_LIMIT_MARGIN = 15.0  # seconds beyond a command's timeout: the server interrupts, kills and answers within 5


class RunningCommand:
    """A command that has been started and can be talked to."""

    def __init__(self, client: ExecClient, session: str) -> None:
        self._client = client
        self._session = session
        self._output = bytearray()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[ExecResult] | None = None

    def output_so_far(self) -> bytes:
        """What the command has printed until now, at most its `max_output` first bytes."""
        return bytes(self._output)

    async def wait_for_output(self, expected: bytes, *, timeout: float = 30.0) -> bytes:
        """Waits until `expected` has been printed, and returns the output so far.

        Raises:
            TimeoutError: it was not printed in `timeout` seconds.
            SandboxError: the command ended without it (reason OutputNotFound), or the sandbox was lost.
        """
        assert self._task is not None
        async with asyncio.timeout(timeout):
            while expected not in self._output:
                if self._task.done():
                    self._task.result()
                    raise SandboxError(f"the command ended without {expected!r}", reason="OutputNotFound")
                self._changed.clear()
                await self._changed.wait()
        return bytes(self._output)

    async def send_input(self, data: bytes) -> None:
        """Types `data` on the command's terminal; a line needs its newline."""
        await self._client.send_input(data, session=self._session)

    async def interrupt(self) -> None:
        """SIGINT for the terminal's foreground, like Ctrl-C."""
        await self._client.interrupt(session=self._session)

    async def result(self) -> ExecResult:
        """Waits for the command's end. Cancelling this wait cancels the command."""
        assert self._task is not None
        return await self._task

    def _listen(self, data: bytes) -> None:
        self._output += data
        self._changed.set()

    def _attach(self, task: asyncio.Task[ExecResult]) -> None:
        self._task = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ExecResult]) -> None:
        self._changed.set()
        if not task.cancelled():
            task.exception()  # seen: whoever awaits `result` gets it


class ExecClient:
    """One connection to a sandbox's exec server. Any number of requests may be in flight."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._running: set[asyncio.Task[ExecResult]] = set()

    @classmethod
    async def connect(cls, address: str, *, token: str | None = None, timeout: float = 10.0) -> ExecClient:
        """Connects to `unix:/path` or `tcp://host:port`.

        Raises:
            BadRequest: the address is neither.
            ConnectionLost: nobody answers there within `timeout` seconds.
            Unauthorized: the token is missing or wrong.
        """
        loop = asyncio.get_running_loop()
        wire = Wire(loop)
        try:
            async with asyncio.timeout(timeout):
                if address.startswith("unix:"):
                    await loop.create_unix_connection(lambda: wire, address.removeprefix("unix:"))
                else:
                    host, port = _split_tcp(address)
                    await loop.create_connection(lambda: wire, host, port)
                hello: dict[str, Any] = {"op": "hello", "version": PROTOCOL_VERSION}
                if token is not None:
                    hello["token"] = token
                await wire.request(hello, limit=timeout)
        except (OSError, TimeoutError) as error:
            wire.fail(ConnectionLost("not connected"))
            raise ConnectionLost(f"no exec server answers at {address}: {error or 'timeout'}") from error
        except BaseException:
            wire.fail(ConnectionLost("not connected"))
            raise
        return cls(wire)

    async def __aenter__(self) -> ExecClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    # bash

    async def bash(
        self, command: str, *, session: str = "main", timeout: float = 30.0, max_output: int = 65536
    ) -> ExecResult:
        """Runs `command` in the session's persistent bash.

        Past `timeout` seconds the command is interrupted, then killed; the result says `timed_out`.

        Raises:
            SessionBusy: the session runs another command.
            CommandTooLarge, LaunchError, TooManySessions, ConnectionLost: as their names say.
        """
        header = {"op": "bash", "session": session, "timeout": timeout, "max_output": max_output}
        return _result(*await self._wire.request(header, _encoded(command), limit=timeout + _LIMIT_MARGIN))

    async def start(
        self, command: str, *, session: str = "main", timeout: float = 30.0, max_output: int = 65536
    ) -> RunningCommand:
        """Like `bash`, but returns at once: input can be sent, and the output read as it comes."""
        running = RunningCommand(self, session)
        header = {
            "op": "bash", "session": session, "timeout": timeout, "max_output": max_output, "stream": True,
        }  # fmt: skip
        running._attach(
            self._spawn(
                self._wire.request(
                    header, _encoded(command), limit=timeout + _LIMIT_MARGIN, listener=running._listen
                )
            )
        )
        await asyncio.sleep(0)  # the request is on the wire before any input that follows
        return running

    async def send_input(self, data: bytes, *, session: str = "main") -> None:
        """Answers a prompt of the command that `session` is running.

        Raises:
            NoCommandRunning: it runs none.
        """
        await self._wire.request({"op": "input", "session": session}, data)

    async def interrupt(self, *, session: str = "main") -> None:
        """SIGINT for the foreground of the session's terminal, like Ctrl-C.

        Raises:
            NoCommandRunning: it runs none.
        """
        await self._wire.request({"op": "interrupt", "session": session})

    async def close_session(self, name: str) -> None:
        """Kills the session's shell and what it runs; the name can be used again."""
        await self._wire.request({"op": "close_session", "session": name})

    # Programs and cells

    async def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_output: int = 1 << 20,
    ) -> ExecResult:
        """Runs a program in a fresh process: no shell, no terminal, a process group of its own.

        `env` is added to the sandbox's environment; `cwd` is the work folder where not given. What the
        program leaves running in its group is killed when it ends; past `timeout` seconds all of it is.

        Raises:
            LaunchError: it cannot be started.
        """
        header = {
            "op": "run", "argv": argv, "env": env or {}, "cwd": cwd,
            "timeout": timeout, "max_output": max_output,
        }  # fmt: skip
        return _result(*await self._wire.request(header, stdin, limit=timeout + _LIMIT_MARGIN))

    async def ipython(self, code: str, *, timeout: float = 60.0, max_output: int = 65536) -> ExecResult:
        """Runs a cell in the sandbox's IPython kernel, which starts at the first one.

        Printed text, results and tracebacks are in `output` in order; `exit_code` is 0 or, after an
        exception, 1; `result` is the text of the last expression (its first 16 Ki characters). Past
        `timeout` seconds the cell is interrupted, then the kernel is replaced.

        Raises:
            IPythonUnavailable: ipykernel is not importable in the sandbox, or the kernel does not start.
            SessionBusy: another cell is running.
        """
        header = {"op": "ipython", "timeout": timeout, "max_output": max_output}
        return _result(
            *await self._wire.request(header, _encoded(code), limit=timeout + 60.0 + _LIMIT_MARGIN)
        )

    # Files

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, offset: int = 0) -> FileContent:
        """At most `max_bytes` (and at most 64 MiB) of a file; relative paths start at the work folder.

        Raises:
            FileError: with reason FileNotFound, IsADirectory, PermissionDenied, …
        """
        header = {"op": "read", "path": path, "max_bytes": max_bytes, "offset": offset}
        fields, data = await self._wire.request(header)
        return FileContent(data, offset, fields["size"], fields["mode"])

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a file atomically, making its parent folders.

        Raises:
            FileError: with reason DiskFull, IsADirectory, PermissionDenied, …
            CommandTooLarge: more than 64 MiB.
        """
        await self._wire.request({"op": "write", "path": path, "mode": mode}, data)

    async def list_dir(self, path: str) -> list[DirEntry]:
        """The entries of a folder, by name.

        Raises:
            FileError: with reason FileNotFound, NotADirectory, …
        """
        _, data = await self._wire.request({"op": "list", "path": path})
        return [DirEntry(*row) for row in json.loads(data)]

    async def remove(self, path: str) -> None:
        """Removes a file, or a folder with all that is in it.

        Raises:
            FileError: with reason FileNotFound, PermissionDenied, …
        """
        await self._wire.request({"op": "remove", "path": path})

    # The sandbox

    async def kill_all(self) -> int:
        """Kills every process of the sandbox but the server; sessions and the kernel start afresh.

        Returns:
            How many processes there were.
        """
        fields, _ = await self._wire.request({"op": "kill_all"})
        count = fields["count"]
        assert isinstance(count, int)
        return count

    async def renew(self, seconds: float) -> None:
        """The server kills everything and exits unless renewed again within `seconds`."""
        await self._wire.request({"op": "renew", "seconds": seconds})

    async def set_env(self, variables: dict[str, str]) -> None:
        """Adds variables to the environment of every session, program and kernel started from now on."""
        await self._wire.request({"op": "set_env", "env": variables})

    async def info(self) -> ServerInfo:
        """What the server says about itself."""
        fields, _ = await self._wire.request({"op": "info"})
        return ServerInfo(
            pid=fields["pid"],
            protocol=fields["protocol"],
            sessions=tuple(fields["sessions"]),
            python=fields["python"],
            ipython=fields["ipython"],
            lease_seconds_left=fields["lease"],
            workdir=fields["workdir"],
        )

    async def shutdown(self) -> None:
        """Ends the server and every process of the sandbox, and closes the connection."""
        await self._wire.request({"op": "shutdown"})
        await self.close()

    async def close(self) -> None:
        """Closes the connection; commands that it was running are interrupted."""
        self._wire.fail(ConnectionLost("the connection was closed"))
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _spawn(self, answer: Coroutine[Any, Any, tuple[dict[str, Any], bytes]]) -> asyncio.Task[ExecResult]:
        async def result() -> ExecResult:
            return _result(*await answer)

        task = asyncio.get_running_loop().create_task(result())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


def _encoded(text: str) -> bytes:
    """UTF-8; text that came from undecodable bytes (surrogates) becomes those bytes again."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise BadRequest(f"command: cannot be encoded as UTF-8: {error}") from None


def _result(fields: dict[str, Any], output: bytes) -> ExecResult:
    return ExecResult(
        exit_code=fields["exit"],
        output=output,
        cwd=fields["cwd"],
        seconds=fields["seconds"],
        timed_out=fields["timed_out"],
        killed=fields["killed"],
        truncated_bytes=fields["truncated"],
        shell_restarted=fields["restarted"],
        result=fields.get("result", ""),
    )


def _split_tcp(address: str) -> tuple[str, int]:
    host, separator, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not separator or not port.isdigit():
        raise BadRequest(f"address: {address!r} is neither unix:/path nor tcp://host:port")
    return host.strip("[]"), int(port)
