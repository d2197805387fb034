"""`rollyard up --engine vllm` with real vLLM servers: one pool, and what happens to it.

There is one start for the whole module, because vLLM takes from half a minute to two. The tests follow each
other in the file's order, each from the state that it finds.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard.main import main
from rollyard.quickstart.vllm_servers import CPU_ARGUMENTS, CPU_ENVIRONMENT
from rollyard_client import Client
from rollyard_crds import BackendPool, Condition
from rollyard_drivers.host.home import Home, read_json
from rollyard_drivers.host.processes import members
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "tiny-policy" / "hf"
START_SECONDS = 240.0
ENGINE = {
    "type": "vllm",
    "args": list(CPU_ARGUMENTS),
    "env": dict(CPU_ENVIRONMENT),
}


def vllm_python() -> str:
    """Return the Python that `scripts/vllm-env` has made, or an empty string if it was not run."""
    given = os.environ.get("VLLM_PYTHON")
    if given:
        return given
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(os.environ.get("ROLLYARD_CACHE") or f"{caches}/rollyard")
    made = sorted(cache.glob("vllm-*/.complete"))
    return str(made[0].parent / "bin" / "python") if made else ""


class Up:
    """One `rollyard up` whose default pool is vLLM."""

    def __init__(self, root: Path, python: str) -> None:
        self.home = Home(root / "h")
        self.log = root / "up.log"
        self.python = python
        flags = [f"--engine-arg={arg}" for arg in ENGINE["args"]]
        flags += [f"--engine-env={name}={value}" for name, value in dict(ENGINE["env"]).items()]
        command = [
            *(sys.executable, "-m", "rollyard", "up", "--home", str(self.home.root), "--port", "0"),
            *("--sandbox", "process", "--engine", "vllm", "--model", str(MODEL), "--replicas", "2"),
            *("--vllm-python", python, *flags),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.until(self.home.context_file.exists, 60.0)
        context, tokens = (
            read_json(self.home.context_file),
            read_json(self.home.state / "tokens.json"),
        )
        assert context is not None
        assert tokens is not None
        self.client = Client(context["url"], tokens["admin"])

    def until(self, condition: Callable[[], Any], seconds: float = START_SECONDS) -> Any:
        deadline = time.monotonic() + patience(seconds)
        while not (found := condition()):
            assert self.process.poll() is None, self.log.read_text()
            if time.monotonic() > deadline:
                logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in self.home.logs.glob("*.log")]
                pytest.fail("it did not come in time\n" + "\n".join(logs))
            time.sleep(0.2)
        return found

    def pool(self, name: str = "default") -> BackendPool:
        return self.client.pool(name)

    def ready(self) -> list[str]:
        return [one.url for one in self.pool().status.backends if one.ready and not one.draining]

    def condition(self, kind: str, pool: str = "default") -> Condition | None:
        return next((one for one in self.pool(pool).status.conditions if one.type == kind), None)

    def leaders(self) -> dict[int, int]:
        """Return the session of each backend's processes, by its index."""
        found = {}
        for path in self.home.pids.glob("default-*-backend-*.json"):
            document = read_json(path)
            if document is not None:
                found[int(path.stem.rpartition("-")[2])] = int(document["pid"])
        return found


def named(pids: list[int], words: str) -> list[int]:
    found = []
    for pid in pids:
        try:
            if words in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                found.append(pid)
        except OSError:
            continue
    return found


@pytest.fixture(scope="module")
def up(
    tmp_path_factory: pytest.TempPathFactory, missing: Callable[[str], Any], even_scheduling: None
) -> Iterator[Up]:
    python = vllm_python()
    if not python:
        missing("there is no environment with vLLM (make it with scripts/vllm-env, or set VLLM_PYTHON)")
    started = Up(tmp_path_factory.mktemp("vllm"), python)
    sessions: set[int] = set()
    try:
        yield started
        sessions = set(started.leaders().values())
        started.client.close()
        started.process.send_signal(signal.SIGINT)
        assert started.process.wait(patience(60)) == 0, started.log.read_text()
        assert [pid for session in sessions for pid in members(session)] == []
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def test_two_servers_become_ready_and_the_start_is_told(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    def told() -> bool:
        condition = up.condition("Progressing")
        return condition is not None and "vLLM loads the model" in condition.message

    up.until(told, 60.0)
    up.until(lambda: len(up.ready()) == 2)
    assert len(set(up.ready())) == 2
    progressing, degraded = up.condition("Progressing"), up.condition("Degraded")
    assert progressing is not None
    assert degraded is not None
    assert degraded.status == "False"
    for url in up.ready():
        body = {"model": str(MODEL), "token_ids": [1], "sampling_params": {"max_tokens": 3, "logprobs": 0}}
        answer = httpx.post(
            f"{url}/inference/v1/generate", json=body, timeout=patience(60.0), trust_env=False
        )
        (choice,) = answer.raise_for_status().json()["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) > 0
    home = ["--home", str(up.home.root)]
    assert main(["get", "bp", *home]) == 0
    assert "2/2" in capsys.readouterr().out
    assert main(["get", "bp", "-o", "wide", *home]) == 0
    wide = capsys.readouterr().out
    assert all(url in wide for url in up.ready())


def test_kill_9_of_a_server_leaves_no_engine_core_and_it_comes_back(up: Up) -> None:
    leader = up.leaders()[0]
    session = members(leader)
    cores = named(session, "EngineCore")
    (server,) = named([pid for pid in session if pid != leader], "api_server")
    assert cores, "vLLM's engine runs in a process of its own"
    before = set(up.ready())
    os.kill(server, signal.SIGKILL)
    up.until(lambda: members(leader) == [], 30.0)
    up.until(lambda: len(up.ready()) == 1, 30.0)
    up.until(lambda: len(up.ready()) == 2)
    assert len(before & set(up.ready())) == 1
    assert up.leaders()[0] != leader


def test_scale_to_one_drains_and_ends_the_other(up: Up, capsys: pytest.CaptureFixture[str]) -> None:
    leaders = up.leaders()
    assert main(["scale", "bp", "default", "--replicas", "1", "--home", str(up.home.root)]) == 0
    assert "scaled to 1" in capsys.readouterr().out
    up.until(lambda: len(up.pool().status.backends) == 1, 90.0)
    up.until(lambda: members(leaders[1]) == [], 30.0)
    up.until(lambda: len(up.ready()) == 1, 60.0)
    # Its record goes once it was reaped, which comes after the end of its processes.
    up.until(lambda: up.leaders() == {0: leaders[0]}, 30.0)


def test_a_folder_that_is_no_model_is_told_in_the_pools_condition(up: Up, tmp_path: Path) -> None:
    empty = tmp_path / "empty-model"
    empty.mkdir()
    for name, model in (("absent", "/no/such/model"), ("empty", str(empty))):
        manifest = pool_manifest(
            name,
            {
                "model": model,
                "engine": {**ENGINE, "command": [up.python, "-m", "vllm.entrypoints.openai.api_server"]},
            },
        )
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(manifest))
        assert main(["submit", "-f", str(path), "--home", str(up.home.root)]) == 0

    def message(pool: str) -> str:
        condition = up.condition("Ready", pool)
        return condition.message if condition is not None else ""

    up.until(lambda: "there is no folder '/no/such/model'" in message("absent"), 30.0)
    up.until(lambda: "Error: " in message("empty") and str(empty) in message("empty"), 120.0)
    assert len(up.ready()) == 1, "the other pool continues"
    for name in ("absent", "empty"):
        up.client.delete_pool(name)
