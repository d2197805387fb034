"""The span of one sampled turn, and of the times in which it waited for weights or for a backend."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, Literal

from rollyard_process.telemetry import conventions as names
from rollyard_process.telemetry.scope import RolloutScope, current
from rollyard_process.telemetry.spans import Value

from rollyard_pipeline.trajectories.recorder import Sample

Cause = Literal["weights", "backend"]
"""Why a turn waits: the backend's weights are updated, or no backend has room."""

MAX_WAITS: Final = 32
"""The largest number of waits of one turn that have spans of their own."""
_GAP_SECONDS: Final = 1.5  # Stretches that follow each other so closely are one wait.
_WAIT_SPANS: Final[dict[Cause, str]] = {"weights": names.PAUSE_SPAN, "backend": names.BACKEND_WAIT_SPAN}


@dataclass(slots=True)
class _Wait:
    cause: Cause
    begin: float
    end: float


@dataclass(slots=True)
class TurnSpan:
    """One turn of the rollout that the current task works on. Without one, it does nothing.

    Args:
        turn: The number of the turn, from 0.
    """

    turn: int
    scope: RolloutScope | None = field(default_factory=current)
    began: float = field(default_factory=time.monotonic)
    id: str = field(init=False, default="")
    traceparent: str | None = field(init=False, default=None)
    """The header with which requests of this turn name it as their parent, or None outside of a rollout."""
    _waits: list[_Wait] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.scope is not None:
            self.id = self.scope.child()
            self.traceparent = self.scope.traceparent(self.id)

    def wait(self, cause: Cause, begin: float, end: float) -> None:
        """Note a stretch of waiting, by the monotonic clock. Stretches that follow closely are joined."""
        if self.scope is None or self.scope.sink is None:
            return
        last = self._waits[-1] if self._waits else None
        if last is not None and last.cause == cause and begin - last.end < _GAP_SECONDS:
            last.end = max(last.end, end)
        elif len(self._waits) < MAX_WAITS:
            self._waits.append(_Wait(cause, max(begin, self.began), end))

    def end(
        self,
        *,
        model: str,
        url: str,
        prompt: int,
        max_tokens: int,
        requests: int,
        sample: Sample | None,
        error: str = "",
    ) -> None:
        """Add the spans of the turn, which ends now.

        Args:
            model: The name of the model.
            url: The base URL of the backend that answered last.
            prompt: The number of tokens of the prompt.
            max_tokens: The largest number of tokens that the turn could have.
            requests: The number of requests that backends answered.
            sample: What was sampled, or None.
            error: The type of the error with which the turn ended, or "".
        """
        scope = self.scope
        if scope is None or scope.sink is None:
            return
        now = time.monotonic()
        for wait in self._waits:
            end = min(wait.end, now)
            name = _WAIT_SPANS[wait.cause]
            scope.add(name, end - wait.begin, {names.BACKEND: url}, parent=self.id, ago=now - end)
        attributes: dict[str, Value] = {
            names.OPERATION: names.CHAT,
            names.PROVIDER: names.PROVIDER_NAME,
            names.CONVERSATION: scope.rollout,
            names.MODEL: model,
            names.BACKEND: url,
            names.TURN: self.turn,
            names.MAX_TOKENS: max_tokens,
            names.INPUT_TOKENS: prompt,
            names.REQUESTS: requests,
        }
        if sample is not None:
            attributes[names.OUTPUT_TOKENS] = len(sample.token_ids)
            attributes[names.FINISH_REASONS] = (sample.finish_reason,)
            if sample.policy_versions:
                attributes[names.POLICY_VERSION] = sample.policy_versions[-1]
        if error:
            attributes[names.ERROR_TYPE] = error
        title = f"{names.CHAT} {model}"
        scope.add(title, now - self.began, attributes, id=self.id, client=True, error=error)
