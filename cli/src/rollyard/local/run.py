"""`rollyard up` in the foreground: a supervisor with REST, sandboxes, signals and short messages."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable
from functools import partial

from rollyard_crds.lease import HeartbeatRequest
from rollyard_drivers.host.home import Home
from rollyard_drivers.loop.rest_store import RestStore
from rollyard_process.log_text import one_line

from rollyard.local.options import Options
from rollyard.local.supervisor import Ready, Supervisor, install_signals, opens_docs

SWEEP_SECONDS = 15.0
REPORT_SECONDS = 5.0
"""The time that the control plane has to take note of the sandboxes that end, in seconds."""


def make_supervisor(
    options: Options, on_ready: Callable[[Ready], None], say: Callable[[str], None]
) -> Supervisor:
    """Return a supervisor that uses REST and ends its sandboxes when it ends."""
    return Supervisor(
        options,
        RestStore,
        on_ready=on_ready,
        on_trouble=lambda trouble: say(one_line(f"trouble: {trouble}")),
        end_sandboxes=partial(end_sandboxes, Home(options.home), options.sandbox),
    )


async def end_sandboxes(home: Home, provider_name: str, url: str, token: str) -> None:
    """End every sandbox of this home, after the control plane has queued the rollouts that need them at Init.

    A sandbox that cannot be removed ends when its own lease expires. A control plane that does not answer is
    left alone: an attempt fails then for each of these rollouts.
    """
    if not (home.run / "sandboxes").is_dir():
        return
    from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable
    from rollyard_pipeline.control_plane.rest import RestControlPlane
    from rollyard_pipeline.errors import ControlPlaneRefused
    from rollyard_pipeline.sandboxes import open_provider

    node = socket.gethostname()
    provider = open_provider(provider_name, run_dir=home.run, node=node)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWEEP_SECONDS):
            sandboxes = provider.claimed()
            beat = HeartbeatRequest(worker=node, node=node, leases=[], ending=sandboxes)
            with contextlib.suppress(ControlPlaneUnavailable, ControlPlaneRefused, TimeoutError):
                async with RestControlPlane(url, token) as control, asyncio.timeout(REPORT_SECONDS):
                    await control.heartbeat(beat)
            for sandbox in sandboxes:
                await provider.release(sandbox)
            await provider.sweep()
            await provider.aclose()
            # Every worker has ended, so no process uses the files that are left here.
            shutil.rmtree(home.run / "sandboxes", ignore_errors=True)


async def run_supervisor(options: Options, say: Callable[[str], None]) -> None:
    """Run `rollyard up` in the foreground until Ctrl-C, SIGTERM or a failure to start.

    Raises:
        HomeInUse: Another supervisor runs on this home.
        StartFailed: The control plane does not become ready.
    """

    def ready(what: Ready) -> None:
        if what.swept:
            say(f"removed what an earlier run left: {', '.join(what.swept)}")
        docs = f"  (API: {what.url}/docs)" if opens_docs(options) else ""
        say(f"Rollyard runs at {what.url}{docs}")
        say(f"  backend  {what.backend}")
        say(f"  sandbox  {options.sandbox}")
        if what.prorl:
            say(f"  ProRL    {what.prorl}  (no token: whoever reaches it can use it)")
        say(f"  home     {options.home}  (logs in {Home(options.home).logs})")
        say("Submit with `rollyard submit -f job.yaml`; look with `rollyard open`; stop with Ctrl-C.")

    supervisor = make_supervisor(options, ready, say)
    install_signals(supervisor)
    await supervisor.run()
    say("stopped; nothing is left running")
