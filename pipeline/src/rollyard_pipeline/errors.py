"""The exceptions of the stage workers: one tree, each with a stable `reason`.

Exceptions that the package always catches itself derive from the root and stand where they are raised.
Failures of an inference server have their own tree, `rollyard_inference.errors`. A `PipelineError` is
always an infrastructure failure. It becomes a `StageFailure`, never a reward. What the policy did wrong is
not an exception but a `truncated` trajectory, an observation, or a low score.

There is one class for each way in which a failure is handled. The reason says what has happened.
"""

from __future__ import annotations

from typing import ClassVar

from rollyard_crds.names import NO_TOOL_PARSER, StageName


class WorkerError(Exception):
    """The base class of every exception of the stage workers."""

    reason: str = "WorkerError"
    """A CamelCase word for programs. It is stable."""


class PipelineError(WorkerError):
    """An infrastructure failure after which the stage is tried again, unless the class says otherwise.

    The attributes say what the queue does next.

    Args:
        message: What has happened, for people.
        reason: What has happened, for programs; that of the class if it is None.
        return_to: The stage at which the rollout begins again; that of the class if it is None.
        counts: Whether the failure counts as an attempt of the rollout; as the class says if it is None. If
            it does not count, the code that raises the exception must limit how often this happens.
    """

    reason = "PipelineError"
    retryable: ClassVar[bool] = True
    return_to: StageName | None = None
    counts: bool = True
    of_node: ClassVar[bool] = False
    """Whether a failure at a worker's start concerns the node, so another node may succeed."""

    def __init__(
        self,
        message: str,
        reason: str | None = None,
        *,
        return_to: StageName | None = None,
        counts: bool | None = None,
    ) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason
        if return_to is not None:
            self.return_to = return_to
        if counts is not None:
            self.counts = counts


class PermanentFailure(PipelineError):
    """A failure that every attempt would have."""

    reason = "PermanentFailure"
    retryable = False


class NoToolParser(PermanentFailure):
    """No parser reads the calls of the model's chat template. It ends the job, as every rollout has it."""

    reason = NO_TOOL_PARSER


class TaskInvalid(PermanentFailure):
    """The task lacks what its handler or agent needs. The message names the field."""

    reason = "TaskInvalid"


class TokenizerUnavailable(PermanentFailure):
    """The folder of the tokenizer is not on this machine, or is incomplete."""

    reason = "TokenizerUnavailable"


class TokenizerUnreachable(PipelineError):
    """The tokenizer cannot be downloaded now. Another attempt, or another worker, may succeed."""

    reason = "TokenizerUnreachable"


class TemplateError(PermanentFailure):
    """The chat template is broken, or refuses this conversation."""

    reason = "TemplateError"


class RewardUnusable(PermanentFailure):
    """The tests of a task gave no reward, or none that can be used.

    A handler raises it from `eval` where the policy may have caused this. The evaluation is then repeated in
    a sandbox that no policy has seen: if it gives a reward there, the policy is to blame and gets 0.
    """

    reason = "RewardUnusable"

    def __init__(self, message: str, reward_reason: str) -> None:
        super().__init__(message)
        self.reward_reason = reward_reason
        """The record's `reward_reason` if the policy is to blame."""


class ChildFailed(PipelineError):
    """A child process (see `child_processes`) could not be started, died, or said that its work failed."""

    reason = "ChildFailed"


class ChildTimeout(ChildFailed):
    """A child process took too long for a request, and was killed."""

    reason = "ChildTimeout"


class HandlerFailed(PipelineError):
    """The process of a handler's call could not be started, or died. The message names the handler."""

    reason = "HandlerFailed"


class SetupFailed(PipelineError):
    """The task's setup script did not exit with 0, or Init took too long."""

    reason = "SetupFailed"
    return_to = "init"


class EvalTimeout(PipelineError):
    """Eval took longer than its limit, and not because of what ran in the sandbox."""

    reason = "EvalTimeout"


class CarryRefused(PipelineError):
    """What Run left cannot be carried into Eval's sandbox. This is the policy's fault and is scored."""

    reason = "CarryRefused"


class EvalSandboxEnded(PipelineError):
    """With what was carried from Run, a test used up the sandbox's memory, or ended its exec server again.

    It is scored like `CarryRefused`.
    """

    reason = "EvalSandboxEnded"

    def __init__(self, message: str, reward_reason: str) -> None:
        super().__init__(message)
        self.reward_reason = reward_reason
        """The reason of the reward of 0."""


class ControlPlaneRefused(PipelineError):
    """The control plane answered with an error that a repetition cannot fix."""

    reason = "ControlPlaneRefused"


class NotThere(ControlPlaneRefused):
    """The requested object does not exist, or no longer exists."""


class JobEnded(ControlPlaneRefused):
    """The job that this worker's token serves has ended, or was deleted or replaced."""
