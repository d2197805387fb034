"""The vLLM servers of the quickstart: a pool that can get new weights in the middle of the job.

The new checkpoint is the old one with a little noise, instead of a trainer's optimiser step. The files,
shapes and names are those of a real checkpoint; only the values were not learnt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rollyard_crds import RolloutJob
from rollyard_crds.weights import WeightUpdate
from rollyard_drivers.host.installed_vllm import installed_version
from rollyard_drivers.reconcile.vllm_version import MINIMUM_TEXT, is_too_old

from rollyard.errors import InvalidInput, StartFailed, UsageProblem
from rollyard.local.options import DEFAULT_POOL
from rollyard.local.vllm import visible_gpus
from rollyard.trajectories.reading import read_file
from rollyard.trajectories.summary import PolicySummary, summarize_policies

if TYPE_CHECKING:
    from rich.console import Console
    from rollyard_client import Client

READY_SECONDS: Final = 900.0
POLL_SECONDS: Final = 0.5
LINE_SECONDS: Final = 15.0
PROBE_SECONDS: Final = 120.0
REFERENCE_SECONDS: Final = 180.0
NEW_VERSION: Final = "step-1"
NOISE: Final = 0.02
"""The noise as a fraction of each matrix's standard deviation. It changes log-probabilities by hundredths."""
CPU_ARGUMENTS: Final = (
    "--enforce-eager",
    "--dtype=float32",
    "--block-size=32",
    # The CPU build of vLLM 0.32 crashes if a prompt is prefilled in chunks and its request has a seed.
    "--no-enable-chunked-prefill",
)
CPU_ENVIRONMENT: Final = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "$(BACKEND_INDEX)",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    # The engine computes in its own process, with one thread, instead of starting another process. A server
    # is ready after two thirds of the processor time, and a token costs two thirds as well.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
_MIN_RUN_PLACES: Final = 4
_SHARE_OF_RUN_PLACES: Final = 8
START_AT: Final = 0.25
"""The share of the rollouts that must have ended when the update is sent."""
FINISH_SECONDS: Final = 180.0
PROMPT_TOKENS: Final = 24
_HEADER_LIMIT: Final = 100 << 20  # The safetensors format limits the header to this number of bytes.
_REFERENCE_SCRIPT: Final = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
folder, ids = sys.argv[1], json.loads(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
with torch.inference_mode():
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
print(json.dumps([min(0.0, float(logprobs[at, token])) for at, token in enumerate(ids[1:])]))
"""


@dataclass(frozen=True, slots=True)
class ReferenceLogprobs:
    """The log-probabilities of a fixed prompt under a checkpoint, as transformers computes them."""

    prompt_ids: list[int]
    logprobs: list[float]
    """The log-probability of each id after the first, in nats."""


def check_model(folder: Path) -> None:
    """Raise InvalidInput unless `folder` holds a Hugging Face model with its tokenizer."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise InvalidInput(f"--model {folder}: no {name} there; give a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise InvalidInput(f"--model {folder}: no *.safetensors there")


def perturbed(source: Path, target: Path, scale: float, seed: int = 0) -> None:
    """Copy the model folder `source` to `target` and add Gaussian noise to every weight matrix.

    The noise is `scale` times the standard deviation of the matrix. Vectors (norms, biases) do not change.

    Raises:
        InvalidInput: A weight file is broken, or its weights have a type that is not supported.
    """
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, partial)
    noise = np.random.default_rng(seed)
    for file in sorted(partial.glob("*.safetensors")):
        _perturb(file, scale, noise)
    os.replace(partial, target)


def _perturb(file: Path, scale: float, noise: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    try:
        (length,) = struct.unpack_from("<Q", data)
        if length > _HEADER_LIMIT:
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(data[8 : 8 + length])
        for name, tensor in header.items():
            if name != "__metadata__" and len(tensor["shape"]) > 1:
                begin, end = (8 + length + offset for offset in tensor["data_offsets"])
                data[begin:end] = _noisy(bytes(data[begin:end]), tensor["dtype"], scale, noise)
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise InvalidInput(f"{file}: cannot be read as safetensors: {error}") from error
    file.write_bytes(data)


def _noisy(raw: bytes, kind: str, scale: float, noise: np.random.Generator) -> bytes:
    """Return the tensor's bytes with noise. `kind` is the name of its type in safetensors."""
    if kind == "BF16":
        # bfloat16 is the upper half of a float32.
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif kind in ("F32", "F16"):
        values = np.frombuffer(raw, np.float32 if kind == "F32" else np.float16).astype(np.float32)
    else:
        raise ValueError(f"weights of type {kind}; F32, F16 and BF16 are known")
    changed = values + scale * values.std() * noise.standard_normal(values.shape, dtype=np.float32)
    if kind == "BF16":
        return bytes(((changed.view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes())
    return bytes(changed.astype(np.float32 if kind == "F32" else np.float16).tobytes())


class ReferenceRun:
    """A forward pass of transformers in another Python, which runs while servers start.

    Args:
        python: A Python with torch and transformers, such as that of vLLM.
        folder: The folder of the checkpoint.
        log: The file for its standard error.
    """

    def __init__(self, python: Path, folder: Path, log: Path) -> None:
        size = json.loads((folder / "config.json").read_text()).get("vocab_size", 0)
        draw = np.random.default_rng(0)
        self._ids = [int(draw.integers(size)) for _ in range(PROMPT_TOKENS)]
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), "-c", _REFERENCE_SCRIPT, str(folder), json.dumps(self._ids)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )

    def result(self, timeout: float) -> ReferenceLogprobs:
        """Wait for the forward pass and return its result.

        Raises:
            StartFailed: The forward pass failed, or it took longer than `timeout` seconds.
        """
        try:
            output, _ = self._process.communicate(timeout=timeout)
            if self._process.returncode == 0:
                return ReferenceLogprobs(self._ids, json.loads(output))
        except (subprocess.TimeoutExpired, ValueError):
            self.stop()
        raise StartFailed(f"transformers computed no log-probabilities of the new weights (log: {self._log})")

    def stop(self) -> None:
        """End the forward pass if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """The options of the servers: their program, their model and their number."""

    python: Path
    """A Python that has vLLM."""
    model: Path
    replicas: int
    update_weights: bool

    def check(self) -> None:
        """Check everything that can be checked before a server starts.

        Raises:
            UsageProblem: The Python is not a program that runs, or it has no vLLM, or one that is too old.
            InvalidInput: The model's folder is incomplete.
        """
        if not (self.python.is_file() and os.access(self.python, os.X_OK)):
            raise UsageProblem(f"--vllm-python: {self.python} is not a program")
        probe = "import importlib.util as u, sys; sys.exit(3 * (u.find_spec('vllm') is None))"
        try:
            code = subprocess.run(
                [str(self.python), "-c", probe], stdin=subprocess.DEVNULL, timeout=PROBE_SECONDS
            ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageProblem(f"--vllm-python: {self.python} does not run: {error}") from error
        if code:
            raise UsageProblem(
                f"--vllm-python: {self.python} has no vLLM (scripts/vllm-env makes one that has)"
            )
        version = installed_version(str(self.python))
        if is_too_old(version):
            raise UsageProblem(
                f"--vllm-python: {self.python} has vLLM {version}, and Rollyard needs {MINIMUM_TEXT} or newer"
            )
        check_model(self.model)


def up_arguments(options: VllmOptions, gpu_count: int) -> list[str]:
    """Return the arguments of `rollyard up`. Without GPUs, the servers use one CPU core each."""
    arguments = ["--engine", "vllm", "--replicas", str(options.replicas)]
    arguments += ["--vllm-python", os.path.abspath(options.python), "--model", str(options.model.resolve())]
    if gpu_count == 0:
        arguments += [f"--engine-arg={argument}" for argument in CPU_ARGUMENTS]
        arguments += [f"--engine-env={name}={value}" for name, value in CPU_ENVIRONMENT.items()]
    elif gpu_count >= options.replicas:
        arguments += ["--gpus", "1"]
    else:
        arguments += [f"--engine-arg=--gpu-memory-utilization={0.8 / options.replicas:.2f}"]
    return arguments


def run_places(places: int, rollouts: int) -> int:
    """Return the concurrency of Run with which most rollouts have not begun when the update is sent."""
    return min(places, max(_MIN_RUN_PLACES, rollouts // _SHARE_OF_RUN_PLACES))


@dataclass(slots=True)
class VllmServers:
    """The servers of one quickstart."""

    options: VllmOptions
    out: Path
    console: Console
    update: MidwayUpdate | None = field(default=None, init=False)
    _reference: ReferenceRun | None = field(default=None, init=False)

    @property
    def folder(self) -> Path:
        """The folder of the new checkpoint."""
        return self.out / "new-weights"

    @contextlib.contextmanager
    def new_weights(self) -> Iterator[None]:
        """Make the new checkpoint. Its log-probabilities are computed during the block, while servers start.

        Raises:
            InvalidInput: The model's weights cannot be read.
        """
        if not self.options.update_weights:
            yield
            return
        folder = self.folder
        perturbed(self.options.model, folder, NOISE)
        self.console.print(
            f"New weights {NEW_VERSION}: {folder}, the policy with a little noise, "
            "in the place of an optimiser's step",
            soft_wrap=True,
        )
        reference = ReferenceRun(self.options.python, folder, self.out / "reference.log")
        self._reference = reference
        try:
            yield
        finally:
            reference.stop()

    def up_arguments(self) -> list[str]:
        """Return the arguments of `rollyard up`."""
        return up_arguments(self.options, len(asyncio.run(visible_gpus())))

    def start(self, client: Client) -> None:
        """Wait until every server is ready, and prepare the weight update if one is wanted.

        Raises:
            StartFailed: A server was not ready in time, or the new weights' log-probabilities are missing.
        """
        self._wait_ready(client)
        if self._reference is not None:
            expected = self._reference.result(REFERENCE_SECONDS)
            self.update = MidwayUpdate(client, self.folder, expected, self.console)

    def _wait_ready(self, client: Client) -> None:
        began = shown_at = time.monotonic()
        shown = ""
        with self.console.status("vLLM servers start") as spinner:
            while (seconds := time.monotonic() - began) < READY_SECONDS:
                status = client.pool(DEFAULT_POOL).status
                ready = sum(backend.ready for backend in status.backends)
                state = f"vLLM servers: {ready} of {self.options.replicas} ready"
                if ready == self.options.replicas:
                    self.console.print(f"{state}, after {seconds:.0f} s")
                    return
                trouble = next((c.message for c in status.conditions if c.type == "Degraded"), "")
                state += f" ({trouble})" if trouble else ""
                spinner.update(f"{state}, {seconds:.0f} s; a start takes about a minute on a CPU")
                now = time.monotonic()
                if not self.console.is_terminal and (state != shown or now - shown_at >= LINE_SECONDS):
                    self.console.print(f"{state}, {seconds:.0f} s", soft_wrap=True)
                    shown, shown_at = state, now
                time.sleep(POLL_SECONDS)
        raise StartFailed(f"{state} within {READY_SECONDS:.0f} s")

    def summarize(self, client: Client, trajectories: Path) -> PolicySummary:
        """Wait for the end of the update, if one is wanted, and return the summary of the policy versions.

        Raises:
            StartFailed: The update did not succeed.
        """
        update = self.update.finish() if self.update is not None else None
        if self.update is not None and (update is None or update.state != "Succeeded"):
            why = "the job ended before it was sent" if update is None else update.message or update.state
            raise StartFailed(f"the weight update {NEW_VERSION} did not succeed: {why}")
        backends = client.pool(DEFAULT_POOL).status.backends
        return summarize_policies(read_file(trajectories), backends, [update] if update is not None else [])


class MidwayUpdate:
    """Sends one update when enough of the job's rollouts have ended, and follows it.

    It is called with each observed state of the job.

    Args:
        client: The client of the control plane.
        folder: The folder of the new checkpoint.
        reference: The log-probabilities that the servers must give.
        console: The console for messages about the update.
    """

    def __init__(self, client: Client, folder: Path, reference: ReferenceLogprobs, console: Console) -> None:
        self._client = client
        self._folder = folder
        self._reference = reference
        self._console = console
        self._update: WeightUpdate | None = None

    def __call__(self, job: RolloutJob) -> None:
        """Send the update if it is due, or check the update that was sent."""
        if self._update is None:
            counts = job.status.counts
            ended = counts.succeeded + counts.failed + counts.cancelled
            if counts.total and ended >= START_AT * counts.total:
                self._update = self._client.update_weights(
                    DEFAULT_POOL,
                    NEW_VERSION,
                    checkpoint=str(self._folder.resolve()),
                    reference=asdict(self._reference),
                    require_verified=True,
                )
                self._say(f"sent after {ended} of {counts.total} rollouts")
        elif self._update.state == "Running":
            number = self._update.id
            self._note(
                next(update for update in self._client.weight_updates(DEFAULT_POOL) if update.id == number)
            )

    def finish(self) -> WeightUpdate | None:
        """Wait until the update has ended and return it, or None if it was never sent.

        Raises:
            WaitTimeout: The update still runs after `FINISH_SECONDS`.
        """
        if self._update is not None and self._update.state == "Running":
            self._note(self._client.wait_weights(DEFAULT_POOL, self._update.id, FINISH_SECONDS))
        return self._update

    def _note(self, update: WeightUpdate) -> None:
        self._update = update
        if update.state != "Running":
            self._say(_account(update))

    def _say(self, text: str) -> None:
        self._console.print(f"Weights {NEW_VERSION}: {text}", soft_wrap=True)


def _account(update: WeightUpdate) -> str:
    if update.state != "Succeeded":
        return f"{update.state.lower()}: {update.message}"
    return f"on all {len(update.backends)} servers, {'verified' if update.verified else 'not verified'}"
