"""What web pages of others, guessers and holders of a session try against the page and its sign-in."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from rollyard_api.access import permissions
from rollyard_api.browsers import door, sessions
from rollyard_api.command import main
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.hosts import HostCheck
from rollyard_api.core.problems import LimitReached
from rollyard_api.options.declared import path_prefix
from rollyard_testing.adversary.restplane import Yard, control_plane
from rollyard_testing.api.browser import HOST, TestBrowser
from rollyard_testing.pace import patience

pytestmark = pytest.mark.attack(boundary="viewers")


SECRET = "A" * 43


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    folder = tmp_path / "page"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text('<meta name="rollyard-prefix" content="">')
    (folder / "assets" / "app.js").write_text("1")
    async with control_plane(
        tmp_path / "state", page_folder=folder, open_docs=True, open_metrics=True
    ) as made:
        await made.submit("mine")
        yield made


def browser_of(yard: Yard, **options: Any) -> TestBrowser:
    return TestBrowser(httpx.ASGITransport(app=yard.app, raise_app_exceptions=False), **options)


async def code_of(yard: Yard, role: str = "viewer") -> str:
    answer = await yard.admin.post("/v1/session/codes", json={"role": role})
    assert answer.status_code == 201
    code: str = answer.json()["code"]
    return code


async def signed_in(yard: Yard, role: str = "viewer") -> TestBrowser:
    browser = browser_of(yard)
    assert (await browser.sign_in(await code_of(yard, role))).status_code == 204
    return browser


def refused(answer: httpx.Response, reason: str) -> bool:
    return answer.status_code == 403 and answer.json()["reason"] == reason


# DNS rebinding: a name of the attacker leads to the control plane.

FOREIGN_HOSTS = [
    "evil.example", "evil.example:8765", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil",
    "evil.example#127.0.0.1", "10.0.0.7:8765", "[2001:db8::1]", "0x7f.1", "2130706433", "127.1",
    "localhost:x",
    "localhost:80:80", " localhost", "localhost/", "", "test.evil", "tes", "[::1", "::1", "localhost:123456",
]  # fmt: skip


DNS_REBINDING = pytest.mark.attack(
    "a name of the attacker leads to the control plane (DNS rebinding)",
    surface="everything without a token",
    stopped_by="the Host header must be a known name or a fitting address",
)


@DNS_REBINDING
async def test_under_a_foreign_name_nothing_answers_without_a_token(yard: Yard) -> None:
    browser, code = await signed_in(yard), await code_of(yard)
    for host in FOREIGN_HOSTS:
        headers = {"Host": host, "Origin": f"http://{host}"}
        for path in ("/", "/jobs/default/mine", "/assets/app.js", "/docs", "/openapi.json", "/metrics"):
            assert refused(await browser.fetch("GET", path, headers=headers), "HostNotAllowed"), (host, path)
        assert refused(await browser.fetch("GET", "/v1/rolloutjobs", headers=headers), "HostNotAllowed"), host
        attempt = await browser.fetch("POST", "/v1/session", json={"code": code}, headers=headers)
        assert refused(attempt, "HostNotAllowed"), host
    assert (await browser_of(yard).sign_in(code)).status_code == 204, "the code was not spent"


HONEST_NAMES = pytest.mark.attack(
    "the check locks out its own names, or the probes of a load balancer",
    surface="everything without a token",
    stopped_by="its names, loopback addresses and `--allowed-host`; `/healthz` and `/readyz` say nothing "
    "and answer always",
)


@HONEST_NAMES
async def test_its_own_names_are_accepted(yard: Yard) -> None:
    for host in ("127.0.0.1:8765", "localhost", "LOCALHOST:1", "[::1]:80", "127.9.9.9", "test", "localhost."):
        answer = await browser_of(yard).fetch("GET", "/", headers={"Host": host})
        assert answer.status_code == 200, host


@DNS_REBINDING
def test_a_listener_on_all_addresses_takes_addresses_and_its_names_only() -> None:
    check = HostCheck("0.0.0.0", ("rollyard.example.org",))
    assert all(check(one) for one in ("10.0.0.7:80", "[2001:db8::1]:80", "rollyard.example.org", "localhost"))
    assert not any(
        check(one) for one in ("evil.example", "a.rollyard.example.org", "rollyard.example.org.evil")
    )


@HONEST_NAMES
async def test_probes_answer_under_every_name(yard: Yard) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await browser_of(yard).fetch("GET", path, headers={"Host": "probe.example"})
        assert (answer.status_code, answer.text) == (200, "ok")


# Requests that a page of another origin makes the user's browser send (CSRF).

FOREIGN: list[dict[str, Any]] = [
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "http://127.0.0.1:9999", "Sec-Fetch-Site": "same-site"},
    {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": None},
    {"Origin": "https://127.0.0.1.evil.example:8765", "Sec-Fetch-Site": None},
    {"Origin": "http://localhost:8765", "Sec-Fetch-Site": None},
    {"Origin": "null", "Sec-Fetch-Site": "cross-site"},
    {"Origin": "null", "Sec-Fetch-Site": None},
    {"Origin": "http://127.0.0.1:8765/", "Sec-Fetch-Site": None},
    {"Origin": "http://127.0.0.1:8765.evil", "Sec-Fetch-Site": None},
    {"Origin": "file://", "Sec-Fetch-Site": None},
    {"Origin": "", "Sec-Fetch-Site": None},
    {"Origin": None, "Sec-Fetch-Site": "cross-site"},
    {"Origin": None, "Sec-Fetch-Site": "same-site"},
    {"Origin": None, "Sec-Fetch-Site": ""},
]


@pytest.mark.attack(
    "a page of another origin, or of another port of the host, reads or changes something with the user's "
    "cookie, or signs the user in to a session of its choice",
    surface="sessions",
    stopped_by="SameSite=Strict, Origin and Sec-Fetch-Site",
)
async def test_a_page_of_another_origin_uses_no_session(yard: Yard) -> None:
    browser, code = await signed_in(yard, "admin"), await code_of(yard)
    for headers in FOREIGN:
        reads = await browser.fetch("GET", "/v1/rolloutjobs", headers=headers)
        assert refused(reads, "ForeignOrigin"), headers
        cancel = await browser.fetch("POST", "/v1/rolloutjobs/mine/cancel", json={}, headers=headers)
        assert refused(cancel, "ForeignOrigin"), headers
        assert refused(await browser.fetch("DELETE", "/v1/session", headers=headers), "ForeignOrigin"), (
            headers
        )
        # Nobody signs the user in to a session of their own choice.
        login = await browser.fetch("POST", "/v1/session", json={"code": code}, headers=headers)
        assert refused(login, "ForeignOrigin"), headers
    assert (await browser.fetch("GET", "/v1/session")).status_code == 200
    job = (await yard.admin.get("/v1/rolloutjobs/mine")).json()
    assert job["status"]["counts"]["cancelled"] == 0


NOT_OF_THE_PAGE: list[dict[str, Any]] = [
    {"Rollyard-Page": None},
    {"Rollyard-Page": "2"},
    {"Rollyard-Page": None, "Content-Type": "application/x-www-form-urlencoded"},
    {"Rollyard-Page": None, "Content-Type": "text/plain"},
    {"Origin": None, "Sec-Fetch-Site": None},
    {"Sec-Fetch-Site": "none"},
]


CHANGE_FROM_ELSEWHERE = pytest.mark.attack(
    "a form, or a request without headers of a browser, makes a change",
    surface="sessions",
    stopped_by="the header `Rollyard-Page`, which needs a permission that is never given, and an Origin",
)


@CHANGE_FROM_ELSEWHERE
async def test_a_change_must_come_from_the_page(yard: Yard) -> None:
    browser, code = await signed_in(yard, "admin"), await code_of(yard)
    for headers in NOT_OF_THE_PAGE:
        for method, path in (("POST", "/v1/rolloutjobs/mine/cancel"), ("DELETE", "/v1/session")):
            assert refused(await browser.fetch(method, path, headers=headers), "ForeignOrigin"), headers
        login = await browser.fetch("POST", "/v1/session", json={"code": code}, headers=headers)
        assert refused(login, "ForeignOrigin"), headers


@CHANGE_FROM_ELSEWHERE
async def test_nobody_is_permitted_to_ask_from_elsewhere(yard: Yard) -> None:
    """A preflight request is never answered with a permission, so no page can add a header or a token."""
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Headers": "rollyard-page"}
    for path in ("/", "/v1/session", "/v1/rolloutjobs/mine/cancel", "/healthz"):
        answer = await browser_of(yard).fetch("OPTIONS", path, headers=headers)
        assert answer.status_code >= 400
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.attack(
    "a cookie is sent beside a token, to lend its rights or to hide an origin",
    surface="sessions",
    stopped_by="a token is judged alone, and not with a foreign Origin",
)
async def test_a_bearer_token_beside_a_cookie_does_not_come_from_elsewhere(yard: Yard) -> None:
    browser = await signed_in(yard)
    bearer = {"Authorization": f"Bearer {yard.plane.tokens.current('admin')}"}
    foreign = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    assert refused(await browser.fetch("GET", "/v1/rolloutjobs", headers=bearer | foreign), "ForeignOrigin")
    program = await yard.admin.get("/v1/rolloutjobs", headers={"Host": "any.name.at.all"})
    assert program.status_code == 200, "a program with a token may use any name"
    # The session does not lend its rights to a token that has fewer.
    worker = {"Authorization": f"Bearer {yard.plane.tokens.current('worker')}"}
    assert (await browser.fetch("GET", "/v1/rolloutjobs", headers=worker)).status_code == 403
    for wrong in ("Bearer wrong", "Bearer ", "Basic abc", ""):
        answer = await browser.fetch("GET", "/v1/rolloutjobs", headers={"Authorization": wrong})
        assert answer.status_code == 401, "a wrong token is not passed over in favour of the cookie"


@pytest.mark.attack(
    "a header is sent twice, so that two readers see different ones",
    surface="sessions",
    stopped_by="such a request is refused",
)
async def test_a_header_that_is_sent_twice_is_refused(yard: Yard) -> None:
    browser = await signed_in(yard)
    ((name, secret),) = browser.cookies.items()
    for pair in ((b"host", b"evil.example"), (b"origin", b"http://127.0.0.1:8765")):
        headers = [
            (b"host", HOST.encode()),
            (b"origin", b"https://evil.example"),
            (b"cookie", f"{name}={secret}".encode()),
            pair,
        ]
        answer = await browser.http.get("/v1/rolloutjobs", headers=headers)
        assert answer.status_code == 403


# One-time codes.


GUESSED_CODES = pytest.mark.attack(
    "guesses",
    surface="one-time codes",
    stopped_by="256 random bits; ten wrong codes of an address at once, and ten a minute after that",
)


@GUESSED_CODES
async def test_guesses_are_refused_and_then_not_even_looked_up(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = browser_of(yard)
    code = await code_of(yard)
    wrong = [
        SECRET,
        "",
        "a",
        code[:-1],
        f"{code}=",
        f" {code}",
        code.lower(),
        "' OR 1=1 --",
        "\x00" * 43,
        "é" * 43,
    ]
    assert len(wrong) == sessions.GUESSES
    now = 0.0
    monkeypatch.setattr(yard.plane.wrong_codes, "_clock", lambda: now)
    for one in wrong:
        answer = await browser.sign_in(one)
        assert (answer.status_code, answer.json()["reason"]) == (401, "CodeUnusable"), one
        assert "set-cookie" not in answer.headers
    answer = await browser.sign_in(SECRET)
    assert (answer.status_code, answer.json()["reason"]) == (429, "TooManyGuesses")
    assert 0 < int(answer.headers["retry-after"]) <= 61
    now += sessions.WINDOW_SECONDS / sessions.GUESSES
    assert (await browser.sign_in(code)).status_code == 204, "the code is still good after the pause"


@GUESSED_CODES
def test_a_guesser_with_many_addresses_fills_no_memory() -> None:
    made = sessions.WrongCodes()
    for number in range(sessions.REMEMBERED + 100):
        made.count(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(made._buckets) == sessions.REMEMBERED
    for number in range(sessions.GUESSES):
        made.count(f"2001:db8::{number:x}")
    with pytest.raises(LimitReached):
        made.check("2001:db8::ffff")
    made.check("2001:db8:0:1::1")


BROKEN = [
    b"", b"{", b"[]", b"null", b'{"code": 7}', b'{"code": null}', b'{"code": "x", "role": "admin"}',
    b"[" * 3000,
    b'{"code": "' + b"x" * 300 + b'"}',
]  # fmt: skip


BROKEN_BODIES = pytest.mark.attack(
    "broken and huge bodies", surface="`/v1/session`", stopped_by="fields by name; at most 4 KiB"
)


@BROKEN_BODIES
async def test_broken_sign_ins(yard: Yard) -> None:
    for body in BROKEN:
        headers = {"Content-Type": "application/json"}
        answer = await browser_of(yard).fetch("POST", "/v1/session", content=body, headers=headers)
        assert answer.status_code in (400, 422), body
        assert answer.headers["content-type"] == "application/problem+json"


@BROKEN_BODIES
async def test_a_large_sign_in_is_refused_unread(yard: Yard) -> None:
    answer = await browser_of(yard).fetch("POST", "/v1/session", content=b"x" * 5000)
    assert answer.status_code == 413


# What a session reaches.

SESSION_READS = {key for key, rule in permissions.RULES.items() if key[0] == "GET" and "viewer" in rule.roles}


STOLEN_SESSION = pytest.mark.attack(
    "a stolen or shared session tries every call",
    surface="sessions",
    stopped_by="it makes the calls of a viewer that change nothing; the role `admin` adds cancelling",
)


@STOLEN_SESSION
@pytest.mark.parametrize("role", ["viewer", "admin"])
async def test_a_session_that_tries_every_call(yard: Yard, role: str) -> None:
    browser = await signed_in(yard, role)
    changes = {("DELETE", "/v1/session")}
    if role == "admin":
        changes.add(("POST", "/v1/rolloutjobs/{name}/cancel"))
    wrong = []
    for (method, template), rule in permissions.RULES.items():
        # This control plane opens /metrics.
        if rule.open or (method, template) in SESSION_READS | changes | {("GET", "/metrics")}:
            continue
        path = template.replace("{name}", "mine").replace("{claim}", "c").replace("{rollout}", "r")
        path = path.replace("{number}", "1").replace("{cursor}", "c").replace("{sha256}", "0" * 64)
        answer = await browser.fetch(method, path, json={} if method != "GET" else None)
        if answer.status_code != 403:
            wrong.append((method, path, answer.status_code))
    assert wrong == []
    assert (await browser.fetch("GET", "/v1/rolloutjobs/mine")).status_code == 200
    cancelled = await browser.fetch("POST", "/v1/rolloutjobs/mine/cancel", json={})
    assert cancelled.is_success is (role == "admin")


ODD = [
    ("POST", "/v1/rolloutjobs/a/../cancel"),
    ("POST", "/v1/rolloutjobs/mine/close/cancel"),
    ("POST", "/v1/rolloutjobs//cancel"),
    ("POST", "/v1/rolloutjobs/mine/cancel/"),
    ("POST", "/v1/rolloutjobs/mine%2Fcancel/../cancel"),
    ("PUT", "/v1/rolloutjobs/mine/cancel"),
    ("PATCH", "/v1/rolloutjobs/mine"),
    ("GET", "/v1/../v1/blobs"),
    ("TRACE", "/v1/rolloutjobs"),
]


@STOLEN_SESSION
async def test_odd_paths_and_methods_of_a_session(yard: Yard) -> None:
    browser = await signed_in(yard, "admin")
    for method, path in ODD:
        answer = await browser.fetch(method, path)
        assert answer.status_code in (403, 404, 405), (method, path, answer.text)


COOKIE_TOSSING = pytest.mark.attack(
    "another page of the host sets cookies of its own (cookie tossing)",
    surface="cookies",
    stopped_by="each candidate is looked up, at most four; over HTTPS those with `__Host-` or `__Secure-` "
    "only",
)


@COOKIE_TOSSING
async def test_cookies_of_others_do_not_matter(yard: Yard) -> None:
    """Another page on the same host, at another port, sets cookies of its own choice (cookie tossing)."""
    browser = await signed_in(yard)
    ((name, secret),) = browser.cookies.items()
    for before in (
        f"{name}={SECRET}; ",
        f'{name}=; {name}=x; {name}="{SECRET}"; ',
        f"__Host-{name}={SECRET}; __Secure-{name}={SECRET}; ",
        "rollyard-00000000=" + SECRET + "; other=1; =; ;; ",
        f"{name}{SECRET}; {name.upper()}={SECRET}; ",
    ):
        answer = await browser.fetch("GET", "/v1/rolloutjobs", headers={"Cookie": f"{before}{name}={secret}"})
        assert answer.status_code == 200, before
    many = "; ".join(f"{name}={chr(65 + n) * 43}" for n in range(20))
    assert (await browser.fetch("GET", "/v1/session", headers={"Cookie": many})).status_code == 401
    huge = f"{name}={secret}; x=" + "y" * (door.MAX_HEADER + 1)
    assert (await browser.fetch("GET", "/v1/session", headers={"Cookie": huge})).status_code == 401


@COOKIE_TOSSING
def test_over_https_only_a_cookie_that_came_over_it_counts() -> None:
    header = f"rollyard-i={SECRET}; __Host-rollyard-i={'B' * 43}"
    assert door.secrets_in(header, "i", https=True) == ["B" * 43]
    assert door.secrets_in(header, "i", https=False) == ["B" * 43, SECRET]
    assert door.secrets_in(header, "j", https=False) == []


@pytest.mark.attack(
    "two control planes on one host replace each other's cookie",
    surface="cookies",
    stopped_by="its name ends in a name of the installation",
)
async def test_two_control_planes_on_one_host_keep_their_sessions_apart(yard: Yard, tmp_path: Path) -> None:
    async with control_plane(tmp_path / "other") as other:
        here, there = await signed_in(yard), await signed_in(other)
        assert not here.cookies.keys() & there.cookies.keys()
        here.cookies |= there.cookies
        assert (await here.fetch("GET", "/v1/session")).status_code == 200
        assert (await here.fetch("DELETE", "/v1/session")).status_code == 204
        assert (await there.fetch("GET", "/v1/session")).status_code == 200


# Paths and headers.

TRAVERSALS = [
    "/assets/../index.html", "/assets/%2e%2e/index.html", "/assets/..%2f..%2fsecret",
    "/assets/%2e%2e%2findex.html",
    "/assets/..\\secret", "/assets/..%5csecret", "/assets/%00", "/assets/app.js%00.html",
    "/assets//etc/passwd",
    "/assets/%252e%252e/index.html", "/assets/.hidden", "/assets/", "/assets", "//etc/passwd",
    "/assets/%c0%ae%c0%ae/secret", "/jobs/../../etc/passwd", "/x/../assets/app.js", "/assets/app.js/",
    "/page/index.html", "/assets/app%2ejs", "/docs/../tokens.json", "/docs/..%2ftokens.json",
]  # fmt: skip


@pytest.mark.attack(
    "a path leads out of its folder, however it is encoded",
    surface="files of the page",
    stopped_by="files are read once, without links, and found by their whole names",
)
async def test_no_path_leads_out_of_the_page(yard: Yard, tmp_path: Path) -> None:
    (tmp_path / "page" / "secret").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    for path in TRAVERSALS:
        status, body = await raw_get(yard, path)
        assert status in (401, 404), path
        assert b"secret" not in body
        assert b"root:" not in body


async def raw_get(yard: Yard, path: str) -> tuple[int, bytes]:
    """Send a path as it stands, because clients would tidy it up, and return the status and the body."""
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        # uvicorn decodes paths in this way.
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"host", b"test")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8765),
    }
    await yard.app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


HOSTILE_OPTIONS = pytest.mark.attack(
    "they put a header, a script or another path into an answer",
    surface="`--path-prefix`, `--allowed-host`",
    stopped_by="one form of each; the start is refused",
)


@HOSTILE_OPTIONS
@pytest.mark.parametrize(
    "prefix",
    [
        "x", "//evil.example", "/a//b", "/a/../b", "/..", "/.", "/a\r\nSet-Cookie: x=1", "/a\nb", "/a b",
        "/<script>",
        '/"onload="', "/a;Domain=evil", "/a?b", "/a#b", "/é", "/%2e", "/a\x00", "/" + "a" * 300,
        "/v1", "/jobs/x",
        "/assets", "/docs", "/metrics", "/healthz",
    ],
    ids=repr,
)  # fmt: skip
def test_no_prefix_injects_anything(prefix: str) -> None:
    with pytest.raises(OptionInvalid, match=r"must be a path such as|must not begin with"):
        path_prefix(prefix)


@HOSTILE_OPTIONS
def test_a_refused_option_ends_the_start_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--path-prefix=/a\r\nX: y", "--allowed-host=http://a", "--session-seconds=0"):
        assert main(["--state-dir", str(tmp_path), "--port", "0", option]) == 2
        said = capsys.readouterr().err
        assert len(said.strip().splitlines()) == 1
        assert option.partition("=")[0] in said


@DNS_REBINDING
def test_a_real_listener_refuses_a_foreign_host(tmp_path: Path) -> None:
    from rollyard_testing.api.control_plane import a_control_plane

    (tmp_path / "state").mkdir()
    with a_control_plane(tmp_path / "state", "--open-docs", ready_seconds=150, end_seconds=90) as started:
        for host, status in (("evil.example", b"403"), (f"127.0.0.1:{started.port}", b"200")):
            with socket.create_connection(("127.0.0.1", started.port), patience(90)) as sock:
                request = f"GET /openapi.json HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                sock.sendall(request.encode())
                first = sock.recv(4096).partition(b"\r\n")[0]
            assert first.split()[1] == status
        # A guesser does not become another client by a header.
        with httpx.Client(base_url=started.url, trust_env=False, timeout=patience(90)) as http:
            for number in range(sessions.GUESSES + 1):
                headers = {"Origin": started.url, "Rollyard-Page": "1", "X-Forwarded-For": f"10.0.0.{number}"}
                answer = http.post("/v1/session", json={"code": SECRET}, headers=headers)
                assert answer.status_code == (429 if number == sessions.GUESSES else 401)
