"""Init puts the repository into its place, in Run's sandbox and in Eval's fresh one."""

from __future__ import annotations

import base64
import binascii
import posixpath
from typing import Final

from rollyard_crds.fields.swe_tests import SweTests

from rollyard_pipeline.errors import SetupFailed, TaskInvalid
from rollyard_pipeline.handlers.base import StageContext
from rollyard_pipeline.handlers.swe import diffs

_SECONDS: Final = 300.0
_FROM_FOLDER: Final = 'mkdir -p -- "$2" && cp -a -- "$1/." "$2"'
_FROM_ARCHIVE: Final = 'mkdir -p -- "$2" && tar -x --no-same-owner -f "$1" -C "$2"'
_FROM_EITHER: Final = f'if [ -d "$1" ]; then {_FROM_FOLDER}; else {_FROM_ARCHIVE}; fi'


async def place(ctx: StageContext, tests: SweTests, folder: str) -> None:
    """Make the repository's folder, apply the task's own diff, and remove what the policy must not see.

    In Eval's sandbox nothing is removed. There the hidden tests' diff is tried instead, while nothing of the
    policy's can be in its way.

    Raises:
        SetupFailed: One of these steps failed.
        TaskInvalid: The archive is not in base64.
        rollyard_sandbox.errors.SandboxError: The sandbox failed.
    """
    repository = tests.repository
    target = posixpath.join(ctx.workdir, repository.unpack) if repository.unpack is not None else folder
    if repository.archive is not None:
        try:
            data = base64.b64decode(repository.archive, validate=True)
        except (binascii.Error, ValueError) as error:
            raise TaskInvalid(f"task '{ctx.task.id}': swe.repository.archive: is not in base64") from error
        packed = f"{ctx.workdir}/.rollyard-archive"
        await ctx.sandbox.write_file(packed, data)
        await _bash(ctx, f'{_FROM_ARCHIVE} && rm -- "$1"', packed, target, what="archive")
    elif repository.source is not None:
        await _bash(ctx, _FROM_EITHER, repository.source, target, what="source")
    await _bash(ctx, '[ -d "$1" ] && [ ! -L "$1" ]', folder, what="path")
    if repository.patch is not None and not await diffs.applies(ctx, folder, repository.patch):
        raise SetupFailed(f"task '{ctx.task.id}': swe.repository.patch does not apply")
    if not ctx.for_eval:
        for path in repository.hidden:
            hidden = posixpath.join(folder, path)
            await _bash(ctx, 'rm -rf -- "$1" && [ ! -e "$1" ]', hidden, what="hidden")
    elif tests.patch is not None and not await diffs.applies(ctx, folder, tests.patch, "--check"):
        raise SetupFailed(f"task '{ctx.task.id}': swe.patch does not apply to the repository")


async def _bash(ctx: StageContext, script: str, *arguments: str, what: str) -> None:
    result = await ctx.sandbox.run(
        ["bash", "-c", script, "bash", *arguments], cwd="/", timeout=min(_SECONDS, ctx.timeout)
    )
    if result.exit_code != 0:
        how = "ran out of time" if result.timed_out else f"ended with {result.exit_code}"
        raise SetupFailed(
            f"task '{ctx.task.id}': swe.repository.{what}: the command {how}: {result.text()[-1000:]}"
        )
