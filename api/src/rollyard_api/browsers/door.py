"""The checks of callers without a bearer token: who has a session, and what a session may do.

The rules of bearer tokens stay as they are. A session may make the calls of a viewer that change nothing, end
itself, and cancel if its role is `admin`.

Browsers send the cookies of a host to all of its ports. The cookie's name therefore ends in a name of the
installation, so that two control planes on one host do not replace each other's cookie.
"""

from __future__ import annotations

import math
import re
import time
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from rollyard_api.access.permissions import Rule
from rollyard_api.browsers import origins
from rollyard_api.browsers.origins import BrowserHeaders
from rollyard_api.browsers.page import DATA_HEADERS
from rollyard_api.browsers.sessions import SECRET, BrowserSession, Sessions
from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.problems import Forbidden, Unauthorized

MAX_HEADER: Final = 16 << 10
"""The largest number of characters of a Cookie header that is read."""
MAX_TRIED: Final = 4
"""The largest number of cookies of one request whose session is looked up."""
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
    pairs = [pair.strip().partition("=") for pair in header.split(";")]
    candidates = [value for cookie in names for name, _, value in pairs if name == cookie]
    return list(dict.fromkeys(value for value in candidates if SECRET.fullmatch(value)))[:MAX_TRIED]


PROBES: Final = frozenset({"/healthz", "/readyz"})
"""The calls that are answered under any host name, because load balancers and kubelets choose their own.
They reveal nothing."""
LOOK_SECONDS: Final = 5.0
"""The longest time in seconds for which a stream is sent without checking its session again."""
_CANCEL: Final = re.compile(r"/v1/rolloutjobs/[^/]+/cancel")
SESSION: Final = "/v1/session"


class SessionOver(ControlPlaneError, OSError):
    """Raised where the session of a stream has ended, as if its client had gone."""


class Door:
    """The checks of requests that bear no token.

    Args:
        sessions: The sessions of the control plane.
        hosts: The Host headers that are accepted.
        prefix: The path below which browsers find the page and the calls, or "" for the root.
    """

    def __init__(self, sessions: Sessions, hosts: HostCheck, prefix: str) -> None:
        self._sessions = sessions
        self._hosts = hosts
        self._prefix = prefix

    def check_open(self, scope: Scope) -> None:
        """Check a request that needs no token.

        Raises:
            Forbidden: It comes under a foreign host name, or is a change that comes from another origin.
        """
        if scope["path"] in PROBES:
            return
        headers = BrowserHeaders(scope)
        origins.check_host(headers, self._hosts)
        if not headers.is_read:
            origins.check_origin(headers)

    def check_bearer(self, scope: Scope) -> None:
        """Check a request that carries a bearer token and a cookie, and so may come from a browser.

        Raises:
            Forbidden: A page of another origin has sent it.
        """
        headers = BrowserHeaders(scope)
        if "origin" in headers:
            origins.check_foreign(headers)

    async def admit(self, scope: Scope, rule: Rule) -> BrowserSession | None:
        """Return the session of a request without a bearer token, or None if it has no cookie of ours.

        Raises:
            Forbidden: The request comes from elsewhere, or a session may not make this call.
            Unauthorized: The session has ended.
        """
        headers = BrowserHeaders(scope)
        secrets = await self.secrets(headers)
        if not secrets:
            return None
        origins.check_host(headers, self._hosts)
        origins.check_origin(headers)
        session = await self._sessions.find(secrets)
        if session is None:
            raise Unauthorized(
                "this session has ended; `rollyard open` makes a new link", reason="SessionEnded"
            )
        _authorize(rule, session, scope["method"], scope["path"])
        return session

    async def secrets(self, headers: BrowserHeaders) -> list[str]:
        """Return the secrets of sessions that a request carries."""
        header = "; ".join(headers.getlist("cookie"))  # HTTP/2 permits several headers of this name.
        if not header:
            return []
        return secrets_in(header, await self._sessions.installation(), https=headers.scheme == "https")

    async def set_cookie(
        self, answer: Response, headers: BrowserHeaders, secret: str, seconds: float
    ) -> None:
        """Let an answer set the cookie of a session.

        Args:
            answer: The answer.
            headers: The headers of the request.
            secret: The secret of the session, or "" to remove the cookie.
            seconds: The time in seconds for which the browser keeps the cookie. It is a duration and not a
                date, because the browser's clock may differ.
        """
        start = "" if not headers.is_https else _SECURE if self._prefix else _HOST_ONLY
        answer.set_cookie(
            f"{start}rollyard-{await self._sessions.installation()}",
            secret,
            max_age=math.ceil(seconds),
            path=f"{self._prefix}/",
            secure=headers.is_https,
            httponly=True,
            samesite="strict",
        )

    def sender(self, send: Send, session: BrowserSession) -> Send:
        """Return a function that sends the answer to a session.

        It adds the headers that keep the answer from other pages and caches. It ends a stream whose session
        has ended in the meantime.
        """
        looked, is_endless = time.monotonic(), False

        async def sending(message: Message) -> None:
            nonlocal looked, is_endless
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                # An answer whose length was announced must be sent as a whole, and it ends soon.
                is_endless = "content-length" not in headers
                for name, value in {**DATA_HEADERS, "Cache-Control": "no-store", "Vary": "Cookie"}.items():
                    headers.setdefault(name, value)
            elif is_endless and time.monotonic() - looked >= LOOK_SECONDS:
                looked = time.monotonic()
                if message.get("more_body", False) and await self._sessions.current(session.digest) is None:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    raise SessionOver("the session has ended")
            await send(message)

        return sending


def _authorize(rule: Rule, session: BrowserSession, method: str, path: str) -> None:
    """Check whether a session may make this call.

    Raises:
        Forbidden: It may not.
    """
    if method in origins.READS:
        if "viewer" in rule.roles:
            return
    elif (method, path) == ("DELETE", SESSION):
        return
    elif method == "POST" and _CANCEL.fullmatch(path):
        if session.role == "admin":
            return
        raise Forbidden(
            "this session may only read; `rollyard open --role admin` makes a link that may cancel, too"
        )
    raise Forbidden(f"a session may not {method} {path}; this call needs a bearer token")
