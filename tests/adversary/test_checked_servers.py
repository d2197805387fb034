"""A server at the URL that `check-backend`, `up --backend` and the control plane ask what it lacks."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from rollyard.local.external_server import trains_line
from rollyard.main import main
from rollyard_inference import fitness
from rollyard_testing.pace import patience

HOSTILE = "x\n2030-01-01 00:00:00 all is well\r\x1b[2K\x1b]0;title\x07\x9b31m\u202e"
UNSEEN = set("\r\x1b\x07\x9b\u202e")
LONG = "y" * (1 << 20)
METADATA = "http://169.254.169.254/latest/meta-data/iam/security-credentials/"
KNOWN = ("/health", "/v1/models", "/inference/v1/abort_requests")
"""The calls that a server must have to be sampled from."""
MOST_TEXT = 16_000
"""The characters that a command may print about any server."""

pytestmark = pytest.mark.attack(
    boundary="control plane", surface="`rollyard check-backend`, `up --backend`, `get bp`"
)

Answer = Callable[[str, BaseHTTPRequestHandler], None]


class Server:
    """An HTTP server whose answers a function of the path writes."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                path = self.path.partition("?")[0]
                server.asked.append(path)
                # The other side leaves in the middle of what it is sent.
                with contextlib.suppress(OSError):
                    answer(path, self)

            do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def write(handler: BaseHTTPRequestHandler, status: int, document: Any, location: str = "") -> None:
    content = json.dumps(document).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    if location:
        handler.send_header("Location", location)
    handler.end_headers()
    handler.wfile.write(content)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Server]]:
    """Yield a starter of servers, at which each request may take a second."""
    for name in ("REQUEST_SECONDS", "SAMPLING_SECONDS", "_INFO_SECONDS"):
        monkeypatch.setattr(fitness, name, patience(1.0))
    started: list[Server] = []

    def start(answer: Answer) -> Server:
        started.append(Server(answer))
        return started[-1]

    yield start
    for server in started:
        server.close()


def shown(capsys: pytest.CaptureFixture[str], url: str, *options: str) -> tuple[int, str]:
    """Run the command, check that what it prints is harmless, and return its status and output."""
    status = main(["check-backend", url, *options])
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert not UNSEEN & set(text)
    assert "\n2030" not in text, "no text of a server begins a line"
    assert "Traceback" not in text
    assert len(text) < MOST_TEXT
    return status, text


@pytest.mark.attack(
    "names, versions and messages of a server move the cursor, forge a line, or are a megabyte long",
    stopped_by="they are cut, and control characters are escaped before they are printed",
)
@pytest.mark.parametrize("text", [HOSTILE, LONG, HOSTILE + LONG], ids=["controls", "long", "both"])
def test_no_text_of_a_checked_server_reaches_a_terminal_as_it_is(
    serve: Callable[[Answer], Server], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {"id": text, "root": text, "logprobs_mode": text, "max_model_len": 9}
    answers: dict[str, Any] = {
        "/health": {},
        "/v1/models": {"data": [card]},
        "/version": {"version": text},
        "/weight_info": {"weight_version": text},
        "/is_paused": {"is_paused": False},
        "/inference/v1/abort_requests": {},
        "/inference/v1/generate": {
            "choices": [
                {
                    "token_ids": [7],
                    "finish_reason": "length",
                    "prompt_token_ids": [1],
                    "logprobs": {"content": [{"token_id": 7, "logprob": -0.5}]},
                }
            ]
        },
    }

    def answer(path: str, handler: BaseHTTPRequestHandler) -> None:
        known = path in answers
        write(handler, 200 if known else 404, answers.get(path, {"error": {"message": text}}))

    server = serve(answer)
    status, printed = shown(capsys, server.url)
    assert "log-probabilities of an unknown kind" in printed, "the attack reached the checks"
    assert status == 1, "it has no tokenizer here"
    shown(capsys, server.url, "--json")
    assert shown(capsys, server.url, "--model", "other")[0] == 2
    line = trains_line(server.url, text)
    assert not UNSEEN & set(line)
    assert len(line) < MOST_TEXT
    answers["/inference/v1/generate"] = {"choices": text}
    assert "no token ids with log-probabilities" in shown(capsys, server.url)[1]


@pytest.mark.attack(
    "an answer that never ends, or that comes byte by byte, keeps the command or fills the memory",
    stopped_by="each answer has at most 8 MiB, each request a time limit, and all requests together one",
)
@pytest.mark.parametrize(
    ("path", "endless"), [("/v1/models", True), ("/metrics", True), ("/inference/v1/generate", False)]
)
def test_what_a_checked_server_sends_is_bounded(
    serve: Callable[[Answer], Server], path: str, endless: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: str, handler: BaseHTTPRequestHandler) -> None:
        if asked != path:
            write(handler, 200 if asked in KNOWN else 404, {"data": [{"id": "tiny"}]})
            return
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(bytes(1 << 16) if endless else b"x")
            if not endless:
                time.sleep(0.05)  # The time between two bytes is the attack.

    server = serve(answer)
    tracemalloc.start()
    try:
        status, text = shown(capsys, server.url)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path in server.asked
    assert status in (1, 2), text
    assert peak < 64 << 20


@pytest.mark.attack(
    "a redirect sends the program that checks a server to the cloud's metadata service, or to a neighbour",
    stopped_by="no redirect is followed; the message names where it leads",
)
@pytest.mark.parametrize("path", ["", "/v1/models", "/metrics", "/inference/v1/generate"])
def test_no_redirect_of_a_checked_server_is_followed(
    serve: Callable[[Answer], Server],
    path: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected: list[str] = []
    real = httpx.AsyncHTTPTransport.handle_async_request

    async def noted(self: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
        connected.append(request.url.host)
        return await real(self, request)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", noted)

    neighbour = serve(lambda _, handler: write(handler, 200, {}))
    for target in (METADATA, neighbour.url):

        def answer(asked: str, handler: BaseHTTPRequestHandler, target: str = target) -> None:
            if not path or asked == path:
                write(handler, 307, {}, target)
            else:
                write(handler, 200 if asked in KNOWN else 404, {"data": [{"id": "tiny"}]})

        server = serve(answer)
        assert shown(capsys, server.url)[0] in (1, 2)
        assert server.asked
    assert set(connected) == {"127.0.0.1"}
    assert neighbour.asked == []
