"""The shell around the operator: kopf starts and stops it, answers probes and handles signals.

kopf does not watch anything here. Its watches end for good after answers that every API server gives now and
then (410, an error inside a watch, a broken connection), and they do not show what was deleted while they
were broken. The module `reflector` watches instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from rollyard_operator.kube.client import KubeClient

PREFIX = "rollyard.dev"
LIVENESS = "http://0.0.0.0:8080/healthz"
ENDING_SECONDS = 10.0
"""The time within which the operator's work and kopf's own tasks have to end."""
Login = Callable[[], Awaitable[kopf.ConnectionInfo]]


def kopf_settings() -> kopf.OperatorSettings:
    """Return kopf's settings: it posts no events and leaves no trace on any object."""
    own = kopf.OperatorSettings()
    own.posting.enabled = False
    own.posting.loggers = False
    own.peering.standalone = True
    own.scanning.disabled = True  # There are no resources to look for.
    own.persistence.finalizer = f"{PREFIX}/operator"
    own.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=PREFIX)
    own.networking.connect_timeout = 10.0
    own.process.ultimate_exiting_timeout = 2 * ENDING_SECONDS
    return own


def login_of(kube: KubeClient) -> Login:
    """Return a login handler with the credentials of a client. kopf calls it again when they have expired."""

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


async def run_under_kopf(
    work: Callable[[], Awaitable[None]], alive: Callable[[], bool], login: Login, liveness: str
) -> None:
    """Run `work` until SIGTERM or SIGINT, and answer liveness probes in the meantime.

    Args:
        work: The operator. It is cancelled at the end.
        alive: Returns whether a liveness probe succeeds.
        liveness: The URL on which probes are answered, or an empty string for none.

    Raises:
        Exception: The error that ended `work`. The process should exit, and its supervisor starts another
            one.
    """
    registry = kopf.OperatorRegistry()
    stop = asyncio.Event()
    working: list[asyncio.Task[None]] = []

    @kopf.on.login(registry=registry, id="login")
    async def _login(**_: Any) -> kopf.ConnectionInfo:
        return await login()

    @kopf.on.startup(registry=registry, id="begin")
    async def _begin(**_: Any) -> None:
        task = asyncio.ensure_future(work())
        task.add_done_callback(lambda _: stop.set())
        working.append(task)

    # A probe is repeated by the kubelet and not by kopf.
    @kopf.on.probe(registry=registry, id="loops", errors=kopf.ErrorsMode.PERMANENT)
    async def _alive(**_: Any) -> bool:
        if not alive():
            raise kopf.PermanentError("the control plane is not polled any more")
        return True

    @kopf.on.cleanup(registry=registry, id="end")
    async def _end(**_: Any) -> None:
        for task in working:
            task.cancel()
        await asyncio.wait(working, timeout=ENDING_SECONDS)

    await kopf.operator(
        registry=registry,
        settings=kopf_settings(),
        standalone=True,
        clusterwide=True,
        liveness_endpoint=liveness or None,
        stop_flag=stop,
    )
    for task in working:
        if task.done() and not task.cancelled():
            task.result()
