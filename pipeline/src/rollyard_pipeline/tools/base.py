"""The base class of tools, the checks of their arguments, and the text of their results for the model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rollyard_sandbox.client import ExecClient, ExecResult

from rollyard_pipeline.sabotage import CRASHED, OUT_OF_MEMORY

# ECMA-48: control sequences, control strings such as titles of windows, and other escape sequences.
_CONTROLS: Final = re.compile(
    r"\x1b(?:\[[0-?]*+[ -/]*+[@-~]|[\]PX^_][^\x07\x1b\r\n]*+(?:\x07|\x1b\\)?|[ -/]*+[0-~])|[\x0e\x0f]"
)
_MOVES: Final = re.compile(r"\x1b\[(?:[0-9;]*+[Hf]|\?(?:47|1047|1049)h)")


def without_controls(text: str) -> str:
    """Return a text without the codes for a terminal."""
    return _CONTROLS.sub("", text)


def render_result(result: ExecResult, timeout: float) -> str:
    """Return the output without trailing newlines, followed by a note about the exit.

    The note is `(no output)` for silent success, `[exit code N]` for failure, `[timed out after N s]` at the
    limit, and `[shell restarted]` if the session's shell had to be replaced. Codes for a terminal are left
    out, because a screen of an editor is mostly codes. If they moved the cursor, a note says so.
    """
    text = result.text()
    # An interrupted terminal adds a carriage return.
    output = without_controls(text).rstrip("\r\n")
    notes: list[str] = []
    if _MOVES.search(text):
        notes.append("[a full-screen program ran, and there is no screen here]")
    if result.timed_out:
        notes.append(f"[timed out after {timeout:g} s]")
    elif result.exit_code:
        notes.append(f"[exit code {result.exit_code}]")
    if result.shell_restarted:
        notes.append("[shell restarted]")
    return "\n".join(part for part in (output, *notes) if part) or "(no output)"


_KILLED: Final = (137, -9)  # The exit codes of a process that SIGKILL ended.
_ENDS: Final = {OUT_OF_MEMORY: "ran out of memory or disk", CRASHED: "has ended by itself"}


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The data and operations that a call may use."""

    client: ExecClient | None
    """The rollout's sandbox, or None if the rollout has none."""
    timeout: float
    """The time that one call may take, in seconds (`agent.toolTimeoutSeconds`)."""
    max_output_bytes: int
    """The number of bytes of output that the model sees (`agent.maxToolOutputBytes`)."""
    oom_killed: Callable[[], Awaitable[bool]] | None = None
    """Returns whether the sandbox has lost a process to its memory limit."""
    own_end: Callable[[], Awaitable[str]] | None = None
    """Returns why the sandbox has ended by itself, or "" (see `SandboxProvider.own_end`)."""

    @property
    def sandbox(self) -> ExecClient:
        """Return the sandbox of a tool whose `needs_sandbox` is true."""
        if self.client is None:
            raise RuntimeError("the tool uses a sandbox but says needs_sandbox = False")
        return self.client

    async def ran(self, result: ExecResult) -> ToolResult:
        """Return the observation of a command or a piece of code that ran."""
        suspect = result.killed or result.shell_restarted or result.exit_code in _KILLED
        return ToolResult(
            render_result(result, self.timeout),
            error="timed out" if result.timed_out else None,
            truncates=OUT_OF_MEMORY
            if suspect and self.oom_killed is not None and await self.oom_killed()
            else "",
        )

    async def lost(self) -> ToolResult | None:
        """Return the observation of a call that lost the sandbox, or None if it did not end by itself."""
        reason = await self.own_end() if self.own_end is not None else ""
        if not reason:
            return None
        message = f"the sandbox {_ENDS.get(reason, 'has ended')}, and is gone"
        return ToolResult(f"error: {message}", error=message, truncates=reason)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model sees of a call, and its effect on the episode."""

    text: str
    error: str | None = None
    """The error of a call that could not do what was requested. It is recorded with the turn."""
    answer: str | None = None
    """The submitted answer, set by a tool that ends the episode."""
    truncates: str = ""
    """The reason for which the call ends the episode, as in `Trajectory.truncated_reason`, or ""."""


class Tool(ABC):
    """The base of tools. Every rollout has its own instance of each tool class.

    To write a tool, subclass this class, set the class variables, implement `call`, and name the class in the
    entry point group `rollyard.tools`.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    parameters: ClassVar[dict[str, Any]]
    """The JSON schema of the arguments, an object with `properties` and `required`."""
    needs_sandbox: ClassVar[bool] = True

    @abstractmethod
    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Run one call. `arguments` have passed `check_arguments`.

        A failure that the model caused is returned as a `ToolResult` with `error`. A lost sandbox raises an
        exception.
        """

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return the description of the tool as chat templates and OpenAI's API expect it."""
        return {
            "type": "function",
            "function": {"name": cls.name, "description": cls.description, "parameters": cls.parameters},
        }


def refusal(message: str) -> ToolResult:
    """Return an observation that describes what was wrong with a call."""
    return ToolResult(f"error: {message}", error=message)


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def check_arguments(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return the first problem of a call's arguments in words for the model, or None if there is none.

    The check covers the parts of JSON schema that tools use here: required names, unknown names, `type`,
    `enum`.
    """
    properties: Mapping[str, Any] = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            return f"argument '{name}' is missing; expected {_expected(schema)}"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument '{name}'; expected {_expected(schema)}"
        rule = properties[name]
        kinds = _TYPES.get(rule.get("type", ""))
        wrong = kinds is not None and (
            not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)
        )
        if wrong:
            return f"argument '{name}' must be of type {rule['type']}, not {type(value).__name__}"
        if "enum" in rule and value not in rule["enum"]:
            return f"argument '{name}' must be one of {', '.join(map(str, rule['enum']))}"
    return None


def _expected(schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    return (
        ", ".join(name if name in required else f"[{name}]" for name in schema.get("properties", {}))
        or "none"
    )
