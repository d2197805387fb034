"""The framework around the operator: kopf watches RolloutJobs and BackendPools, answers probes and logs in.

Its handlers put what they see into the operator's caches, which wake the loop of an object. kopf ends for
good after answers that every API server gives now and then, such as an error inside a watch, so it is started
again within the process, and the operator's loops continue meanwhile. A list finds what was deleted while a
watch was broken.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import kopf
from kubernetes.aio import client

from rollyard_operator.kube.client import TRY_AGAIN, KubeClient
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.resources import OWN_KINDS, RESOURCES

PREFIX = "rollyard.dev"
LIVENESS = "http://0.0.0.0:8080/healthz"
ENDING_SECONDS = 10.0
"""The time within which the operator's work has to end."""
KOPF_ENDING_SECONDS = 5.0
"""The time within which kopf's tasks have to end before they are left behind."""
FIRST_LIST_SECONDS = 10.0
"""kopf starts without its watches if the cluster has not been listed after this many seconds."""
LOOK_SECONDS = 1.0
"""The time between two looks at the namespaces that may be watched, in seconds."""
STEADY_SECONDS = 60.0
"""After a run of this many seconds, the pause before the next start is short again."""
ResultT = TypeVar("ResultT")
_log = logging.getLogger(__name__)


class Watched(Protocol):
    """The operator as kopf drives it. Operator implements it."""

    def watchable(self) -> frozenset[str | None]:
        """Return the namespaces that may be watched. None stands for all."""

    def seen(self, type: str | None, obj: Object) -> None:
        """Take an event of a watch."""

    def watches_broke(self) -> None:
        """Find out what changed without an event."""

    def alive(self) -> bool:
        """Return whether a liveness probe succeeds."""


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it posts no events and leaves no trace on any object."""
    own = kopf.OperatorSettings()
    own.posting.enabled = False
    own.posting.loggers = False
    own.peering.standalone = True
    own.scanning.disabled = True  # The operator may list neither namespaces nor definitions of resources.
    own.persistence.finalizer = f"{PREFIX}/operator"
    own.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    own.networking.connect_timeout = 10.0
    # The process outlives kopf, so kopf must not kill it some time after its own end.
    own.process.ultimate_exiting_timeout = None
    return own


class Kopf:
    """One run of kopf, in a thread with an event loop of its own.

    Its tasks are spawned and ended here. `kopf.operator` would cancel all tasks of the event loop at its end,
    because it has lost track of its own, and wait for them without a limit. A watch that breaks while it is
    cancelled never ends, so neither would kopf.
    """

    def __init__(self, operator: Watched, kube: KubeClient, liveness: str) -> None:
        self._operator = operator
        self._kube = kube
        self._liveness = liveness
        self._home = asyncio.get_running_loop()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self.watched = operator.watchable()
        """The namespaces that this run watches."""

    async def run(self) -> None:
        """Run until `stop` was called.

        Raises:
            Exception: kopf has failed.
        """
        running = asyncio.ensure_future(asyncio.to_thread(self._run_loop))
        try:
            await asyncio.shield(running)
        finally:
            self.stop()
            await asyncio.wait([running])

    def stop(self) -> None:
        """End the run."""
        self._stop.set()
        if self._loop is not None:
            with suppress(RuntimeError):  # It has ended.
                self._loop.call_soon_threadsafe(self._ended.set)

    def _run_loop(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(self._serve())
        finally:
            loop.close()  # This leaves tasks that do not end, for which `asyncio.run` would wait.

    async def _serve(self) -> None:
        self._ended, self._loop = asyncio.Event(), asyncio.get_running_loop()
        if self._stop.is_set():
            return
        everywhere = not self.watched or None in self.watched
        tasks = await kopf.spawn_tasks(
            registry=self._handlers(),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=everywhere,
            namespaces=() if everywhere else sorted(name for name in self.watched if name is not None),
            liveness_endpoint=self._liveness or None,
        )
        # These run until they are cancelled, so the first one that ends says that kopf has failed.
        stopping = asyncio.create_task(self._ended.wait())
        ended, _ = await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=KOPF_ENDING_SECONDS)
        failed = ended - {stopping}
        for task in failed:
            # One that kopf itself has cancelled must not look like the end of the operator.
            if not task.cancelled():
                task.result()
        if failed:
            names = ", ".join(sorted(task.get_name() for task in failed))
            raise RuntimeError(f"the {names} of kopf has ended")

    async def _at_home(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of a coroutine that runs in the operator's event loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._home))

    def _handlers(self) -> kopf.OperatorRegistry:
        """Return kopf's handlers: the login, the probe, and one for the events of each kind."""
        registry = kopf.OperatorRegistry()

        # kopf calls it again when the credentials have expired.
        @kopf.on.login(registry=registry, id="login")
        async def _login(**_: Any) -> kopf.ConnectionInfo:
            return await self._at_home(_connection(self._kube.configuration))

        async def is_alive() -> bool:
            return self._operator.alive()

        # A probe is repeated by the kubelet and not by kopf. It hangs if the operator's event loop does.
        @kopf.on.probe(registry=registry, id="loops", errors=kopf.ErrorsMode.PERMANENT)
        async def _alive(**_: Any) -> bool:
            if not await self._at_home(is_alive()):
                raise kopf.PermanentError("the control plane is not polled any more")
            return True

        async def _seen(event: kopf.RawEvent, **_: Any) -> None:
            self._home.call_soon_threadsafe(self._operator.seen, event["type"], dict(event["object"]))

        for kind in OWN_KINDS if self.watched else ():
            group, _, version = RESOURCES[kind].api.partition("/")
            kopf.on.event(group, version, RESOURCES[kind].plural, registry=registry, id="seen")(_seen)
        return registry


async def _connection(own: client.Configuration) -> kopf.ConnectionInfo:
    """Return what the operator's own client uses to connect. A token that is replaced is read again."""
    header = await own.get_api_key_with_prefix("BearerToken") or ""
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
        server=own.host,
        ca_path=own.ssl_ca_cert,
        insecure=not own.verify_ssl,
        scheme=scheme or None,
        token=token or None,
        certificate_path=own.cert_file,
        private_key_path=own.key_file,
        proxy_url=own.proxy,
    )


async def run_under_kopf(
    work: Callable[[], Awaitable[None]], operator: Watched, kube: KubeClient, liveness: str
) -> None:
    """Run `work` until SIGTERM or SIGINT, with kopf beside it. kopf is started again whenever it fails.

    Args:
        work: The operator's loops. They are cancelled at the end.
        liveness: The URL on which probes are answered, or an empty string for none.

    Raises:
        Exception: The error that ended `work`. The process should exit, and its supervisor starts another
            one.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    working = asyncio.ensure_future(work())
    working.add_done_callback(lambda _: stop.set())
    failures, started = 0, loop.time()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        while not (stop.is_set() or operator.watchable() or loop.time() - started > FIRST_LIST_SECONDS):
            await _set_within(stop, 0.1)
        while not stop.is_set():
            began = loop.time()
            try:
                run = Kopf(operator, kube, liveness)
                async with asyncio.TaskGroup() as group:
                    ending = group.create_task(_until_changed(run, operator, stop))
                    await run.run()
                    ending.cancel()
            except* Exception as errors:
                error = errors.exceptions[0]
                failures = 1 if loop.time() - began > STEADY_SECONDS else failures + 1
                _log.warning("kopf is started again: %s: %s", type(error).__name__, error)
                operator.watches_broke()
                await _set_within(stop, TRY_AGAIN.pause(failures))
    finally:
        working.cancel()
        await asyncio.wait([working], timeout=ENDING_SECONDS)
    if working.done() and not working.cancelled():
        working.result()


async def _until_changed(kopf_run: Kopf, operator: Watched, stop: asyncio.Event) -> None:
    """Wait until `stop`, or until other namespaces may be watched, and end the run of kopf."""
    while not stop.is_set() and operator.watchable() == kopf_run.watched:
        await _set_within(stop, LOOK_SECONDS)
    kopf_run.stop()


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, for at most this many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
