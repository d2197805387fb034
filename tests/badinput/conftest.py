"""Fixtures of one `rollyard up` for all bad input, and of backends that answer badly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from rollyard_testing.faults.yard import Yard
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

MODEL = Path(__file__).resolve().parents[2] / "engine/src/rollyard_engine/models/tiny-policy"
END = 2
"""The model's end-of-turn token."""


class BadBackend(BaseHTTPRequestHandler):
    """vLLM's calls under several base URLs.

    Each samples well once, so that it counts as ready, and then in its own bad way.
    """

    protocol_version = "HTTP/1.1"
    released = threading.Event()
    """The event is set at the end of the tests, and lets hanging answers go."""
    asked: ClassVar[Counter[str]] = Counter()
    """The number of requests to sample, by base URL."""

    def do_GET(self) -> None:
        model = "another" if self.path.startswith("/foreign/") else "policy"
        card = {"id": model, "object": "model", "max_model_len": 4096, "logprobs_mode": "processed_logprobs"}
        self._answer(200, {"data": [card], "object": "list"} if self.path.endswith("/v1/models") else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        _, kind, *call = self.path.split("/")
        if call != ["inference", "v1", "generate"]:
            self._answer(404, {})
            return
        if "token_ids" not in body:
            self._answer(400, {"error": {"message": "token_ids: Field required"}})
            return
        self.asked[kind] += 1
        if self.asked[kind] == 1 or kind in ("sound", "foreign"):
            self._sample(body)
        elif kind == "error":
            self._answer(500, {"error": {"message": "the engine is dead"}})
        elif kind == "hang":
            self.released.wait(patience(120))
            self.close_connection = True
        elif kind == "lengths":
            self._sample(body, token_ids=[5, 6])
        elif kind == "garbage":
            self._send(200, b'{"choices": [{"token_ids": [5')
        elif kind == "closes":
            self.send_response(200)
            self.send_header("Content-Length", "4096")
            self.end_headers()
            self.wfile.write(b'{"choices": [')
            self.close_connection = True
        elif kind == "busy" and self.asked[kind] <= 4:
            self._answer(429, {"error": {"message": "too many requests"}}, {"Retry-After": "0"})
        elif kind == "overflow":
            told = "The decoder prompt (length 9) is longer than the maximum model length of 8."
            self._answer(400, {"error": {"message": told, "type": "BadRequestError", "code": 400}})
        else:
            self._sample(body)

    def _sample(self, body: dict[str, Any], **wrong: Any) -> None:
        """Return one token, which ends the turn."""
        prompt = len(body["token_ids"])
        logprobs = {"content": [{"token_id": wrong.get("token_ids", [END])[0], "logprob": -0.5}]}
        choice = {"token_ids": [END], "finish_reason": "stop", "logprobs": logprobs, **wrong}
        self._answer(200, {"choices": [choice], "usage": {"prompt_tokens": prompt}})

    def _answer(self, status: int, document: object, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(document).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Backends(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@pytest.fixture(scope="module")
def backends() -> Iterator[str]:
    """Yield the base URL; `/sound`, `/error`, `/hang` and so on below it are a backend each."""
    BadBackend.released.clear()
    BadBackend.asked.clear()
    with Backends(("127.0.0.1", 0), BadBackend) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        BadBackend.released.set()
        server.shutdown()
        thread.join(patience(10))


@dataclass(frozen=True)
class Said:
    """What a command wrote, and its exit status."""

    status: int
    out: str
    err: str


def rollyard(*arguments: str, home: Path | None = None, cwd: Path | None = None) -> Said:
    """Run the command line in a process of its own with this home."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLYARD_")}
    if home is not None:
        env["ROLLYARD_HOME"] = str(home)
    command = [sys.executable, "-m", "rollyard", *arguments]
    done = subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience(100),
    )
    assert "Traceback" not in done.stdout + done.stderr
    return Said(done.returncode, done.stdout, done.stderr)


class Desk:
    """A running Rollyard, as its user has it: the command line, REST, and files to submit."""

    def __init__(self, yard: Yard, folder: Path, backends: str) -> None:
        self.yard = yard
        self.folder = folder
        self.backends = backends

    until = staticmethod(until)

    def cli(self, *arguments: str) -> Said:
        return rollyard(*arguments, home=self.yard.home, cwd=self.folder)

    def write(self, document: dict[str, Any]) -> str:
        """Write a manifest file named after its job, and return the file's name."""
        name = f"{document['metadata']['name']}.yaml"
        (self.folder / name).write_text(yaml.safe_dump(document))
        return name

    def refused(self, document: dict[str, Any], reason: str, *told: str) -> None:
        """Check that command line and REST refuse the document with these words, and that nothing of it is
        kept.
        """
        name = document["metadata"]["name"]
        before = self.names()
        said = self.cli("submit", "-f", self.write(document), "--wait")
        assert (said.status, said.out) == (1, "")
        for words in told:
            assert words in said.err
        with self.yard.http() as http:
            answer = http.post("/v1/rolloutjobs", json=document)
            assert answer.status_code == 422, answer.text
            assert answer.headers["Content-Type"] == "application/problem+json"
            problem = answer.json()
            assert (problem["status"], problem["reason"]) == (422, reason)
            for words in told:
                assert any(words in line for line in problem["errors"]), problem
            assert http.get(f"/v1/rolloutjobs/{name}").status_code == 404
        assert self.names() == before
        assert self.sandboxes(name) == []

    def names(self) -> list[str]:
        with self.yard.http() as http:
            return sorted(item["metadata"]["name"] for item in http.get("/v1/rolloutjobs").json()["items"])

    def submit(self, document: dict[str, Any]) -> None:
        with self.yard.http() as http:
            answer = http.post("/v1/rolloutjobs", json=document)
        assert answer.status_code == 201, answer.text

    def job(self, name: str) -> dict[str, Any]:
        with self.yard.http() as http:
            answer = http.get(f"/v1/rolloutjobs/{name}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def ended(self, name: str) -> dict[str, Any]:
        """Return the job once it is over."""
        until(lambda: self.job(name)["status"].get("completionTime") is not None, patience(90))
        until(lambda: self.conditions(name).get("Finished") == ("True", self.conditions(name)["Finished"][1]))
        return self.job(name)

    def conditions(self, name: str) -> dict[str, tuple[str, str]]:
        listed = self.job(name)["status"].get("conditions", [])
        return {item["type"]: (item["status"], item["reason"]) for item in listed}

    def trajectories(self, name: str) -> list[dict[str, Any]]:
        with self.yard.http() as http:
            answer = http.get(f"/v1/rolloutjobs/{name}/trajectories")
        assert answer.status_code == 200, answer.text
        return [json.loads(line) for line in answer.text.splitlines()]

    def sandboxes(self, name: str) -> list[str]:
        """Return the sandboxes on this machine that a rollout of the job has claimed."""
        return [
            text
            for file in (self.yard.home / "run" / "sandboxes").glob("*/sandbox.json")
            if f'"{name}-' in (text := _read(file))
        ]

    def cleared(self, name: str) -> None:
        """Wait until no sandbox and no worker of the job is left."""
        until(lambda: self.sandboxes(name) == [], patience(30))
        until(lambda: not list((self.yard.home / "pids").glob(f"{name}*.json")))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return ""  # The folder was removed just now.


@pytest.fixture(scope="module")
def desk(bubblewrap_works: None, backends: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("b")  # The path of a socket must be short.
    yard = Yard(folder, "--backend", f"{backends}/sound", "--tokenizer", str(MODEL))
    try:
        yard.start()
        yield Desk(yard, folder, backends)
        yard.look()
        assert yard.stop() == 0
        assert yard.settled_listing(30) == []
    finally:
        yard.end()


@pytest.fixture(scope="module")
def cli() -> Callable[..., Said]:
    """Return the command line without a running Rollyard."""
    return rollyard
