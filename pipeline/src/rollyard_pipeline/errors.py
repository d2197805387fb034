"""The exceptions of the stage workers: one tree, each with a stable `reason`.

Exceptions that the package always catches itself derive from the root and stand where they are raised.
Failures of an inference server have their own tree, `rollyard_inference.errors`. A `PipelineError` is
always an infrastructure failure. It becomes a `StageFailure`, never a reward. What the policy did wrong is
not an exception but a `truncated` trajectory, an observation, or a low score.
"""

from __future__ import annotations

from typing import ClassVar

from rollyard_crds.names import NO_TOOL_PARSER, StageName


class WorkerError(Exception):
    """The base class of every exception of the stage workers."""

    reason: str = "WorkerError"
    """A CamelCase word for programs. It is stable."""


class PipelineError(WorkerError):
    """The base class of infrastructure failures. The attributes say what the queue does next."""

    reason = "PipelineError"
    retryable: ClassVar[bool] = True
    return_to: ClassVar[StageName | None] = None
    counts: ClassVar[bool] = True
    """Whether the failure counts as an attempt of the rollout.

    If it does not, the code that raises the exception must limit how often this happens.
    """
    of_node: ClassVar[bool] = False
    """Whether a failure at a worker's start concerns the node, so another node may succeed."""


class OptionError(PipelineError):
    """A command-line option cannot be used."""

    reason = "OptionInvalid"


class ExtensionError(PipelineError):
    """A handler, agent, tool, parser or reward function of this name cannot be loaded on this worker.

    The reason is `UnknownHandler`, `UnknownAgent`, `UnknownTool`, `UnknownToolParser` or
    `UnknownRewardFunction`.
    """

    reason = "UnknownExtension"
    retryable = False

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoToolParser(PipelineError):
    """No parser reads the calls of the model's chat template. It ends the job, as every rollout has it."""

    reason = NO_TOOL_PARSER
    retryable = False


class ToolParserFailed(PipelineError):
    """The process that reads turns with the library `renderers` could not be started, or died."""

    reason = "ToolParserFailed"


class ToolParserTimeout(ToolParserFailed):
    """The process took too long for a turn, and was killed."""

    reason = "ToolParserTimeout"


class RewardComponentUnknown(PipelineError):
    """The job's `reward` names a component that nothing returns, or gives one name to two components."""

    reason = "RewardComponentUnknown"
    retryable = False


class RewardFunctionFailed(PipelineError):
    """The job's reward function raised an exception, died, or returned something else than a score."""

    reason = "RewardFunctionFailed"


class RewardFunctionTimeout(RewardFunctionFailed):
    """The job's reward function took too long, and its process was killed."""

    reason = "RewardFunctionTimeout"


class RewardServiceFailed(PipelineError):
    """The job's reward service gave no score in any of the tries."""

    reason = "RewardServiceFailed"


class FormatCheckFailed(PipelineError):
    """The process that looks for patterns could not be started, or died."""

    reason = "FormatCheckFailed"


class FormatCheckTimeout(FormatCheckFailed):
    """A pattern could not be looked for in time, and the process was killed."""

    reason = "FormatCheckTimeout"


class TaskInvalid(PipelineError):
    """The task lacks what its handler or agent needs. The message names the field."""

    reason = "TaskInvalid"
    retryable = False


class PromptTooLong(PipelineError):
    """The first prompt of a rollout leaves no room for a sampled token. The message has both numbers."""

    reason = "PromptTooLong"
    retryable = False


class TokenizerUnavailable(PipelineError):
    """The folder of the tokenizer is not on this machine, or is incomplete."""

    reason = "TokenizerUnavailable"
    retryable = False


class TemplateError(PipelineError):
    """The chat template is broken, or refuses this conversation."""

    reason = "TemplateError"
    retryable = False


class SetupFailed(PipelineError):
    """The task's setup script did not exit with 0."""

    reason = "SetupFailed"
    return_to: ClassVar[StageName | None] = "init"


class InitTimeout(PipelineError):
    """Init took longer than `stages.init.timeoutSeconds`."""

    reason = "InitTimeout"
    return_to: ClassVar[StageName | None] = "init"


class EvalTimeout(PipelineError):
    """Eval took longer than its limit, and not because of what ran in the sandbox."""

    reason = "EvalTimeout"


class EvaluationInvalid(PipelineError):
    """A handler's evaluation is not a finite number, or lies outside of its `reward_range`."""

    reason = "EvaluationInvalid"
    retryable = False


class RewardUnusable(PipelineError):
    """The tests of a task gave no reward, or none that can be used.

    A handler raises it from `eval` where the policy may have caused this. The evaluation is then repeated in
    a sandbox that no policy has seen: if it gives a reward there, the policy is to blame and gets 0.
    """

    reason = "RewardUnusable"
    retryable = False

    def __init__(self, message: str, reward_reason: str) -> None:
        super().__init__(message)
        self.reward_reason = reward_reason
        """The record's `reward_reason` if the policy is to blame."""


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


class SandboxCrashed(PipelineError):
    """The exec server of a rollout's sandbox has ended by itself, which is a bug of ours, for the first time.

    When it does again, the rollout scores 0.
    """

    reason = "SandboxCrashed"
    return_to = "init"


class CarryUnusable(PipelineError):
    """The job requests a carry that its own Init makes impossible. The message names the field."""

    reason = "CarryUnusable"
    retryable = False


class EvalSandboxFailed(PipelineError):
    """Eval's fresh sandbox could not be prepared, or was lost. What Run left still exists."""

    reason = "EvalSandboxFailed"


class NoBackend(PipelineError):
    """The pool has had no ready backend for too long.

    The control plane limits how often this does not count.
    """

    reason = "NoBackend"
    counts = False


class ControlPlaneRefused(PipelineError):
    """The control plane answered with an error that a repetition cannot fix."""

    reason = "ControlPlaneRefused"


class NotThere(ControlPlaneRefused):
    """The requested object does not exist, or no longer exists."""


class JobEnded(ControlPlaneRefused):
    """The job that this worker's token serves has ended, or was deleted or replaced."""


class SandboxMissing(PipelineError):
    """A sandbox is needed on a worker that was started without any."""

    reason = "SandboxMissing"
    retryable = False


class HandlerStateInvalid(PipelineError):
    """What a handler left in `ctx.carry` is not JSON, or is too large."""

    reason = "HandlerStateInvalid"
    retryable = False


class HandlerFailed(PipelineError):
    """The process of a handler's call could not be started, or died. The message names the handler."""

    reason = "HandlerFailed"


class HandlerRaised(PipelineError):
    """A handler raised an exception of a class that Rollyard does not know, in its own process."""

    reason = "InternalError"


class HandlerBlocked(PipelineError):
    """The code of a handler was at work when the time of Run was up, so the policy is not to blame."""

    reason = "HandlerBlocked"


class VerifierFailed(PipelineError):
    """The process that compares answers could not be started, or died."""

    reason = "VerifierFailed"
