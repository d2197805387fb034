"""`python -m rollyard_operator --config FILE`: the operator of one installation."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from rollyard_client import DriverClient, Retry
from rollyard_client.transport import CA_FILE
from rollyard_crds.security.log_text import log_to
from rollyard_drivers.reconcile.plan import Profile

from rollyard_operator.installation import Operator
from rollyard_operator.kopf_shell import LIVENESS, login_of, on_signals, watch
from rollyard_operator.kube import labels
from rollyard_operator.kube.client import KubeClient, KubeError
from rollyard_operator.kube.object_cache import PodCache
from rollyard_operator.kube.reflector import Reflector
from rollyard_operator.kube.watch import KubeWatch
from rollyard_operator.pods.workloads import installation_digest
from rollyard_operator.sandboxes.isolation import external_checks, isolation_checks
from rollyard_operator.sandboxes.loop import SandboxLoop
from rollyard_operator.sandboxes.witnesses import Witnesses
from rollyard_operator.settings import OperatorSettings, SettingsError, load_settings

_log = logging.getLogger("rollyard_operator")
MAX_ACTIVE_JOBS = 100
"""More wait as Pending; what the cluster has room for is its scheduler's and Kueue's business."""
ENDS = {signal.SIGTERM, signal.SIGINT}
STEADY_SECONDS = 20.0
SHORT_PAUSE_SECONDS, LONG_PAUSE_SECONDS = 1.0, 5.0
"""Before all begins anew: after it was steady for so long, and else."""
ENDING_SECONDS = 5.0
"""For the watches, to end when they are asked to."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollyard_operator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the installation's settings, YAML")
    parser.add_argument("--liveness", default=LIVENESS, metavar="URL", help="where to answer liveness probes")
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    return parser.parse_args(arguments)


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"tokenFile: {path} cannot be read: {error.strerror}") from error
    if not token:
        raise SettingsError(f"tokenFile: {path} is empty")
    return token


async def serve(settings: OperatorSettings, liveness: str, leave: Callable[[bool], None]) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Args:
        leave: ends this process at once; True: for a new one of the same command, which reads all that it
            needs to know from the cluster.

    Raises:
        SettingsError: the token file cannot be read.
        KubeError: there is no cluster, or it refuses us.
    """
    if settings.control_plane_ca_file is not None:
        os.environ[CA_FILE] = str(settings.control_plane_ca_file)
    kube = await KubeClient.connect()
    pods = KubeWatch(kube)
    url, token = settings.control_plane_url, _token(settings.token_file)
    # A turn that fails is tried again soon: the client itself need not be patient.
    client = DriverClient(url, token, timeout=15.0, retry=Retry(attempts=3))
    try:
        settings = settings.model_copy(update={"api_server_version": await kube.version()})
        async with httpx.AsyncClient(trust_env=False) as http:
            await _run(settings, kube, pods, client, http, liveness, leave)
    finally:
        await client.aclose()
        await pods.close()
        await kube.close()


async def _run(
    settings: OperatorSettings,
    kube: KubeClient,
    pods: KubeWatch,
    client: DriverClient,
    http: httpx.AsyncClient,
    liveness: str,
    leave: Callable[[bool], None],
) -> None:
    witnesses = Witnesses(await external_checks(settings))
    profile = Profile(max_active_jobs=MAX_ACTIVE_JOBS, made_of=installation_digest(settings))
    operator = Operator(settings, profile, kube, client, http)
    sandboxes = SandboxLoop(
        kube,
        operator.yard.pods,
        client,
        lambda namespace, name: operator.yard.jobs.get((namespace, name)),
        settings,
        key=_token(settings.token_file),
        checks=await isolation_checks(settings, kube, os.environ),
        doubt=witnesses.doubt if settings.isolation.required else (lambda: ""),
    )
    operator.job_changed = sandboxes.wake
    filled, asked, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
    on_signals(asked.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDS)

    async def begun() -> None:
        filled.set()

    async def watching() -> None:
        await filled.wait()
        try:
            await watch(operator, settings, login_of(kube), liveness, asked, over.set)
        finally:
            over.set()

    async def watching_pods() -> None:
        await filled.wait()
        try:
            await _watch_pods(settings, pods, operator.yard.pods)
        except KubeError as error:
            _log.error("the watch of pods is refused: %s", error)
        except Exception:
            _log.exception("the watch of pods failed")
        finally:
            over.set()

    looking = (witnesses.run,) if settings.isolation.external else ()
    began = time.monotonic()
    working = asyncio.create_task(operator.run(begun, sandboxes.run, *looking), name="operator")
    watches = asyncio.create_task(watching(), name="watches")
    pod_watches = asyncio.create_task(watching_pods(), name="watches of pods")
    ends = [asyncio.create_task(one.wait()) for one in (asked, over)]
    try:
        await asyncio.wait((working, *ends), return_when=asyncio.FIRST_COMPLETED)
        if over.is_set() and not asked.is_set():
            steady = time.monotonic() - began > STEADY_SECONDS
            pause = SHORT_PAUSE_SECONDS if steady else LONG_PAUSE_SECONDS
            _log.warning("the watches have ended: in %g s all begins anew", pause)
            await asyncio.wait(ends[:1], timeout=pause)
            leave(not asked.is_set())
        working.cancel()
        if asked.is_set() and filled.is_set():
            _, left = await asyncio.wait((watches,), timeout=ENDING_SECONDS)
            if left:
                leave(False)
    finally:
        for task in (working, watches, pod_watches, *ends):
            task.cancel()
        ended = await asyncio.gather(working, watches, pod_watches, *ends, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome


async def _watch_pods(settings: OperatorSettings, watcher: KubeWatch, cache: PodCache) -> None:
    """Keep the cache of pods until cancelled; in the namespaces that it looks after.

    Raises:
        KubeError: the API server refuses it for good.
    """
    namespaces: list[str | None] = [*settings.namespaces] or [None]
    selector = labels.selector(settings.instance)
    tasks = [
        asyncio.create_task(Reflector(watcher, "Pod", namespace, selector, cache).run(), name="reflector")
        for namespace in namespaces
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _leave(begin_anew: bool) -> None:
    """End this process at once, or replace it by a new one of the same command.

    After a watch has failed, tasks of kopf are left that neither go on nor end.
    """
    if not begin_anew:
        os._exit(0)
    # Whoever asks it to end meanwhile is heard later: the first process of a container ignores what it
    # has no handler for.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDS)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 when it was asked to end, 1 after a failure, 2 for unusable settings."""
    options = _options(arguments)
    log_to(level=options.log_level)
    for noisy in ("kopf", "httpx", "httpcore", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        asyncio.run(serve(load_settings(options.config), options.liveness, _leave))
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    except KubeError as error:
        print(f"rollyard_operator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
