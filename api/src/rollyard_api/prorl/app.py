"""The application with ProRL Agent's calls, and nothing else: no documents, no metrics, no other call.

It listens on a port of its own in the process of the control plane. A gate in front of the calls decides who
may call at all, and bounds the size, time and number of bodies. Many calls wait for the ends of rollouts, and
one look at the database serves all of a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import orjson
import sqlalchemy as sa
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy.engine import Connection
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rollyard_api.core.codec import JSON, check_plain, decode, dumps, loads
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.limits import Limit
from rollyard_api.core.problems import (
    ApiError,
    Forbidden,
    Invalid,
    Malformed,
    TooLarge,
    Unavailable,
)
from rollyard_api.core.sockets import listening_socket, write_port
from rollyard_api.core.wakeups import job_topic
from rollyard_api.options.declared import ControlPlaneOptions
from rollyard_api.prorl import calls
from rollyard_api.prorl.calls import NewCall, StartedCall
from rollyard_api.prorl.config import ProrlConfig, read_config
from rollyard_api.prorl.process_calls import NAMES, RolloutParams, job_spec, process_answer, task_of
from rollyard_api.rollouts import claims
from rollyard_api.service import ControlPlane
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage.rows import EndedRollout, JobRow, read_one
from rollyard_api.storage.schema import jobs, rollouts
from rollyard_api.trajectories import records
from rollyard_api.trajectories.delivery import Delivery

FURTHER_CONNECTIONS: Final = 256
"""The number of connections in addition to those of waiting /process calls."""
SHUTDOWN_SECONDS: Final = 2


log = logging.getLogger("rollyard.api.prorl")

LOOK_SECONDS: Final = 20.0
"""The longest time between two looks at a job for which calls wait, in seconds."""
RETRY_SECONDS: Final = 1.0

End = Literal["ended", "late", "left", "closing"]


@dataclass(slots=True)
class _Follower:
    """The calls that wait for rollouts of one job."""

    waiting: defaultdict[str, set[asyncio.Future[End]]] = field(default_factory=lambda: defaultdict(set))
    task: asyncio.Task[None] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self, rollouts: Iterable[str], end: End) -> None:
        for rollout in rollouts:
            for future in self.waiting.get(rollout, ()):
                if not future.done():
                    future.set_result(end)


def _look(conn: Connection, job_id: int, after: int | None) -> tuple[list[str], int | None]:
    """Return the rollouts that ended after a place, and the place of the last one; None for a lost job."""
    last = conn.scalar(sa.select(jobs.c.ended).where(jobs.c.id == job_id))
    if last is None or after is None:
        return [], last
    of_job = sa.select(rollouts.c.id).where(rollouts.c.job_id == job_id)
    return list(conn.scalars(of_job.where(rollouts.c.end_seq > after, rollouts.c.end_seq <= last))), last


def _has_ended(conn: Connection, rollout: str) -> bool:
    """Return whether a rollout has ended, or is gone."""
    row = conn.execute(sa.select(rollouts.c.end_seq).where(rollouts.c.id == rollout)).one_or_none()
    return row is None or row.end_seq is not None


class Ends:
    """The calls of this process that wait for rollouts."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._followers: dict[int, _Follower] = {}

    async def wait(self, job_id: int, rollout: str, seconds: float, left: asyncio.Future[End]) -> End:
        """Return once a rollout has ended, the time is over, the client has left, or the process ends.

        Args:
            job_id: The job of the rollout.
            rollout: The id of the rollout.
            seconds: The longest wait.
            left: A future that is done once nobody waits for the answer any more.
        """
        follower = self._followers.get(job_id)
        if follower is None:
            follower = self._followers[job_id] = _Follower()
            follower.task = asyncio.create_task(self._follow(job_id, follower))
        future: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        follower.waiting[rollout].add(future)
        try:
            # Every end after the follower's first look is noticed by it, and every earlier one by this look.
            await follower.begun.wait()
            if await self._plane.database.read(partial(_has_ended, rollout=rollout)):
                return "ended"
            await asyncio.wait({future, left}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            return next((waiter.result() for waiter in (future, left) if waiter.done()), "late")
        finally:
            follower.waiting[rollout].discard(future)
            if not follower.waiting[rollout]:
                del follower.waiting[rollout]
            future.cancel()

    async def _follow(self, job_id: int, follower: _Follower) -> None:
        database, bus = self._plane.database, self._plane.bus
        after: int | None = None
        try:
            while follower.waiting and not bus.closing:
                look = partial(database.read, partial(_look, job_id=job_id, after=after))
                wait = 0.0 if after is None else LOOK_SECONDS
                try:
                    ended, after = await bus.until(job_topic(job_id), look, lambda ends: bool(ends[0]), wait)
                except ApiError as error:
                    log.warning("waiting for rollouts: %s: %s", error.reason, error.detail)
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                follower.begun.set()
                follower.wake(list(follower.waiting) if after is None else ended, "ended")
        finally:
            # There is no await between the last check of `waiting` and this line, so that no call is missed.
            del self._followers[job_id]
            follower.begun.set()
            follower.wake(list(follower.waiting), "closing")

    async def close(self) -> None:
        """Answer the calls that still wait, and end the followers of their jobs."""
        tasks = [follower.task for follower in self._followers.values() if follower.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MAX_INSTANCE_BYTES: Final = 16 << 20
"""The largest body of `/process`, in bytes."""
MAX_BODY_BYTES: Final = 64 << 10
"""The largest body of every other call, in bytes."""
MAX_HELD_BYTES: Final = 256 << 20
"""The largest size of all bodies that are in memory at the same time, in bytes."""
BODY_SECONDS: Final = 60.0
"""The time within which a body must have arrived, in seconds."""
_BROWSERS: Final = ("origin", "sec-fetch-site", "sec-fetch-mode", "access-control-request-method")
"""The headers that browsers add to the requests of web pages, and that no client of the protocol sends."""


class BodyGate:
    """An ASGI application that refuses web pages and unbounded bodies before they reach the calls.

    A call finds the body in `request.state.body`, and awaits `request.state.body_read` when it no longer
    needs it.

    Args:
        app: The calls.
        hosts: The Host headers that are accepted.
    """

    def __init__(self, app: ASGIApp, hosts: HostCheck) -> None:
        self._app = app
        self._hosts = hosts
        self._held = 0
        self._freed = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI specifies it."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        async with AsyncExitStack() as stack:
            try:
                request.state.body = await self._body(request, stack)
            except ApiError as refusal:
                # The rest of the body is not read, so the connection cannot be used again.
                headers = {"Connection": "close"}
                answer = JSONResponse({"detail": refusal.detail}, refusal.status, headers)
                await answer(scope, receive, send)
                return
            request.state.body_read = stack.aclose
            await self._app(scope, receive, send)

    @asynccontextmanager
    async def _room(self, count: int) -> AsyncIterator[None]:
        """Hold room in memory for this many bytes within the block, which begins once there is that much."""
        while self._held + count > MAX_HELD_BYTES:
            self._freed.clear()
            await self._freed.wait()
        self._held += count
        try:
            yield
        finally:
            self._held -= count
            self._freed.set()

    async def _body(self, request: Request, stack: AsyncExitStack) -> bytes:
        headers, path = request.headers, request.scope["path"]
        if any(name in headers for name in _BROWSERS):
            raise Forbidden("requests of web pages are refused")
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self._hosts(hosts[0]):
            raise Forbidden("the Host header names another host than this listener; see its setting 'hosts'")
        most = MAX_INSTANCE_BYTES if path == "/process" else MAX_BODY_BYTES
        too_large = TooLarge(f"the body of {path} may have {most} bytes")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > most:
            raise too_large
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError("the body must not be compressed", status=415, reason="BodyPacked")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                # A body without a length may become as long as any.
                await stack.enter_async_context(
                    self._room(most if "transfer-encoding" in headers else int(length))
                )
                async for piece in request.stream():
                    body += piece
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            detail = f"the body did not arrive within {BODY_SECONDS:g} s"
            raise ApiError(detail, status=408, reason="BodyTooSlow") from None
        except ClientDisconnect:
            raise Malformed("the connection was lost") from None
        kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
        if body and kind != "application/json":
            raise Invalid("the body must be JSON, with Content-Type: application/json")
        return bytes(body)


READING: Final = 32
"""The largest number of `/process` calls whose bodies are read at the same time."""
RESULT_TRIES: Final = 20
"""How often a result is read from a trajectory store that does not answer."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
_Result = Callable[[dict[str, Any]], dict[str, Any]]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class AddServer(_Body):
    """The body of `/add_llm_server`."""

    address: Annotated[str, Field(min_length=1, max_length=calls.MAX_ADDRESS)]


class CancelCall(_Body):
    """The body of `/cancel`."""

    job_id: str


class ProcessCall(_Body):
    """The body of `/process`."""

    instance: dict[str, Any]
    sampling_params: RolloutParams = Field(default_factory=RolloutParams)
    job_id: str | None = None


class ProrlCalls:
    """The calls, on one control plane.

    Args:
        plane: The control plane.
        config: What the installer decided.
    """

    def __init__(self, plane: ControlPlane, config: ProrlConfig) -> None:
        self._plane = plane
        self._config = config
        self.ends = Ends(plane)
        self._reading = asyncio.Semaphore(READING)
        self._open = Limit("/process calls", each=config.max_calls, total=config.max_calls)

    async def start(self, request: Request) -> Response:
        """Answer POST /start: 200 if a batch was opened, 400 if one is open already."""
        await self._cancel_rest()
        if not await self._write(calls.start):
            return _detail(400, "Server is already running")
        return JSONResponse({"status": "Server started successfully"})

    async def stop(self, request: Request) -> Response:
        """Answer POST /stop: 200 if the batch and its unfinished rollouts were ended, 503 if none is open."""
        await self._write(calls.stop)
        await self._cancel_rest()
        return JSONResponse({"status": "Server stopped successfully"})

    async def status(self, request: Request) -> Response:
        """Answer GET /status: 200 with counts of the open batch, 503 if none is open."""
        counts = await self._plane.database.read(partial(calls.counts, namespace=self._config.namespace))
        pending = sum(counts.values()) - counts["jobs"]
        return JSONResponse({"status": "running", "running": True, "pending_jobs": pending, **counts})

    async def add_server(self, request: Request) -> Response:
        """Answer POST /add_llm_server: 200 if added, even before /start; 422 if refused, 500 if unusable."""
        body = await self._body(request, AddServer)
        url = await calls.add_server(self._plane, self._config, body.address)
        return JSONResponse({"status": "success", "message": f"LLM server {url} added"})

    async def clear_servers(self, request: Request) -> Response:
        """Answer POST /clear_llm_server: 200, and no server is left."""
        await calls.clear_servers(self._plane, self._config)
        return JSONResponse({"status": "success", "message": "LLM servers cleared"})

    async def cancel(self, request: Request) -> Response:
        """Answer POST /cancel: 200, even for an unknown job_id; 503 if no batch is open."""
        body = await self._body(request, CancelCall)
        cancelled = await self._write(partial(calls.cancel, key=calls.key_of(body.job_id)))
        await self._plane.database.write(claims.release_unneeded, durable=False)
        outcome = "cancelled" if cancelled else "is unknown, so nothing was cancelled"
        return JSONResponse({"status": "success", "message": f"job {body.job_id[:128]} {outcome}"})

    async def process(self, request: Request) -> Response:
        """Answer POST /process: 200 with the result once the rollout has ended; otherwise 503, 422 or 500."""
        with self._open.held(self._config.namespace):
            # A trainer sends all calls of a batch at once. A few are read at a time, and the others wait.
            async with self._reading:
                new = await self._new_call(request)
                call = await self._plane.database.write(partial(calls.admit, new=new))
            key, anonymous = new.key, new.anonymous
            names = {name: new.task.metadata[name] for name in NAMES}
            result = partial(process_answer, names=names, tools=tuple(new.spec.agent.tools))
            del new  # The call may wait for hours, and nobody needs its task any longer.
            left = asyncio.ensure_future(_disconnected(request))
            try:
                end = await self.ends.wait(call.job_id, call.rollout, self._config.wait_seconds, left)
            finally:
                left.cancel()
                with suppress(asyncio.CancelledError):
                    await left
            if end != "ended" and anonymous:
                # Without a job_id, nobody can ask for the result any more.
                with suppress(ApiError):
                    await self._write(partial(calls.cancel, key=key))
            if end == "closing":
                raise Unavailable("the server is restarting; ask again with the same job_id")
            if end != "ended":
                seconds = f"{self._config.wait_seconds:g}"
                raise Unavailable(f"no result within {seconds} s; ask again with the same job_id")
            return await self._result(result, call)

    def behind_gate(self, bound: str) -> ASGIApp:
        """Return the application with the calls, for a listener that is bound to this address."""
        posts = {
            "/start": self.start,
            "/stop": self.stop,
            "/process": self.process,
            "/cancel": self.cancel,
            "/add_llm_server": self.add_server,
            "/clear_llm_server": self.clear_servers,
        }
        routes = [Route(path, call, methods=["POST"]) for path, call in posts.items()]
        routes.append(Route("/status", self.status, methods=["GET"]))
        handled = (ApiError, ValidationError, HTTPException, Exception)
        app = Starlette(routes=routes, exception_handlers=dict.fromkeys(handled, _problem))
        app.router.redirect_slashes = False
        return BodyGate(app, HostCheck(bound, self._config.hosts))

    async def forget_lost(self) -> None:
        """End the rollouts whose clients an earlier process has lost, and those of a stopped batch."""
        if self._plane.database.sqlite:  # Otherwise other replicas have clients of their own.
            await self._write(calls.drop_anonymous)
        await self._cancel_rest()

    async def _new_call(self, request: Request) -> NewCall:
        plane, config = self._plane, self._config
        body = await self._body(request, ProcessCall)
        spec = job_spec(config.spec, config.pool, body.sampling_params)
        plane.sandbox_hosts.check(spec)
        plane.reward_services.check(spec, config.namespace)
        read = partial(task_of, body.instance, config.formats, config.specs)
        return NewCall(
            key=calls.key_of(body.job_id),
            digest=_digest([body.instance, body.sampling_params.model_dump()]),
            anonymous=body.job_id is None,
            spec=spec,
            settings=_digest(spec.to_json()),
            task=await plane.parsing.run(read, config.namespace),
            namespace=config.namespace,
            max_jobs=config.max_jobs,
            quota=plane.settings.rollout_quota,
        )

    async def _result(self, result: _Result, call: StartedCall) -> Response:
        plane, namespace = self._plane, self._config.namespace
        for again in range(RESULT_TRIES):
            if again:
                await asyncio.sleep(RETRY_SECONDS)
            try:
                return await self._read(result, call)
            except ApiError as error:
                # A store that does not answer must not cost a client one of its retries at once.
                if error.status not in (429, 503, 504) or plane.bus.closing:
                    raise
                log.warning("result of %s in %s: %s: %s", call.rollout, namespace, error.reason, error.detail)
        raise Unavailable("the result cannot be read; ask again with the same job_id")

    async def _read(self, result: _Result, call: StartedCall) -> Response:
        plane, namespace = self._plane, self._config.namespace

        def query(conn: Connection) -> tuple[JobRow | None, EndedRollout | None]:
            row = conn.execute(records.select().where(rollouts.c.id == call.rollout)).one_or_none()
            return job_rows.by_id(conn, call.job_id), read_one(EndedRollout, row)

        job, row = await plane.database.read(query)
        if job is None or row is None:
            raise ApiError("the rollout is gone, because somebody deleted its job", reason="RolloutGone")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(plane.pages_of([row]).turn(namespace))
            (line,) = await plane.archive.lines([row], job, plane.settings.page_bytes)
            body = await plane.archive.builds.run(lambda: dumps(result(loads(line))), namespace)
            return Delivery(body, JSON, {}, stack.pop_all())

    async def _cancel_rest(self) -> None:
        while await self._write(calls.cancel_some):
            pass
        await self._plane.database.write(claims.release_unneeded, durable=False)

    async def _write(self, op: Callable[..., T]) -> T:
        """Run a change with the namespace of the calls."""
        return await self._plane.database.write(partial(op, namespace=self._config.namespace))

    async def _body(self, request: Request, model: type[M]) -> M:
        def decoded() -> Any:
            document = decode(request.state.body, JSON)
            check_plain(document)
            return document

        document = await self._plane.parsing.run(decoded, self._config.namespace)
        del request.state.body  # The call may wait for hours, and nobody reads the body again.
        await request.state.body_read()
        return model.model_validate(document)


def _digest(document: Any) -> str:
    """Return the SHA-256 of a value of JSON, whatever the order of its fields."""
    return hashlib.sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).hexdigest()


async def _disconnected(request: Request) -> End:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return "left"


def _detail(status: int, detail: Any) -> Response:
    return JSONResponse({"detail": detail}, status)


_STATUSES: Final[Mapping[int, int]] = {400: 422, 409: 500, 429: 503, 504: 503, 507: 503}
"""The replacements of statuses that the protocol does not know. 503 is a server that cannot answer now."""


async def _problem(_request: Request, error: Exception) -> Response:
    """Return the answer of a call that raised an exception."""
    match error:
        case ApiError():
            status = _STATUSES.get(error.status, error.status)
            return JSONResponse({"detail": error.detail}, status, error.headers)
        case ValidationError():
            # The content of the request is left out, because it may hold a key of another service.
            problems = [
                {"loc": ["body", *item["loc"]], "msg": item["msg"], "type": item["type"]}
                for item in error.errors(include_url=False, include_context=False, include_input=False)
            ]
            return _detail(422, problems)
        case HTTPException():
            return _detail(error.status_code, error.detail)
        case _:  # Starlette raises it again after the answer, and the server logs it.
            return _detail(500, "unexpected error; the server's log says more")


@dataclass(frozen=True, slots=True)
class ProrlListener:
    """A listening socket for the calls, with what the installer decided."""

    socket: socket.socket
    config: ProrlConfig
    host: str
    port_file: Path | None = None


class _Server(uvicorn.Server):
    """A second server, which leaves signals to the control plane's own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def opened(options: ControlPlaneOptions) -> ProrlListener | None:
    """Return the listener of the ProRL calls, or None if they are off.

    Raises:
        OptionInvalid: A setting is wrong, or the address is not available.
    """
    if not options.prorl:
        if options.prorl_config is not None:
            raise OptionInvalid("--prorl-config goes with --prorl")
        return None
    config = read_config(options.prorl_config, options.prorl_tokenizer)
    sock = listening_socket(options.prorl_host, options.prorl_port, "--prorl-port")
    return ProrlListener(sock, config, options.prorl_host, options.prorl_port_file)


@asynccontextmanager
async def listening(plane: ControlPlane, listener: ProrlListener) -> AsyncIterator[None]:
    """Serve the calls within the block."""
    api = ProrlCalls(plane, listener.config)
    await api.forget_lost()
    config = uvicorn.Config(
        api.behind_gate(listener.host),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=listener.config.max_calls + FURTHER_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        timeout_keep_alive=75,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener.socket]), name="ProRL calls")
    if listener.port_file is not None:
        write_port(listener.port_file, listener.socket)
    try:
        yield
    finally:
        # The waiting calls are answered first, because the server waits for them.
        await api.ends.close()
        server.should_exit = True
        await serving
