"""Addresses of the page: deep links, the history, new windows, and a prefix in front of all paths."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect
from rollyard_testing.browser.plane import ENDED, Filled, Plane, a_plane

pytestmark = pytest.mark.page

PREFIX = "/rl/yard"


@pytest.fixture(scope="module")
def prefixed(store: Filled, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """Start a control plane whose paths all have a prefix."""
    state = store.copy(tmp_path_factory.mktemp("prefixed") / "state")
    with a_plane(state, "--path-prefix", PREFIX) as running:
        yield running


@pytest.fixture(params=["", PREFIX], ids=["root", "prefix"])
def either(request: pytest.FixtureRequest) -> Plane:
    """Return the control plane of the test: one without a prefix, then one with it."""
    found: Plane = request.getfixturevalue("prefixed" if request.param else "plane")
    return found


def test_the_back_button_leads_back_through_the_views(either: Plane, look: Callable[..., Any]) -> None:
    served = either.served
    window = look(served)
    page = window.at(f"{served.url}/")
    page.evaluate("window.sameDocument = true")
    page.get_by_role("link", name=ENDED, exact=True).click()
    page.locator('[data-row="2"] [data-key=task]').click()
    expect(page.get_by_role("article").first).to_be_visible()
    page.get_by_role("article").first.get_by_role("link").first.click()
    expect(page.get_by_role("tab", name="Conversation")).to_be_visible()
    page.get_by_role("tab", name="Tokens").click()
    addresses = [page.url]
    for expected in (
        r"/rollouts/[^/?]+$",
        r"/groups/task-00002$",
        rf"/jobs/default/{ENDED}$",
        rf"^{re.escape(served.url)}/$",
    ):
        page.go_back()
        expect(page).to_have_url(re.compile(expected))
        addresses.append(page.url)
    expect(page.get_by_role("link", name=ENDED, exact=True)).to_be_visible()
    page.go_forward()
    expect(page.locator('[data-row="2"]')).to_be_visible()
    assert page.evaluate("window.sameDocument") is True
    # Each of these addresses is a link of its own.
    for address in addresses:
        assert address.startswith(served.url)
        page.goto(address)
        expect(page.get_by_role("heading", level=1).first).to_be_attached()
        expect(page.get_by_role("alert")).to_have_count(0)
    paths = {urlsplit(request.partition(" ")[2]).path for request in window.witness.requests}
    assert all(path.startswith(urlsplit(served.url).path) for path in paths)


def test_a_link_opens_in_a_window_of_its_own(either: Plane, look: Callable[..., Any]) -> None:
    window = look(either.served)
    page = window.at(either.served.job(ENDED))
    cell = page.locator('[data-row="1"] [data-key=sample]').nth(3)
    with window.context.expect_page() as opened:
        cell.click(modifiers=["Control"])
    other = opened.value
    expect(other.get_by_role("heading", level=1)).to_contain_text("task-00001")
    expect(other.get_by_role("heading", level=1)).to_contain_text("#3")
    assert page.url == either.served.job(ENDED)


def test_an_address_of_nothing_says_so(either: Plane, look: Callable[..., Any]) -> None:
    served = either.served
    window = look(served)
    page = window.at(served.job("nowhere"))
    expect(page.get_by_role("main")).to_contain_text("There is no such job.")
    page.get_by_role("link", name="Go to the overview").click()
    expect(page).to_have_url(f"{served.url}/")
    page = window.at(served.rollout(ENDED, "nothing-0-0"))
    expect(page.get_by_role("main")).to_contain_text("There is no such rollout.")
    page = window.at(served.group(ENDED, "no-such-task"))
    expect(page.get_by_role("main")).to_contain_text("no group of that task")


def test_a_value_of_the_address_that_means_nothing_is_ignored(plane: Plane, look: Callable[..., Any]) -> None:
    page = look(plane.served).at(
        f"{plane.served.job(ENDED)}?sort=%00%22&status=%3Cscript%3E&informative=2&tab=__proto__"
    )
    expect(page.locator('[role=grid] [data-row="0"] [data-key=task]')).to_have_text("task-00000")
