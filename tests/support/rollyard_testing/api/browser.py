"""A browser as the control plane sees it: a cookie jar, and the headers that browsers add."""

from __future__ import annotations

from typing import Any

import httpx

from rollyard_testing.pace import patience

HOST = "127.0.0.1:8765"


class TestBrowser:
    """A browser with one tab on the page of a control plane.

    Args:
        transport: The transport to the control plane.
        host: The host and port in the address bar.
        scheme: `http` or `https`, as the browser sees it.
        prefix: The path prefix of the page.
    """

    __test__ = False

    def __init__(
        self, transport: httpx.AsyncBaseTransport, host: str = HOST, scheme: str = "http", prefix: str = ""
    ) -> None:
        self.origin = f"{scheme}://{host}"
        self.prefix = prefix
        self.http = httpx.AsyncClient(transport=transport, base_url=f"http://{host}", timeout=patience(70))
        self.cookies: dict[str, str] = {}
        self.set_cookie = ""
        """The last Set-Cookie header."""

    async def fetch(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request as the page's own scripts do, and keep the cookie of the answer."""
        headers = {"Sec-Fetch-Site": "same-origin", **options.pop("headers", {})}
        if method not in ("GET", "HEAD"):
            headers = {"Origin": self.origin, "Rollyard-Page": "1", **headers}
        if self.cookies:
            headers = {"Cookie": "; ".join(f"{k}={v}" for k, v in self.cookies.items()), **headers}
        given = {name: value for name, value in headers.items() if value is not None}
        answer = await self.http.request(method, self.prefix + path, headers=given, **options)
        self.http.cookies.clear()
        if "set-cookie" in answer.headers:
            self.set_cookie = answer.headers["set-cookie"]
            pair, *attributes = self.set_cookie.split("; ")
            name, _, value = pair.partition("=")
            self.cookies.pop(name, None)
            if "Max-Age=0" not in attributes:
                self.cookies[name] = value
        return answer

    async def sign_in(self, code: str) -> httpx.Response:
        """Redeem a one-time code."""
        return await self.fetch("POST", "/v1/session", json={"code": code})
