"""What a policy writes stays text: no view of a hostile rollout runs, loads, hides or moves anything."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect
from rollyard_testing.browser.plane import HALF, HOSTILE, Plane
from rollyard_testing.browser.signin import Served, a_context, sign_in
from rollyard_testing.browser.witness import HIDDEN, attacks_seen
from rollyard_testing.invariants import invariant
from rollyard_testing.page.attacks import LARGE, NAMES, TEXTS

pytestmark = pytest.mark.page


def _rollouts(served: Served) -> list[dict[str, Any]]:
    with served.http() as http:
        path = f"/v1/rolloutjobs/{HOSTILE}/rollouts"
        answer = http.get(path, params={"slim": "true", "limit": 200}).raise_for_status()
    found: list[dict[str, Any]] = answer.json()["items"]
    return found


@pytest.fixture(scope="module")
def rollouts(plane: Plane) -> list[dict[str, Any]]:
    """Return slim rows of the hostile job in the order in which its texts were written."""
    found = [row for row in _rollouts(plane.served) if row["ended_at"] is not None]
    with plane.served.http() as http:
        grid = http.get(f"/v1/rolloutjobs/{HOSTILE}/grid", params={"limit": 500}).raise_for_status()
    place = {group["task_id"]: group["no"] for group in grid.json()["items"]}
    found.sort(key=lambda row: (place[row["task_id"]], row["sample"]))
    assert len(found) == len(TEXTS) + len(NAMES) + 2
    return found


def _settled(page: Page) -> None:
    """Wait until nothing is being loaded."""
    expect(page.get_by_role("main")).to_be_visible()
    expect(page.locator(".waiting:not(:empty)")).to_have_count(0)


def _shows_all(page: Page) -> None:
    """Check that nothing that is shown is invisible or turns the direction of text."""
    text = page.evaluate("document.body.innerText")
    found = HIDDEN.search(text)
    assert found is None, f"{found[0]!r} in {text[max(0, found.start() - 40) : found.start() + 40]!r}"
    # Attributes that are read out or shown on hover are texts as well.
    titles = page.evaluate(
        "[...document.querySelectorAll('[title], [aria-label]')]"
        ".map(e => (e.getAttribute('title') ?? '') + (e.getAttribute('aria-label') ?? '')).join('\\n')"
    )
    found = HIDDEN.search(titles)
    assert found is None, f"{found[0]!r} in {titles[max(0, found.start() - 40) : found.start() + 40]!r}"
    assert HIDDEN.search(page.title()) is None


HOSTILE_TEXTS = pytest.mark.attack(
    "text of a policy, a worker or a task is taken for markup, a script, an address or a key of an "
    "object, or hides what it says",
    boundary="viewers",
    surface="the page",
    stopped_by="it is shown as text only, with control characters and directions by their names; a "
    "content security policy without exceptions",
)


@HOSTILE_TEXTS
@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_in_every_place_of_a_rollout_changes_nothing(
    plane: Plane, look: Callable[..., Any], rollouts: list[dict[str, Any]], kind: str
) -> None:
    window = look(plane.served)
    row = rollouts[list(TEXTS).index(kind)]
    page = window.at(plane.served.rollout(HOSTILE, row["id"]))
    for tab in ("Conversation", "Tokens", "Timeline", "Eval", "Raw"):
        page.get_by_role("tab", name=re.compile(f"^{tab}")).click()
        _settled(page)
        with invariant():
            assert attacks_seen(page) == [], tab
        _shows_all(page)
    page.get_by_role("tab", name=re.compile("^Conversation")).click()
    for name in ("Output", "Log"):
        # A text that is empty has nothing to unfold.
        for summary in page.locator("summary").filter(has_text=re.compile(f"^{name}")).all():
            summary.click()
    for place in range(4):
        page.locator(".branches li > a:first-child").nth(place).click()
        _settled(page)
        with invariant():
            assert attacks_seen(page) == [], f"conversation {place}"
        _shows_all(page)
    window.harmless()


@HOSTILE_TEXTS
def test_lists_of_hostile_rollouts_change_nothing(
    plane: Plane, look: Callable[..., Any], rollouts: list[dict[str, Any]]
) -> None:
    window = look(plane.served)
    for url in (
        f"{plane.served.url}/",
        plane.served.job(HOSTILE),
        f"{plane.served.job(HOSTILE)}?tab=rollouts",
        f"{plane.served.job(HOSTILE)}?tab=gantt",
    ):
        page = window.at(url)
        _settled(page)
        with invariant():
            assert attacks_seen(page) == [], url
        _shows_all(page)
        box = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert box[0] <= box[1], f"{url} is {box[0]} pixels wide in a window of {box[1]}"
    # Reasons that mean something to JavaScript's objects are listed and counted like others.
    page = window.at(plane.served.job(HOSTILE))
    reasons = page.get_by_role("region", name="Failures by reason")
    for name in NAMES:
        expect(reasons.get_by_role("link", name=name, exact=True).first).to_be_visible()


@HOSTILE_TEXTS
@pytest.mark.attack(
    "an id of a task is a path, or an encoded one, and leads a link elsewhere",
    boundary="viewers",
    surface="the page",
    stopped_by="each part of a path is encoded, and found as a whole",
)
def test_groups_with_hostile_ids_are_found_by_their_links(
    plane: Plane, look: Callable[..., Any], rollouts: list[dict[str, Any]]
) -> None:
    window = look(plane.served)
    page = window.at(plane.served.job(HOSTILE))
    links = page.locator("[data-row] [data-key=task]")
    expect(links.first).to_be_visible()
    count = len({row["task_id"] for row in rollouts})
    expect(links).to_have_count(count)
    for place in range(count):
        page.goto(plane.served.job(HOSTILE))
        link = page.locator(f'[data-row="{place}"] [data-key=task]')
        # Long names are shortened here.
        name = re.compile(f"^{re.escape(link.inner_text().removesuffix('…'))}")
        link.click()
        expect(page.get_by_role("article").first).to_be_visible()
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        _settled(page)
        with invariant():
            assert attacks_seen(page) == [], name.pattern
        _shows_all(page)
        # The link leads to the same group in a new window, and stays on this control plane.
        url = page.url
        assert url.startswith(f"{plane.served.url}/jobs/default/{HOSTILE}/groups/")
        page.goto("about:blank")
        page.goto(url)
        expect(page.get_by_role("heading", level=1)).to_have_text(name)
        expect(page.get_by_role("article").first).to_be_visible()


@pytest.mark.attack(
    "an output of ten megabytes stops the browser",
    boundary="viewers",
    surface="the page",
    stopped_by="parts of bounded size",
)
def test_an_output_of_ten_megabytes_is_shown_in_parts(
    plane: Plane, look: Callable[..., Any], rollouts: list[dict[str, Any]]
) -> None:
    for row, beginning in ((rollouts[-2], "first line"), (rollouts[-1], "zzzz")):
        window = look(plane.served)
        page = window.at(plane.served.rollout(HOSTILE, row["id"]))
        output = page.get_by_role("article").nth(2)
        expect(output).to_contain_text(beginning)
        expect(output).to_contain_text(f"{LARGE:,} characters")
        assert page.evaluate("document.body.innerText.length") < 100_000
        before = len(output.inner_text())
        for _ in range(2):
            output.get_by_role("button", name=re.compile("Show more")).click()
            expect(output.get_by_role("button", name=re.compile("Show more"))).to_be_enabled()
        assert len(output.inner_text()) > before
        page.get_by_role("tab", name="Raw").click()
        expect(page.get_by_label("The record as JSON")).to_be_visible()
        assert page.evaluate("document.body.innerText.length") < 2_000_000
        with page.expect_download() as started:
            page.get_by_role("link", name="Download the record").click()
        record = json.loads(started.value.path().read_bytes())
        assert len(record["messages"][2]["content"]) == LARGE


def test_a_record_with_half_a_character_is_shown_or_refused(plane: Plane, look: Callable[..., Any]) -> None:
    # JSON can spell half a surrogate pair, which is no text. A store that was changed by hand may hold one.
    served = plane.served
    half = "\\ud83d half \\ude00\\ud800"
    page_of = look(served)

    def answer(route: Any) -> None:
        brief = route.fetch()
        route.fulfill(response=brief, body=brief.text().replace('"stop"', f'"{half}"'))

    page_of.page.route("**/brief*", answer)
    row = next(row for row in _rollouts(served) if row["ended_at"] is not None)
    with page_of.page.expect_response("**/brief*") as answered:
        page = page_of.at(served.rollout(HOSTILE, row["id"]))
    assert half in answered.value.text()
    _settled(page)
    assert page.evaluate("document.body.innerText.isWellFormed()") is True
    # The page may have asked once more, and the end of its context would fail that answer in a later test.
    page.unroute_all(behavior="wait")


class _Hostile(BaseHTTPRequestHandler):
    """A page of another site on the same machine, whose requests carry the cookie of the session."""

    text = ""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def _another_site(text: str) -> Iterator[str]:
    class Site(_Hostile):
        pass

    Site.text = text
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


OTHER_SITES = pytest.mark.attack(
    "a page of another site, or a name that was rebound, in a real browser with the session",
    boundary="viewers",
    surface="the page",
    stopped_by="the checks of hosts, origins and headers, tried in Chromium",
)


@OTHER_SITES
def test_a_page_of_another_site_can_read_and_change_nothing(
    own_plane: Plane, look: Callable[..., Any]
) -> None:
    served = own_plane.served
    window = look(served, "admin")
    window.at(served.job(HALF))
    cancel = f"{served.url}/v1/rolloutjobs/{HALF}/cancel"
    text = f"""<!doctype html><title>other</title><body>
      <form id=f method=post target=frame action="{cancel}"><input name=a value=b></form>
      <form id=g method=post target=frame enctype=text/plain action="{served.url}/v1/session">
      <input name=a></form>
      <iframe name=frame></iframe><iframe id=page src="{served.url}/"></iframe>"""
    with _another_site(text) as site:
        page = window.context.new_page()
        page.goto(site)
        page.evaluate("document.getElementById('f').submit()")
        page.evaluate("document.getElementById('g').submit()")
        for path in ("/v1/overview", "/v1/session", f"/v1/rolloutjobs/{HALF}", "/v1/events"):
            outcome = page.evaluate(
                """url => fetch(url, {credentials: "include"}).then(a => a.text(), error => String(error))""",
                f"{served.url}{path}",
            )
            assert "Failed to fetch" in outcome, path
        for options in (
            '{method: "POST", credentials: "include", mode: "no-cors"}',
            '{method: "POST", credentials: "include", headers: {"Rollyard-Page": "1"}}',
            '{method: "DELETE", credentials: "include"}',
        ):
            page.evaluate(f"url => fetch(url, {options}).catch(() => null)", cancel)
            page.evaluate(f"url => fetch(url, {options}).catch(() => null)", f"{served.url}/v1/session")
        opened = page.evaluate(
            """url => new Promise(resolve => {
              const source = new EventSource(url, {withCredentials: true});
              source.onopen = () => resolve("open");
              source.onerror = () => resolve("refused");
            })""",
            f"{served.url}/v1/events",
        )
        assert opened == "refused"
        # The page cannot be framed, so nobody can be made to click in it.
        framed = next(frame for frame in page.frames if frame.url not in (page.url, f"{page.url}/"))
        assert framed.locator("main").count() == 0
        page.close()
    # What that page did is not the doing of ours.
    window.witness.requests.clear()
    window.witness.console.clear()
    window.witness.violations.clear()
    with served.http() as http:
        job = http.get(f"/v1/rolloutjobs/{HALF}").raise_for_status().json()
    assert job["status"]["phase"] != "Cancelled"
    assert job["status"]["counts"]["cancelled"] == 0
    assert window.page.evaluate("url => fetch(url).then(a => a.status)", f"{served.url}/v1/session") == 200


@OTHER_SITES
def test_a_name_that_was_rebound_reaches_nothing(plane: Plane, browser: Browser) -> None:
    served = plane.served
    port = served.origin.rpartition(":")[2]
    with a_context(browser, served) as (context, _):
        page = context.new_page()
        sign_in(page, served)
        for path in ("/", "/v1/session", "/v1/overview", f"/jobs/default/{HALF}"):
            answer = page.goto(f"http://rebound.example:{port}{path}")
            assert answer is not None
            assert answer.status in (400, 401, 403, 421), f"{path} answered {answer.status}"
            assert "<script" not in answer.text()
    for headers in ({"Host": "rebound.example"}, {"Host": f"127.0.0.1.rebound.example:{port}"}):
        refused = httpx.get(f"{served.url}/", headers=headers, trust_env=False)
        assert refused.status_code in (400, 403, 421), headers
