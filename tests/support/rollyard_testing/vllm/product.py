"""A control plane and stage workers as processes, before given inference servers, seen over REST only.

Nothing of Rollyard is imported here.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from rollyard_testing.faults.ledger import Ledger
from rollyard_testing.invariants import invariant
from rollyard_testing.manifests import job_manifest, pool_manifest
from rollyard_testing.pace import patience
from rollyard_testing.vllm.servers import SERVED

PLUGIN = Path(__file__).parent / "plugin"
_ENTRY_POINTS = """\
[rollyard.agents]
dialogue = dialogues:Dialogue
retokenizing = dialogues:Retokenizing
[rollyard.tools]
lookup = dialogues:Lookup
[rollyard.handlers]
free = dialogues:Free
"""
_START_SECONDS = patience(180.0)


class Product:
    """A product whose parts end with the block; `arguments` are further ones of the control plane."""

    def __init__(self, folder: Path, arguments: Sequence[str] = ()) -> None:
        self._folder = folder
        self._arguments = arguments
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def __enter__(self) -> Product:
        # The extensions are installed as a user's are: by a distribution on the path.
        installed = self._folder / "site" / "dialogues-1.0.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: dialogues\nVersion: 1.0\n")
        (installed / "entry_points.txt").write_text(_ENTRY_POINTS)
        port_file = self._folder / "port"
        api = self._start("api", "rollyard_api", "--state-dir", str(self._folder / "state"), "--port", "0",
                          "--port-file", str(port_file), "--lease-seconds", "15",
                          *self._arguments)  # fmt: skip
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not port_file.exists():
                assert api.poll() is None, self.words()
                assert time.monotonic() < deadline, self.words()
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        self.url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        return self

    def __exit__(self, *exc: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience(20))
            process.kill()
            process.wait(patience(10))

    def worker(self, name: str, *arguments: str, run: int = 64) -> subprocess.Popen[bytes]:
        """Start a stage worker with `run` places in Run."""
        return self._start(
            name, "rollyard_pipeline", "--url", self.url, "--name", name,
            "--token-file", str(self._folder / "state" / "tokens.json"),
            "--run-dir", str(self._folder / "run"), "--sandbox", "process",
            "--concurrency", f"init=16,run={run},eval=16", *arguments,
        )  # fmt: skip

    def http(self, role: str = "admin") -> httpx.Client:
        """Return a client of the REST API."""
        token = json.loads((self._folder / "state" / "tokens.json").read_text())[role]
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=patience(60), trust_env=False)

    def pool(self, name: str, urls: Sequence[str], tokenizer: Path, **spec: Any) -> None:
        """Make an external pool of these servers, and wait until it is ready."""
        engine = {"type": "external", "external": {"urls": list(urls)}}
        self._post(
            "/v1/backendpools",
            pool_manifest(name, {"model": SERVED, "tokenizer": str(tokenizer), "engine": engine, **spec}),
        )
        with self.http() as http:
            deadline = time.monotonic() + _START_SECONDS
            while True:
                pool = http.get(f"/v1/backendpools/{name}").raise_for_status().json()
                if all(one["ready"] for one in pool["status"]["backends"]):
                    return
                assert time.monotonic() < deadline, json.dumps(pool["status"])
                time.sleep(0.1)

    def job(
        self,
        name: str,
        pool: str,
        tasks: list[dict[str, Any]],
        samples: int,
        *,
        agent: str = "dialogue",
        parser: str = "auto",
        tools: Sequence[str] = ("lookup",),
        sampling: dict[str, Any],
        **spec: Any,
    ) -> set[tuple[str, int]]:
        """Submit dialogues, and return the (task, sample) pairs that must come back."""
        self._post(
            "/v1/rolloutjobs",
            job_manifest(
                name,
                {
                    "tasks": {"inline": tasks},
                    "handler": "free",
                    "samplesPerTask": samples,
                    "agent": {
                        "type": agent,
                        "tools": list(tools),
                        "toolParser": parser,
                        "maxTurns": 64,
                        "maxContextTokens": 4096,
                    },
                    "sampling": sampling,
                    "backendRef": {"name": pool},
                    **spec,
                },
            ),
        )
        return {(task["id"], sample) for task in tasks for sample in range(samples)}

    def results(self, name: str, expected: set[tuple[str, int]], seconds: float) -> list[dict[str, Any]]:
        """Return every trajectory of a job, once each, as the REST API answers."""
        ledger = Ledger()
        deadline = time.monotonic() + seconds
        with self.http() as http:
            while len(ledger.seen) < len(expected):
                assert time.monotonic() < deadline, (
                    f"{name}: {len(ledger.seen)} of {len(expected)} ended in {seconds:g} s\n{self.words()}"
                )
                ledger.read(http, name)
                time.sleep(0.1)
            # All that was submitted has ended, so whatever else would come has come as well.
            ledger.read(http, name)
            whole = Ledger()
            whole.read(http, name)
        with invariant():
            assert ledger.judge(expected) == []
            assert whole.seen == ledger.seen
        return list(whole.seen.values())

    def update(self, pool: str, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Ask for a weight update, wait for its end, and return it as it is then."""
        path = f"/v1/backendpools/{pool}/weights"
        update = self._post(path, request)
        deadline = time.monotonic() + seconds
        with self.http() as http:
            while update["state"] == "Running":
                assert time.monotonic() < deadline, json.dumps(update, indent=1)
                answer = http.get(f"{path}/{update['id']}", params={"wait": 10})
                update = answer.raise_for_status().json()
        return dict(update)

    def words(self) -> str:
        """Return the end of every log."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    def _start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join((str(self._folder / "site"), str(PLUGIN)))
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd=self._folder,
            )  # fmt: skip
        self._processes.append(process)
        return process

    def _post(self, path: str, body: Any) -> Any:
        with self.http() as http:
            answer = http.post(path, json=body)
        assert answer.status_code < 300, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()


@contextlib.contextmanager
def a_product(*arguments: str) -> Iterator[Product]:
    """Yield a product in a folder of its own, whose path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="ryv-") as folder, Product(Path(folder), arguments) as product:
        yield product
