"""The exceptions of the sandbox providers: a branch of the package's tree, each with a stable `reason`.

All of them are infrastructure failures, and none of them ever becomes a reward.
"""

from __future__ import annotations

from typing import Literal

from rollyard_pipeline.errors import PipelineError


class SandboxProviderError(PipelineError):
    """The base of the branch.

    Unless a class states otherwise, the next attempt starts at Init in a new sandbox.
    """

    reason = "SandboxError"
    return_to = "init"


class ImageNotUsable(SandboxProviderError):
    """The image is of a kind that this provider cannot start, or lacks what a sandbox needs."""

    reason = "ImageNotUsable"
    retryable = False


class DockerfileRefused(ImageNotUsable):
    """A Dockerfile that cannot be translated faithfully. The message names the line and the reason."""

    reason = "DockerfileRefused"

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line
        """The number of the line, from 1."""


class NodeUnusable(SandboxProviderError):
    """This node cannot start sandboxes, and another node may.

    The reason is `UserNamespacesForbidden` (by the kernel or by the policy of a container),
    `BubblewrapMissing`, `ApptainerMissing` or `EngineMissing` (there is no usable program), `EngineUnusable`
    (Docker or Podman does not answer, or cannot enforce limits), or `RunDirUnusable` (the path is too long
    for a socket, or the folder cannot be made private).
    """

    reason = "NodeUnusable"
    retryable = False
    of_node = True

    def __init__(
        self,
        message: str,
        reason: Literal[
            "UserNamespacesForbidden",
            "BubblewrapMissing",
            "ApptainerMissing",
            "EngineMissing",
            "EngineUnusable",
            "RunDirUnusable",
        ],
    ) -> None:
        super().__init__(message)
        self.reason = reason


class SandboxLost(SandboxProviderError):
    """The sandbox is gone, is on another node, or does not answer."""

    reason = "SandboxLost"


class SandboxStartFailed(SandboxProviderError):
    """The sandbox's exec server did not become ready. The message ends with the server's output."""

    reason = "SandboxStartFailed"


class SandboxImpossible(SandboxProviderError):
    """No attempt can start this sandbox, as its driver reports or as the exec server in it shows.

    The reason is more precise where the request is the cause: `NetworkImpossible` if sandboxes of this kind
    cannot have the network of the job, `ResourceLimitsUnavailable` if this machine cannot enforce a limit,
    `SandboxFileRefused` if a file cannot be written at its path, and `ImageNotAllowed` if the installer of
    the worker does not list the image that a job or a task names.
    """

    reason = "SandboxImpossible"
    retryable = False

    def __init__(
        self,
        message: str,
        reason: Literal[
            "SandboxImpossible",
            "NetworkImpossible",
            "ResourceLimitsUnavailable",
            "SandboxFileRefused",
            "ImageNotAllowed",
        ] = "SandboxImpossible",
    ) -> None:
        super().__init__(message)
        self.reason = reason


class DiskFull(SandboxProviderError):
    """The image cache is full, or the sandbox has reached its own disk limit."""

    reason = "DiskFull"


class NodeDiskFull(DiskFull):
    """The disk of the run folder is full. The rollout moves to another node, or waits for room.

    It does not count as an attempt. The provider takes no more work until there is room (see
    `SandboxProvider.trouble`).
    """

    reason = "NodeDiskFull"
    counts = False
    of_node = True
