"""A weight update in the middle of a job, as a trainer sends one between two of its steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard_crds import RolloutJob
from rollyard_crds.weights import WeightUpdate

from rollyard.quickstart.checkpoint import ReferenceLogprobs

if TYPE_CHECKING:
    from rich.console import Console
    from rollyard_client import Client

START_AT = 0.25
"""The share of the rollouts that have ended when the update is sent."""
FINISH_SECONDS = 180.0


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
            self._seen(next(one for one in self._client.weight_updates(self._pool) if one.id == number))

    def finish(self) -> WeightUpdate | None:
        """Wait until the update has ended and return it, or None if it was never sent.

        Raises:
            WaitTimeout: The update still runs after `FINISH_SECONDS`.
        """
        if self._update is not None and self._update.state == "Running":
            self._seen(self._client.wait_weights(self._pool, self._update.id, FINISH_SECONDS))
        return self._update

    def _seen(self, update: WeightUpdate) -> None:
        self._update = update
        if update.state != "Running":
            self._say(_account(update))

    def _say(self, text: str) -> None:
        self._console.print(f"Weights {self._new.version}: {text}", soft_wrap=True)


def _account(update: WeightUpdate) -> str:
    if update.state != "Succeeded":
        return f"{update.state.lower()}: {update.message}"
    return f"on all {len(update.backends)} servers, {'verified' if update.verified else 'not verified'}"
