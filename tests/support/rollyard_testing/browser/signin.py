"""Browser contexts that are signed in at a control plane, as a person signs in with `rollyard open`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
from playwright.sync_api import Browser, BrowserContext, Page, expect

from rollyard_testing.browser.chromium import PATIENCE
from rollyard_testing.browser.witness import Witness, attend
from rollyard_testing.pace import patience


@dataclass(frozen=True, slots=True)
class Served:
    """A control plane that serves the page: its address with the path prefix, and its tokens by role."""

    url: str
    tokens: dict[str, str]

    @property
    def origin(self) -> str:
        """The address without the path prefix."""
        return "/".join(self.url.split("/")[:3])

    def http(self, role: str = "admin") -> httpx.Client:
        """Return a client with the token of a role."""
        headers = {"Authorization": f"Bearer {self.tokens[role]}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=patience(60), trust_env=False)

    def code(self, role: str = "viewer") -> str:
        """Return a one-time code that the token of a role makes.

        Raises:
            httpx.HTTPStatusError: The control plane refuses.
        """
        with self.http(role) as http:
            answer = http.post("/v1/session/codes", json={"role": role}).raise_for_status()
            code: str = answer.json()["code"]
            return code

    def job(self, name: str, namespace: str = "default") -> str:
        """Return the address of the view of a job."""
        return f"{self.url}/jobs/{quote(namespace, safe='')}/{quote(name, safe='')}"

    def group(self, job: str, task: str, namespace: str = "default") -> str:
        """Return the address of the view of a group."""
        return f"{self.job(job, namespace)}/groups/{quote(task, safe='')}"

    def rollout(self, job: str, rollout: str, namespace: str = "default") -> str:
        """Return the address of the view of a rollout."""
        return f"{self.job(job, namespace)}/rollouts/{quote(rollout, safe='')}"


@contextmanager
def a_context(browser: Browser, served: Served, **options: Any) -> Iterator[tuple[BrowserContext, Witness]]:
    """Yield a fresh context of a browser with a witness of its pages, and close it with the block."""
    context = browser.new_context(**{"locale": "en-US", **options})
    context.set_default_timeout(PATIENCE)
    context.set_default_navigation_timeout(PATIENCE)
    try:
        yield context, attend(context, served.origin)
    finally:
        context.close()


def sign_in(page: Page, served: Served, role: str = "viewer", path: str = "/") -> None:
    """Open the page through a link with a one-time code, and wait until it is signed in."""
    page.goto(f"{served.url}{path}#code={served.code(role)}")
    expect(page.get_by_role("main")).to_be_visible()
    # The code is taken out of the address at once.
    page.wait_for_url(lambda url: "code=" not in url)
    page.wait_for_function("url => fetch(url).then(answer => answer.ok)", arg=f"{served.url}/v1/session")


def cookies_of(browser: Browser, served: Served, role: str = "viewer") -> Any:
    """Return the state of a context that has signed in, from which other contexts can begin."""
    with a_context(browser, served) as (context, _):
        sign_in(context.new_page(), served, role)
        return context.storage_state()
