"""The asyncio client, which has one method for each operation of the exec server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from hmac import compare_digest
from typing import Any, Final, Literal

from rollyard_sandbox import proof
from rollyard_sandbox.client.results import (
    DirEntry,
    EvalPlace,
    ExecResult,
    FileContent,
    ServerInfo,
    variables_of,
)
from rollyard_sandbox.client.wire import SandboxTunnel, Wire
from rollyard_sandbox.client.work_folder import WorkFolder
from rollyard_sandbox.errors import BadRequest, ConnectionLost, SandboxError, SandboxSabotaged
from rollyard_sandbox.frames import PROTOCOL_VERSION

_KERNEL_START: Final = 60.0  # The seconds that the first cell may wait for its kernel.
# The seconds beyond a command's timeout. The server interrupts, kills and answers within 5 of them. A command
# that has filled the sandbox with busy processes delays a new shell by 10 more, and each step a little.
_LIMIT_MARGIN: Final = 45.0


class ExecClient:
    """One connection to a sandbox's exec server. Any number of requests may be in flight."""

    def __init__(
        self,
        wire: Wire,
        secret: bytes | None = None,
        proven_token: str | None = None,
    ) -> None:
        self._wire = wire
        self.proven_token = proven_token
        """The token to connect with from now on. The server must then prove each time that it knows it.

        It is None if no token was shown, or if the server does not prove that it knows its token.
        """
        self.secret = secret
        """What the server must prove that it knows, or None."""
        self._again: Callable[[], Awaitable[ExecClient]] | None = None
        self._running: set[asyncio.Task[ExecResult]] = set()

    @classmethod
    async def connect(
        cls,
        address: str,
        *,
        token: str | None = None,
        secret: bytes | None = None,
        lease: float | None = None,
        timeout: float = 10.0,
    ) -> ExecClient:
        """Connect to `unix:/path` or `tcp://host:port`.

        With `secret` the server must prove that it knows the same secret, here and whenever an evaluation
        begins. The same holds for a `token` that is another client's `proven_token`, which itself is never
        sent. A token in its plain form is sent as it is, and may only be shown to a server that no command
        can have replaced yet.

        With `lease` the lease is renewed for that many seconds, as `renew` does, without a further request.

        Raises:
            BadRequest: The address is neither, or `lease` is not above 0 and up to a week.
            ProtocolError: The server speaks another version of the protocol.
            ConnectionLost: No server answers there within `timeout` seconds.
            SandboxError: The token is missing or wrong (reason Unauthorized).
            SandboxSabotaged: The process that answers does not know the secret.
        """
        loop = asyncio.get_running_loop()
        wire = Wire(loop)
        proven = None
        if token is not None and token.startswith(proof.PROVEN):
            proven = token
            token, secret = proof.derived(token.removeprefix(proof.PROVEN))
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
                if lease is not None:
                    hello["lease"] = lease
                challenge = hello["challenge"] = proof.new_challenge()
                answer, _ = await wire.request(hello, limit=timeout)
                if secret is None and token is not None and "proof" in answer:
                    proven, secret = f"{proof.PROVEN}{token}", proof.derived(token)[1]
                _check_proof(secret, "hello", challenge, answer)
        except (OSError, TimeoutError) as error:
            wire.fail(ConnectionLost("not connected"))
            raise ConnectionLost(f"no exec server answers at {address}: {error or 'timeout'}") from error
        except BaseException:
            wire.fail(ConnectionLost("not connected"))
            raise
        client = cls(wire, secret, proven)
        credential = proven if proven is not None else token
        client._again = lambda: cls.connect(address, token=credential, secret=secret, timeout=timeout)
        return client

    async def __aenter__(self) -> ExecClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def unanswered(self) -> int:
        """Return how many requests are unanswered. A cancelled one counts until the server answers it."""
        return self._wire.unanswered

    # The methods below run commands in bash sessions.

    async def bash(
        self, command: str, *, session: str = "main", timeout: float = 30.0, max_output: int = 65536
    ) -> ExecResult:
        """Run `command` in the session's persistent bash, with `/dev/null` as its standard input.

        (A command that calls `exec` has the terminal, as with `start`.)

        After `timeout` seconds the command is interrupted, then killed, and its result has `timed_out` set.

        Raises:
            BadRequest: The session runs another command (reason SessionBusy), or the server's limit of
                sessions is reached (reason TooManySessions).
            CommandTooLarge: The command does not fit into a request.
            LaunchError: No shell could be started.
            ConnectionLost: The server is gone or does not answer.
        """
        return await self._execute("bash", _encoded(command), timeout, max_output, session=session)

    async def start(
        self, command: str, *, session: str = "main", timeout: float = 30.0, max_output: int = 65536
    ) -> RunningCommand:
        """Start `command` like `bash`, but on the terminal, and return at once.

        Input can be sent, and output read as it comes.
        """
        running = RunningCommand(self, session)
        result = self._execute(
            "bash",
            _encoded(command),
            timeout,
            max_output,
            listener=running.listen,
            session=session,
            stream=True,
            reads_input=True,
        )
        task = asyncio.get_running_loop().create_task(result)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        running.attach(task)
        await asyncio.sleep(0)  # This puts the request on the wire before any input that follows.
        return running

    async def send_input(self, data: bytes, *, session: str = "main") -> None:
        """Type `data` on the terminal of the command that `session` is running, such as to answer a prompt.

        The command must have been started by `start`, because one of `bash` does not read the terminal.

        Raises:
            BadRequest: The session runs no command (reason NoCommandRunning).
        """
        await self._wire.request({"op": "input", "session": session}, data)

    async def interrupt(self, *, session: str = "main") -> None:
        """Send SIGINT to the foreground of the session's terminal, like Ctrl-C.

        Raises:
            BadRequest: The session runs no command (reason NoCommandRunning).
        """
        await self._wire.request({"op": "interrupt", "session": session})

    async def close_session(self, name: str) -> None:
        """Kill the session's shell and what it runs. The name can be used again."""
        await self._wire.request({"op": "close_session", "session": name})

    # The methods below run programs and cells.

    async def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout: float = 60.0,
        max_output: int = 1 << 20,
        clean_env: bool = False,
        terminal: bool = False,
    ) -> ExecResult:
        """Run a program in a fresh process, without a shell, in a session and process group of its own.

        `env` is added to the sandbox's environment or, with `clean_env`, is all of the program's environment
        (`argv[0]` is then looked up in its PATH). `cwd` defaults to the work folder. What the program leaves
        running in its group is killed when it ends. After `timeout` seconds all of it is killed.

        With `terminal` its standard input, output and error are a terminal of its own, with 50 rows and 200
        columns, that echoes nothing and leaves line ends as they are. `stdin` is typed on it. The terminal's
        input does not end then, unless the last byte is Ctrl-D. TERM is `dumb`, and pagers are off, unless
        `env` says otherwise.

        Raises:
            LaunchError: The program, or its terminal, cannot be started.
        """
        fields: dict[str, Any] = {
            "argv": argv,
            "env": env or {},
            "cwd": cwd,
            "clean_env": clean_env,
            "terminal": terminal,
        }
        return await self._execute("run", stdin, timeout, max_output, **fields)

    async def ipython(self, code: str, *, timeout: float = 60.0, max_output: int = 65536) -> ExecResult:
        """Run a cell in the sandbox's IPython kernel, which starts at the first cell.

        `output` has printed text, results and tracebacks in order. `exit_code` is 0 or, after an exception,
        1. `result` is the text of the last expression (its first 16 Ki characters). After `timeout` seconds
        the cell is interrupted, then the kernel is replaced.

        Raises:
            IPythonUnavailable: ipykernel is not importable in the sandbox, or the kernel does not start.
            BadRequest: Another cell is running (reason SessionBusy).
        """
        return await self._execute("ipython", _encoded(code), timeout, max_output, margin=_KERNEL_START)

    # The methods below read and write files.

    async def read_file(self, path: str, *, max_bytes: int = 1 << 20, offset: int = 0) -> FileContent:
        """Return at most `max_bytes` (and at most 64 MiB) of a file. Relative paths start at the work folder.

        Raises:
            FileError: The reason is FileNotFound, IsADirectory, PermissionDenied, …
        """
        header = {"op": "read", "path": path, "max_bytes": max_bytes, "offset": offset}
        fields, data = await self._wire.request(header)
        return FileContent(data, offset, fields["size"], fields["mode"])

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file atomically, and make its parent folders.

        Raises:
            FileError: The reason is DiskFull, IsADirectory, PermissionDenied, …
            CommandTooLarge: `data` has more than 64 MiB.
        """
        await self._wire.request({"op": "write", "path": path, "mode": mode}, data)

    async def list_dir(self, path: str) -> list[DirEntry]:
        """Return the entries of a folder, sorted by name.

        Raises:
            FileError: The reason is FileNotFound, NotADirectory, …
        """
        _, data = await self._wire.request({"op": "list", "path": path})
        return [DirEntry(*row) for row in json.loads(data)]

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with its contents.

        Raises:
            FileError: The reason is FileNotFound, PermissionDenied, …
        """
        await self._wire.request({"op": "remove", "path": path})

    def work_folder(self, folder: str | None = None) -> WorkFolder:
        """Return the work folder, or the one at an absolute path. Its operations follow no symbolic link."""
        return WorkFolder(self._wire, folder)

    async def tunnel(self, purpose: Literal["network", "gateway"] = "network") -> SandboxTunnel:
        """Open another connection, which serves one connection of a program to a loopback port inside.

        Args:
            purpose: The tunnels of each purpose have a port of their own.

        Raises:
            SandboxError: An evaluation has begun in this sandbox (reason TunnelRefused).
            ConnectionLost: The server is gone or does not answer.
        """
        if self._again is None:
            raise ConnectionLost("not connected")
        client = await self._again()
        try:
            fields, _ = await client._wire.request({"op": "tunnel", "purpose": purpose})
            return await client._wire.into_tunnel(int(fields["port"]))
        except BaseException:
            await client.close()
            raise

    async def forward(
        self,
        header: dict[str, Any],
        body: bytes,
        *,
        limit: float,
        listener: Callable[[bytes], None] | None = None,
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request of a client in another process, and return header and body of its answer.

        Args:
            header: The header of the request, as the other client has made it.
            body: The body of the request.
            limit: How long to wait for the answer, in seconds.
            listener: Receives output that comes before the answer.

        Raises:
            SandboxError: The server refuses the request, or is gone.
        """
        return await self._wire.request(header, body, limit=limit, listener=listener)

    # The methods below concern the sandbox as a whole.

    async def kill_all(self) -> int:
        """Kill every process of the sandbox except the server. Sessions and the kernel lose their state.

        Returns:
            The number of processes that were killed.
        """
        fields, _ = await self._wire.request({"op": "kill_all"})
        count = fields["count"]
        assert isinstance(count, int)
        return count

    async def end_init(self, *folders: str) -> None:
        """Have the server record the settings of all git repositories, which `begin_eval` puts back.

        Args:
            folders: Absolute paths outside of the work folder below which there may be repositories, too.

        Raises:
            FileError: There are too many files and folders to look for repositories in.
        """
        await self._wire.request({"op": "end_init", "folders": list(folders)})

    async def begin_eval(self, *, network: bool = False) -> EvalPlace:
        """Kill every process of the sandbox, then make a private place to which none of them could write.

        The settings of git repositories are then those that `end_init` has recorded, and all sessions have
        ended. All tunnels are closed. A further call makes another place and removes the earlier one.

        Args:
            network: Whether `tunnel` may be called again in this sandbox for a network.

        Raises:
            SandboxSabotaged: Programs of the sandbox have made it impossible, because they filled or locked
                folders, or another process answers in the server's name.
            FileError: It is impossible for another reason, such as a full disk of the node, or too many files
                to look for repositories in.
            SandboxError: Processes survive SIGKILL (reason ProcessesSurvive).
        """
        challenge = proof.new_challenge()
        request = {"op": "begin_eval", "challenge": challenge, "network": network}
        fields, body = await self._wire.request(request)
        _check_proof(self.secret, f"begin_eval {fields['folder']}", challenge, fields)
        sabotage = tuple(map(str, fields.get("sabotage", ())))
        return EvalPlace(
            fields["folder"],
            fields["home"],
            fields["tmp"],
            fields["reward_file"],
            sabotage,
            variables_of(body.decode("utf-8", "replace")),
        )

    async def renew(self, seconds: float) -> None:
        """Renew the lease: the server kills everything and exits unless it is renewed within `seconds`."""
        await self._wire.request({"op": "renew", "seconds": seconds})

    async def set_env(self, variables: dict[str, str]) -> None:
        """Add variables to the environment of every session, program and kernel started from now on."""
        await self._wire.request({"op": "set_env", "env": variables})

    async def info(self) -> ServerInfo:
        """Return the server's information about itself."""
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
        """End the server and every process of the sandbox, and close the connection."""
        await self._wire.request({"op": "shutdown"})
        await self.close()

    async def close(self) -> None:
        """Close the connection. Commands that it was running are interrupted."""
        self._wire.fail(ConnectionLost("the connection was closed"))
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    async def _execute(
        self,
        operation: str,
        body: bytes,
        timeout: float,
        max_output: int,
        *,
        margin: float = 0.0,
        listener: Callable[[bytes], None] | None = None,
        **fields: Any,
    ) -> ExecResult:
        """Run a command, a program or a cell, which may take `margin` seconds longer than the others."""
        header = {"op": operation, "timeout": timeout, "max_output": max_output, **fields}
        limit = timeout + margin + _LIMIT_MARGIN
        return _result(*await self._wire.request(header, body, limit=limit, listener=listener))


class RunningCommand:
    """A command that has been started, and accepts input and interrupts."""

    def __init__(self, client: ExecClient, session: str) -> None:
        self._client = client
        self._session = session
        self._output = bytearray()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[ExecResult] | None = None

    def output_so_far(self) -> bytes:
        """Return what the command has printed until now, at most its first `max_output` bytes."""
        return bytes(self._output)

    async def wait_for_output(self, expected: bytes, *, timeout: float = 30.0) -> bytes:
        """Wait until `expected` has been printed, and return the output so far.

        Raises:
            TimeoutError: It was not printed within `timeout` seconds.
            SandboxError: The command ended without it (reason OutputNotFound), or the sandbox was lost.
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
        """Type `data` on the command's terminal. A line needs its newline."""
        await self._client.send_input(data, session=self._session)

    async def interrupt(self) -> None:
        """Send SIGINT to the terminal's foreground, like Ctrl-C."""
        await self._client.interrupt(session=self._session)

    async def result(self) -> ExecResult:
        """Wait for the command's end, and return its result. Cancelling this wait cancels the command."""
        assert self._task is not None
        return await self._task

    def listen(self, data: bytes) -> None:
        """Store output that the server has sent."""
        self._output += data
        self._changed.set()

    def attach(self, task: asyncio.Task[ExecResult]) -> None:
        """Store the task that waits for the command's result."""
        self._task = task
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[ExecResult]) -> None:
        self._changed.set()
        if not task.cancelled():
            task.exception()  # This marks it as retrieved. A caller that awaits `result` still gets it.


def _check_proof(secret: bytes | None, purpose: str, challenge: str, answer: dict[str, Any]) -> None:
    if secret is None:
        return
    claimed = answer.get("proof")
    if not isinstance(claimed, str) or not compare_digest(
        claimed.encode("utf-8", "surrogatepass"), proof.answer(secret, purpose, challenge).encode()
    ):
        raise SandboxSabotaged(
            "the process on the exec server's socket does not know its secret: a program of the sandbox has "
            "taken its place"
        )


def _encoded(text: str) -> bytes:
    """Return text as UTF-8. Surrogates, which stand for undecodable bytes, become those bytes again."""
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
