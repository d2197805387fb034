"""Links to the page."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

from rollyard.errors import CliError, LookupFailed

if TYPE_CHECKING:
    from rollyard_client import Client

    from rollyard.connection import OpenConnection

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]", "::": "[::1]"}
"""What stands in a link for the address of a listener on all addresses of this machine."""


class NoLink(CliError):
    """Raised if a browser cannot reach the control plane at its address."""

    reason = "NoLink"


def page_url(url: str, prefix: str) -> str:
    """Return the address of the page, without a slash at its end.

    Args:
        url: The address of the control plane, as a client uses it.
        prefix: The path prefix of the page, or "".

    Raises:
        NoLink: The address is a Unix socket.
    """
    if not url.startswith(("http://", "https://")):
        socket = url.partition("://")[2]
        raise NoLink(
            f"no browser can open the Unix socket {socket}; forward a port to it with "
            f"`ssh -L 8765:{socket} HOST`, and give --url http://127.0.0.1:8765"
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


def job_link(made: OpenConnection, namespace: str, job: str, rollout: str = "") -> str:
    """Return the link of a job or of a rollout, without a code.

    Raises:
        NoLink: No browser can reach the control plane at its address once the command has ended.
    """
    if made.is_tunnel:
        words = " ".join(part for part in (job, rollout) if part)
        raise NoLink(
            "the way into the cluster ends with this command; `rollyard open --kubernetes "
            f"{words}` keeps one open for the browser"
        )
    prefix = made.client.page_prefix()
    return page_url(made.client.url, prefix) + path_of(namespace, job, rollout)


def link_if_any(made: OpenConnection, namespace: str, job: str) -> str:
    """Return the link of a job, or what to do for one, or "" if this caller has no page."""
    from rollyard_client.errors import Unauthorized

    try:
        return job_link(made, namespace, job)
    except NoLink as error:
        return str(error) if made.is_tunnel else ""
    except Unauthorized:
        return ""  # The token is that of a driver.


def rollout_id(client: Client, job: str, given: str, namespace: str) -> str:
    """Return the id of a rollout that is named by its id, the end of it, or the id of its only task.

    Raises:
        LookupFailed: There is no such rollout, or there are several.
    """
    from rollyard_client.errors import Conflict, NotFound

    # A whole id is found by one call, and a part of one by reading the list of all rollouts.
    try:
        return client.trajectory(job, given, namespace).id
    except Conflict:
        return given  # The rollout has not ended, so it has no trajectory yet.
    except NotFound:
        pass
    near = []
    for rollout in client.rollouts(job, namespace=namespace):
        if rollout.id.endswith(given) or rollout.task_id == given:
            near.append(rollout.id)
    if len(near) == 1:
        return near[0]
    if near:
        more = ", …" if len(near) > 8 else ""
        raise LookupFailed(f"{given!r} fits {len(near)} rollouts: {', '.join(near[:8])}{more}")
    raise LookupFailed(f"no rollout {given!r}; `rollyard view {job} --list` lists those that have ended")
