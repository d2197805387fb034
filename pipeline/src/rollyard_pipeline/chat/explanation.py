"""Tools for a model whose chat template knows none: the parser of the job explains them.

What a template lacks is found by rendering, not by reading its source:

- A template that shows the offered tools needs nothing.
- One that shows calls and their results, but no list of tools, gets the explanation alone: the tools and the
  format of calls, at the end of the system message.
- One that shows neither also gets calls as text, and results as messages of the user, because such templates
  refuse the role `tool` or leave it out.

All of this happens before each rendering, so the conversation that is rendered remains one that only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Explanation:
    """What is said of the tools, and how the messages of a conversation are shown."""

    instructions: str
    """The tools and the format of calls. It may contain `tokenizer.MARK`."""
    in_system: bool
    """Whether the template takes a system message. If not, its text begins the first message of the user."""
    written: Callable[[Sequence[Mapping[str, Any]]], str] | None
    """What writes calls as text, each with `name` and `arguments`. If it is None, the template shows calls
    and results itself."""

    def shown(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages as the template is given them."""
        text, rest = self.instructions, list(messages)
        if rest and rest[0]["role"] == "system":
            said = rest.pop(0).get("content")
            text = f"{said}\n\n{text}" if said else text
        if self.written is not None:
            rest = _as_text(rest, self.written)
        if self.in_system:
            return [{"role": "system", "content": text}, *rest]
        if rest and rest[0]["role"] == "user":
            return [{**rest[0], "content": f"{text}\n\n{rest[0].get('content') or ''}"}, *rest[1:]]
        return [{"role": "user", "content": text}, *rest]


def _as_text(
    messages: Sequence[dict[str, Any]], written: Callable[[Sequence[Mapping[str, Any]]], str]
) -> list[dict[str, Any]]:
    """Return messages without calls, and with the results of a turn in one message of the user.

    What the user says after them is part of the same message, because many templates of this kind refuse
    two messages of the user in succession.
    """
    shown: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
        if after_result and role in ("tool", "user"):
            shown[-1]["content"] += f"\n{content}"
            after_result = role == "tool"
            continue
        if role == "tool":
            shown.append({"role": "user", "content": content})
        elif message.get("tool_calls"):
            calls = written([call["function"] for call in message["tool_calls"]])
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            shown.append({**kept, "content": f"{content}\n{calls}" if content else calls})
        else:
            shown.append(message)
        after_result = role == "tool"
    return shown
