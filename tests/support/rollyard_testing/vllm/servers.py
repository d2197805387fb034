"""Real vLLM servers for tests: started with bounded waits, ended with their whole process group."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from rollyard.quickstart.vllm_servers import CPU_ENVIRONMENT

from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[4]
SERVED = "tiny"
"""The name under which every test server serves its model."""
START_SECONDS = 300.0
"""The longest start, in seconds; it takes about 60 on two idle cores."""
ENVIRONMENT_SECONDS = 1500.0
"""The time to make the environment with vLLM on a fresh machine; about 180 s where the packages are near."""
MAX_MODEL_LEN = 4096
SLICE_SECONDS = 0.05
"""The period in which a slowed server's model computes once."""


class EnvironmentMissing(Exception):
    """The environment with vLLM cannot be made here."""


def gpus() -> int:
    """Return the number of GPUs here; where there are any, `scripts/vllm-env` takes vLLM for GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=patience(60))
    return len(done.stdout.splitlines()) if done.returncode == 0 else 0


def vllm_python() -> Path:
    """Return the Python of an environment with vLLM and transformers, made at the first call on a machine.

    Raises:
        EnvironmentMissing: It cannot be made; the message says why.
    """
    try:
        done = subprocess.run(
            [str(ROOT / "scripts/vllm-env")],
            capture_output=True,
            text=True,
            timeout=patience(ENVIRONMENT_SECONDS),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentMissing(f"scripts/vllm-env: {error}") from error
    if done.returncode != 0:
        raise EnvironmentMissing(f"scripts/vllm-env failed: {done.stderr.strip()[-1000:]}")
    return Path(done.stdout.strip())


class VllmServer:
    """One `vllm` API server on a port of this machine; call `start` again after `stop` or `kill`.

    Args:
        python: The Python of an environment with vLLM.
        model: A Hugging Face folder.
        index: Which core it is bound to (0, 1, …), or which GPU.
        folder: The folder for its log.
        arguments: Further ones of its command line; the last of a repeated option wins.
        environment: Further variables.
        port: The port; by default a free one, which it keeps when it is started again.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        index: int,
        folder: Path,
        *,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.model = model
        self.index = index
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"vllm-{index}-{self.port}.log"
        self.arguments = tuple(arguments)
        self._python = python
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._first_version = ""

    @property
    def pid(self) -> int:
        """Return the pid of the API server, which is the leader of its process group."""
        assert self._process is not None
        return self._process.pid

    def launch(self) -> None:
        """Start the process; `wait` waits until it serves."""
        # Prompts are never prefilled in parts: where one is, the CPU build dies on a request that has a seed
        # ("CPU Generator does not use offset", seen with 0.32).
        command = [
            str(self._python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", SERVED,
            "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN),
            "--block-size", "32", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "16384",
            "--enable-scale-out", "--enable-prompt-tokens-details",
            "--logprobs-mode", "processed_logprobs", *self.arguments,
        ]  # fmt: skip
        variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if count := gpus():
            variables |= {"CUDA_VISIBLE_DEVICES": str(self.index % count)}
            command += ["--gpu-memory-utilization", "0.3"]
        else:
            variables |= {**CPU_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": str(self.index)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **variables, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Wait until it has answered a request with logprobs; `/health` alone does not say that it samples.

        Raises:
            RuntimeError: It ended, or was not ready in time; the end of its log is in the message.
        """
        seconds = patience(seconds)
        deadline = time.monotonic() + seconds
        body = {"model": SERVED, "prompt": [1], "max_tokens": 1, "logprobs": 0, "return_token_ids": True}
        with httpx.Client(trust_env=False, timeout=patience(30)) as http:
            while time.monotonic() < deadline:
                if not self.alive():
                    raise RuntimeError(f"vLLM ended before it was ready:\n{self.words()}")
                with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
                    answer = http.post(f"{self.url}/v1/completions", json=body)
                    if answer.status_code == 200 and answer.json()["choices"][0]["token_ids"]:
                        self._first_version = self.version()
                        return
                time.sleep(0.5)
        raise RuntimeError(f"vLLM was not ready within {seconds:g} s:\n{self.words()}")

    def start(self) -> None:
        """Launch and wait."""
        self.launch()
        self.wait()

    def alive(self) -> bool:
        """Return whether its API server runs."""
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Send kill -9 to the whole process group, so nothing of it answers any more."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order, and by force where that takes longer than a moment."""
        if self.alive():
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert self._process is not None
                self._process.terminate()
                self._process.wait(patience(10))
        self._signal(signal.SIGKILL)

    def words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else "(no log)"

    def call(
        self, path: str, body: Any = None, *, method: str = "POST", seconds: float = patience(60.0)
    ) -> Any:
        """Return the answer, as JSON or text, of one request of its API that must succeed."""
        with httpx.Client(trust_env=False, timeout=seconds) as http:
            answer = http.request(method, f"{self.url}{path}", json=body)
        assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:500]}"
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        lines = str(self.call("/metrics", method="GET")).splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name
        )

    def heal(self) -> None:
        """Restore the state after its start: running, with its first weights and label."""
        if not self._answers():
            self.kill()
            self.start()
            return
        if self.call("/is_paused", method="GET")["is_paused"]:
            self.call("/resume")
        if self.version() != self._first_version:
            self.call("/pause?mode=abort")
            arguments = {"method": "reload_weights", "kwargs": {"weights_path": str(self.model)}}
            self.call("/collective_rpc", arguments)
            self.call("/update_weight_version", {"new_version": self._first_version})
            self.call("/reset_prefix_cache")
            self.call("/resume")

    def _answers(self) -> bool:
        """Return whether its engine lives: the API server outlives it for a while."""
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(trust_env=False, timeout=patience(10)) as http,
        ):
            return self.alive() and http.get(f"{self.url}/health").status_code == 200
        return False

    @contextlib.contextmanager
    def slowed(self, share: float) -> Iterator[None]:
        """Let its model compute only for a share of the time.

        A turn of the small model is over within a second or two, which a test on a busy machine can miss.
        Only the processes that compute are stopped and continued, so the API answers as quickly as ever.
        """
        computing = self._computing()
        done = threading.Event()

        def alternate() -> None:
            while not done.is_set():
                _send(computing, signal.SIGSTOP)
                done.wait(SLICE_SECONDS * (1 - share))
                _send(computing, signal.SIGCONT)
                done.wait(SLICE_SECONDS * share)

        thread = threading.Thread(target=alternate, name="slow")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextlib.contextmanager
    def frozen(self, *, engine_only: bool) -> Iterator[None]:
        """Stop the processes that compute, or all of them, which leaves its connections open."""
        stopped = self._computing() + ([] if engine_only else [psutil.Process(self.pid)])
        _send(stopped, signal.SIGSTOP)
        try:
            yield
        finally:
            _send(stopped, signal.SIGCONT)

    def _computing(self) -> list[psutil.Process]:
        """Return the processes that hold the model: workers, or the engine where it has none."""
        below = psutil.Process(self.pid).children(recursive=True)
        for title in ("VLLM::Worker", "VLLM::EngineCore"):
            if found := [one for one in below if any(word.startswith(title) for word in one.cmdline()[:1])]:
                return found
        raise RuntimeError(f"no process of {self.url} computes: {[one.cmdline()[:3] for one in below]}")

    def version(self) -> str:
        """Return the label of its weights."""
        return str(self.call("/weight_info", method="GET")["weight_version"])

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        self._process.wait(patience(30))


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(number)


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
