"""Sign-in: one-time codes, the sessions that they become, and how both end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from rollyard_api.browsers import sessions as module
from rollyard_api.settings import Settings
from rollyard_api.storage.schema import browser_sessions, sign_in_codes
from rollyard_testing.api.browser import TestBrowser
from rollyard_testing.api.plane import make_manifest, serving
from rollyard_testing.pace import patience

OLD = {"admin": "a-secret", "worker": "w", "driver": "d", "viewer": "v-secret"}


def transport_of(served: Any) -> httpx.AsyncBaseTransport:
    transport: httpx.AsyncBaseTransport = served.admin._transport
    return transport


async def code_of(http: httpx.AsyncClient, **body: Any) -> str:
    answer = await http.post("/v1/session/codes", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    code: str = answer.json()["code"]
    return code


async def signed_in(served: Any, role: str = "viewer", **options: Any) -> TestBrowser:
    browser = TestBrowser(transport_of(served), **options)
    answer = await browser.sign_in(await code_of(served.admin, role=role))
    assert answer.status_code == 204, answer.text
    return browser


@pytest.fixture
async def viewer(served: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client with the viewer's token."""
    token = served.plane.tokens.by_role["viewer"][0]
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        transport=transport_of(served), base_url="http://test", headers=headers
    ) as http:
        yield http


CODE_USED_TWICE = pytest.mark.attack(
    "a code is used twice, at once, late, or after its token was removed",
    boundary="viewers",
    surface="one-time codes",
    stopped_by="it is deleted in the transaction that makes the session; 60 s; its token is looked up",
)


@CODE_USED_TWICE
async def test_a_code_becomes_a_session_once(served: Any) -> None:
    code = await code_of(served.admin)
    first, second = TestBrowser(transport_of(served)), TestBrowser(transport_of(served))
    assert (await first.fetch("GET", "/v1/rolloutjobs")).status_code == 401
    assert (await first.sign_in(code)).status_code == 204
    again = await second.sign_in(code)
    assert (again.status_code, again.json()["reason"]) == (401, "CodeUnusable")
    assert (await second.fetch("GET", "/v1/rolloutjobs")).status_code == 401
    found = (await first.fetch("GET", "/v1/session")).json()
    assert (found["role"], found["cancel"]) == ("viewer", False)
    week = 7 * 86400
    assert abs(found["expires_at"] - time.time() - week) < 60
    answer = await first.fetch("GET", "/v1/rolloutjobs")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@CODE_USED_TWICE
async def test_two_redemptions_at_once_make_one_session(served: Any) -> None:
    code = await code_of(served.admin)
    browsers = [TestBrowser(transport_of(served)) for _ in range(8)]
    answers = await asyncio.gather(*(browser.sign_in(code) for browser in browsers))
    assert sorted(answer.status_code for answer in answers) == [204] + 7 * [401]


async def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(served: Any) -> None:
    browser = await signed_in(served)
    name, *attributes = browser.set_cookie.split("; ")
    instance = await served.plane.sessions.installation()
    assert name.startswith(f"rollyard-{instance}=")
    assert sorted(attributes) == ["HttpOnly", "Max-Age=604800", "Path=/", "SameSite=strict"]


async def test_behind_https_the_cookie_is_bound_to_it(settings: Settings) -> None:
    host = "rollyard.example.org"
    for prefix, start in (("", "__Host-rollyard-"), ("/lab", "__Secure-rollyard-")):
        async with serving(settings, allowed_hosts=(host,), path_prefix=prefix) as served:
            browser = await signed_in(served, host=host, scheme="https", prefix=prefix)
            name, *attributes = browser.set_cookie.split("; ")
            assert name.startswith(start)
            path = f"Path={prefix}/"
            assert sorted(attributes) == ["HttpOnly", "Max-Age=604800", path, "SameSite=strict", "Secure"]
            assert (await browser.fetch("GET", "/v1/rolloutjobs")).status_code == 200


@pytest.mark.attack(
    "a copy of the database signs somebody in",
    boundary="viewers",
    surface="sessions",
    stopped_by="it holds SHA-256 sums only",
)
async def test_the_store_holds_no_secret(served: Any) -> None:
    code = await code_of(served.admin)
    browser = await signed_in(served)
    (secret,) = browser.cookies.values()

    def rows(conn: sa.Connection) -> str:
        return repr([conn.execute(table.select()).all() for table in (sign_in_codes, browser_sessions)])

    stored = await served.plane.database.read(rows)
    for hidden in (code, secret, served.plane.tokens.current("admin")):
        assert hidden not in stored


OUTLIVING_SESSION = pytest.mark.attack(
    "it outlives its token, its time, its sign-out, or an open stream",
    boundary="viewers",
    surface="sessions",
    stopped_by="each request compares it with the tokens in force; streams look every 5 s",
)


@OUTLIVING_SESSION
async def test_signing_out_ends_the_session_and_the_cookie(served: Any) -> None:
    browser = await signed_in(served)
    kept = dict(browser.cookies)
    answer = await browser.fetch("DELETE", "/v1/session")
    assert answer.status_code == 204
    assert browser.cookies == {}
    assert "Max-Age=0" in browser.set_cookie
    browser.cookies = kept
    after = await browser.fetch("GET", "/v1/rolloutjobs")
    assert (after.status_code, after.json()["reason"]) == (401, "SessionEnded")
    answer = await served.admin.delete("/v1/session")
    assert (answer.status_code, answer.json()["reason"]) == (400, "BadRequest")


async def test_signing_in_again_ends_the_earlier_session(served: Any) -> None:
    browser = await signed_in(served)
    earlier = dict(browser.cookies)
    assert (await browser.sign_in(await code_of(served.admin))).status_code == 204
    assert browser.cookies != earlier
    other = TestBrowser(transport_of(served))
    other.cookies = earlier
    assert (await other.fetch("GET", "/v1/rolloutjobs")).status_code == 401


@OUTLIVING_SESSION
@pytest.mark.parametrize("changed", ["session_idle_seconds", "session_seconds"])
async def test_a_session_expires(settings: Settings, changed: str) -> None:
    async with serving(settings, **{changed: 0.4}) as served:
        browser = await signed_in(served)
        began = time.monotonic()
        while time.monotonic() - began < patience(10):
            if changed == "session_idle_seconds":
                await asyncio.sleep(0.5)
            answer = await browser.fetch("GET", "/v1/rolloutjobs")
            if answer.status_code == 401:
                break
            await asyncio.sleep(0.05)
        assert answer.json()["reason"] == "SessionEnded"


async def test_a_session_in_use_outlives_the_idle_time(settings: Settings) -> None:
    async with serving(settings, session_idle_seconds=3.0) as served:
        browser = await signed_in(served)
        end = time.monotonic() + 4.5
        while time.monotonic() < end:
            assert (await browser.fetch("GET", "/v1/session")).status_code == 200
            await asyncio.sleep(0.1)


@CODE_USED_TWICE
async def test_a_code_expires(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CODE_SECONDS", 0.05)
    code = await code_of(served.admin)
    await asyncio.sleep(0.1)
    answer = await TestBrowser(transport_of(served)).sign_in(code)
    assert (answer.status_code, answer.json()["reason"]) == (401, "CodeUnusable")


@OUTLIVING_SESSION
async def test_a_session_ends_with_its_token(settings: Settings, tmp_path: Path) -> None:
    path = tmp_path / "given.json"

    def write(**changes: Any) -> None:
        scratch = path.with_suffix(".new")
        scratch.write_text(json.dumps({name: value for name, value in (OLD | changes).items() if value}))
        scratch.replace(path)

    write()
    async with serving(settings, tokens_file=path, tokens_seconds=3600.0) as served:
        look: Callable[[], Any] = served.plane.look_at_tokens

        async def by(token: str) -> TestBrowser:
            browser = TestBrowser(transport_of(served))
            headers = {"Authorization": f"Bearer {token}"}
            made = await served.anonymous.post("/v1/session/codes", json={}, headers=headers)
            assert (await browser.sign_in(made.json()["code"])).status_code == 204
            return browser

        async def statuses(*browsers: TestBrowser) -> list[int]:
            return [(await browser.fetch("GET", "/v1/rolloutjobs")).status_code for browser in browsers]

        of_admin, of_viewer = await by("a-secret"), await by("v-secret")
        unused = await code_of(served.admin)
        # A token that is about to be retired is still in force.
        write(admin=["new", "a-secret"])
        await look()
        assert await statuses(of_admin, of_viewer) == [200, 200]
        write(admin="new")
        await look()
        assert await statuses(of_admin, of_viewer) == [401, 200]
        # The code of the removed token is worth nothing, either.
        assert (await TestBrowser(transport_of(served)).sign_in(unused)).status_code == 401
        write(admin="new", viewer=None)
        await look()
        assert await statuses(of_admin, of_viewer) == [401, 401]
        # The secret of the viewer under another role revives nothing.
        write(admin="new", viewer="x", driver="v-secret")
        await look()
        assert await statuses(of_admin, of_viewer) == [401, 401]


@OUTLIVING_SESSION
async def test_an_open_stream_ends_with_its_session(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollyard_api.browsers import door
    from rollyard_api.routes import results

    monkeypatch.setattr(door, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(results, "COUNTS_SECONDS", 0.2)
    assert (await served.admin.post("/v1/rolloutjobs", json=make_manifest())).status_code == 201
    browser = await signed_in(served)
    reading = asyncio.create_task(browser.fetch("GET", "/v1/rolloutjobs/job/events"))
    await asyncio.sleep(0.6)  # Time for some looks and counts: this client shows a stream only when it ends.
    assert not reading.done()
    assert (await served.admin.delete("/v1/sessions")).json() == {"ended": 1}
    answer = await asyncio.wait_for(reading, patience(10))
    assert answer.status_code == 200
    assert "event: end" not in answer.text


async def test_all_sessions_end_on_request(served: Any, viewer: httpx.AsyncClient) -> None:
    of_admin = await signed_in(served)
    of_viewer = TestBrowser(transport_of(served))
    assert (await of_viewer.sign_in(await code_of(viewer))).status_code == 204
    assert (await viewer.delete("/v1/sessions")).json() == {"ended": 1}
    assert (await of_viewer.fetch("GET", "/v1/rolloutjobs")).status_code == 401
    assert (await of_admin.fetch("GET", "/v1/rolloutjobs")).status_code == 200
    await code_of(viewer)
    assert (await served.admin.delete("/v1/sessions")).json() == {"ended": 2}
    assert (await of_admin.fetch("GET", "/v1/rolloutjobs")).status_code == 401


async def test_who_may_make_which_codes(served: Any, viewer: httpx.AsyncClient) -> None:
    await code_of(viewer)
    refused = await viewer.post("/v1/session/codes", json={"role": "admin"})
    assert (refused.status_code, refused.json()["reason"]) == (403, "Forbidden")
    for http in (served.worker, served.driver):
        assert (await http.post("/v1/session/codes", json={})).status_code == 403
    assert (await served.anonymous.post("/v1/session/codes", json={})).status_code == 401
    for body, field in (({"role": "driver"}, "role"), ({"rolle": "viewer"}, "rolle"), ([], "body")):
        answer = await served.admin.post("/v1/session/codes", json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"][0].startswith(f"{field}: ")
    answer = await served.admin.post("/v1/session/codes")
    assert (answer.status_code, answer.json()["role"]) == (201, "viewer")


async def test_the_number_of_codes_and_sessions_is_bounded(
    served: Any, viewer: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CODES", 3)
    monkeypatch.setattr(module, "MAX_SESSIONS", 2)
    of_admin = await signed_in(served)
    browsers = []
    for _ in range(4):
        browsers.append(TestBrowser(transport_of(served)))
        assert (await browsers[-1].sign_in(await code_of(viewer))).status_code == 204
    found = [(await browser.fetch("GET", "/v1/session")).status_code for browser in [of_admin, *browsers]]
    assert found == [200, 401, 401, 200, 200], "a viewer's token pushes out none of the admin's sessions"
    kept = await code_of(served.admin)
    codes = [await code_of(viewer) for _ in range(4)]
    answers = [(await TestBrowser(transport_of(served)).sign_in(code)).status_code for code in [kept, *codes]]
    assert answers == [204, 401, 204, 204, 204]


async def test_every_replica_and_a_restart_know_the_session(settings: Settings) -> None:
    async with serving(settings) as served:
        browser = await signed_in(served)
        name = await served.plane.sessions.installation()
    async with serving(settings) as again:
        moved = TestBrowser(transport_of(again))
        moved.cookies = browser.cookies
        assert (await moved.fetch("GET", "/v1/rolloutjobs")).status_code == 200
        assert await again.plane.sessions.installation() == name
