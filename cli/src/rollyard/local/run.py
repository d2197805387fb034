"""Runs a supervisor with everything real: REST, sandboxes, signals, and a compact account of it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable

from rollyard_crds.security.log_text import one_line
from rollyard_drivers.host.home import Home
from rollyard_drivers.loop.rest_store import RestStore

from rollyard.local.options import Options
from rollyard.local.supervisor import Ready, Supervisor, install_signals, opens_docs

SWEEP_SECONDS = 15.0


def make_supervisor(
    options: Options, on_ready: Callable[[Ready], None], say: Callable[[str], None]
) -> Supervisor:
    """A supervisor over REST that removes its sandboxes when it ends."""
    return Supervisor(
        options,
        RestStore,
        on_ready=on_ready,
        on_trouble=lambda trouble: say(one_line(f"trouble: {trouble}")),
        sweep_sandboxes=lambda: remove_sandboxes(Home(options.home), options.sandbox),
    )


async def remove_sandboxes(home: Home, provider_name: str) -> None:
    """Removes every sandbox of this home. Those that resist die by their own lease."""
    if not (home.run / "sandboxes").is_dir():
        return
    from rollyard_pipeline.sandboxes import open_provider

    provider = open_provider(provider_name, run_dir=home.run, node=socket.gethostname())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SWEEP_SECONDS):
            for sandbox in provider.claimed():
                await provider.release(sandbox)
            await provider.sweep()
            await provider.aclose()
            # Every worker has ended: what is left here belongs to nobody.
            shutil.rmtree(home.run / "sandboxes", ignore_errors=True)


async def run_supervisor(options: Options, say: Callable[[str], None]) -> None:
    """`rollyard up` in the foreground: until Ctrl-C, SIGTERM, or a failure to start.

    Raises:
        HomeInUse, StartFailed: see Supervisor.run.
    """

    def ready(what: Ready) -> None:
        if what.swept:
            say(f"removed what an earlier run left: {', '.join(what.swept)}")
        docs = f"  (API: {what.url}/docs)" if opens_docs(options) else ""
        say(f"Rollyard runs at {what.url}{docs}")
        say(f"  backend  {what.backend}")
        say(f"  sandbox  {options.sandbox}")
        say(f"  home     {options.home}  (logs in {Home(options.home).logs})")
        say("Submit with `rollyard submit -f job.yaml`; stop with Ctrl-C.")

    supervisor = make_supervisor(options, ready, say)
    install_signals(supervisor)
    await supervisor.run()
    say("stopped; nothing is left running")
