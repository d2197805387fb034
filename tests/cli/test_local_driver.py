"""`rollyard up` with real processes: sandboxes without isolation, kills, and nothing left behind.

The backend is an external server that only answers health checks: the job's agent is `oracle`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rollyard.main import main
from rollyard_client import Client
from rollyard_drivers.host.home import Home, read_json
from rollyard_drivers.host.processes import ProcessIdentity, is_alive
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

MARK = "ROLLYARD_DRIVER_TEST"


class BackendHealth(BaseHTTPRequestHandler):
    """A server that behaves like vLLM just enough to be found healthy."""

    def do_GET(self) -> None:
        found = {"object": "list", "data": [{"id": "policy", "object": "model"}]}
        body = json.dumps(found if self.path == "/v1/models" else {}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), BackendHealth) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join(patience(10))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    tasks = [
        {
            "id": f"t{number}",
            "prompt": "say it",
            "test_script": f'[ "$(cat said)" = {number} ]',
            "solution": [{"name": "bash", "arguments": {"command": f"echo {number} > said"}}],
        }
        for number in range(6)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    manifest = job_manifest(
        "oracle",
        {
            "tasks": {"url": "tasks.jsonl"},
            "handler": "shell",
            "samplesPerTask": 2,
            "agent": {"type": "oracle", "tools": ["bash"]},
            "sandbox": {"warm": 1},
        },
    )
    path = tmp_path / "job.json"
    path.write_text(json.dumps(manifest))
    return path


def marked(mark: str) -> list[str]:
    """Return the processes that inherited this mark, without the one that asks."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [f"{entry.name} {command}"] if command else []
        except OSError:
            continue
    return found


class Up:
    """One `rollyard up`."""

    def __init__(self, root: Path, *more: str) -> None:
        self.home = Home(root / "h")
        self.mark = str(root)
        (root / "model").mkdir(exist_ok=True)
        (root / "model" / "tokenizer.json").write_text("{}")
        self.log = root / "up.log"
        arguments = ["--home", str(self.home.root), "--port", "0", "--sandbox", "process", *more]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollyard", "up", *arguments],
                env={**os.environ, MARK: self.mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            supervisor = self.home.supervisor()
            mine = supervisor is not None and supervisor.pid == self.process.pid
            return mine and self.home.context_file.exists()

        until(ready)

    def client(self) -> Client:
        context = read_json(self.home.context_file)
        tokens = read_json(self.home.state / "tokens.json")
        assert context is not None
        assert tokens is not None
        return Client(context["url"], tokens["admin"])

    def child(self, prefix: str) -> ProcessIdentity:
        (file,) = [file for file in self.home.pids.glob("*.json") if file.name.startswith(prefix)]
        document = read_json(file)
        identity = ProcessIdentity.from_json(document) if document is not None else None
        assert identity is not None
        return identity

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(patience(40))


@pytest.fixture
def up(tmp_path: Path, server: str) -> Iterator[Up]:
    started = Up(tmp_path, "--backend", server, "--tokenizer", str(tmp_path / "model"))
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()


def test_a_job_from_submit_to_file_and_nothing_left(
    up: Up, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(up.home.root)]
    assert main(["submit", "-f", str(job), "--wait", *home]) == 0, up.log.read_text()
    assert "Succeeded: init 12/12, run 12/12, eval 12/12, reward 1.000" in capsys.readouterr().out
    assert main(["submit", "-f", str(job), *home]) == 0, "the same manifest again is no error"
    assert main(["get", *home]) == 0
    assert "AllEnded" in capsys.readouterr().out
    assert main(["describe", "oracle", *home]) == 0
    assert "12 with a reward, 0 failed" in capsys.readouterr().out
    for name in ("t.parquet", "t.jsonl", "t.jsonl.gz"):
        assert main(["trajectories", "oracle", "-o", str(tmp_path / name), *home]) == 0
        assert "12 trajectories" in capsys.readouterr().out
    assert main(["view", "oracle", *home]) == 0
    assert "reward 1" in capsys.readouterr().out
    assert main(["get", "rj", "nosuch", *home]) == 1
    assert "no RolloutJob 'nosuch'" in capsys.readouterr().err

    greedy = json.loads(job.read_text())
    greedy["metadata"]["name"] = "greedy"
    greedy["spec"] |= {"agent": {"type": "single_turn"}, "backendRef": {"name": "none"}, "suspend": True}
    greedy["spec"]["sampling"] = {"temperature": 0.0}
    (tmp_path / "greedy.json").write_text(json.dumps(greedy))
    assert main(["submit", "-f", str(tmp_path / "greedy.json"), *home]) == 0
    warning = "rollyard: warning: spec.sampling.temperature: at 0 the 2 samples of a task are alike"
    assert warning in capsys.readouterr().err

    with up.client() as client:
        # The control plane of `rollyard up` runs as its user, and reads the files of that user.
        manifest = json.loads(job.read_text())
        manifest["metadata"]["name"] = "own-file"
        manifest["spec"] |= {"tasks": {"url": (tmp_path / "tasks.jsonl").as_uri()}, "suspend": True}
        assert client.submit(manifest).status.counts.total == 12
        client.cancel("own-file")
        client.cancel("greedy")

        manifest["metadata"]["name"] = "starving"
        sampling = {"dynamicSampling": {"targetGroups": 1}, "suspend": False}
        manifest["spec"] |= {"tasks": {"stream": True}, **sampling}
        client.submit(manifest)
        until(lambda: client.job("starving").status.message.startswith("no step is open: 0 of 0 groups"))
        client.open_target("starving", "step-0")
        until(lambda: client.job("starving").status.message.startswith("no task is left: 0 of 1 groups"))
        client.cancel("starving")

        until(lambda: not list(up.home.pids.glob("oracle*.json")))
        conditions = {one.type: one.status for one in client.job("oracle").status.conditions}
    assert conditions == {
        "Admitted": "True",
        "Suspended": "False",
        "Running": "False",
        "Degraded": "False",
        "Finished": "True",
        "Succeeded": "True",
        "Failed": "False",
        "Complete": "True",
    }

    second = subprocess.run(
        [sys.executable, "-m", "rollyard", "up", *home, "--port", "0"],
        capture_output=True,
        text=True,
    )
    assert second.returncode == 1
    assert f"another `rollyard up` (process {up.process.pid}) runs on" in second.stderr

    assert up.stop() == 0
    assert marked(up.mark) == []
    assert not (up.home.run / "sandboxes").exists()
    assert not up.home.context_file.exists()


def test_whatever_is_killed_comes_back(up: Up, job: Path, server: str, tmp_path: Path) -> None:
    home = ["--home", str(up.home.root)]
    assert main(["submit", "-f", str(job), *home]) == 0
    until(lambda: list(up.home.pids.glob("oracle*.json")))
    worker = up.child("oracle")
    os.kill(worker.pid, signal.SIGKILL)
    plane = up.child("control-plane")
    os.kill(plane.pid, signal.SIGKILL)
    until(lambda: not is_alive(plane) and not is_alive(worker))
    assert main(["watch", "oracle", *home]) == 0, up.log.read_text()

    # The supervisor itself is killed: its children die with it, and the next one continues.
    up.process.kill()
    up.process.wait()
    again = Up(tmp_path, "--backend", server, "--tokenizer", str(tmp_path / "model"))
    try:
        with again.client() as client:
            assert client.job("oracle").status.counts.succeeded == 12
        assert main(["down", *home]) == 0
        assert again.process.wait(patience(10)) == 0
        until(lambda: marked(up.mark) == [], patience(100))
    finally:
        again.process.kill()
        again.process.wait()


VERDICT = """
import json
from dataclasses import dataclass

from rollyard_pipeline.handlers import Evaluation, Handler


@dataclass
class Verdict:
    reward: float


class VerdictHandler(Handler):
    needs_sandbox = False

    async def eval(self, ctx):
        return Evaluation(json.loads(json.dumps(Verdict(REWARD).reward)))
"""


def test_an_edited_plugin_counts_for_the_next_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Its name hides no module, neither from itself nor from the worker.
    plugin = tmp_path / "json.py"
    plugin.write_text(VERDICT.replace("REWARD", "0.25"))
    up = Up(tmp_path, "--replicas", "0", "--plugin", str(plugin))
    agent = {"type": "oracle", "tools": ["submit"]}
    spec = {"tasks": {"stream": True}, "handler": "verdict", "agent": agent}
    task = {"prompt": "say it", "solution": [{"name": "submit", "arguments": {"answer": "it"}}]}
    try:
        with up.client() as client:
            client.submit(job_manifest("first", spec))
            client.push_tasks("first", [task | {"id": "a"}])
            until(lambda: client.job("first").status.counts.succeeded == 1)

            plugin.write_text(VERDICT.replace("REWARD", "0.75"))
            worker = up.child("first")
            os.kill(worker.pid, signal.SIGKILL)
            client.push_tasks("first", [task | {"id": "b"}])
            client.submit(job_manifest("second", spec))
            client.push_tasks("second", [task | {"id": "a"}])
            until(lambda: client.job("first").status.counts.succeeded == 2)
            until(lambda: client.job("second").status.counts.succeeded == 1)
            assert not is_alive(worker)
            assert client.job("first").status.reward_mean == 0.25
            assert client.job("second").status.reward_mean == 0.75
        assert main(["describe", "second", "--home", str(up.home.root)]) == 0
        digest = hashlib.sha256(plugin.read_bytes()).hexdigest()[:12]
        assert f"json.py (sha256:{digest})" in capsys.readouterr().out
        assert up.stop() == 0
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def test_without_a_backend_rollouts_wait_for_the_time_that_was_asked_for(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = json.loads(job.read_text())
    manifest["spec"] |= {"backendRef": {"name": "default"}, "stages": {"init": {"concurrency": 2}}}
    job.write_text(json.dumps(manifest))
    up = Up(tmp_path, "--replicas", "0", "--no-backend-seconds", "2")
    try:
        assert main(["submit", "-f", str(job), "--wait", "--home", str(up.home.root)]) == 1, (
            up.log.read_text()
        )
        with up.client() as client:
            rollouts = list(client.rollouts("oracle"))
        assert {(one.status, one.reason, one.attempt) for one in rollouts} == {("failed", "NoBackend", 0)}
        assert {one.message for one in rollouts} == {"the pool had no ready backend for 2 s"}
        capsys.readouterr()
        assert main(["view", "oracle", "--failed", "--home", str(up.home.root)]) == 0
        shown = capsys.readouterr().out
        assert "NoBackend: the pool had no ready backend for 2 s" in shown
        assert "attempt" not in shown, "it waited, and tried nothing"
        assert up.stop() == 0
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()


def vllm(folder: Path, script: str) -> list[str]:
    """Return the arguments of a detached `up` whose vLLM is a shell script, with a whole model folder."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    model = Path(__file__).parents[2] / "examples" / "tiny-policy" / "hf"
    arguments = ["up", "--detach", "--home", str(folder / "h"), "--port", "0", "--sandbox", "process"]
    return [*arguments, "--engine", "vllm", "--vllm-python", str(program), "--model", str(model)]


def test_a_server_that_does_not_start_fails_the_detached_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(vllm(tmp_path, "echo 'ValueError: no room for the cache'; exit 3")) == 1
    error = capsys.readouterr().err
    assert "exited with 3 (ValueError: no room for the cache)" in error
    assert len(error.splitlines()) == 1
    home = Home(tmp_path / "h")
    assert home.supervisor() is None
    assert not list(home.pids.glob("*.json"))
    log = (home.logs / "up.log").read_text()
    assert "trouble: " in log
    assert "exited with 3" in log
    assert "stopped; nothing is left running" in log


# The command of a shell ends here; this process lives on, and its object for the running program does not.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_server_that_loads_for_long_is_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard.commands.up.MODEL_SECONDS", 0.0)
    assert main(vllm(tmp_path, "exec sleep 600")) == 0
    try:
        assert "no backend is ready yet" in capsys.readouterr().out
        assert Home(tmp_path / "h").supervisor() is not None
    finally:
        assert main(["down", "--home", str(tmp_path / "h")]) == 0
