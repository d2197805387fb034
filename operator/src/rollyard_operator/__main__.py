"""`python -m rollyard_operator --config FILE`: the operator of one installation."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from rollyard_client import DriverClient, Retry
from rollyard_client.environment import CA_FILE
from rollyard_drivers.reconcile.plan import Profile
from rollyard_process.log_text import log_to
from rollyard_process.telemetry.options import add_log_option
from rollyard_process.telemetry.variables import TraceOptionError

from rollyard_operator.installation import Operator
from rollyard_operator.kopf_shell import LIVENESS, run_under_kopf
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.pods.workloads import installation_digest
from rollyard_operator.sandboxes.isolation import Witnesses, external_checks, isolation_checks
from rollyard_operator.sandboxes.loop import SandboxLoop
from rollyard_operator.settings import OperatorSettings, SettingsError, load_settings

MAX_ACTIVE_JOBS = 100
"""Further jobs wait as Pending. Capacity is left to the cluster's scheduler and Kueue."""


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollyard_operator", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the installation's settings, YAML")
    parser.add_argument("--liveness", default=LIVENESS, metavar="URL", help="where to answer liveness probes")
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    add_log_option(parser)
    return parser.parse_args(arguments)


def _token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"tokenFile: {path} cannot be read: {error.strerror}") from error
    if not token:
        raise SettingsError(f"tokenFile: {path} is empty")
    return token


async def serve(settings: OperatorSettings, liveness: str) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises:
        SettingsError: The token file cannot be read.
        KubeError: There is no cluster, or it refuses the operator. Later errors may be raised as a group of
            exceptions.
    """
    if settings.control_plane_ca_file is not None:
        os.environ[CA_FILE] = str(settings.control_plane_ca_file)
    kube = await KubeClient.connect()
    url, token = settings.control_plane_url, _token(settings.token_file)
    # A pass that fails is retried soon, so the client itself makes few attempts.
    client = DriverClient(url, token, timeout=15.0, retry=Retry(attempts=3))
    try:
        settings = settings.model_copy(update={"api_server_version": await kube.version()})
        async with httpx.AsyncClient(trust_env=False) as http:
            await _run(settings, kube, client, http, liveness)
    finally:
        await client.close()
        await kube.close()


async def _run(
    settings: OperatorSettings,
    kube: KubeClient,
    client: DriverClient,
    http: httpx.AsyncClient,
    liveness: str,
) -> None:
    witnesses = Witnesses(await external_checks(settings))
    profile = Profile(max_active_jobs=MAX_ACTIVE_JOBS, made_of=installation_digest(settings))
    operator = Operator(settings, profile, kube, client, http)
    sandboxes = SandboxLoop(
        kube,
        operator.context.pods,
        client,
        lambda namespace, name: operator.context.jobs.get((namespace, name)),
        settings,
        key=_token(settings.token_file),
        checks=await isolation_checks(settings, kube, os.environ),
        doubt=witnesses.doubt if settings.isolation.required else (lambda: ""),
    )
    operator.job_changed = sandboxes.wake
    looking = (witnesses.run,) if settings.isolation.external else ()
    await run_under_kopf(lambda: operator.run(sandboxes.run, *looking), operator, kube, liveness)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator. Return 0 if it was asked to stop, 1 after a failure, and 2 for unusable settings."""
    options, status = _options(arguments), 0
    try:
        log_to(level=options.log_level, form=options.log_format)
    except TraceOptionError as error:
        print(f"rollyard_operator: {error}", file=sys.stderr)
        return 2
    for noisy in ("kopf", "httpx", "httpcore", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        asyncio.run(serve(load_settings(options.config), options.liveness))
    except* SettingsError as group:
        print(*group.exceptions, sep="\n", file=sys.stderr)
        status = 2
    except* KubeError as group:
        print(*(f"rollyard_operator: {error}" for error in group.exceptions), sep="\n", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
