"""The way of new weights to the pool, with the proof that every server has them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from rollyard import Client
from rollyard.errors import NotFound
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tinygrpo.errors import PoolNotReady, UpdateFailed
from tinygrpo.policy import reference

_UPDATE_SECONDS: Final = 600.0
_POOL_SECONDS: Final = 900.0
"""A server of a large model takes minutes to start."""
_LOOK_SECONDS: Final = 1.0
_TOLERANCE: Final = 0.001
"""Both sides compute in float32. One update changes log-probabilities by more than this."""
_PROMPT: Final = (
    "Count the lines with wagon in meadow/maple.txt. Find the file in cotton that holds willow and submit "
    "its number of lines. Set copper to 42 in the file of harbor that has it."
)


class WeightPusher:
    """It gives a pool new weights and waits until every backend samples with them.

    Args:
        client: A client of the control plane.
        pool: The pool.
        tokenizer: The file `tokenizer.json` of the policy.
    """

    def __init__(self, client: Client, pool: str, tokenizer: Path) -> None:
        self._client = client
        self._pool = pool
        self._prompt: list[int] = Tokenizer.from_file(str(tokenizer)).encode(_PROMPT).ids

    def wait_for_pool(self, seconds: float = _POOL_SECONDS) -> None:
        """Wait until the pool has a server that is ready. On a cluster the trainer may start before it.

        Raises:
            PoolNotReady: There is none in time. The message says why.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                conditions = self._client.pool(self._pool).status.conditions
            except NotFound as error:
                said = str(error)
            else:
                ready = next((one for one in conditions if one.type == "Ready"), None)
                if ready is not None and ready.status == "True":
                    return
                said = "no driver has seen it yet" if ready is None else f"{ready.reason}: {ready.message}"
            if time.monotonic() >= deadline:
                raise PoolNotReady(f"the pool {self._pool} is not ready after {seconds:g} s: {said}")
            time.sleep(_LOOK_SECONDS)

    def push(self, version: str, checkpoint: Path, model: PreTrainedModel) -> float:
        """Push a checkpoint, and return the longest time that a backend was paused, in seconds.

        Requests in flight continue with the new weights, and their tokens carry the version of each.

        Raises:
            UpdateFailed: A server did not take the weights, or gives other log-probabilities than `model`.
        """
        begun = self._client.update_weights(
            self._pool,
            version,
            checkpoint=str(checkpoint),
            mode="keep",
            reference=reference(model, self._prompt, _TOLERANCE),
            require_verified=True,
        )
        done = self._client.wait_weights(self._pool, begun.id, timeout=_UPDATE_SECONDS)
        if done.state != "Succeeded" or not done.verified:
            raise UpdateFailed(f"the pool {self._pool} did not take {version}: {done.state}: {done.message}")
        return max((one.paused_seconds or 0.0 for one in done.backends), default=0.0)
