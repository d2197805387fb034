"""Diffs are applied to a repository in the sandbox, by its git."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rollyard_crds.task_formats.swebench.diffs import changed_files
from rollyard_sandbox.client import ExecResult

from rollyard_pipeline.handlers.base import StageContext

_GIT: Final = ("git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn")
_SECONDS: Final = 120.0
_FENCED: Final = re.compile(r"^```[ \t]*(?:diff|patch)?[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINKS: Final = re.compile(r"^(?:new file mode|new mode) (?:120000|160000)\b", re.MULTILINE)
_MOVED: Final = re.compile(r"^(?:rename|copy) from (.*)$", re.MULTILINE)


async def applies(
    ctx: StageContext, folder: str, patch: str, *options: str, env: Mapping[str, str] | None = None
) -> bool:
    """Apply a diff to the folder, with further options of `git apply`, and return whether that was possible.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or has no git.
    """
    return (await _git(ctx, folder, patch, options, env)).exit_code == 0


async def apply_answer(
    ctx: StageContext, folder: str, answer: str, protected: Callable[[bytes], bool], max_bytes: int
) -> str:
    """Apply the diff that an answer holds, and return why it is refused, or "".

    Changes of protected files are left out. Links and moves of protected files are refused.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or has no git.
    """
    patch = patch_of(answer)
    if not patch.strip() or len(patch.encode(errors="replace")) > max_bytes:
        return "it is empty, or too long"
    if _LINKS.search(patch):
        return "it makes links"
    if any(name.startswith('"') or protected(_bytes(name)) for name in _MOVED.findall(patch)):
        return "it moves a file that the policy cannot change"
    listed = await _git(ctx, folder, patch, ("--numstat", "-z"), ctx.eval_env)
    if listed.exit_code != 0 or listed.truncated_bytes:
        return "it is no diff"
    names = {_bytes(name) for name in changed_files(patch)}
    names |= {record.split(b"\t", 2)[-1] for record in listed.output.split(b"\0") if record}
    excluded = [f"--exclude={_literal(name)}" for name in sorted(names) if protected(name)]
    if not await applies(ctx, folder, patch, *excluded, env=ctx.eval_env):
        return "it does not apply"
    return ""


def patch_of(answer: str) -> str:
    """Return the last fenced block of an answer, after `</think>`, else all of it. It ends with a newline."""
    said = answer.rpartition("</think>")[2]
    blocks = _FENCED.findall(said)
    patch = str(blocks[-1]) if blocks else said
    return patch if patch.endswith("\n") or not patch else f"{patch}\n"


async def _git(
    ctx: StageContext, folder: str, patch: str, options: Sequence[str], env: Mapping[str, str] | None
) -> ExecResult:
    # A repository further up must not decide what the paths of the diff are relative to.
    variables = {**(env or {}), "GIT_CEILING_DIRECTORIES": posixpath.dirname(folder)}
    return await ctx.sandbox.run(
        [*_GIT, *options, "-"], env=variables, clean_env=env is not None, cwd=folder,
        stdin=patch.encode(errors="replace"), timeout=min(_SECONDS, ctx.timeout), max_output=1 << 20,
    )  # fmt: skip


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "replace")


def _literal(name: bytes) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", name.decode("utf-8", "surrogateescape"))
