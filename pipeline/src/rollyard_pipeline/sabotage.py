"""The decision who has failed when an evaluation cannot be done: the policy, or the infrastructure.

The rule: what a sandbox contains is the policy's. A policy that has filled, locked or broken it gets 0.0 at
once, because a new try would pay. A sandbox, an exec server, a worker or a disk of the node that is lost is
infrastructure: the attempt counts, and there is no reward.
"""

from __future__ import annotations

from typing import Final

from rollyard_sandbox.errors import SandboxError as ExecError

SABOTAGED: Final = "SandboxSabotaged"
OUT_OF_MEMORY: Final = "SandboxOutOfMemory"
TEST_TIMEOUT: Final = "TestTimeout"
VERIFY_TIMEOUT: Final = "VerifyTimeout"
ANSWER_UNUSABLE: Final = "AnswerUnusable"
REWARD_INVALID: Final = "RewardInvalid"

_POLICYS: Final = frozenset(
    {
        # The exec server has its own evidence.
        "SandboxSabotaged",
        # Processes that no SIGKILL ends belong to the sandbox.
        "ProcessesSurvive",
        # Files and folders of the sandbox that are not what the evaluation needs.
        "FileError", "FileNotFound", "FileTooLarge", "InputOutputError", "IsADirectory", "NameTooLong",
        "NotADirectory", "NotAFile", "NotEmpty", "PermissionDenied", "ReadOnly", "SymlinkLoop",
        "TooManyEntries", "WouldBlock",
        # Its disks and limits are its own, and nothing but what Run has left uses them.
        "DiskFull", "ResourceExhausted",
        # A program is there and cannot be started: its folder is gone, or what it is given is too long.
        "LaunchFailed",
        # What the policy said or left does not fit into a request.
        "CommandTooLarge",
    }
)  # fmt: skip
_INFRASTRUCTURE: Final = frozenset(
    {
        # The sandbox, its server or the node is gone, or is not the one that was meant.
        "SandboxLost", "ProtocolError", "Unauthorized",
        # Descriptors are those of the server or of the node.
        "TooManyOpenFiles",
        # The image has no such program. Where Run could remove it, `stages.evaluation` looks for that.
        "ProgramNotFound",
        # The server makes the protections against its commands by itself.
        "ConfinementFailed",
        "IPythonUnavailable",
        # Mistakes of a handler.
        "BadRequest", "NoCommandRunning", "OutputNotFound", "SessionBusy", "TooManySessions",
        "SandboxError",
    }
)  # fmt: skip


def reward_reason(error: Exception) -> str:
    """Why an evaluation that met `error` scores 0.0; empty: the error is no failing of the policy."""
    if not isinstance(error, ExecError):
        return ""
    return SABOTAGED if error.reason in _POLICYS else ""


def judged() -> frozenset[str]:
    """Every reason of the exec server that the table knows."""
    return _POLICYS | _INFRASTRUCTURE
