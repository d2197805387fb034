"""The decision about who is at fault when an evaluation cannot be done: the policy or the infrastructure.

The rule is that what a sandbox contains is the policy's responsibility. A policy that has filled, locked or
broken its sandbox gets 0.0 at once, because it would otherwise gain from a new try. If a sandbox, an exec
server, a worker or a disk of the node is lost, that is an infrastructure failure: the attempt counts, and
there is no reward.

An exec server that ends by itself has a bug, which is an infrastructure failure. It is one only once for each
rollout, because a policy that knows the bug would otherwise have as many tries as it likes.
"""

from __future__ import annotations

import secrets
from typing import Final

from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import LaunchError
from rollyard_sandbox.errors import SandboxError as ExecError

SABOTAGED: Final = "SandboxSabotaged"
OUT_OF_MEMORY: Final = "SandboxOutOfMemory"
CRASHED: Final = "SandboxCrashed"
TEST_TIMEOUT: Final = "TestTimeout"
VERIFY_TIMEOUT: Final = "VerifyTimeout"
ANSWER_UNUSABLE: Final = "AnswerUnusable"
REWARD_INVALID: Final = "RewardInvalid"
FORMAT_TIMEOUT: Final = "FormatTimeout"
REWARD_MISSING: Final = "RewardMissing"

_LOOK_SECONDS: Final = 30.0
_POLICYS: Final = frozenset(
    {
        # The exec server has its own evidence.
        "SandboxSabotaged",
        # Processes that no SIGKILL ends belong to the sandbox.
        "ProcessesSurvive",
        # Files and folders of the sandbox are not what the evaluation needs.
        "FileError",
        "FileNotFound",
        "FileTooLarge",
        "InputOutputError",
        "IsADirectory",
        "NameTooLong",
        "NotADirectory",
        "NotAFile",
        "NotEmpty",
        "PermissionDenied",
        "ReadOnly",
        "SymlinkLoop",
        "TooManyEntries",
        "WouldBlock",
        # A sandbox has its own disks and limits, and only what Run has left uses them.
        "DiskFull",
        "ResourceExhausted",
        # A program exists but cannot be started: its folder is gone, or its arguments are too long.
        "LaunchFailed",
        # Something in the sandbox has confused its server. It is a bug of ours, which the worker logs.
        "ServerFault",
        # What the policy said or left does not fit into a request.
        "CommandTooLarge",
    }
)
_INFRASTRUCTURE: Final = frozenset(
    {
        # The sandbox, its server or the node is gone, or is not the expected one.
        "SandboxLost",
        "ProtocolError",
        "Unauthorized",
        # Descriptors belong to the server or to the node.
        "TooManyOpenFiles",
        # The image has no such program. `was_removed` checks whether Run could have removed it.
        "ProgramNotFound",
        # The server sets up the protections against its commands by itself.
        "ConfinementFailed",
        "IPythonUnavailable",
        # These are mistakes of a handler.
        "BadRequest",
        "NoCommandRunning",
        "OutputNotFound",
        "SessionBusy",
        "TooManySessions",
        "SandboxError",
    }
)


def reward_reason(error: Exception) -> str:
    """Return why an evaluation that raised `error` scores 0.0, or "" if the policy is not at fault."""
    if not isinstance(error, ExecError):
        return ""
    return SABOTAGED if error.reason in _POLICYS else ""


async def was_removed(client: ExecClient, error: ExecError) -> bool:
    """Return whether the policy may have removed a missing program: it can write where programs are."""
    if error.reason != "ProgramNotFound":
        return False
    try:
        looked = await client.run(["test", "-w", "/usr/bin"], cwd="/", timeout=_LOOK_SECONDS)
    except LaunchError:
        return await _can_write(client)  # The policy may have removed `test`, too.
    except ExecError:
        return False
    return looked.exit_code == 0


async def _can_write(client: ExecClient) -> bool:
    probe = f"/usr/bin/.{secrets.token_hex(16)}"
    try:
        await client.write_file(probe, b"")
        await client.remove(probe)
    except ExecError:
        return False
    return True


def judged() -> frozenset[str]:
    """Return every reason of the exec server that the table contains."""
    return _POLICYS | _INFRASTRUCTURE
