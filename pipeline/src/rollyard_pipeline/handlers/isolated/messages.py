"""What a worker and the process of a handler say to each other: calls, and the exceptions that end them.

A call is pickled, which only the worker does. What comes back is JSON, because the texts of a policy have
passed through the handler.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ConfigDict
from rollyard_crds.task import Task
from rollyard_crds.trajectory import TokensMissing
from rollyard_sandbox.errors import SandboxError, from_wire

from rollyard_pipeline import errors
from rollyard_pipeline.errors import PipelineError, RewardUnusable
from rollyard_pipeline.handlers.base import StageContext
from rollyard_pipeline.handlers.isolated.places import message_of
from rollyard_pipeline.trajectories.sanitize import clean_text

_TRACE: Final = 16_384  # The number of characters of a traceback that reach the worker's log.


@dataclass(frozen=True, slots=True)
class HandlerCall:
    """A call of the handler, as the worker pickles it."""

    method: str
    """The name of the method: init, run or eval."""
    task: Task
    context: StageContext
    """The context without what only the worker has."""
    agent: bool
    """Whether the context has the job's agent."""
    secrets: tuple[bytes | None, ...]
    """The secret of each sandbox's exec server."""


class HandlerOutcome(BaseModel):
    """What a process says about a call that has ended."""

    model_config = ConfigDict(extra="forbid", strict=True)

    shown: str = ""
    """What the call added to `ctx.show`."""
    carry: dict[str, Any] | None = None
    """The `ctx.carry` that the call left, if it has a context and did not fail."""
    reward: Any = None
    """The reward that `eval` returned. It is judged like that of any handler."""
    components: dict[str, Any] | None = None
    """The components that `eval` returned. None if the call was not one of `eval`, or failed."""
    reason: Any = ""
    """The reason that `eval` returned."""
    raised: int | None = None
    """The number of the request to the agent whose exception ended the call."""
    error: dict[str, Any] | None = None
    """Another exception that ended the call, as `described` returns it."""


def described(error: BaseException) -> dict[str, Any]:
    """Return what `exception_of` needs to make this exception again."""
    fields: dict[str, Any] = {"message": str(error)}
    match error:
        case SandboxError():
            return fields | {"kind": "sandbox", "reason": error.reason}
        case PipelineError() | TokensMissing():
            decisions = {
                name: getattr(error, name)
                for name in ("reason", "retryable", "return_to", "counts")
                if hasattr(error, name)
            }
            blamed = error.reward_reason if isinstance(error, RewardUnusable) else ""
            return fields | {
                "kind": "pipeline",
                "class": type(error).__name__,
                "decisions": decisions,
                "blamed": blamed,
            }
    trace = "".join(traceback.format_exception(error))[-_TRACE:]
    return {"kind": "other", "message": message_of(error), "trace": trace}


def exception_of(fields: dict[str, Any]) -> Exception:
    """Return the exception that `described` has described.

    Raises:
        KeyError, TypeError, ValueError: The fields are not those of an exception.
    """
    message = clean_text(str(fields["message"]))
    if fields["kind"] == "sandbox":
        return from_wire(str(fields["reason"]), message)
    if fields["kind"] == "pipeline":
        kind = getattr(errors, str(fields["class"]), PipelineError)
        if kind is RewardUnusable:
            return RewardUnusable(message, str(fields["blamed"]))
        # A class of the handler's package is not known here.
        known = isinstance(kind, type) and issubclass(kind, PipelineError)
        error = kind(message) if known else PipelineError(message)
        vars(error).update(fields["decisions"])
        return error
    error = PipelineError(message, "InternalError")
    error.add_note(clean_text(str(fields["trace"])))
    return error
