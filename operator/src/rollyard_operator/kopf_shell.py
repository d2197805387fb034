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
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol

import kopf

from rollyard_operator.kube.client import TRY_AGAIN, KubeClient
from rollyard_operator.kube.labels import Object
from rollyard_operator.kube.resources import OWN_KINDS, RESOURCES

PREFIX = "rollyard.dev"
LIVENESS = "http://0.0.0.0:8080/healthz"
ENDING_SECONDS = 10.0
"""The time within which the operator's work has to end."""
FIRST_LIST_SECONDS = 10.0
"""kopf starts without its watches if the cluster has not been listed after this many seconds."""
LOOK_SECONDS = 1.0
"""The time between two looks at the namespaces that may be watched, in seconds."""
STEADY_SECONDS = 60.0
"""After a run of this many seconds, the pause before the next start is short again."""
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
    # kopf would kill the process some time after each of its ends, which are no ends of the process here.
    own.process.ultimate_exiting_timeout = None
    return own


def handlers(operator: Watched, kube: KubeClient, watching: bool) -> kopf.OperatorRegistry:
    """Return kopf's handlers: the login, the probe, and (if `watching`) one for the events of each kind."""
    registry = kopf.OperatorRegistry()

    # kopf calls it again when the credentials have expired.
    @kopf.on.login(registry=registry, id="login")
    async def _login(**_: Any) -> kopf.ConnectionInfo:
        access = await kube.access()
        return kopf.ConnectionInfo(
            server=access.server,
            ca_path=access.ca_file,
            insecure=access.insecure,
            scheme=access.scheme,
            token=access.token,
            certificate_path=access.cert_file,
            private_key_path=access.key_file,
            proxy_url=access.proxy,
        )

    # A probe is repeated by the kubelet and not by kopf.
    @kopf.on.probe(registry=registry, id="loops", errors=kopf.ErrorsMode.PERMANENT)
    async def _alive(**_: Any) -> bool:
        if not operator.alive():
            raise kopf.PermanentError("the control plane is not polled any more")
        return True

    async def _seen(event: kopf.RawEvent, **_: Any) -> None:
        operator.seen(event["type"], dict(event["object"]))

    for kind in OWN_KINDS if watching else ():
        group, _, version = RESOURCES[kind].api.partition("/")
        kopf.on.event(group, version, RESOURCES[kind].plural, registry=registry, id="seen")(_seen)
    return registry


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
        _stop_on_signals(stop)
        while not (stop.is_set() or operator.watchable() or loop.time() - started > FIRST_LIST_SECONDS):
            await _set_within(stop, 0.1)
        while not stop.is_set():
            began = loop.time()
            try:
                await _run_kopf(operator, kube, liveness, stop)
            except Exception as error:
                failures = 1 if loop.time() - began > STEADY_SECONDS else failures + 1
                _log.warning("kopf is started again: %s: %s", type(error).__name__, error)
                operator.watches_broke()
                await _set_within(stop, TRY_AGAIN.pause(failures))
    finally:
        working.cancel()
        await asyncio.wait([working], timeout=ENDING_SECONDS)
    if working.done() and not working.cancelled():
        working.result()


async def _run_kopf(operator: Watched, kube: KubeClient, liveness: str, stop: asyncio.Event) -> None:
    """Run kopf until `stop`, or until other namespaces may be watched.

    Raises:
        Exception: kopf has failed.
    """
    watched = operator.watchable()
    everywhere = not watched or None in watched
    # kopf.operator() would, at its end, cancel all tasks of the process that began after it.
    tasks = await kopf.spawn_tasks(
        registry=handlers(operator, kube, bool(watched)),
        settings=kopf_settings(),
        standalone=True,
        clusterwide=everywhere,
        namespaces=() if everywhere else sorted(name for name in watched if name is not None),
        liveness_endpoint=liveness or None,
        stop_flag=stop,
    )
    _stop_on_signals(stop)  # kopf has replaced the handlers with some that end only itself.
    try:
        while operator.watchable() == watched:
            done, _ = await asyncio.wait(tasks, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if done:
                break
    finally:
        await _end(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def _set_within(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, for at most this many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


def _stop_on_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
