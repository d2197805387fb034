"""The vLLM servers of the quickstart: a pool of them, which can get new weights in the middle of the job."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rollyard_crds import RolloutJob
from rollyard_crds.weights import WeightUpdate
from rollyard_drivers.host.installed_vllm import installed_version
from rollyard_drivers.reconcile.vllm_version import MINIMUM_TEXT, is_too_old

from rollyard.errors import StartFailed, UsageProblem
from rollyard.local.options import DEFAULT_POOL
from rollyard.quickstart.checkpoint import ReferenceLogprobs, ReferenceRun, check_model, perturbed
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
    # The engine computes in its own process, with one thread, where it would start another one for that. A
    # server is ready after two thirds of the processor time, and a token costs two thirds as well.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
}
_MIN_RUN_PLACES: Final = 4
_SHARE_OF_RUN_PLACES: Final = 8
START_AT: Final = 0.25
"""The share of the rollouts that have ended when the update is sent."""
FINISH_SECONDS: Final = 180.0


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
            raise UsageProblem(f"--vllm-python: {self.python} is no program")
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


def gpus() -> int:
    """Return the number of GPUs that NVIDIA's driver reports."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30.0)
    except subprocess.TimeoutExpired:
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


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
        return up_arguments(self.options, gpus())

    def start(self, client: Client) -> None:
        """Wait until every server is ready, and prepare the weight update if one is wanted.

        Raises:
            StartFailed: A server was not ready in time, or the new weights' log-probabilities are missing.
        """
        self._wait_ready(client)
        if self._reference is not None:
            expected = self._reference.result(REFERENCE_SECONDS)
            new = NewVersion(NEW_VERSION, self.folder, expected)
            self.update = MidwayUpdate(client, DEFAULT_POOL, new, self.console)

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


@dataclass(frozen=True, slots=True)
class NewVersion:
    """A checkpoint to which the servers are updated."""

    version: str
    folder: Path
    reference: ReferenceLogprobs


class MidwayUpdate:
    """Sends one update when enough of the job's rollouts have ended, and follows it.

    It is called with each observed state of the job.

    Args:
        client: The client of the control plane.
        pool: The BackendPool from which the job samples.
        new: The new version of the pool's weights.
        console: The console for messages about the update.
    """

    def __init__(self, client: Client, pool: str, new: NewVersion, console: Console) -> None:
        self._client = client
        self._pool = pool
        self._new = new
        self._console = console
        self._update: WeightUpdate | None = None

    def __call__(self, job: RolloutJob) -> None:
        """Send the update if it is due, or check the update that was sent."""
        if self._update is None:
            counts = job.status.counts
            ended = counts.succeeded + counts.failed + counts.cancelled
            if counts.total and ended >= START_AT * counts.total:
                self._update = self._client.update_weights(
                    self._pool,
                    self._new.version,
                    checkpoint=str(self._new.folder.resolve()),
                    reference=asdict(self._new.reference),
                    require_verified=True,
                )
                self._say(f"sent after {ended} of {counts.total} rollouts")
        elif self._update.state == "Running":
            number = self._update.id
            self._note(
                next(update for update in self._client.weight_updates(self._pool) if update.id == number)
            )

    def finish(self) -> WeightUpdate | None:
        """Wait until the update has ended and return it, or None if it was never sent.

        Raises:
            WaitTimeout: The update still runs after `FINISH_SECONDS`.
        """
        if self._update is not None and self._update.state == "Running":
            self._note(self._client.wait_weights(self._pool, self._update.id, FINISH_SECONDS))
        return self._update

    def _note(self, update: WeightUpdate) -> None:
        self._update = update
        if update.state != "Running":
            self._say(_account(update))

    def _say(self, text: str) -> None:
        self._console.print(f"Weights {self._new.version}: {text}", soft_wrap=True)


def _account(update: WeightUpdate) -> str:
    if update.state != "Succeeded":
        return f"{update.state.lower()}: {update.message}"
    return f"on all {len(update.backends)} servers, {'verified' if update.verified else 'not verified'}"
