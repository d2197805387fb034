"""The page as it is served: its paths, its headers, and a path prefix."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.browsers import page
from rollyard_api.browsers.page import takes_gzip
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.options.declared import host_name, path_prefix
from rollyard_api.settings import Settings
from rollyard_testing.api.plane import make_manifest, serving

SCRIPT = "assets/app-0A1B2C3D.js"
INDEX = f"""<!doctype html>
<html><head>
<meta name="rollyard-prefix" content="">
<link rel="stylesheet" href="assets/app-1A2B3C4D.css">
<script type="module" src="{SCRIPT}"></script>
</head><body></body></html>
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a small page."""
    made = tmp_path / "page"
    (made / "assets").mkdir(parents=True)
    (made / "index.html").write_text(INDEX)
    (made / SCRIPT).write_text("let x = 1;\n" * 100)
    (made / "assets" / "app-1A2B3C4D.css").write_text("body { margin: 0 }")
    (made / "assets" / "plain.js").write_text("1")
    (made / "assets" / ".hidden.js").write_text("1")
    (made / "assets" / "notes.md").write_text("1")
    (tmp_path / "secret.js").write_text("secret")
    (made / "assets" / "link.js").symlink_to(tmp_path / "secret.js")
    return made


Opened = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def opened(settings: Settings, folder: Path) -> Opened:
    """Return a starter of a control plane with this page, which yields a client without a token."""

    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[httpx.AsyncClient]:
        shown = {"page_folder": folder, "allowed_hosts": ("test",), **changes}
        async with serving(settings, **shown) as served:
            yield served.anonymous

    return start


SCRIPTS = pytest.mark.attack(
    "a script in a name or a text runs, or something is loaded from elsewhere",
    boundary="viewers",
    surface="the page, `/docs`",
    stopped_by="a content security policy without inline scripts and other hosts",
)


@SCRIPTS
@pytest.mark.parametrize(
    "path",
    ["/", "/jobs/default/quickstart", "/jobs/a/b/groups/one%2Ftwo", "/jobs/a/b/rollouts/b-0-1", "/jobs/a/b/"],
)
async def test_paths_of_the_page_answer_its_document(opened: Opened, path: str) -> None:
    async with opened() as http:
        answer = await http.get(path)
        assert answer.status_code == 200
        assert '<meta name="rollyard-prefix" content="">' in answer.text
        assert f'src="/{SCRIPT}"' in answer.text
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(
            part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy == {
            "default-src": "'none'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self'",
            "font-src": "'none'",
            "require-trusted-types-for": "'script'",
        }
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"
        head = await http.head(path)
        assert (head.status_code, head.headers["etag"]) == (200, answer.headers["etag"])


@pytest.mark.parametrize(
    "path", ["/jobs", "/jobs/a", "/jobs//b", "/jobs/a/b/tasks/c", "/nothing", "/index.html"]
)
async def test_other_paths_are_no_page(opened: Opened, path: str) -> None:
    async with opened() as http:
        assert (await http.get(path)).status_code == 401


async def test_the_document_is_asked_for_again_and_not_sent_again(opened: Opened) -> None:
    async with opened() as http:
        tag = (await http.get("/")).headers["etag"]
        for given in (tag, f'"x", W/{tag}', "*"):
            again = await http.get("/", headers={"If-None-Match": given})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert "content-security-policy" in again.headers
        assert (await http.get("/", headers={"If-None-Match": '"x"'})).status_code == 200


async def test_hashed_assets_are_kept_for_ever(opened: Opened) -> None:
    async with opened() as http:
        script = await http.get(f"/{SCRIPT}")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
        assert (await http.get("/assets/plain.js")).headers["cache-control"] == "no-cache"


async def test_assets_are_packed_where_the_browser_takes_it(opened: Opened, folder: Path) -> None:
    async with opened() as http:
        async with http.stream("GET", f"/{SCRIPT}", headers={"Accept-Encoding": "br, gzip"}) as packed:
            raw = b"".join([piece async for piece in packed.aiter_raw()])
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.headers["vary"] == "Accept-Encoding"
        assert gzip.decompress(raw) == (folder / SCRIPT).read_bytes()
        assert int(packed.headers["content-length"]) == len(raw) < 200
        plain = await http.get(f"/{SCRIPT}", headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.headers["etag"] != packed.headers["etag"]


@pytest.mark.parametrize(
    ("header", "taken"),
    [
        ("", False), ("gzip", True), ("br;q=1, GZIP;q=0.5", True), ("*", True), ("gzip;q=0", False),
        ("gzip; q=0.000", False), ("gzip;q=0.001", True), ("gzipped", False), ("identity", False),
    ],
)  # fmt: skip
def test_accepted_encodings(header: str, taken: bool) -> None:
    assert takes_gzip(header) is taken


async def test_a_page_that_is_not_built_says_so(opened: Opened, tmp_path: Path) -> None:
    async with opened(page_folder=tmp_path / "nothing") as http:
        answer = await http.get("/")
        assert (answer.status_code, answer.json()["reason"]) == (404, "PageNotBuilt")
        assert "rollyard_api/page/index.html" in answer.json()["detail"]


async def test_an_asset_of_another_release_is_not_found(opened: Opened) -> None:
    async with opened() as http:
        answer = await http.get("/assets/app-9Z9Z9Z9Z.js")
        assert (answer.status_code, answer.json()["reason"]) == (404, "NotFound")
        assert (await http.get("/favicon.ico")).status_code == 404


async def test_the_page_takes_no_changes(opened: Opened) -> None:
    async with opened() as http:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            answer = await http.request(method, "/")
            assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


async def test_below_a_prefix_there_is_all(opened: Opened) -> None:
    async with opened(path_prefix="/lab/rollyard") as http:
        for path in ("/lab/rollyard", "/lab/rollyard/", "/lab/rollyard/jobs/a/b", "/"):
            answer = await http.get(path)
            assert answer.status_code == 200, path
            assert '<meta name="rollyard-prefix" content="/lab/rollyard">' in answer.text
            assert f'src="/lab/rollyard/{SCRIPT}"' in answer.text
        assert (await http.get(f"/lab/rollyard/{SCRIPT}")).status_code == 200
        assert (await http.get("/lab/rollyard/healthz")).text == "ok"
        assert (await http.get("/lab/rollyard/v1/rolloutjobs")).status_code == 401
        # A proxy may take the prefix away, and workers inside a cluster do not know it.
        assert (await http.get("/healthz")).text == "ok"
        for path in ("/lab/rollyardjobs/a/b", "/lab", "/lab/other/", "/lab/rollyard/lab/rollyard/"):
            assert (await http.get(path)).status_code == 401, path


async def test_calls_below_a_prefix(settings: Settings) -> None:
    async with serving(settings, path_prefix="/x") as served:
        assert (await served.admin.post("/x/v1/rolloutjobs", json=make_manifest())).status_code == 201
        assert (await served.admin.get("/x/v1/rolloutjobs/job")).status_code == 200
        assert (await served.admin.get("/v1/rolloutjobs/job")).status_code == 200
        assert (await served.admin.get("/x/openapi.json")).json()["servers"] == [{"url": "/x"}]


@pytest.mark.parametrize(
    ("given", "prefix"), [("", ""), ("/", ""), ("/x", "/x"), ("/x/", "/x"), ("/a-b/c.d_~", "/a-b/c.d_~")]
)
def test_prefixes(given: str, prefix: str) -> None:
    assert path_prefix(given) == prefix


@pytest.mark.parametrize(("given", "name"), [("Lab.Example.org.", "lab.example.org"), ("login1", "login1")])
def test_host_names(given: str, name: str) -> None:
    assert host_name(given) == name


@pytest.mark.parametrize(
    "given", ["", "http://a", "a:80", "a b", "*.a", "a..b", "-a", "a/b", "a" * 254, "10.0.0.1", "::1"]
)
def test_names_that_are_none(given: str) -> None:
    with pytest.raises(OptionInvalid, match=r"is an address|must be a DNS name"):
        host_name(given)


async def test_a_page_that_is_too_large_is_an_error(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_BYTES", 100)
    async with opened() as http:
        answer = await http.get("/")
        assert (answer.status_code, answer.json()["reason"]) == (500, "PageUnusable")


@SCRIPTS
async def test_documentation_needs_no_internet_and_no_inline_script(
    opened: Opened, settings: Settings
) -> None:
    shown = {"path_prefix": "/x", "allowed_hosts": ("test",)}
    async with serving(settings, **shown, open_docs=True) as served:
        http = served.anonymous
        page = await http.get("/x/docs")
        assert page.status_code == 200
        assert "://" not in page.text
        scripts = [
            part.partition(">")[2].partition("</script>")[0] for part in page.text.split("<script")[1:]
        ]
        assert scripts == ["", ""]
        assert "script-src 'self';" in page.headers["content-security-policy"]
        for name in ("swagger-ui.css", "swagger-ui-bundle.js", "start.js"):
            assert f'"/x/docs/{name}"' in page.text
            answer = await http.get(f"/x/docs/{name}")
            assert answer.status_code == 200
            assert len(answer.content) > 100
        for name in ("nothing.js", "__init__.py", "..%2Fmain.py", "%2e%2e/main.py"):
            assert (await http.get(f"/x/docs/{name}")).status_code in (401, 404)
