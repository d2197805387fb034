"""`rollyard up`: everything on this machine, in the foreground or detached."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rollyard.local.home import Home
    from rollyard.local.options import Options

DETACH_SECONDS = 90.0
LEASE_SECONDS = click.FloatRange(1.0, 3600.0)


@click.command()
@click.option(
    "--backend", "backend_url", default="", metavar="URL", help="Use a running vLLM-compatible server."
)
@click.option("--model", default="", help="Model folder; with --backend: the name it is served under.")
@click.option("--tokenizer", default="", help="With --backend: folder with tokenizer.json and chat template.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0: a free one.")
@click.option(
    "--sandbox",
    type=click.Choice(["bubblewrap", "process"]),
    default="bubblewrap",
    show_default=True,
    help="What isolates rollouts; `process` isolates nothing.",
)
@click.option(
    "--lease-seconds",
    type=LEASE_SECONDS,
    default=15.0,
    show_default=True,
    help="After a worker's sudden end its rollouts go on elsewhere within this time.",
)
@click.option("--home", type=click.Path(path_type=Path), help="State folder [~/.local/state/rollyard].")
@click.option("--detach", is_flag=True, help="Return once it is ready; stop it with `rollyard down`.")
def command(
    backend_url: str,
    model: str,
    tokenizer: str,
    host: str,
    port: int,
    sandbox: str,
    lease_seconds: float,
    home: Path | None,
    detach: bool,
) -> None:
    """Start control plane, workers and a backend on this machine; Ctrl-C stops everything."""
    from rollyard.errors import UsageProblem
    from rollyard.local.home import Home, default_home
    from rollyard.local.options import Options

    if backend_url and not backend_url.startswith(("http://", "https://")):
        raise UsageProblem(f"--backend must be a URL such as http://127.0.0.1:8000 (got {backend_url!r})")
    if tokenizer and not backend_url:
        raise UsageProblem("--tokenizer goes with --backend; an embedded engine reads its model folder")
    if model and not backend_url:
        folder = Path(model).expanduser().resolve()
        if not folder.is_dir():
            raise UsageProblem(f"--model: {folder} is no folder")
        model = str(folder)
    if backend_url:
        from rollyard.local.external import served

        model, tokenizer = served(backend_url, model, tokenizer)
    options = Options(
        home=(home or default_home()).expanduser().resolve(),
        host=host,
        port=port,
        backend_url=backend_url,
        model=model,
        tokenizer=tokenizer,
        sandbox=sandbox,
        lease_seconds=lease_seconds,
    )
    if detach:
        _detach(Home(options.home), options)
    else:
        _foreground(options)


def _foreground(options: Options) -> None:
    import asyncio

    from rollyard.local.run import run_supervisor

    asyncio.run(run_supervisor(options, click.echo))


def _detach(home: Home, options: Options) -> None:
    import subprocess
    import time

    from rollyard.errors import HomeInUse, StartFailed
    from rollyard.local.home import read_json
    from rollyard.local.logfile import last_line

    running = home.supervisor()
    if running is not None:
        raise HomeInUse(
            f"`rollyard up` runs already on {home.root} (process {running.pid}); stop it with `rollyard down`"
        )
    home.make()
    log = home.logs / "up.log"
    arguments = ["--home", str(home.root), "--host", options.host, "--port", str(options.port)]
    arguments += ["--sandbox", options.sandbox, "--lease-seconds", f"{options.lease_seconds:g}"]
    for name, value in (
        ("--backend", options.backend_url),
        ("--model", options.model),
        ("--tokenizer", options.tokenizer),
    ):
        arguments += [name, value] if value else []
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollyard", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
    deadline = time.monotonic() + DETACH_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            text = last_line(log).removeprefix("rollyard: ") or "`rollyard up` ended"
            raise StartFailed(text if "(log: " in text else f"{text} (log: {log})")
        context = read_json(home.context_file)
        supervisor = home.supervisor()
        if context is not None and supervisor is not None and supervisor.pid == process.pid:
            click.echo(f"Rollyard runs at {context['url']} (process {process.pid}, home {home.root})")
            click.echo(f"Stop it with `rollyard down{_home_flag(home)}`")
            return
        time.sleep(0.05)
    process.terminate()
    raise StartFailed(f"`rollyard up` was not ready within {DETACH_SECONDS:.0f} s (log: {log})")


def _home_flag(home: Home) -> str:
    from rollyard.local.home import default_home

    return "" if home.root == default_home().expanduser().resolve() else f" --home {home.root}"
