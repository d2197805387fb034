"""The tools that come with Rollyard: `bash {command}`, `ipython {code}`, `submit {answer}`, and `edit`."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import CommandTooLarge, FileError, IPythonUnavailable

from rollyard_pipeline.tools.base import Tool, ToolContext, ToolResult, refusal


def _one_text(name: str, description: str) -> dict[str, Any]:
    """Return the schema of arguments that are one text."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "description": description}},
        "required": [name],
    }


class BashTool(Tool):
    """Runs a command in the rollout's shell. Variables and the working folder persist between calls."""

    name = "bash"
    description = "Run a command in a persistent bash session and get its output."
    parameters = _one_text("command", "The command to run.")

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Run the command in the rollout's shell and show its output."""
        try:
            result = await ctx.sandbox.bash(
                arguments["command"], timeout=ctx.timeout, max_output=ctx.max_output_bytes
            )
        except CommandTooLarge as error:
            return refusal(str(error))
        return await ctx.ran(result)


class IPythonTool(Tool):
    """Runs code in the rollout's kernel. Names persist between calls."""

    name = "ipython"
    description = "Run Python code in a persistent IPython session and get its output."
    parameters = _one_text("code", "The code to run.")

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Run the code in the rollout's IPython kernel and show its output."""
        try:
            result = await ctx.sandbox.ipython(
                arguments["code"], timeout=ctx.timeout, max_output=ctx.max_output_bytes
            )
        except (CommandTooLarge, IPythonUnavailable) as error:
            return refusal(str(error))
        return await ctx.ran(result)


_MAX_ANSWER_BYTES: Final = 64 * 1024  # An environment variable of the test script must be able to hold it.


class SubmitTool(Tool):
    """Submits the final answer. A shell test script reads it as `$ROLLYARD_ANSWER`."""

    name = "submit"
    description = "Submit the final answer and end the task."
    parameters = _one_text("answer", "The final answer.")
    needs_sandbox = False

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Submit the answer, which ends the episode."""
        answer: str = arguments["answer"]
        problem = answer_problem(answer)
        return ToolResult("submitted", answer=answer) if problem is None else refusal(problem)


def answer_problem(answer: str) -> str | None:
    """Return why a text cannot be an answer, or None if it can."""
    size = len(answer.encode(errors="replace"))
    if size > _MAX_ANSWER_BYTES:
        return f"the answer has {size} bytes, at most {_MAX_ANSWER_BYTES} are allowed"
    return "the answer holds a NUL character" if "\0" in answer else None


_MAX_FILE_BYTES: Final = 8 << 20


class EditTool(Tool):
    """Views, creates and changes UTF-8 text files of the sandbox: `edit {command, path, …}`.

    Relative paths start at the work folder, whatever the shell's current folder is.
    """

    name = "edit"
    description = (
        "View a file or folder, create a file, replace text that occurs exactly once, or insert lines."
    )
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": {"type": "string", "description": "The file, relative to the work folder or absolute."},
            "file_text": {"type": "string", "description": "create: the whole text of the file."},
            "old_str": {"type": "string", "description": "str_replace: text that occurs exactly once."},
            "new_str": {"type": "string", "description": "str_replace, insert: the new text."},
            "insert_line": {"type": "integer", "description": "insert: after this line; 0 is the start."},
            "view_range": {
                "type": "array",
                "description": "view: [first, last] line, from 1; last may be -1.",
            },
        },
        "required": ["command", "path"],
    }

    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """View, create or change one file, as `arguments["command"]` says."""
        path: str = arguments["path"]
        try:
            match arguments["command"]:
                case "view":
                    return await _view(ctx, path, arguments.get("view_range"))
                case "create":
                    return await _create(ctx.sandbox, path, arguments.get("file_text"))
                case "str_replace":
                    old, new = arguments.get("old_str"), arguments.get("new_str", "")
                    return await _replace(ctx.sandbox, path, old, new)
                case _:
                    return await _insert(
                        ctx.sandbox, path, arguments.get("insert_line"), arguments.get("new_str")
                    )
        except FileError as error:
            if error.reason == "FileNotFound":
                return refusal(f"no such file: {path}")
            return refusal(str(error))
        except CommandTooLarge as error:
            return refusal(str(error))


async def _text(client: ExecClient, path: str) -> str | None:
    """Return the file's text, or None if it is too long or not UTF-8."""
    content = await client.read_file(path, max_bytes=_MAX_FILE_BYTES)
    if not content.complete:
        return None
    try:
        return content.data.decode()
    except UnicodeDecodeError:
        return None


def _not_text(path: str) -> ToolResult:
    return refusal(f"{path} is not UTF-8 text of at most {_MAX_FILE_BYTES} bytes")


async def _view(ctx: ToolContext, path: str, view_range: object) -> ToolResult:
    try:
        text = await _text(ctx.sandbox, path)
    except FileError as error:
        if error.reason != "IsADirectory":
            raise
        entries = await ctx.sandbox.list_dir(path)
        names = sorted(entry.name + ("/" if entry.kind == "directory" else "") for entry in entries)
        return ToolResult(_cut("\n".join(names) or "(empty folder)", ctx.max_output_bytes))
    if text is None:
        return _not_text(path)
    lines = text.splitlines()
    first, last = 1, len(lines)
    if view_range is not None:
        whole = isinstance(view_range, list) and len(view_range) == 2
        if not whole or not all(type(number) is int for number in view_range):  # type: ignore[attr-defined]
            return refusal("argument 'view_range' must be [first, last], two line numbers")
        first, last = view_range  # type: ignore[misc]
        last = len(lines) if last == -1 else min(last, len(lines))
        if not 1 <= first <= max(len(lines), 1) or last < first - 1:
            return refusal(f"argument 'view_range' must lie within 1 and {len(lines)}")
    shown = "\n".join(f"{number:6}\t{lines[number - 1]}" for number in range(first, last + 1))
    return ToolResult(_cut(shown or "(empty file)", ctx.max_output_bytes))


async def _create(client: ExecClient, path: str, text: str | None) -> ToolResult:
    if text is None:
        return refusal("argument 'file_text' is missing; 'create' needs it")
    await client.write_file(path, text.encode(errors="replace"))
    return ToolResult(f"created {path}")


async def _replace(client: ExecClient, path: str, old: str | None, new: str) -> ToolResult:
    if not old:
        return refusal("argument 'old_str' is missing or empty; 'str_replace' needs it")
    text = await _text(client, path)
    if text is None:
        return _not_text(path)
    count = text.count(old)
    if count != 1:
        return refusal(f"old_str occurs {count} times in {path}, expected once")
    await client.write_file(path, text.replace(old, new).encode(errors="replace"))
    return ToolResult(f"edited {path}")


async def _insert(client: ExecClient, path: str, line: int | None, new: str | None) -> ToolResult:
    if line is None or new is None:
        return refusal("arguments 'insert_line' and 'new_str' are needed by 'insert'")
    text = await _text(client, path)
    if text is None:
        return _not_text(path)
    lines = text.splitlines(keepends=True)
    if not 0 <= line <= len(lines):
        return refusal(f"argument 'insert_line' must lie within 0 and {len(lines)}")
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    if new and not new.endswith("\n") and line < len(lines):
        new += "\n"
    lines.insert(line, new)
    await client.write_file(path, "".join(lines).encode(errors="replace"))
    return ToolResult(f"edited {path}")


def _cut(text: str, limit: int) -> str:
    """Return at most about `limit` bytes of `text`, with its head and tail kept."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    half = limit // 2
    head = data[:half].decode(errors="ignore")
    tail = data[-half:].decode(errors="ignore")
    return f"{head}\n[{len(data) - 2 * half} bytes left out]\n{tail}"
