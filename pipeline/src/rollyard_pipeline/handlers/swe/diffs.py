"""The application of diffs to a repository in the sandbox, by the sandbox's git."""

from __future__ import annotations

import asyncio
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rollyard_sandbox.client import ExecResult

from rollyard_pipeline.handlers.base import StageContext
from rollyard_pipeline.handlers.blocks import Block, State, fenced_blocks

_GIT: Final = ("git", "-c", "safe.directory=*", "apply", "--whitespace=nowarn")
_SECONDS: Final = 120.0
_LABELS: Final = frozenset({"diff", "patch"})
_HUNK: Final = re.compile(r"@@ -[0-9]{1,9}(?:,([0-9]{1,9}))? \+[0-9]{1,9}(?:,([0-9]{1,9}))? @@")
_DIFF: Final = re.compile(
    r"^(?:--- .++\n\+\+\+ .++\n@@ -[0-9]|"
    r"diff --git .++\n(?:--- |(?:old|new|deleted|similarity|rename|copy|index)\b))",
    re.MULTILINE,
)
"""The header of a file with its first hunk, or with what git says about a file that is moved or created."""
_NAMES: Final = re.compile(
    r"^(?:--- (.++)\n\+\+\+ (.++)\n@@ -|rename from (.++)\nrename to (.++)$)", re.MULTILINE
)
_SIDE: Final = re.compile(r"[ab]/")


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

    Changes of protected files are left out. What git says about the diff, and the folder before and
    afterwards, decide this. The text of the diff does not, because git has its own way of reading it.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or has no git.
    """
    # Reading a hostile answer may take a second, in which the worker has others to serve.
    patch = await asyncio.to_thread(patch_of, answer)
    if not patch.strip() or len(patch.encode(errors="replace")) > max_bytes:
        return "it is empty, or too long"
    listed = await _git(ctx, folder, patch, ("--numstat", "-z"), ctx.eval_env)
    if listed.exit_code != 0 or listed.truncated_bytes:
        return "it is not a diff"
    names = {record.split(b"\t", 2)[-1] for record in listed.output.split(b"\0") if record}
    if any(posixpath.normpath(name) != name or name.startswith((b"/", b"../")) for name in names):
        return "it has a path that could be written more shortly, or leads out of the folder"
    excluded = [f"--exclude={_literal(name)}" for name in sorted(names) if protected(name)]
    before = await ctx.sandbox.work_folder(folder).tree()
    if not await applies(ctx, folder, patch, *excluded, env=ctx.eval_env):
        return "it does not apply"
    after = await ctx.sandbox.work_folder(folder).tree()
    if any(
        entry != before.get(path) for path, entry in after.items() if entry.kind not in ("file", "folder")
    ):
        return "it makes links"
    if any(after.get(path) != before.get(path) for path in before.keys() | after.keys() if protected(path)):
        return "it moves, makes or changes a file that the policy cannot change"
    return ""


def patch_of(answer: str) -> str:
    """Return the diff in an answer, which ends with a newline.

    It is the whole answer if that begins as a diff does. Otherwise it is the last fenced block that looks
    like a diff, with headers of files and hunks, among those that are labelled as one, or else among all;
    together with the others, if no two of them change the same file. Otherwise it is the last block that is
    labelled as a diff, else the last one of all, else the whole answer.
    """
    begins = _DIFF.match(answer.lstrip("\n")) is not None
    blocks = [] if begins else [block for block in fenced_blocks(answer, _state) if block.text.strip()]
    labelled = [block for block in blocks if block.label in _LABELS]
    for those in (labelled, blocks):
        alike = [block.text for block in those if _DIFF.search(block.text)]
        if alike:
            return "".join(alike) if _apart(alike) else alike[-1]
    for candidates in (labelled, blocks):
        if candidates:
            return candidates[-1].text
    return answer if answer.endswith("\n") or not answer else f"{answer}\n"


def _apart(diffs: Sequence[str]) -> bool:
    """Return whether no two of several diffs change the same file."""
    changed: set[str] = set()
    for diff in diffs:
        words = [name.partition("\t")[0].strip() for matches in _NAMES.findall(diff) for name in matches]
        names = {_SIDE.sub("", name, count=1) for name in words if name and name != "/dev/null"}
        if not names or not names.isdisjoint(changed):
            return False
        changed |= names
    return True


def _state(block: Block) -> State:
    """Return whether a block was cut before its last hunk has all of its lines, as at a fence in Markdown."""
    if block.label and block.label not in _LABELS:
        return "whole"
    old = new = 0
    for line in block.text.removesuffix("\n").split("\n"):
        if old <= 0 and new <= 0:
            hunk = _HUNK.match(line)
            if hunk is not None:
                old, new = (int(count or 1) for count in hunk.groups())
        elif line.startswith((" ", "-", "+", "\\")) or not line:
            old -= line[:1] in " -"
            new -= line[:1] in " +"
        else:
            return "broken"
    return "cut" if old > 0 or new > 0 else "whole"


async def _git(
    ctx: StageContext, folder: str, patch: str, options: Sequence[str], env: Mapping[str, str] | None
) -> ExecResult:
    # A repository further up must not decide to what the paths of the diff are relative.
    variables = {**(env or {}), "GIT_CEILING_DIRECTORIES": posixpath.dirname(folder)}
    return await ctx.sandbox.run(
        [*_GIT, *options, "-"],
        env=variables,
        clean_env=env is not None,
        cwd=folder,
        stdin=patch.encode(errors="replace"),
        timeout=min(_SECONDS, ctx.timeout),
        max_output=1 << 20,
    )


def _literal(name: bytes) -> str:
    return re.sub(r"([*?\[\]\\])", r"\\\1", name.decode("utf-8", "surrogateescape"))
