"""The shell around the operator: kopf watches jobs and pools, and tells what it sees. It decides and writes
nothing.

Pods have a watch of their own (`reflector`): there are many times more events of them, and all that these do
is fill a cache.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import kopf

from rollyard_operator.installation import KINDS, Operator
from rollyard_operator.kube.client import RESOURCES, KubeClient
from rollyard_operator.settings import OperatorSettings

PREFIX = "rollyard.dev"
LONGEST_PAUSE_SECONDS = 15.0
LIVENESS = "http://0.0.0.0:8080/healthz"
Login = Callable[[], Awaitable[kopf.ConnectionInfo]]


class Endless:
    """Pauses between tries, in seconds, without an end.

    A watch that gives up would end the whole operator, also where a single namespace refuses it.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((1.0, 1.0, 2.0, 3.0, 5.0, 8.0), itertools.repeat(LONGEST_PAUSE_SECONDS))


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing is compared with what it was: handlers of events alone want no differences.

    kopf would copy every object several times for each event, a quarter of the operator's CPU time.
    """

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        """Nothing is kept."""


def kopf_settings() -> kopf.OperatorSettings:
    """How kopf is to behave: it watches what is ours, and leaves no trace on any object."""
    own = kopf.OperatorSettings()
    own.posting.enabled = False
    own.posting.loggers = False
    own.peering.standalone = True
    own.scanning.disabled = True  # the resources are there before the watches begin
    own.persistence.finalizer = f"{PREFIX}/operator"
    own.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    own.persistence.diffbase_storage = _NoDiffs()
    own.networking.connect_timeout = 10.0
    own.networking.error_backoffs = Endless()
    own.process.ultimate_exiting_timeout = None  # its own kill -9, minutes after a watch has failed
    own.queueing.exit_timeout = 0.5
    own.queueing.idle_timeout = 1.0
    return own


def kopf_registry(operator: Operator, login: Login, ending: Callable[[], object]) -> kopf.OperatorRegistry:
    """Events and nothing else: handlers of creation, update or deletion would mark the objects."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry, id="login")
    async def _login(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    async def told(event: kopf.RawEvent, **_: Any) -> None:
        obj = dict(event["object"])
        if event["type"] == "DELETED":
            operator.gone(obj)
        else:
            operator.seen(obj)
        if event["type"] is None:
            operator.listed()

    for kind in KINDS:
        resource = RESOURCES[kind]
        group, _, version = resource.api.rpartition("/")
        kopf.on.event(group, version, resource.plural, registry=registry, id=resource.plural)(told)

    # Asked again by the kubelet, not by kopf.
    @kopf.on.probe(registry=registry, id="loops", errors=kopf.ErrorsMode.PERMANENT)
    async def _alive(**_: Any) -> bool:
        if not operator.alive():
            raise kopf.PermanentError("the poll of the control plane does not go on")
        return True

    @kopf.on.cleanup(registry=registry, id="ending")
    async def _ending(**_: Any) -> None:
        ending()

    return registry


def login_of(kube: KubeClient) -> Login:
    """The credentials of a client, for kopf; asked again when they have expired."""

    async def login() -> kopf.ConnectionInfo:
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

    return login


def on_signals(call: Callable[[], object]) -> None:
    """Call it, in this event loop, when SIGTERM or SIGINT comes, and nobody else."""
    loop = asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, call)


async def watch(
    operator: Operator,
    settings: OperatorSettings,
    login: Login,
    liveness: str,
    asked: asyncio.Event,
    ending: Callable[[], object],
) -> None:
    """Watch until asked to end; tell the operator what is seen.

    Raises the error that ended a watch, such as an answer 410 or a line that breaks off. kopf does not
    go on after it, and may wait for its own tasks without an end.

    Args:
        asked: set by SIGTERM and SIGINT.
        ending: called when the end begins, whatever its reason.
    """
    before = asyncio.all_tasks()
    tasks = await kopf.spawn_tasks(
        registry=kopf_registry(operator, login, ending),
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=list(settings.namespaces),
        liveness_endpoint=liveness or None,
        stop_flag=asked,
    )
    on_signals(asked.set)  # kopf has taken them
    await kopf.run_tasks(tasks, ignored=before)
