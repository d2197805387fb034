"""`rollyard open` and the links of `view --web` and `describe`, against a control plane of this machine."""

from __future__ import annotations

import stat
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard import page
from rollyard.connection import OpenConnection
from rollyard.errors import CliError
from rollyard.main import main
from rollyard.page import link_if_any, page_url, path_of
from rollyard_client import Client
from rollyard_testing.api.control_plane import a_control_plane
from rollyard_testing.manifests import job_manifest

READY_SECONDS = 150
JOB: dict[str, Any] = job_manifest(
    "job",
    {
        "tasks": {"inline": [{"id": "t/1", "prompt": "p"}]},
        "samplesPerTask": 2,
        "handler": "shell",
        "agent": {"type": "oracle"},
    },
    namespace="team",
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a control plane with one job. The environment names it and its token."""
    folder = tmp_path_factory.mktemp("plane")
    options = ("--log-level", "error", "--path-prefix", "/lab")
    with (
        a_control_plane(folder, *options, ready_seconds=READY_SECONDS, end_seconds=60) as started,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("ROLLYARD_URL", started.url)
        patch.setenv("ROLLYARD_TOKEN", started.tokens["admin"])
        patch.setenv("ROLLYARD_HOME", str(folder / "home"))
        with Client() as client:
            client.submit(JOB)
        yield started.url


def sign_in(link: str) -> httpx.Response:
    """Redeem the code of a link as the page does."""
    page, _, code = link.partition("#code=")
    origin = "/".join(page.split("/")[:3])
    headers = {"Origin": origin, "Rollyard-Page": "1"}
    return httpx.post(f"{origin}/lab/v1/session", json={"code": code}, headers=headers, trust_env=False)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0, capsys.readouterr().err
    return capsys.readouterr().out.strip()


def test_the_link_signs_a_browser_in_once(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    link = shown(capsys, "open")
    assert link.startswith(f"{url}/lab/#code=")
    answer = sign_in(link)
    assert answer.status_code == 204
    cookies = dict(answer.cookies)
    session = httpx.get(f"{url}/lab/v1/session", cookies=cookies, trust_env=False).json()
    assert (session["role"], session["cancel"]) == ("viewer", False)
    assert sign_in(link).status_code == 401
    answer = sign_in(shown(capsys, "open", "--role", "admin"))
    session = httpx.get(f"{url}/lab/v1/session", cookies=dict(answer.cookies), trust_env=False).json()
    assert (session["role"], session["cancel"]) == ("admin", True)
    assert shown(capsys, "open", "--revoke-all") == "2 sessions and links ended"
    assert httpx.get(f"{url}/lab/v1/session", cookies=cookies, trust_env=False).status_code == 401


def test_links_of_a_job_and_of_a_rollout(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    of_job = f"{url}/lab/jobs/team/job"
    assert shown(capsys, "open", "job", "-n", "team").startswith(f"{of_job}#code=")
    with Client(namespace="team") as client:
        first, second = (rollout.id for rollout in client.rollouts("job"))
    assert shown(capsys, "open", "job", first[-3:], "-n", "team").startswith(
        f"{of_job}/rollouts/{first}#code="
    )
    assert shown(capsys, "view", "job", second, "--web", "-n", "team") == f"{of_job}/rollouts/{second}"
    assert shown(capsys, "view", "job", "--web", "-n", "team") == of_job
    assert f"Page:         {of_job}\n" in shown(capsys, "describe", "rj", "job", "-n", "team")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("open", "nothing"), 1, "nothing"),
        (("open", "job", "x-9", "-n", "team"), 1, "no rollout 'x-9'"),
        (("open", "job", "t/1", "-n", "team"), 1, "fits 2 rollouts"),
        (("open", "a", "b", "c"), 2, "at most"),
        (("open", "--revoke-all", "job"), 2, "--revoke-all"),
        (("view", "--web"), 2, "NAME"),
        (("view", "job", "--web", "--failed"), 2, "--web"),
        (("open", "--role", "driver"), 2, "driver"),
    ],
    ids=str,
)
def test_wrong_uses(
    url: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, message: str
) -> None:
    assert main(list(words)) == status
    said = capsys.readouterr()
    assert message in said.err
    assert "code=" not in said.out + said.err


def test_no_secret_but_the_code_is_printed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["open", "--no-browser"]) == 0
    said = capsys.readouterr()
    assert "ry-" not in said.out + said.err
    assert "once, within 60 seconds" in said.err


@pytest.mark.parametrize(
    ("url", "prefix", "page"),
    [
        ("http://127.0.0.1:8765", "", "http://127.0.0.1:8765"),
        ("http://127.0.0.1:8765/", "/x", "http://127.0.0.1:8765/x"),
        ("https://a.example/x", "/x", "https://a.example/x"),
        ("https://a.example/x/", "", "https://a.example/x"),
        ("http://0.0.0.0:80", "", "http://127.0.0.1:80"),
        ("http://[::]:80", "", "http://[::1]:80"),
        ("http://[2001:db8::1]:80", "", "http://[2001:db8::1]:80"),
        ("http://user:secret@a.example", "", "http://a.example"),
    ],
)
def test_addresses_of_the_page(url: str, prefix: str, page: str) -> None:
    assert page_url(url, prefix) == page


def test_a_unix_socket_needs_a_port() -> None:
    with pytest.raises(CliError, match=r"ssh -L 8765:/run/rollyard\.sock HOST"):
        page_url("http+unix:///run/rollyard.sock", "")


def test_names_are_encoded() -> None:
    assert path_of("a", "b", "c/../d?#") == "/jobs/a/b/rollouts/c%2F..%2Fd%3F%23"
    assert path_of("a") == "/"


def test_a_tunnel_ends_with_the_command(url: str) -> None:
    with Client() as client:
        hint = link_if_any(OpenConnection(client, is_tunnel=True), "team", "job")
    assert "`rollyard open --kubernetes job`" in hint


@pytest.mark.attack(
    "other users of the machine read it in the browser's command line",
    boundary="viewers",
    surface="one-time codes",
    stopped_by="the browser is given a file of mode 0600",
)
def test_the_browser_gets_the_code_in_a_file_of_this_user(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda given: opened.append(given) or True)
    (tmp_path / "page").mkdir(mode=0o700)
    (tmp_path / "page" / page.FILE_NAME).symlink_to(tmp_path / "victim")
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path))
    link = shown(capsys, "open", "--browser")
    path = tmp_path / "page" / page.FILE_NAME
    assert opened == [path.as_uri()], "the command line of a browser is no secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert link in path.read_text()
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize(
    ("env", "there"),
    [
        ({}, False),
        ({"DISPLAY": ":0"}, True),
        ({"WAYLAND_DISPLAY": "w"}, True),
        ({"DISPLAY": ":0", "SSH_CONNECTION": "x"}, False),
    ],
)
def test_desktops(env: dict[str, str], there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert page.has_desktop(env) is there
