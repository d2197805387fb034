"""Signing in to the page by a link, and the ends of a session."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from rollyard_testing.browser.plane import ENDED, HALF, Plane
from rollyard_testing.browser.signin import sign_in

pytestmark = pytest.mark.page


def _asks_to_sign_in(page: Page) -> None:
    expect(page.get_by_role("heading", name="Sign in from a terminal")).to_be_visible()
    expect(page.get_by_text("rollyard open", exact=True)).to_be_visible()


def test_a_link_signs_in_once(plane: Plane, look: Callable[..., Any]) -> None:
    served = plane.served
    code = served.code()
    window = look(served, fresh=True)
    cookies = window.context.cookies()
    assert len(cookies) == 1
    assert cookies[0]["httpOnly"] is True
    assert cookies[0]["sameSite"] == "Strict"
    assert "code" not in window.page.url
    # No script can read the session, and no address in the history holds the code.
    assert window.page.evaluate("document.cookie") == ""
    other = look(served)
    other.context.clear_cookies()
    page = other.page
    page.goto(f"{served.url}/#code={code}")
    expect(page.get_by_role("link", name=ENDED, exact=True)).to_be_visible()
    assert "code" not in page.url
    other.context.clear_cookies()
    page.goto("about:blank")
    page.goto(f"{served.url}/#code={code}")
    _asks_to_sign_in(page)
    expect(page.get_by_role("alert")).to_contain_text("used before")


def test_without_a_session_every_address_asks_to_sign_in(plane: Plane, look: Callable[..., Any]) -> None:
    served = plane.served
    window = look(served)
    window.context.clear_cookies()
    for url in (
        f"{served.url}/",
        served.job(ENDED),
        served.group(ENDED, "task-00000"),
        served.rollout(ENDED, "x"),
    ):
        window.page.goto(url)
        _asks_to_sign_in(window.page)
    refused = {status for url, status in window.witness.statuses if "/v1/" in url}
    assert refused == {401}


def test_a_link_to_a_view_signs_in_and_shows_it(plane: Plane, look: Callable[..., Any]) -> None:
    served = plane.served
    window = look(served)
    window.context.clear_cookies()
    sign_in(window.page, served, path=f"/jobs/default/{ENDED}?tab=rollouts")
    expect(window.page.get_by_role("table", name="Rollouts")).to_be_visible()
    assert window.page.url == f"{served.job(ENDED)}?tab=rollouts"


def test_who_signs_out_is_out_everywhere(plane: Plane, look: Callable[..., Any]) -> None:
    served = plane.served
    window = look(served, fresh=True)
    kept = window.context.cookies()
    window.page.get_by_role("button", name="Sign out").click()
    _asks_to_sign_in(window.page)
    # The server has forgotten the session, and not only the browser.
    window.context.add_cookies(kept)
    window.page.goto(served.job(ENDED))
    _asks_to_sign_in(window.page)


def test_an_open_page_says_that_its_token_was_replaced(own_plane: Plane, look: Callable[..., Any]) -> None:
    served = own_plane.served
    window = look(served, fresh=True)
    page = window.at(served.job(HALF))
    expect(page.locator("[data-row]").first).to_be_visible()
    file = own_plane.state / "tokens.json"
    tokens = json.loads(file.read_text())
    tokens["viewer"] = secrets.token_urlsafe(32)
    file.write_text(json.dumps(tokens))
    # The next answer says that the session is gone, and the page says how to get another.
    page.get_by_role("tab", name="Rollouts").click()
    page.wait_for_function(
        "url => fetch(url).then(answer => answer.status === 401)", arg=f"{served.url}/v1/session"
    )
    _asks_to_sign_in(page)
    # A link that the new token makes signs in again.
    sign_in(page, own_plane.served)
    expect(page.get_by_role("link", name=HALF, exact=True)).to_be_visible()


def test_a_viewer_cancels_nothing(plane: Plane, look: Callable[..., Any]) -> None:
    served = plane.served
    page = look(served).at(served.job(HALF))
    expect(page.locator("[data-row]").first).to_be_visible()
    expect(page.get_by_role("button", name="Cancel job…")).to_have_count(0)
    status = page.evaluate(
        """url => fetch(url, {method: "POST", headers: {"Rollyard-Page": "1"}}).then(a => a.status)""",
        f"{served.url}/v1/rolloutjobs/{HALF}/cancel",
    )
    assert status == 403


def test_an_admin_cancels_after_a_question_and_changes_nothing_else(
    own_plane: Plane, look: Callable[..., Any]
) -> None:
    served = own_plane.served
    page = look(served, "admin").at(served.job(HALF))
    button = page.get_by_role("button", name="Cancel job…")
    button.click()
    page.get_by_role("button", name="Keep it").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    with served.http() as http:
        assert http.get(f"/v1/rolloutjobs/{HALF}").json()["status"]["counts"]["cancelled"] == 0
    for method, path in (
        ("DELETE", f"/v1/rolloutjobs/{HALF}"),
        ("PATCH", f"/v1/rolloutjobs/{HALF}"),
        ("POST", "/v1/rolloutjobs"),
        ("POST", "/v1/session/codes"),
        ("POST", "/v1/leases"),
    ):
        status = page.evaluate(
            """([method, url]) => fetch(url, {method, headers: {"Rollyard-Page": "1"}, body: "{}"})
              .then(a => a.status)""",
            [method, f"{served.url}{path}"],
        )
        assert status in (401, 403), f"{method} {path} answered {status}"
    button.click()
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.get_by_role("main")).to_contain_text("Cancelled")
    expect(button).to_have_count(0)
    with served.http() as http:
        assert http.get(f"/v1/rolloutjobs/{HALF}").json()["status"]["counts"]["cancelled"] > 0
