"""Fixtures for tests of the page: a browser, a live Rollyard, and a store with many kinds of rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from rollyard_testing.browser.chromium import PATIENCE, a_browser, problem
from rollyard_testing.browser.live import Live, a_live_rollyard
from rollyard_testing.browser.plane import Filled, Plane, a_plane, filled
from rollyard_testing.browser.signin import Served, a_context, cookies_of, sign_in
from rollyard_testing.browser.witness import Witness, attacks_seen
from rollyard_testing.invariants import invariant

expect.set_options(timeout=PATIENCE)

QUICKSTART = "quickstart"
TASKS, SAMPLES = 6, 4


@pytest.fixture(scope="module")
def browser(missing: Callable[[str], None]) -> Iterator[Browser]:
    """Start Chromium. It ends with the module, because Playwright holds the event loop of the thread."""
    reason = problem()
    if reason is not None:
        missing(reason)
    # A name of another site leads to this machine, as a rebinding name server makes it do.
    with a_browser(["--host-resolver-rules=MAP rebound.example 127.0.0.1"]) as running:
        yield running


@pytest.fixture(scope="session")
def store() -> Iterator[Filled]:
    """Fill a state folder, from which control planes of tests start."""
    with filled() as made:
        yield made


@pytest.fixture(scope="session")
def plane(store: Filled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """Start the control plane that all tests share which change nothing."""
    with a_plane(store.copy(tmp_path_factory.mktemp("plane") / "state")) as running:
        yield running


@pytest.fixture
def own_plane(store: Filled, tmp_path: Path) -> Iterator[Plane]:
    """Start a control plane that the test may change and end."""
    with a_plane(store.copy(tmp_path / "state"), "--store-seconds", "2") as running:
        yield running


@pytest.fixture(scope="session")
def live(bubblewrap_works: None) -> Iterator[Live]:
    """Start `rollyard up` and run a small quickstart on it."""
    with a_live_rollyard() as running:
        running.submit(QUICKSTART, TASKS, SAMPLES)
        running.wait(QUICKSTART)
        yield running


@dataclass(frozen=True, slots=True)
class Look:
    """A signed-in browser window at a control plane, and a witness of it."""

    page: Page
    context: BrowserContext
    witness: Witness
    served: Served

    def at(self, url: str) -> Page:
        """Go to an address by its link, and return the page once it shows something."""
        self.page.goto(url)
        expect(self.page.get_by_role("main")).to_be_visible()
        return self.page

    def harmless(self) -> None:
        """Check that nothing was done that no page may do."""
        with invariant():
            assert attacks_seen(self.page) == []
        assert self.witness.faults() == []


Looking = Callable[..., Look]


@pytest.fixture(scope="module")
def _states() -> dict[tuple[str, str], Any]:
    return {}


@pytest.fixture
def look(browser: Browser, _states: dict[tuple[str, str], Any]) -> Iterator[Looking]:
    """Return a function that opens a signed-in window: `look(served, role="viewer", **options of a context)`.

    A role signs in once a module at a control plane, and each window has the cookies of that. All windows are
    closed at the end of the test, and must have been harmless.
    """
    with ExitStack() as stack:
        opened: list[Look] = []

        def one(served: Served, role: str = "viewer", *, fresh: bool = False, **options: Any) -> Look:
            key = (served.url, role)
            if not fresh:
                if key not in _states:
                    _states[key] = cookies_of(browser, served, role)
                options["storage_state"] = _states[key]
            context, witness = stack.enter_context(a_context(browser, served, **options))
            page = context.new_page()
            if fresh:
                sign_in(page, served, role)
            opened.append(Look(page, context, witness, served))
            return opened[-1]

        yield one
        for window in opened:
            window.harmless()
