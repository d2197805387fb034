"""The handler `shell`: a hidden test script decides, in the sandbox that the policy worked in."""

from __future__ import annotations

import math
import secrets
from typing import Final

from rollyard_crds.task import Task
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import FileError

from rollyard_pipeline.errors import TaskInvalid, TestScriptError
from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext
from rollyard_pipeline.handlers.scripts import run_script

_OUTPUT: Final = 16_384  # bytes kept of the script's output
_REWARD_BYTES: Final = 64


class ShellHandler(Handler):
    """Exit status 0 of `test_script` is reward 1.0, any other 0.0.

    Every process of Run is killed first; the script arrives only then and runs in a fresh
    bash. It sees `$ROLLYARD_ANSWER` (what `submit` handed in, else empty) and may write a
    number between 0 and 1 to the file `$ROLLYARD_REWARD_FILE`, which then is the reward.
    A script past its time limit scores 0, with the component `test_timeout`.
    """

    def check(self, task: Task) -> list[str]:
        return [] if task.test_script else ["test_script: required by the handler 'shell'"]

    async def eval(self, ctx: StageContext) -> Evaluation:
        if not ctx.task.test_script:
            raise TaskInvalid(f"task '{ctx.task.id}': test_script: required by the handler 'shell'")
        client = ctx.sandbox
        await client.kill_all()
        # Unguessable, so that nothing that Run left behind can have written it.
        reward_file = f"{ctx.workdir}/.rollyard-{secrets.token_hex(16)}"
        result = await run_script(
            client,
            ctx.task.test_script,
            env={**ctx.env, "ROLLYARD_ANSWER": ctx.answer or "", "ROLLYARD_REWARD_FILE": reward_file},
            timeout=ctx.timeout,
            max_output=_OUTPUT,
        )
        if result.timed_out:
            return Evaluation(0.0, {"test_timeout": 1.0})
        written = await _reward(client, reward_file)
        if written is not None:
            return Evaluation(written, {"exit_zero": float(result.exit_code == 0)})
        return Evaluation(1.0 if result.exit_code == 0 else 0.0)


async def _reward(client: ExecClient, path: str) -> float | None:
    try:
        content = await client.read_file(path, max_bytes=_REWARD_BYTES)
    except FileError as error:
        if error.reason in ("FileNotFound", "NotADirectory"):
            return None
        raise
    text = content.text().strip()
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise TestScriptError(f"$ROLLYARD_REWARD_FILE holds {text!r}, expected a number between 0 and 1")
    return value
