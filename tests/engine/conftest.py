"""Fixtures of real servers on the shipped policy, and of a second set of weights made from it."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import rollyard_engine
from rollyard_testing.pace import patience

START_SECONDS = patience(30.0)


@dataclass
class Server:
    """A running engine process."""

    process: subprocess.Popen[str]
    port: int
    url: str = field(init=False)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.url, timeout=patience(30), limits=httpx.Limits(max_connections=None)
        )

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=patience(30))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=patience(30))

    def complete(self, prompt: list[int] | str, **fields: Any) -> dict[str, Any]:
        """Return one completion with ids and log-probabilities: its only choice, with ``usage`` added."""
        body = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, "ignore_eos": True, **fields}
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        return {**content["choices"][0], "usage": content["usage"]}

    def metric(self, name: str) -> float:
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(name + "{"):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(patience(10))
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Return the folder of the policy that the package ships."""
    return Path(rollyard_engine.__file__).parent / "models" / "tiny-policy"


@pytest.fixture(scope="session")
def other_weights(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same network with every stored number changed by some per cent."""
    folder = tmp_path_factory.mktemp("weights") / "other"
    shutil.copytree(model_dir, folder)
    data = folder / "model.onnx.data"
    numbers = np.fromfile(data, dtype=np.float32)
    noise = np.random.default_rng(0).normal(1.0, 0.05, numbers.shape).astype(np.float32)
    (numbers * noise).tofile(data)
    return folder


@pytest.fixture(scope="session")
def start_server_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Yield a function that starts engine processes. Those that still run are ended."""
    servers: list[Server] = []

    def start(model: Path, *arguments: str, env: dict[str, str] | None = None) -> Server:
        port_file = tmp_path_factory.mktemp("engine") / "port"
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "rollyard_engine", "--model", str(model)),
                *("--port", "0", "--port-file", str(port_file), *arguments),
            ],
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            assert process.poll() is None, f"the engine ended with {process.returncode}"
            assert time.monotonic() < deadline, "the engine did not start in time"
            time.sleep(0.01)
        server = Server(process, int(port_file.read_text()))
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server_process: StartServer, model_dir: Path) -> Server:
    """Return a server that the tests share. None of them may leave it paused or with other weights."""
    return start_server_process(model_dir, "--max-num-seqs", "16")


@pytest.fixture
def own_server(start_server_process: StartServer, model_dir: Path) -> Iterator[Server]:
    """Yield a server of the test's own, with few slots."""
    started = start_server_process(
        model_dir, "--max-num-seqs", "2", "--max-waiting", "2", "--policy-version", "v1"
    )
    yield started
    started.stop()


@pytest.fixture
def free_port() -> Iterator[int]:
    """Yield a port that something else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]
