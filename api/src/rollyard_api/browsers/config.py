"""Checks of the options about what browsers see."""

from __future__ import annotations

import re
from typing import Final

from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.hosts import MAX_HOST, NAME, address_of

MAX_PREFIX: Final = 200
"""The largest number of characters of a path prefix."""
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9_~][A-Za-z0-9._~-]*)+")
_OWN: Final = frozenset({"assets", "docs", "healthz", "jobs", "metrics", "openapi.json", "readyz", "v1"})
"""What paths of the control plane itself begin with."""


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
