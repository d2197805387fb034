"""The settings of what browsers see, and the checks of the options about them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.hosts import MAX_HOST, NAME, HostCheck, address_of

MAX_PREFIX: Final = 200
"""The largest number of characters of a path prefix."""
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9_~][A-Za-z0-9._~-]*)+")
_OWN: Final = frozenset({"assets", "docs", "healthz", "jobs", "metrics", "openapi.json", "readyz", "v1"})
"""What paths of the control plane itself begin with."""


@dataclass(frozen=True, slots=True)
class BrowserSettings:
    """The addresses of the page, and the times that sessions last."""

    bound: str = "127.0.0.1"
    """The address that the control plane listens on, or the path of a Unix socket."""
    path_prefix: str = ""
    """The path below which browsers find the page and the calls, such as `/rollyard`, or "" for the root."""
    allowed_hosts: tuple[str, ...] = ()
    """The DNS names under which browsers may reach the control plane, in addition to `localhost`."""
    idle_seconds: float = 12 * 3600.0
    """The time in seconds after which a session ends that nobody uses."""
    session_seconds: float = 7 * 86400.0
    """The time in seconds after which every session ends."""
    page_folder: Path = Path(__file__).parent.parent / "page"
    """The folder with the page's index.html and its assets."""

    @property
    def hosts(self) -> HostCheck:
        """The Host headers that are accepted from callers without a token."""
        return HostCheck(self.bound, self.allowed_hosts)


def path_prefix(text: str) -> str:
    """Return a path prefix in its usual form, without a slash at its end; "" and "/" stand for the root.

    Raises:
        OptionInvalid: This is no path prefix, or it begins with a path of the control plane.
    """
    prefix = text.removesuffix("/")
    if not prefix:
        return ""
    if len(prefix) > MAX_PREFIX or not _PREFIX.fullmatch(prefix):
        raise OptionInvalid(
            "must be a path such as /rollyard, of letters, digits and '-._~', "
            f"with at most {MAX_PREFIX} characters (got {text[:MAX_PREFIX]!r})"
        )
    first = prefix.split("/")[1]
    if first in _OWN:
        raise OptionInvalid(f"must not begin with /{first}, which is a path of the control plane itself")
    return prefix


def host_name(text: str) -> str:
    """Return the DNS name of a host in lower case.

    Raises:
        OptionInvalid: This is no DNS name.
    """
    name = text.strip().removesuffix(".").lower()
    if address_of(name) is not None:
        raise OptionInvalid(f"is for DNS names, and {name} is an address; addresses are accepted without it")
    if len(name) > MAX_HOST or not NAME.fullmatch(name):
        raise OptionInvalid(
            "must be a DNS name such as rollyard.example.org, without a scheme and a port "
            f"(got {text[:MAX_HOST]!r})"
        )
    return name
