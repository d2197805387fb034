"""The cookie that holds the secret of a session. This module is pure.

Browsers send the cookies of a host to all of its ports. The cookie's name therefore ends in a name of the
installation, so that two control planes on one host do not replace each other's cookie.
"""

from __future__ import annotations

import re
from typing import Final

MAX_HEADER: Final = 16 << 10
"""The largest number of characters of a Cookie header that is read."""
MAX_TRIED: Final = 4
"""The largest number of cookies of one request whose session is looked up."""
SECRET: Final = re.compile(r"[A-Za-z0-9_-]{43}")
"""The form of the secret of a session, and of a one-time code: 32 bytes in URL-safe base 64."""
_HOST_ONLY: Final = "__Host-"
_SECURE: Final = "__Secure-"


def secrets_in(header: str, instance: str, *, https: bool) -> list[str]:
    """Return the secrets in a Cookie header, in the order in which they are to be tried.

    Another page on the same host can set cookies of its own. It cannot set those whose name begins with
    `__Host-` or `__Secure-` unless it uses HTTPS itself, so these come first, and over HTTPS no others count.

    Args:
        header: The Cookie header.
        instance: The name of the installation.
        https: Whether the browser is known to use HTTPS.
    """
    if len(header) > MAX_HEADER:
        return []
    base = f"rollyard-{instance}"
    names = [_HOST_ONLY + base, _SECURE + base, *(() if https else (base,))]
    found: dict[str, list[str]] = {name: [] for name in names}
    for pair in header.split(";"):
        name, _, value = pair.strip().partition("=")
        if name in found and SECRET.fullmatch(value) and value not in found[name]:
            found[name].append(value)
    return [value for name in names for value in found[name]][:MAX_TRIED]


def cookie(secret: str, instance: str, prefix: str, *, https: bool, seconds: float) -> str:
    """Return the Set-Cookie header of a session.

    Args:
        secret: The secret of the session, or "" to remove the cookie.
        instance: The name of the installation.
        prefix: The path prefix of the page, or "".
        https: Whether the browser uses HTTPS.
        seconds: The time in seconds for which the browser keeps the cookie. It is a span, and no date,
            because the browser's clock may differ.
    """
    parts = [
        f"{_name(instance, prefix, https=https)}={secret}",
        f"Path={prefix}/",
        f"Max-Age={int(seconds)}",
        "HttpOnly",
        "SameSite=Strict",
        *(("Secure",) if https else ()),
    ]
    return "; ".join(parts)


def _name(instance: str, prefix: str, *, https: bool) -> str:
    start = "" if not https else _SECURE if prefix else _HOST_ONLY
    return f"{start}rollyard-{instance}"
