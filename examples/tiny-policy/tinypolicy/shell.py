"""Real tools on many folders at once: each round runs one call per folder, all in one bash process.

What a tool prints is rendered exactly as the agent renders it, so that the policy sees in training what
it will see in a rollout.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tinypolicy.tasks import ToolCall

_ROUND_SECONDS: Final = 600
_CPU_SECONDS: Final = 5
_OUTPUT_LIMIT: Final = 4096


class ToolRoundError(RuntimeError):
    """The shell that runs a round of calls itself failed."""

    reason: Final = "ToolRoundFailed"


def write_folder(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` (relative path to text) below `folder`."""
    for path, file_text in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file_text)


def render_result(output: str, exit_code: int) -> str:
    """Return a bash result as the policy sees it: the output, and the exit code where it is not 0."""
    output = output.rstrip("\n")
    if exit_code == 0:
        return output or "(no output)"
    return "\n".join(filter(None, (output, f"[exit code {exit_code}]")))


def _edit(folder: Path, arguments: Mapping[str, str]) -> str:
    path, old, new = (arguments.get(key, "") for key in ("path", "old_str", "new_str"))
    target = (folder / path).resolve()
    if arguments.get("command") != "str_replace" or not old:
        return "error: expected command str_replace with path, old_str and new_str"
    if not target.is_relative_to(folder.resolve()) or not target.is_file():
        return f"error: no such file: {path}"
    before = target.read_text()
    if before.count(old) != 1:
        return f"error: old_str occurs {before.count(old)} times in {path}, expected once"
    target.write_text(before.replace(old, new))
    return f"edited {path}"


def run_scripts(root: Path, jobs: Sequence[tuple[Path, str, Mapping[str, str]]]) -> list[tuple[str, int]]:
    """Run (folder, script, environment) jobs, each in a subshell of its own; return output and exit code.

    The process sees the system read-only and writes below `root` only, with no network, where bubblewrap
    is installed. Raises `ToolRoundError` if the round as a whole fails or outlives its limit.
    """
    if not jobs:
        return []
    out = root / "outputs"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    lines = []
    for index, (folder, script, environment) in enumerate(jobs):
        exports = "".join(f"export {key}={shlex.quote(value)}; " for key, value in environment.items())
        lines.append(
            f"( cd {shlex.quote(str(folder))}; ulimit -t {_CPU_SECONDS}; {exports}"
            f"eval {shlex.quote(script)} )"
            f" > {out}/{index} 2>&1 < /dev/null; codes+=($?)"
        )
    lines.append(f"printf '%s\\n' \"${{codes[@]}}\" > {out}/codes")
    program = root / "round.sh"
    program.write_text("\n".join(lines) + "\n")
    command = ["bash", str(program)]
    bubblewrap = shutil.which("bwrap")
    if bubblewrap:
        command = [
            bubblewrap,
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--unshare-all",
            "--die-with-parent",
            "--bind",
            str(root),
            str(root),
            *command,
        ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ROUND_SECONDS, check=False)
    if done.returncode != 0 or not (out / "codes").exists():
        raise ToolRoundError(f"the shell of a round exited with {done.returncode}: {done.stderr[-500:]}")
    codes = [int(code) for code in (out / "codes").read_text().split()]
    return [
        ((out / str(index)).read_bytes()[:_OUTPUT_LIMIT].decode(errors="replace"), code)
        for index, code in enumerate(codes)
    ]


def run_round(root: Path, calls: Sequence[tuple[Path, ToolCall]]) -> list[str]:
    """Run one call per folder and return the result texts. `submit` has none and must not be among them."""
    shell = [(folder, call) for folder, call in calls if call.name == "bash"]
    jobs: list[tuple[Path, str, Mapping[str, str]]] = [
        (folder, call.arguments.get("command", ""), {}) for folder, call in shell
    ]
    outputs = iter(run_scripts(root, jobs))
    results = []
    for folder, call in calls:
        if call.name == "bash":
            results.append(render_result(*next(outputs)))
        elif call.name == "edit":
            results.append(_edit(folder, call.arguments))
        else:
            results.append(f"error: unknown tool {call.name}")
    return results
