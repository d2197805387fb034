"""What a tool is, and the checking of its arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rollyard_sandbox.client import ExecClient, ExecResult

from rollyard_pipeline.tools.render import render_result

_KILLED: Final = (137, -9)  # exit codes of a process that SIGKILL ended


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a call may use."""

    client: ExecClient | None
    """The rollout's sandbox; None where the rollout has none."""
    timeout: float
    """Seconds that one call may take (`agent.toolTimeoutSeconds`)."""
    max_output_bytes: int
    """Bytes of output that the model gets to see (`agent.maxToolOutputBytes`)."""
    oom_killed: Callable[[], Awaitable[bool]] | None = None
    """Whether the sandbox has lost a process to its memory limit."""

    @property
    def sandbox(self) -> ExecClient:
        """The sandbox of a tool that says `needs_sandbox`."""
        if self.client is None:
            raise RuntimeError("the tool uses a sandbox but says needs_sandbox = False")
        return self.client

    async def ran(self, result: ExecResult) -> ToolResult:
        """The observation of a command or a piece of code that ran."""
        suspect = result.killed or result.shell_restarted or result.exit_code in _KILLED
        return ToolResult(
            render_result(result, self.timeout),
            error="timed out" if result.timed_out else None,
            out_of_memory=suspect and self.oom_killed is not None and await self.oom_killed(),
        )


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model gets to see, and what it means for the episode."""

    text: str
    error: str | None = None
    """Set where the call could not do what it was asked; recorded with the turn."""
    answer: str | None = None
    """Set by a tool that ends the episode: the submitted answer."""
    out_of_memory: bool = False
    """The sandbox reached its memory limit during the call."""


class Tool(ABC):
    """One tool: a class, of which every rollout has an instance of its own.

    Subclass, set the class variables, implement `call`, and name the class in the entry
    point group `rollyard.tools`.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    parameters: ClassVar[dict[str, Any]]
    """JSON schema of the arguments: an object with `properties` and `required`."""
    needs_sandbox: ClassVar[bool] = True

    @abstractmethod
    async def call(self, arguments: dict[str, Any], ctx: ToolContext) -> ToolResult:
        """Run one call; `arguments` have passed `check_arguments`.

        What goes wrong for the model's own reasons is a `ToolResult` with `error`; a lost
        sandbox is raised.
        """

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The tool as chat templates and OpenAI's API describe tools."""
        return {
            "type": "function",
            "function": {"name": cls.name, "description": cls.description, "parameters": cls.parameters},
        }


def refusal(message: str) -> ToolResult:
    """An observation that says what was wrong with a call."""
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
    """The first problem of a call's arguments, in the model's words; None if there is none.

    Checks what tools here use of JSON schema: required names, unknown names, `type`, `enum`.
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
