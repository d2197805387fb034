"""Substitutes for calls that an older server lacks: pods keep theirs while workers are upgraded."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rollyard_sandbox.client.results import EvalPlace
from rollyard_sandbox.errors import FileError, SandboxSabotaged

if TYPE_CHECKING:
    from rollyard_sandbox.client.exec_client import ExecClient

_NAME_BYTES = 16
# Anybody may write to these at first, and they are of fixed size: who finds them otherwise was kept out.
_SHARED = ("/dev/shm", "/tmp")
_LOCKED = frozenset({"PermissionDenied", "NotADirectory", "SymlinkLoop"})


async def begin_eval(client: ExecClient) -> EvalPlace:
    """`ExecClient.begin_eval` through `kill_all` and file operations.

    The folder's name cannot be guessed, and it is made when no process of the sandbox is alive.

    Raises:
        SandboxSabotaged: folders that anybody can write to in a fresh sandbox are locked.
        FileError: nothing can be written for another reason.
    """
    await client.kill_all()
    work = (await client.info()).workdir
    problems: dict[str, FileError] = {}
    for parent in dict.fromkeys((*_SHARED, work)):
        folder = f"{parent}/.eval-{secrets.token_hex(_NAME_BYTES)}"
        place = EvalPlace(folder, f"{folder}/home", f"{folder}/tmp", f"{folder}/reward")
        try:
            for inner in (place.home, place.tmp):
                # Writing makes the folders of a file; there is no call that makes one alone.
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
