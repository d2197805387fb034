"""The handlers of the server, one for each kind of request."""

from __future__ import annotations

import os
import sys
from time import monotonic, sleep

from rollyard_sandbox.errors import (
    BadRequest,
    CommandTooLarge,
    FileError,
    LaunchError,
    ProtocolError,
    SandboxError,
)
from rollyard_sandbox.execution import processes
from rollyard_sandbox.execution.bash_session import BashSession
from rollyard_sandbox.execution.commands import Command, Outcome
from rollyard_sandbox.frames import MAX_BODY, PROTOCOL_VERSION
from rollyard_sandbox.isolation.system_calls import remove_segments
from rollyard_sandbox.proof import answer
from rollyard_sandbox.server import files
from rollyard_sandbox.server.eval_place import EvalPlaces
from rollyard_sandbox.server.git_settings import GitSettings
from rollyard_sandbox.server.tunnels import Tunnels

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Final

    from rollyard_sandbox.execution.event_loop import EventLoop, Timer
    from rollyard_sandbox.execution.ipython import IPython
    from rollyard_sandbox.execution.programs import RunningProgram
    from rollyard_sandbox.isolation.protections import Protections
    from rollyard_sandbox.server.connection import Connection
    from rollyard_sandbox.server.options import ServerOptions


_MAX_COMMAND: Final = 32 * 1024 * 1024  # bytes
_MAX_RESULT: Final = 16 * 1024  # characters of a cell's result, in addition to its output
_MAX_SECONDS: Final = 7 * 24 * 3600.0  # The longest time that a request may name.
_MAX_IN_FLIGHT: Final = 1024  # requests per connection
_PAGERS: Final = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
}


class Operations:
    """The operations on the sessions, the programs, the files and the IPython kernel of one sandbox.

    Args:
        lease_ended: Called when the lease was not renewed in time.
    """

    def __init__(
        self,
        loop: EventLoop,
        options: ServerOptions,
        protections: Protections,
        lease_ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._options = options
        self._protections = protections
        self._lease_ended = lease_ended
        self._lease: Timer | None = None
        self._workdir = workdir = os.path.abspath(options.workdir)
        self._own_namespace = own_namespace = options.own_pid_namespace or os.getpid() == 1
        self._secret = options.secret
        self._sessions: dict[str, BashSession] = {}
        self._programs: set[RunningProgram] = set()
        self._ipython: IPython | None = None
        self._network = Tunnels(loop)
        self._gateway = Tunnels(loop)
        self._git_settings = GitSettings(workdir, own_folders=own_namespace)
        self._places = EvalPlaces(workdir, own_folders=own_namespace, namespaces=protections.namespaces)
        self._handlers: dict[str, Callable[[Connection, int, dict[str, Any], bytes], None]] = {
            "hello": self._hello,
            "info": self._info,
            "bash": self._bash,
            "input": self._input,
            "interrupt": self._interrupt,
            "close_session": self._close_session,
            "run": self._run,
            "ipython": self._run_cell,
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "remove": self._remove,
            "beneath": self._work_folder,
            "kill_all": self._kill_all,
            "end_init": self._end_init,
            "begin_eval": self._begin_eval,
            "renew": self._renew,
            "set_env": self._set_env,
            "tunnel": self._tunnel,
            "shutdown": self._shutdown,
        }
        if options.lease is not None:
            self._set_lease(options.lease)

    def prove_token(self, key: bytes) -> None:
        """Let the server prove from now on that it knows `key`, unless it has a secret in addition to its
        token."""
        if self._secret is None:
            self._secret = key

    def handle(self, connection: Connection, header: dict[str, Any], body: bytes) -> None:
        """Answer one request, now or later."""
        request = header.get("id")
        if not isinstance(request, int) or isinstance(request, bool):
            connection.refuse(0, ProtocolError("id: a whole number is needed"))
            return
        operation = header.get("op")
        if operation == "cancel":
            cancel = connection.in_flight.get(request)
            if cancel is not None:
                cancel()
            return
        handler = self._handlers.get(operation) if isinstance(operation, str) else None
        try:
            if handler is None:
                raise BadRequest(f"op: {operation!r} is unknown")
            if request in connection.in_flight:
                raise BadRequest(f"id: {request} is in flight already")
            if len(connection.in_flight) >= _MAX_IN_FLIGHT:
                raise BadRequest(f"more than {_MAX_IN_FLIGHT} requests in flight")
            handler(connection, request, header, body)
        except SandboxError as error:
            connection.refuse(request, error)
        except OSError as error:
            # The handler ran out of descriptors, processes or memory: it has met the sandbox's limits.
            connection.refuse(request, LaunchError(f"{operation}: {error}", reason="ResourceExhausted"))
        except Exception as error:
            # No request ends the server, because the policy would gain a new try from its end.
            sys.excepthook(*sys.exc_info())
            connection.refuse(
                request, SandboxError(f"{operation}: {type(error).__name__}: {error}", reason="ServerFault")
            )

    def close(self) -> None:
        """Clean up when the server ends, after every process has been killed."""
        if self._ipython is not None:
            self._ipython.close()

    def _set_lease(self, seconds: float) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = self._loop.call_later(seconds, self._lease_ended)

    def kill_all(self) -> int:
        """Kill every process of the sandbox except this one, and return how many there were."""
        # The first process of the commands' namespaces is killed, too. The next command starts another one.
        namespaces = self._protections.namespaces
        first = namespaces is not None and namespaces.alive()
        pausing = namespaces.wait if namespaces is not None and first else sleep
        count = processes.kill_everything(self._loop.reap, own_namespace=self._own_namespace, pausing=pausing)
        return count - first

    # The requests below concern the server itself.

    def _hello(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        if header.get("version") != PROTOCOL_VERSION:
            raise ProtocolError(
                f"version: the sandbox's exec server speaks protocol {PROTOCOL_VERSION}, and this client "
                f"{str(header.get('version'))[:20]}: use the sandbox image of the same version"
            )
        if "lease" in header:
            self._set_lease(_seconds_field(header, "lease"))
        connection.greet(MAX_BODY)
        fields = {"version": PROTOCOL_VERSION, "pid": os.getpid()}
        connection.answer(request, fields | self._proof("hello", header))

    def _info(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        from importlib.util import find_spec

        connection.answer(
            request,
            {
                "pid": os.getpid(),
                "protocol": PROTOCOL_VERSION,
                "sessions": sorted(self._sessions),
                "python": f"{sys.executable} {sys.version.split()[0]}",
                "ipython": all(find_spec(name) is not None for name in ("ipykernel", "jupyter_client")),
                "lease": None if self._lease is None else max(0.0, self._lease.when - monotonic()),
                "workdir": self._workdir,
            },
        )

    def _renew(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        self._set_lease(_seconds_field(header, "seconds"))
        connection.answer(request, {})

    def _set_env(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        variables = header.get("env")
        if not isinstance(variables, dict) or not all(
            isinstance(name, str)
            and isinstance(value, str)
            and name
            and "=" not in name
            and "\0" not in name + value
            for name, value in variables.items()
        ):
            raise BadRequest("env: an object of strings is needed, without NUL and without = in names")
        os.environ.update(variables)
        connection.answer(request, {})

    def _shutdown(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        connection.answer(request, {})
        self._loop.stop()

    def _kill_all(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        connection.answer(request, {"count": self._end_everything()})

    def _tunnel(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        match header.get("purpose", "network"):
            case "network":
                tunnels = self._network
            case "gateway":
                tunnels = self._gateway
            case purpose:
                raise BadRequest(f"purpose: {str(purpose)[:20]!r} is neither network nor gateway")
        if tunnels.closed:
            raise SandboxError("tunnel: an evaluation has begun", reason="TunnelRefused")
        if tunnels.full():
            raise SandboxError("tunnel: there are too many tunnels", reason="TooManyTunnels")
        connection.answer(request, {"port": tunnels.port()})
        sock = connection.take_socket()
        if sock is None:
            connection.close()
        else:
            tunnels.add(sock)

    def _end_init(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        further = header.get("folders")
        if not isinstance(further, list) or not all(
            isinstance(path, str) and path.startswith("/") and "\0" not in path for path in further
        ):
            raise BadRequest("folders: a list of absolute paths is needed")
        self._git_settings.record(further)
        connection.answer(request, {})

    def _begin_eval(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        self._gateway.close(for_good=True)
        self._network.close(for_good=header.get("network") is not True)
        self._end_everything()
        alive = processes.alive_below(processes.snapshot(), own_namespace=self._own_namespace)
        if alive:
            raise SandboxError(
                f"{len(alive)} processes of the sandbox survive SIGKILL", reason="ProcessesSurvive"
            )
        if self._own_namespace:
            remove_segments()
        place, sabotage = self._places.make(), self._places.sabotage()
        if not sabotage:  # Otherwise there will be no evaluation.
            self._git_settings.put_back()
        fields = {**vars(place), "sabotage": sabotage}
        environment = b"\0".join(b"%b=%b" % pair for pair in os.environb.items())
        connection.answer(request, fields | self._proof(f"begin_eval {place.folder}", header), environment)

    def _proof(self, purpose: str, header: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to the request's challenge, {} if there is no challenge or no secret to prove."""
        if self._secret is None or "challenge" not in header:
            return {}
        return {"proof": answer(self._secret, purpose, header["challenge"])}

    def _end_everything(self) -> int:
        for session in self._sessions.values():
            session.expect_kill()
        for program in self._programs:
            program.expect_kill()
        if self._ipython is not None:
            self._ipython.expect_kill()
        count = self.kill_all()  # This also reaps, which ends the commands and programs.
        for session in self._sessions.values():
            session.kill()
        self._sessions.clear()
        if self._ipython is not None:
            self._ipython.forget()
        return count

    # The requests below concern bash sessions.

    def _session(self, header: dict[str, Any]) -> BashSession:
        name = _text_field(header, "session")
        session = self._sessions.get(name)
        if session is None:
            if not 0 < len(name) <= 200:
                raise BadRequest("session: a name of 1 to 200 characters is needed")
            if len(self._sessions) >= self._options.max_sessions:
                raise BadRequest(
                    f"{self._options.max_sessions} sessions are open; close one first",
                    reason="TooManySessions",
                )
            environment = {**os.environ, **_PAGERS, "PS1": "", "PS2": ""}
            session = BashSession(self._loop, name, self._workdir, environment, self._protections)
            self._sessions[name] = session
        return session

    def _existing(self, header: dict[str, Any]) -> BashSession:
        session = self._sessions.get(_text_field(header, "session"))
        if session is None:
            raise BadRequest(f"there is no session {header['session']!r}", reason="NoCommandRunning")
        return session

    def _bash(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        if b"\0" in body:
            raise BadRequest("command: holds a NUL byte, which bash cannot run")
        if len(body) > _MAX_COMMAND:
            raise CommandTooLarge(f"command of {len(body)} bytes; at most {_MAX_COMMAND} are allowed")
        timeout = _seconds_field(header, "timeout")
        max_output = self._limit(header)
        on_output = None
        if header.get("stream"):
            remaining = max_output

            def on_output(data: bytes) -> None:
                nonlocal remaining
                if remaining > 0:
                    connection.event(request, data[:remaining])
                    remaining -= len(data)

        session = self._session(header)
        command = Command(
            body,
            timeout,
            max_output,
            on_output,
            lambda outcome: _reply(connection, request, outcome),
            reads_input=header.get("reads_input") is True,
        )
        session.execute(command)
        connection.in_flight[request] = lambda: session.cancel(command)

    def _input(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        self._existing(header).send_input(body)
        connection.answer(request, {})

    def _interrupt(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        self._existing(header).interrupt()
        connection.answer(request, {})

    def _close_session(
        self, connection: Connection, request: int, header: dict[str, Any], body: bytes
    ) -> None:
        session = self._sessions.pop(_text_field(header, "session"), None)
        if session is not None:
            session.kill()
        connection.answer(request, {})

    # The requests below concern programs, cells and files.

    def _run(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        from rollyard_sandbox.execution.programs import RunningProgram

        argv = header.get("argv")
        if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
            raise BadRequest("argv: a list of strings is needed")
        extra = header.get("env") or {}
        if not isinstance(extra, dict) or not all(isinstance(value, str) for value in extra.values()):
            raise BadRequest("env: an object of strings is needed")
        terminal = header.get("terminal") is True
        inherited = {**os.environ, **(_PAGERS if terminal else {})}
        environment = extra if header.get("clean_env") is True else {**inherited, **extra}
        cwd = header.get("cwd") or self._workdir
        if not isinstance(cwd, str):
            raise BadRequest("cwd: a string is needed")
        program: RunningProgram | None = None

        def done(outcome: Outcome | SandboxError) -> None:
            self._programs.discard(program)
            _reply(connection, request, outcome)

        program = RunningProgram(
            self._loop,
            self._protections,
            argv,
            environment,
            os.path.join(self._workdir, cwd),
            body,
            _seconds_field(header, "timeout"),
            self._limit(header),
            done,
            terminal=terminal,
        )
        self._programs.add(program)
        connection.in_flight[request] = program.cancel

    def _run_cell(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        from rollyard_sandbox.execution.ipython import IPython

        timeout, max_output = _seconds_field(header, "timeout"), self._limit(header)
        try:
            code = body.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"code: not UTF-8: {error}") from None
        if self._ipython is None:
            self._ipython = IPython(self._loop, self._protections, self._workdir)

        def done(outcome: Outcome | SandboxError, result: str) -> None:
            # The result is sent in the header, whose size is limited. The output has all of it.
            _reply(connection, request, outcome, result[: min(max_output, _MAX_RESULT)])

        connection.in_flight[request] = self._ipython.execute(code, timeout, max_output, done)

    def _read(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        data, size, mode = files.read(
            self._path(header),
            _whole_field(header, "offset", 0, 1 << 62),
            min(_whole_field(header, "max_bytes", 0, 1 << 62), MAX_BODY),
        )
        connection.answer(request, {"size": size, "mode": mode}, data)

    def _write(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        files.write(self._path(header), body, _whole_field(header, "mode", 0, 0o7777))
        connection.answer(request, {})

    def _list(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        from json import dumps

        connection.answer(request, {}, dumps(files.entries(self._path(header))).encode())

    def _remove(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        files.remove(self._path(header))
        connection.answer(request, {})

    def _work_folder(self, connection: Connection, request: int, header: dict[str, Any], body: bytes) -> None:
        """Run an operation on a folder (`beneath` on the wire), which follows no symbolic link.

        Paths are relative to the work folder or, with `anywhere`, to the sandbox's root.
        """
        from rollyard_sandbox.server import work_folder

        folder = "/" if header.get("anywhere") is True else self._workdir
        path, answer = header.get("path"), b""
        match header.get("action"):
            case "tree":
                answer = work_folder.tree(folder, work_folder.name(path) if path else b"")
            case "digests":
                answer = work_folder.digests(folder, _body_list(body))
            case "read":
                offset = _whole_field(header, "offset", 0, 1 << 62)
                most = _whole_field(header, "max_bytes", 0, MAX_BODY)
                answer = work_folder.read(folder, work_folder.name(path), offset, most)
            case "put":
                mode = _whole_field(header, "mode", 0, 0o777)
                work_folder.put(folder, work_folder.name(path), body, mode)
            case "make":
                work_folder.make(folder, _body_list(body))
            case "remove":
                work_folder.remove(folder, _body_list(body))
            case action:
                raise BadRequest(f"action: {action!r} is unknown")
        connection.answer(request, {}, answer)

    def _path(self, header: dict[str, Any]) -> str:
        path = _text_field(header, "path")
        try:
            os.fsencode(path)
        except UnicodeEncodeError:
            raise FileError(f"{path!r}: cannot be the name of a file") from None
        if not path or "\0" in path:
            raise FileError(f"{path!r}: a path without NUL is needed")
        return os.path.join(self._workdir, path)

    def _limit(self, header: dict[str, Any]) -> int:
        return min(_whole_field(header, "max_output", 0, 1 << 62), self._options.max_output)


def _reply(connection: Connection, request: int, outcome: Outcome | SandboxError, result: str = "") -> None:
    if isinstance(outcome, SandboxError):
        connection.refuse(request, outcome)
        return
    connection.answer(
        request,
        {
            "exit": outcome.exit_code,
            "cwd": outcome.cwd,
            "seconds": round(outcome.seconds, 6),
            "timed_out": outcome.timed_out,
            "killed": outcome.killed,
            "truncated": outcome.truncated_bytes,
            "restarted": outcome.shell_restarted,
            "result": result,
        },
        outcome.output,
    )


# The functions below read fields of requests, and raise BadRequest with the field's name.


def _body_list(body: bytes) -> list[Any]:
    """Return the list that a body holds as JSON."""
    from json import loads

    try:
        items = loads(body)
    except ValueError as error:
        raise BadRequest(f"body: not JSON: {error}") from None
    if not isinstance(items, list):
        raise BadRequest("body: a list is needed")
    return items


def _text_field(header: dict[str, Any], field: str) -> str:
    """Return a field that must be a string."""
    value = header.get(field)
    if not isinstance(value, str):
        raise BadRequest(f"{field}: a string is needed")
    return value


def _whole_field(header: dict[str, Any], field: str, least: int, most: int) -> int:
    """Return a field that must be a whole number from `least` to `most`."""
    value = header.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadRequest(f"{field}: a whole number from {least} to {most} is needed")
    return value


def _seconds_field(header: dict[str, Any], field: str) -> float:
    """Return a field that must be a number of seconds above 0 and up to _MAX_SECONDS."""
    value = header.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _MAX_SECONDS:
        raise BadRequest(f"{field}: seconds above 0 and up to {_MAX_SECONDS:.0f} are needed")
    return float(value)
