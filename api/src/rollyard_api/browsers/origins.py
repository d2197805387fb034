"""Checks of the headers by which browsers say where a request comes from.

A web page of another origin can make a browser send requests to the control plane, with the user's cookies,
and under a name that the page's owner resolves to the control plane's address (DNS rebinding). SameSite
cookies do not prevent the former, because another port of the same host is the same site. What is checked
here follows `_view/network.py` of inspect_ai 0.3.
"""

from __future__ import annotations

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.problems import Forbidden

PAGE_HEADER: Final = "rollyard-page"
"""The header that the page sends with every change. No page of another origin can add it, because the
browser would ask for permission first, and the control plane never gives it."""
READS: Final = frozenset({"GET", "HEAD"})
_HOST: Final = r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?"
_PORTS: Final = {"http": "80", "https": "443"}


class BrowserHeaders(Headers):
    """The headers of one request, some of which say where it comes from.

    Args:
        scope: The request.

    Raises:
        Forbidden: A header that is checked was sent twice, so that two readers could use different ones.
    """

    def __init__(self, scope: Scope) -> None:
        super().__init__(raw=scope["headers"])
        self.is_read = scope["method"] in READS
        """Whether the request changes nothing."""
        self.scheme = scope.get("scheme", "http")
        """`http` or `https`, as the control plane itself was reached."""
        for name in ("host", "origin", "sec-fetch-site", PAGE_HEADER):
            if len(self.getlist(name)) > 1:
                raise Forbidden(f"the header {name} was sent twice", reason="HeaderRepeated")

    @property
    def is_https(self) -> bool:
        """Whether the browser uses HTTPS, which only its Origin header shows behind an ingress."""
        return self.scheme == "https" or self.get("origin", "").startswith("https://")


def check_host(headers: BrowserHeaders, hosts: HostCheck) -> None:
    """Refuse a request under a host name that is not the control plane's.

    Raises:
        Forbidden: The Host header is missing, or names another host.
    """
    host = headers.get("host", "")
    if not hosts(host):
        raise Forbidden(
            f"no browser may open this control plane under the name {host[:300]!r}; "
            "whoever runs it permits a name with --allowed-host",
            reason="HostNotAllowed",
        )


def _is_foreign(headers: BrowserHeaders) -> bool:
    """Return whether a page of another origin has sent the request.

    `none` in Sec-Fetch-Site stands for an address that the user has entered. A sandboxed frame and a page
    that keeps its address secret have the origin `null`; only the former is of another site.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None and site != "same-origin":
        return not (site == "none" and headers.is_read)
    if origin is None:
        return False
    if origin == "null":
        return site != "same-origin"
    return not _is_same(origin, headers.get("host", ""), headers.scheme)


def _refusal(problem: str) -> Forbidden:
    return Forbidden(problem, reason="ForeignOrigin")


def check_foreign(headers: BrowserHeaders) -> None:
    """Refuse a request that a page of another origin has sent.

    Raises:
        Forbidden: It comes from such a page.
    """
    if _is_foreign(headers):
        raise _refusal("this request comes from a page of another origin")


def check_origin(headers: BrowserHeaders) -> None:
    """Refuse a request that a page of another origin has sent, and a change that the page has not sent.

    Raises:
        Forbidden: The request comes from elsewhere, or does not show that it comes from the page.
    """
    check_foreign(headers)
    if headers.is_read:
        return
    if headers.get(PAGE_HEADER) != "1":
        raise _refusal("a change with a session needs the header 'Rollyard-Page: 1', which the page sends")
    if "sec-fetch-site" not in headers and "origin" not in headers:
        raise _refusal("a change with a session needs the header Origin, which browsers send")


def _is_same(origin: str, host: str, scheme: str) -> bool:
    """Return whether an Origin and a Host header name the same host and port.

    Behind an ingress with TLS, the origin has the scheme `https` although the control plane serves HTTP.
    """
    sender = re.fullmatch(f"(https?)://{_HOST}", origin.lower())
    server = re.fullmatch(_HOST, host.lower())
    if sender is None or server is None or (scheme == "https" and sender[1] != "https"):
        return False
    usual = _PORTS[sender[1]]
    return (sender[2], sender[3] or usual) == (server[1], server[2] or usual)
