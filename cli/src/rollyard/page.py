"""The page from the command line: links to it, and the browser in which it is opened."""

from __future__ import annotations

import html
import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit, urlunsplit

from rollyard.errors import CliError, LookupFailed

if TYPE_CHECKING:
    from rollyard_client import Client

    from rollyard.connection import OpenConnection

EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}
"""What a link has instead of the address of a listener on all addresses of this machine."""
FILE_NAME: Final = "open.html"
_DOCUMENT: Final = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={link}">
<title>Rollyard</title>
<a href="{link}">Rollyard</a>
"""


def page_url(url: str, prefix: str) -> str:
    """Return the address of the page, without a slash at its end.

    Args:
        url: The address of the control plane, as a client uses it.
        prefix: The path prefix of the page, or "".

    Raises:
        CliError: The address is a Unix socket.
    """
    if not url.startswith(("http://", "https://")):
        socket = url.partition("://")[2]
        raise CliError(
            f"no browser can open the Unix socket {socket}; forward a port to it with "
            f"`ssh -L 8765:{socket} HOST`, and give --url http://127.0.0.1:8765",
            reason="NoLink",
        )
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    name, _, port = host.rpartition(":") if host.rpartition(":")[2].isdigit() else (host, "", "")
    name = EVERYWHERE.get(name, name)
    path = parts.path.rstrip("/")
    if not path.endswith(prefix):
        path += prefix
    return urlunsplit((parts.scheme, f"{name}:{port}" if port else name, path, "", ""))


def path_of(namespace: str, job: str = "", rollout: str = "") -> str:
    """Return the path of a job, of a rollout, or of the overview, below the page's address."""
    parts = [*(("jobs", namespace, job) if job else ()), *(("rollouts", rollout) if rollout else ())]
    return "/" + "/".join(quote(part, safe="") for part in parts)


def job_link(opened: OpenConnection, namespace: str, job: str, rollout: str = "") -> str:
    """Return the link of a job or of a rollout, without a code.

    Raises:
        CliError: No browser can reach the control plane at its address once the command has ended.
    """
    if opened.is_tunnel:
        words = " ".join(part for part in (job, rollout) if part)
        raise CliError(
            "the way into the cluster ends with this command; `rollyard open --kubernetes "
            f"{words}` keeps one open for the browser",
            reason="NoLink",
        )
    prefix = opened.client.page_prefix()
    return page_url(opened.client.url, prefix) + path_of(namespace, job, rollout)


def link_if_any(opened: OpenConnection, namespace: str, job: str) -> str:
    """Return the link of a job, or how to get one, or "" if this caller cannot use the page."""
    from rollyard_client.errors import Unauthorized

    try:
        return job_link(opened, namespace, job)
    except CliError as error:
        return str(error) if opened.is_tunnel else ""
    except Unauthorized:
        return ""  # The token is that of a driver.


def rollout_id(client: Client, job: str, name: str, namespace: str) -> str:
    """Return the id of a rollout that is named by its id, the end of its id, or the id of its task.

    Raises:
        LookupFailed: There is no such rollout, or there are several.
    """
    from rollyard_client.errors import Conflict, NotFound

    # A whole id needs one call, and a part of one needs the list of all rollouts.
    try:
        return client.trajectory(job, name, namespace).id
    except Conflict:
        return name  # The rollout has not ended, so it has no trajectory yet.
    except NotFound:
        pass
    matches = []
    for rollout in client.rollouts(job, namespace=namespace):
        if rollout.id.endswith(name) or rollout.task_id == name:
            matches.append(rollout.id)
    if len(matches) == 1:
        return matches[0]
    if matches:
        more = ", …" if len(matches) > 8 else ""
        raise LookupFailed(f"{name!r} fits {len(matches)} rollouts: {', '.join(matches[:8])}{more}")
    raise LookupFailed(f"no rollout {name!r}; `rollyard view {job} --list` lists those that have ended")


def has_desktop(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether programs with windows can be started here."""
    if env.get("SSH_CONNECTION"):
        return False
    return sys.platform == "darwin" or bool(env.get("DISPLAY") or env.get("WAYLAND_DISPLAY"))


def open_in_browser(link: str, folder: Path) -> bool:
    """Open a link in the user's browser, and return whether one was started.

    The command line of a process is visible to all users of a machine, so the browser is given a file that
    only this user can read, and the file leads to the link. The next call replaces the file, whose code
    expired long before.

    Args:
        link: The link, with its one-time code.
        folder: The folder for the file, which is made if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / FILE_NAME
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(_DOCUMENT.format(link=html.escape(link, quote=True)))
    try:
        return webbrowser.open(path.as_uri())
    except webbrowser.Error:
        return False
