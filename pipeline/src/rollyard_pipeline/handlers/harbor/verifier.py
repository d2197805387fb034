"""Running a task's tests in a sandbox, after everything that could have been planted there was removed.

No process of the policy is alive while this module works, so what it has removed stays removed. Which of the
policy's files the tests run is up to the tests.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollyard_crds.fields.harbor import HarborFolder
from rollyard_sandbox.client import EvalPlace, ExecClient
from rollyard_sandbox.errors import FileError
from rollyard_tasks.harbor.plan import LOGS, TESTS, WORKDIR, HarborPlan, HarborStep

from rollyard_pipeline.errors import RewardUnusable
from rollyard_pipeline.handlers.environment import evaluation_environment
from rollyard_pipeline.handlers.harbor.rewards import MAX_FILE, Content, read_rewards
from rollyard_pipeline.sabotage import TEST_TIMEOUT

VERIFIER: Final = f"{LOGS}/verifier"
_OUTPUT: Final = 4096  # The number of bytes of the tests' output that an error message may have.


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What the tests said: the rewards by their keys, or the reason why there are none."""

    rewards: Mapping[str, float]
    reason: str = ""
    printed: str = ""
    """The output of the tests, and what was left out of their reward files."""


async def make_folder(client: ExecClient, path: str) -> None:
    """Make an empty folder, in place of whatever is at its path.

    Raises:
        FileError: It cannot be made.
    """
    await remove(client, path)
    await client.write_file(f"{path}/.made", b"")
    await client.remove(f"{path}/.made")


async def remove(client: ExecClient, path: str) -> None:
    """Remove a file, a link or a folder, if there is one.

    Raises:
        FileError: It cannot be removed.
    """
    try:
        await client.remove(path)
    except FileError as error:
        if error.reason != "FileNotFound":
            raise


async def empty(client: ExecClient, folder: str) -> None:
    """Remove everything in a folder, which itself stays: it may be a mount.

    Raises:
        FileError: Something cannot be removed.
    """
    for entry in await client.list_dir(folder):
        await remove(client, f"{folder}/{entry.name}")


async def upload(client: ExecClient, folder: str, files: Mapping[str, tuple[bytes, int]]) -> None:
    """Write files, which are given as content and mode by their paths below a folder.

    Whatever is at such a path is removed first: a link would keep the content elsewhere.

    Raises:
        FileError: A file cannot be written.
    """
    for path, (data, mode) in files.items():
        await remove(client, f"{folder}/{path}")
        await client.write_file(f"{folder}/{path}", data, mode=mode)


async def verify(
    client: ExecClient,
    plan: HarborPlan,
    step: HarborStep,
    folder: HarborFolder,
    *,
    place: EvalPlace,
    env: Mapping[str, str],
    timeout: float,
) -> StepVerdict:
    """Run the tests of a step, and return what they wrote.

    Args:
        client: A sandbox in which `begin_eval` was the last call.
        place: The place that it made.
        env: The environment of the evaluation.
        timeout: The limit of the tests in seconds.

    Raises:
        RewardUnusable: The tests ended without a reward that can be used.
        rollyard_sandbox.errors.SandboxError: The tests cannot be started, or the sandbox failed.
    """
    await make_folder(client, VERIFIER)
    if not (plan.separate and plan.verifier_image):
        await empty(client, TESTS)
        await upload(client, TESTS, folder.below(*step.tests))
    # What the policy wrote there must not decide which program or module is found.
    variables: Mapping[str, str] = env
    for written in dict.fromkeys([plan.workdir, LOGS, *plan.artifacts]):
        variables = evaluation_environment(variables, place, workdir=written, author=env)
    # Tests find the modules next to them, which Python would otherwise not search for (PYTHONSAFEPATH).
    variables = {"PYTHONPATH": TESTS, **variables, **step.verifier_env}
    result = await client.run(
        ["bash", "--noprofile", "--norc", f"{TESTS}/test.sh"],
        env=dict(variables),
        cwd=plan.workdir,
        clean_env=True,
        timeout=timeout,
        max_output=_OUTPUT,
    )
    # Processes that the tests left running could change the files while they are read.
    await client.kill_all()
    printed = result.text().strip()
    if result.timed_out:
        return StepVerdict({}, TEST_TIMEOUT, printed)
    try:
        as_json, as_text = await _content(client, "reward.json"), await _content(client, "reward.txt")
        reading = read_rewards(as_json, as_text, plan.reward_key)
        return StepVerdict(
            reading.rewards, printed="\n".join(part for part in (printed, reading.note) if part)
        )
    except RewardUnusable as error:
        end = result.text()[-1000:].strip()
        words = f"{error}; test.sh exited with {result.exit_code}: {end or 'it printed nothing'}"
        raise RewardUnusable(words, error.reward_reason) from error


async def _content(client: ExecClient, name: str) -> Content:
    try:
        content = await client.read_file(f"{VERIFIER}/{name}", max_bytes=MAX_FILE + 1)
    except FileError as error:
        if error.reason == "FileNotFound":
            return None
        return f"{name} cannot be read ({error.reason})"
    return content.data if len(content.data) <= MAX_FILE else f"{name} is longer than {MAX_FILE} bytes"


async def enter(client: ExecClient, plan: HarborPlan) -> bool:
    """Let the agent's shell begin in the working folder, and return whether that was possible."""
    if plan.workdir == WORKDIR:
        return True
    result = await client.bash(f"cd -- {shlex.quote(plan.workdir)}", timeout=30.0)
    return result.exit_code == 0
