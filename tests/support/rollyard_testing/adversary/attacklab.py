"""The product under attack: a control plane process, a worker process and real sandboxes.

Secrets are planted wherever a policy must not read: in the worker's environment, in files of the host and of
the run folder, and in each hidden test; the product's own tokens are secrets, too. Whatever a rollout leaves
on the host is read from the kernel's listings.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollyard_client import Client
from rollyard_crds.task import FunctionCall
from rollyard_crds.trajectory import Trajectory

from rollyard_testing.adversary.attacks import Attack, Outcome, Step, judge
from rollyard_testing.adversary.policyserver import MODEL, WAIT_SECONDS, PolicyServer, calling
from rollyard_testing.manifests import job_manifest, pool_manifest
from rollyard_testing.pace import patience

PYTHON = "/.rollyard/venv/bin/python"
START_SECONDS = patience(90.0)
GONE_SECONDS = patience(15.0)
SMALL = {"resources": {"memory": "192Mi", "disk": "16Mi", "processes": 64}, "warm": 1}
STAGES = {"init": {"timeoutSeconds": 60}, "run": {"timeoutSeconds": 60}, "eval": {"timeoutSeconds": 20}}
TOOLS = ["bash", "ipython", "edit", "submit"]
PLUGIN = """# {}
from rollyard_pipeline.handlers.shell import ShellHandler


class GradedHandler(ShellHandler):
    pass
"""
"""A plugin whose text is a secret."""


class Lab:
    """A running product, and the means to attack it."""

    def __init__(self, folder: Path, options: tuple[str, ...]) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.state = folder / "state"
        self.options = options
        self.secrets = {
            name: f"canary-{secrets.token_hex(12)}"
            for name in (
                "the worker's environment",
                "a file of the host",
                "a file of the run folder",
                "a plugin",
            )
        }
        self.api: subprocess.Popen[bytes] | None = None
        self.worker: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._policies: PolicyServer | None = None

    @property
    def client(self) -> Client:
        """Return a client with the admin's token."""
        assert self._client is not None
        return self._client

    @contextmanager
    def running(self) -> Iterator[Lab]:
        """Run the product, from its start until nothing of it is left."""
        self.run.mkdir(mode=0o700)
        (self.folder / "host-secret").write_text(self.secrets["a file of the host"])
        (self.run / "run-secret").write_text(self.secrets["a file of the run folder"])
        (self.folder / "plugins").mkdir()
        (self.folder / "plugins" / "graded.py").write_text(PLUGIN.format(self.secrets["a plugin"]))
        with contextlib.ExitStack() as stack:
            self.api = stack.enter_context(self._process("api", *self._api_command()))
            port = int(_appears(self.folder / "port", self.api, self.folder / "api.log"))
            tokens = json.loads((self.state / "tokens.json").read_text())
            self.secrets |= {f"the {role}'s token": token for role, token in tokens.items()}
            url = f"http://127.0.0.1:{port}"
            self._words = {
                "@PY@": PYTHON, "@RUN@": str(self.run), "@STATE@": str(self.state),
                "@LAB@": str(self.folder), "@API_PORT@": str(port),
            }  # fmt: skip
            self._client = stack.enter_context(Client(url, tokens["admin"]))
            worker = (
                "rollyard_pipeline", "--url", url, "--token-file", str(self.state / "tokens.json"),
                "--run-dir", str(self.run), "--concurrency", "init=4,run=8,eval=4", *self.options,
            )  # fmt: skip
            self.worker = stack.enter_context(self._process("worker", *worker))
            self._words["@WORKER@"] = str(self.worker.pid)
            stack.callback(self._end_policies)
            yield self
        assert self.left() == []

    def attack(self, attack: Attack) -> Outcome:
        """Run an attack, and judge it.

        Raises:
            Verdict: The attack succeeded, at least in part.
        """
        with self.rollout(attack) as rollout:
            outcome = rollout.outcome()
        self.judge(attack, outcome)
        return outcome

    def judge(self, attack: Attack, outcome: Outcome, secrets: Mapping[str, str] | None = None) -> None:
        """Judge as `attacks.judge` does, with the secrets of this product, of the rollout's hidden test, and
        more.
        """
        hidden = {"its hidden test": _hidden(outcome.trajectory.job)}
        judge(attack, outcome, {**self.secrets, **hidden, **(secrets or {})})

    @contextmanager
    def rollout(self, attack: Attack) -> Iterator[Rollout]:
        """Yield a rollout of an attack, which may have company.

        It is cancelled if the block ends before it does.
        """
        rollout = Rollout(self, attack)
        rollout.begin({"agent": {"type": "oracle", "tools": TOOLS}}, rollout.steps())
        try:
            yield rollout
        finally:
            rollout.end()

    @contextmanager
    def dictated(self, attack: Attack) -> Iterator[Dictated]:
        """Yield a rollout whose turns the block dictates; the attack's own steps come first."""
        if self._policies is None:
            self._policies = PolicyServer(self.folder / "model")
            self._serving = self._policies.serving()
            self._serving.__enter__()
            self.client.create_pool(_pool(self._policies))
        rollout = Dictated(self, attack, self._policies)
        agent = {"type": "tools", "tools": TOOLS, "maxTurns": 60, "maxContextTokens": 60_000}
        rollout.begin({"agent": agent, "backendRef": {"name": "dictated"}}, None)
        try:
            for step in rollout.steps():
                rollout.call(step.name, **step.arguments)
            yield rollout
        finally:
            rollout.end()

    def words(self, text: str, mark: str) -> str:
        """Return `text` with its placeholders replaced."""
        for word, meaning in {**self._words, "@MARK@": mark}.items():
            text = text.replace(word, meaning)
        return text

    def settled(self, mark: str) -> list[str]:
        """Return what a rollout has left, once that is nothing, or as it is after some seconds."""
        deadline = time.monotonic() + GONE_SECONDS
        while (left := self.left(mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def left(self, mark: str | None = None) -> list[str]:
        """Return what carries a rollout's mark on the host, or what the ended product left."""
        needle = mark or str(self.run)
        found = [f"the process {line[:200]}" for line in command_lines() if needle in line]
        found += [f"the shared memory /dev/shm/{name}" for name in os.listdir("/dev/shm") if needle in name]
        found += [f"the file /tmp/{name}" for name in os.listdir("/tmp") if needle in name]
        if mark is not None:
            return found + [f"the sandbox {name}" for name in self._in_use(mark)]
        folder = self.run / "sandboxes"
        found += [f"the folder {path}" for path in folder.glob("*") if path.is_dir()]
        for listing in ("self/mountinfo", "net/unix"):
            lines = Path("/proc", listing).read_text().splitlines()
            found += [f"in {listing}: {line}" for line in lines if needle in line]
        return found

    def log(self) -> str:
        """Return the end of what the worker wrote."""
        return (self.folder / "worker.log").read_text(errors="replace")[-4000:]

    def first_processes(self, mark: str) -> list[int]:
        """Return process 1 of each of the rollout's sandboxes, as the host numbers it."""
        return [record["root"]["pid"] for record in self._records(mark).values()]

    def _in_use(self, mark: str) -> list[str]:
        """Return the sandboxes that the rollout has claimed."""
        return list(self._records(mark))

    def _records(self, mark: str) -> dict[str, dict[str, Any]]:
        used = {}
        folder = self.run / "sandboxes"
        for name in os.listdir(folder) if folder.is_dir() else ():
            with contextlib.suppress(OSError, ValueError):
                record = json.loads((folder / name / "sandbox.json").read_text())
                if (record["owner"] or "").startswith(mark):
                    used[name] = record
        return used

    def _api_command(self) -> tuple[str, ...]:
        port_file = str(self.folder / "port")
        return (
            "rollyard_api", "--state-dir", str(self.state), "--port", "0", "--port-file", port_file,
            "--plugin", str(self.folder / "plugins"),
        )  # fmt: skip

    @contextmanager
    def _process(self, name: str, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        environment = {**os.environ, "ADVERSARY_CANARY": self.secrets["the worker's environment"]}
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise

    def _end_policies(self) -> None:
        if self._policies is not None:
            self._serving.__exit__(None, None, None)


class Rollout:
    """One rollout of an attack, in a job of its own."""

    def __init__(self, lab: Lab, attack: Attack) -> None:
        self.mark = f"rya-{secrets.token_hex(8)}"
        self.lab = lab
        self.attack = attack
        self._ended: Trajectory | None = None

    def steps(self) -> list[FunctionCall]:
        """Return the attack's steps with their placeholders replaced."""
        return [self._step(step) for step in self.attack.steps]

    def begin(self, spec: dict[str, Any], solution: list[FunctionCall] | None) -> None:
        """Submit the job."""
        task: dict[str, Any] = {
            "id": self.attack.name,
            "prompt": f"Solve the task {self.mark}.",
            "sandbox": self._filled(self.attack.sandbox),
            "test_script": f"# {_hidden(self.mark)}\n" + self.lab.words(self.attack.test_script, self.mark),
        }
        if solution is not None:
            task["solution"] = [step.model_dump() for step in solution or [FunctionCall(name="submit")]]
        manifest = job_manifest(self.mark, {
                "tasks": {"inline": [task]}, "handler": "shell", "sandbox": SMALL, "stages": STAGES,
                "minGroupSize": 1, **spec, **self.attack.spec,
            })  # fmt: skip
        self.lab.client.submit(manifest)

    def outcome(self) -> Outcome:
        """Return the result, once the rollout has ended and had some seconds to be gone."""
        for trajectory in self.lab.client.trajectories(self.mark, follow=True):
            self._ended = trajectory
            break
        assert self._ended is not None, self.lab.log()
        observations = tuple(each.content for each in self._ended.messages if each.role == "tool")
        return Outcome(self._ended, observations, tuple(self.lab.settled(self.mark)))

    def end(self) -> None:
        """Cancel the rollout, unless it has ended."""
        if self._ended is None:
            self.lab.client.cancel(self.mark)

    def _step(self, step: Step) -> FunctionCall:
        call = step if isinstance(step, FunctionCall) else bash(step)
        return FunctionCall(name=call.name, arguments=self._filled(call.arguments))

    def _filled(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.lab.words(value, self.mark)
        if isinstance(value, dict):
            return {self._filled(key): self._filled(each) for key, each in value.items()}
        return value


class Dictated(Rollout):
    """A rollout whose turns a test dictates, so that it can be kept waiting or have company."""

    def __init__(self, lab: Lab, attack: Attack, policies: PolicyServer) -> None:
        super().__init__(lab, attack)
        self.turns = policies.turns(self.mark)
        self.tokenizer = policies.tokenizer
        self._asked = False

    def bash(self, command: str) -> str:
        """Run a command, and return what it shows."""
        return self.call("bash", command=self.lab.words(command, self.mark))

    def call(self, name: str, **arguments: Any) -> str:
        """Make a call, and return what the model reads as its result."""
        return self.say(calling(name, arguments))

    def say(self, text: str) -> str:
        """Sample any text as a turn, and return what the model reads as the result of its calls."""
        before = self._prompt()
        self._say(text)
        answer = self._prompt()[len(before) :].split("<tool_response>\n", 1)[-1]
        return answer.rsplit("\n</tool_response>", 1)[0]

    def say_last(self, text: str) -> None:
        """Sample any text as the last turn of this try."""
        self._prompt()
        self._say(text)

    def submit(self, answer: str = "") -> Outcome:
        """End the episode, and return the result."""
        self.say_last(calling("submit", {"answer": answer}))
        return self.outcome()

    def end(self) -> None:
        super().end()
        self.turns.texts.put(calling("submit", {"answer": ""}))  # It is for a request that still waits.

    def _prompt(self) -> str:
        if not self._asked:
            self._last = self.turns.prompts.get(timeout=WAIT_SECONDS)
            self._asked = True
        return self._last

    def _say(self, text: str) -> None:
        self._asked = False
        self.turns.texts.put(text)


def bash(command: str) -> FunctionCall:
    """Return a call of the tool `bash`."""
    return FunctionCall(name="bash", arguments={"command": command})


@contextmanager
def a_lab(*options: str) -> Iterator[Lab]:
    """Yield a product whose worker is started with these options."""
    # Sockets lie in it, whose paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="rya"))
    try:
        with Lab(folder, options).running() as lab:
            yield lab
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def until(condition: Callable[[], object], what: str, seconds: float = START_SECONDS) -> None:
    """Wait until `condition` holds.

    Raises:
        AssertionError: It does not hold within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


def _hidden(mark: str) -> str:
    """Return the secret of a hidden test, which no text that the policy gets holds."""
    return "hidden-test-" + mark[::-1]


def _pool(server: PolicyServer) -> dict[str, Any]:
    engine = {"type": "external", "external": {"urls": [server.url]}}
    return pool_manifest("dictated", {"model": MODEL, "tokenizer": str(server.folder), "engine": engine})


def _appears(path: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    def there() -> bool:
        assert process.poll() is None, log.read_text()
        return path.exists()

    until(there, str(path))
    return path.read_text()


def command_lines() -> Iterator[str]:
    """Yield the command line of each process of this machine, but for this one."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if line:
                    yield line
