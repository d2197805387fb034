"""Running a bash script in a sandbox without a file: it needs no disk, and nothing inside can change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rollyard_sandbox.client import ExecClient, ExecResult
from rollyard_sandbox.errors import LaunchError

# The script comes on standard input and is read completely before any of it runs. None of its own commands
# can consume the rest. The variable is not exported.
_READ_AND_RUN: Final = 'rollyard_script=$(cat) && exec < /dev/null && eval "$rollyard_script"'
# The answer comes first, up to a NUL, because it may be longer than a request's header.
_READ_ANSWER: Final = "IFS= read -r -d '' ROLLYARD_ANSWER && export ROLLYARD_ANSWER && "
# The shell reads no start-up file, and with -p neither BASH_ENV nor functions from the environment.
_TEST_SHELL: Final = ("bash", "--noprofile", "--norc", "-p", "-c", _READ_ANSWER + _READ_AND_RUN, "bash")


async def run_script(
    client: ExecClient, script: str, *, env: Mapping[str, str], timeout: float, max_output: int
) -> ExecResult:
    """Run `script` in a fresh bash in the work folder, or in `/` if the work folder is gone.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or has no bash.
    """
    argv = ["bash", "-c", _READ_AND_RUN, "bash"]
    data = script.encode(errors="replace")
    try:
        return await client.run(argv, env=dict(env), stdin=data, timeout=timeout, max_output=max_output)
    except LaunchError:
        return await client.run(
            argv, env=dict(env), cwd="/", stdin=data, timeout=timeout, max_output=max_output
        )


async def run_test(
    client: ExecClient,
    script: str,
    *,
    env: Mapping[str, str],
    answer: str,
    timeout: float,
    max_output: int,
) -> ExecResult:
    """Run a hidden test in a fresh bash in the work folder.

    Args:
        env: The whole environment of the test, except ROLLYARD_ANSWER.
        answer: The value of ROLLYARD_ANSWER.

    Raises:
        rollyard_sandbox.errors.SandboxError: The test cannot be started, or the sandbox failed.
    """
    data = answer.replace("\0", "\ufffd").encode(errors="replace") + b"\0" + script.encode(errors="replace")
    return await client.run(
        list(_TEST_SHELL), env=dict(env), clean_env=True, stdin=data, timeout=timeout, max_output=max_output
    )
