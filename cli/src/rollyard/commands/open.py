"""The command `rollyard open`, which prints a link that signs a browser in."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Final

import click

from rollyard import terminal
from rollyard.connection import connection, server_options

CODE_SECONDS: Final = 60
"""The seconds in which the link must be opened, as the control plane has them."""


@click.command()
@click.argument("arguments", nargs=-1, metavar="[NAME] [ROLLOUT]")
@click.option(
    "--role",
    type=click.Choice(["viewer", "admin"]),
    default="viewer",
    show_default=True,
    help="What the browser may do: a viewer reads, an admin may cancel, too.",
)
@click.option(
    "--browser/--no-browser",
    default=None,
    help="Open the link in a browser on this machine [if there is a desktop].",
)
@click.option("--revoke-all", is_flag=True, help="End all sessions and links instead.")
@server_options
def command(
    arguments: tuple[str, ...],
    role: str,
    browser: bool | None,
    revoke_all: bool,
    url: str | None,
    home: Path | None,
    namespace: str,
) -> None:
    """Print a link to the page, to a job or to a rollout, which signs a browser in.

    The link works once, within a minute. With `--kubernetes`, the command runs until Ctrl-C and keeps
    the way into the cluster open.
    """
    from rollyard.page import page_url, path_of, rollout_id

    if len(arguments) > 2:
        raise click.UsageError("give at most the job's NAME and a ROLLOUT")
    if revoke_all and (arguments or browser):
        raise click.UsageError("--revoke-all takes no NAME and no --browser")
    with connection(url, home, namespace) as opened:
        client = opened.client
        if revoke_all:
            ended = client.end_sessions()
            click.echo(f"{ended} {'session or link' if ended == 1 else 'sessions and links'} ended")
            return
        name, rollout = (*arguments, "", "")[:2]
        page_url(client.url, "")  # This raises an error before a code is made that nobody could use.
        if name:
            client.job(name, namespace)
        if rollout:
            rollout = rollout_id(client, name, rollout, namespace)
        code = client.sign_in_code("admin" if role == "admin" else "viewer")
        link = f"{page_url(client.url, code.prefix)}{path_of(namespace, name, rollout)}#code={code.code}"
        _show(link, browser)
        if opened.is_tunnel:
            click.echo("The way into the cluster stays open until Ctrl-C.", err=True)
            # Python handles the signal of Ctrl-C, which ends the command, only in the main thread.
            threading.Event().wait()


def _show(link: str, browser: bool | None) -> None:
    from rollyard_drivers.host.home import default_home

    from rollyard.page import has_desktop, open_in_browser

    use_browser = (sys.stdout.isatty() and has_desktop()) if browser is None else browser
    if use_browser and open_in_browser(link, default_home().expanduser().resolve() / "page"):
        terminal.echo_line("Your browser opens the page. If it does not, open this link:", err=True)
    elif browser:
        terminal.echo_line("No browser could be started here. Open this link:", err=True)
    terminal.echo_line(link)
    click.echo(f"The link works once, within {CODE_SECONDS} seconds.", err=True)
