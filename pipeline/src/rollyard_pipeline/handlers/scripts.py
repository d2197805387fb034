"""Running a bash script in a sandbox without a file: it needs no disk, and nothing there can change it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rollyard_sandbox.client import ExecClient, ExecResult
from rollyard_sandbox.errors import LaunchError

# The script comes on standard input and is read whole before any of it runs, so that no command
# of its own can eat the rest. The variable is not exported.
_READ_AND_RUN: Final = 'rollyard_script=$(cat) && exec < /dev/null && eval "$rollyard_script"'


async def run_script(
    client: ExecClient, script: str, *, env: Mapping[str, str], timeout: float, max_output: int
) -> ExecResult:
    """Run `script` in a fresh bash in the work folder; in `/` where the work folder is gone.

    Raises:
        rollyard_sandbox.errors.SandboxError: the sandbox failed, or has no bash.
    """
    argv = ["bash", "-c", _READ_AND_RUN, "bash"]
    data = script.encode(errors="replace")
    try:
        return await client.run(argv, env=dict(env), stdin=data, timeout=timeout, max_output=max_output)
    except LaunchError:
        return await client.run(
            argv, env=dict(env), cwd="/", stdin=data, timeout=timeout, max_output=max_output
        )
