"""Substitutes for calls that an older server lacks. Pods keep their server while workers are upgraded."""

from __future__ import annotations

import secrets
from typing import Protocol

from rollyard_sandbox.client.results import EvalPlace, ServerInfo
from rollyard_sandbox.errors import FileError, SandboxSabotaged

_NAME_BYTES = 16
# Every program may write to these folders at first, and their size is fixed. If one of them cannot be written
# to later, a program of the sandbox has prevented it.
_SHARED = ("/dev/shm", "/tmp")
_LOCKED = frozenset({"PermissionDenied", "NotADirectory", "SymlinkLoop"})


class OlderCalls(Protocol):
    """The calls of the client that every server has."""

    async def info(self) -> ServerInfo:
        """Return what the server says about itself."""

    async def kill_all(self) -> int:
        """End every process of the sandbox but the server, and return how many there were."""

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Replace a file, and make the folders above it."""

    async def remove(self, path: str) -> None:
        """Remove a file or a folder."""


async def begin_eval(client: OlderCalls) -> EvalPlace:
    """Do the work of `ExecClient.begin_eval` through `kill_all` and file operations.

    The folder's name cannot be guessed, and it is made when no process of the sandbox is alive.

    Raises:
        SandboxSabotaged: Folders to which every program can write in a fresh sandbox are locked.
        FileError: Nothing can be written for another reason.
    """
    await client.kill_all()
    work = (await client.info()).workdir
    problems: dict[str, FileError] = {}
    for parent in dict.fromkeys((*_SHARED, work)):
        folder = f"{parent}/.eval-{secrets.token_hex(_NAME_BYTES)}"
        place = EvalPlace(folder, f"{folder}/home", f"{folder}/tmp", f"{folder}/reward")
        try:
            for inner in (place.home, place.tmp):
                # Writing a file makes its folders. There is no call that makes a folder alone.
                await client.write_file(f"{inner}/.made", b"", mode=0o600)
                await client.remove(f"{inner}/.made")
            await client.write_file(place.reward_file, b"", mode=0o600)
        except FileError as error:
            problems[parent] = error
            continue
        return place
    evidence = [str(error) for parent, error in problems.items() if error.reason in _LOCKED]
    if evidence:
        raise SandboxSabotaged("no private place can be made for the evaluation: " + "; ".join(evidence))
    raise problems[work]
