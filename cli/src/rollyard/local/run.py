"""`rollyard up` in the foreground: a supervisor with REST, sandboxes, signals and short messages."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable

from rollyard_drivers.host.home import Home
from rollyard_drivers.loop.rest_store import RestStore
from rollyard_process.log_text import one_line

from rollyard.local.options import Options
from rollyard.local.supervisor import Ready, Supervisor, install_signals, opens_docs

SWEEP_SECONDS = 15.0


def make_supervisor(
    options: Options, on_ready: Callable[[Ready], None], say: Callable[[str], None]
) -> Supervisor:
    """Return a supervisor that uses REST and removes its sandboxes when it ends."""
    return Supervisor(
        options,
        RestStore,
        on_ready=on_ready,
        on_trouble=lambda trouble: say(one_line(f"trouble: {trouble}")),
        sweep_sandboxes=lambda: remove_sandboxes(Home(options.home), options.sandbox),
    )


async def remove_sandboxes(home: Home, provider_name: str) -> None:
    """Remove every sandbox of this home. A sandbox that cannot be removed ends when its own lease expires."""
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
