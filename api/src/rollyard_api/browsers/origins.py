"""Checks of the headers by which browsers say where a request comes from.

A web page of another origin can make a browser send requests to the control plane, with the user's cookies,
and under a name that the page's owner resolves to the control plane's address (DNS rebinding). SameSite
cookies do not prevent the former, because another port of the same host is the same site. What is checked
here follows `_view/network.py` of inspect_ai 0.3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
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
_ONCE: Final = ("host", "origin", "sec-fetch-site", PAGE_HEADER)


@dataclass(frozen=True, slots=True)
class BrowserHeaders:
    """The headers of one request that say where it comes from. Each is None if it was not sent."""

    method: str
    scheme: str
    """`http` or `https`, as the control plane itself was reached."""
    host: str | None
    origin: str | None
    site: str | None
    """The value of Sec-Fetch-Site."""
    page: str | None
    """The value of `Rollyard-Page`."""
    cookie: str

    @property
    def is_read(self) -> bool:
        """Whether the request changes nothing."""
        return self.method in READS

    @property
    def is_https(self) -> bool:
        """Whether the browser uses HTTPS, of which only its Origin header tells behind an ingress."""
        return self.scheme == "https" or (self.origin or "").startswith("https://")


def headers_of(scope: Scope) -> BrowserHeaders:
    """Return the headers of a request.

    Raises:
        Forbidden: A header that is checked was sent twice, so that two readers could take different ones.
    """
    headers = Headers(raw=scope["headers"])
    for name in _ONCE:
        if len(headers.getlist(name)) > 1:
            raise Forbidden(f"the header {name} was sent twice", reason="HeaderRepeated")
    return BrowserHeaders(
        method=scope["method"],
        scheme=scope.get("scheme", "http"),
        host=headers.get("host"),
        origin=headers.get("origin"),
        site=headers.get("sec-fetch-site"),
        page=headers.get(PAGE_HEADER),
        # HTTP/2 permits several headers of this name.
        cookie="; ".join(headers.getlist("cookie")),
    )


def check_host(headers: BrowserHeaders, hosts: HostCheck) -> None:
    """Refuse a request under a name that is not the control plane's.

    Raises:
        Forbidden: The Host header is missing, or names another host.
    """
    if headers.host is None or not hosts(headers.host):
        raise Forbidden(
            f"no browser may open this control plane under the name {(headers.host or '')[:300]!r}; "
            "whoever runs it permits a name with --allowed-host",
            reason="HostNotAllowed",
        )


def is_foreign(headers: BrowserHeaders) -> bool:
    """Return whether a page of another origin has sent the request.

    `none` of Sec-Fetch-Site stands for an address that the user has entered. A sandboxed frame and a page
    that keeps its address secret have the origin `null`; only the former is of another site.
    """
    if headers.site is not None and headers.site != "same-origin":
        return not (headers.site == "none" and headers.is_read)
    if headers.origin is None:
        return False
    if headers.origin == "null":
        return headers.site != "same-origin"
    return not _is_same(headers.origin, headers.host, headers.scheme)


def check_origin(headers: BrowserHeaders) -> None:
    """Refuse a request that a page of another origin has sent, and a change that the page has not sent.

    Raises:
        Forbidden: The request comes from elsewhere, or does not show that it comes from the page.
    """
    if is_foreign(headers):
        raise Forbidden("this request comes from a page of another origin", reason="ForeignOrigin")
    if headers.is_read:
        return
    if headers.page != "1":
        raise Forbidden(
            "a change with a session needs the header 'Rollyard-Page: 1', which the page sends",
            reason="ForeignOrigin",
        )
    if headers.site is None and headers.origin is None:
        raise Forbidden(
            "a change with a session needs the header Origin, which browsers send", reason="ForeignOrigin"
        )


def _is_same(origin: str, host: str | None, scheme: str) -> bool:
    """Return whether an Origin and a Host header name the same host and port.

    Behind an ingress with TLS, the origin has the scheme `https` although the control plane serves HTTP.
    """
    given = re.fullmatch(f"(https?)://{_HOST}", origin.lower())
    asked = re.fullmatch(_HOST, (host or "").lower())
    if given is None or asked is None or (scheme == "https" and given[1] != "https"):
        return False
    usual = _PORTS[given[1]]
    return (given[2], given[3] or usual) == (asked[1], asked[2] or usual)
