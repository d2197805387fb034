"""Messages in the forms of OpenAI, TRL, verl and servers of open models, made into the one form of a task.

- A null counts as absent, and so does an empty list of calls or an empty thought.
- `developer` becomes `system`. Templates of open models have no other role for a developer's messages.
- Content in parts becomes the texts of its parts, one a line, as inference servers join them. Other parts
  are refused: models get only texts here.
- Arguments of calls that are a JSON text become the object in that text.
- An assistant's thought becomes `reasoning_content`, whichever of its three names it has.
- What no template can show is refused by name, and unknown fields are left for `Message` to refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from rollyard_crds.errors import CrdsError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
"""The name of a thought with DeepSeek and Qwen, with vLLM and OpenRouter, and with gpt-oss."""
_REFUSED: Final = {
    "refusal": "cannot be shown to a model: write it as 'content'",
    "audio": "cannot be shown to a model, which gets only texts here",
    "function_call": "is the form from before 'tool_calls': write it as one of them, and its result as a "
    "message of the role 'tool'",
}
_SPEAKERS: Final = {
    "tool_calls": ("assistant", "belongs to messages of the role 'assistant' only"),
    "reasoning_content": ("assistant", "belongs to messages of the role 'assistant' only"),
    "tool_call_id": ("tool", "belongs to messages of the role 'tool' only"),
}
MAX_ARGUMENTS: Final = 1 << 20
"""The largest number of characters of arguments that are a JSON text."""
_Location = tuple[int | str, ...]


class MessageRefused(CrdsError, ValueError):
    """A message that no task can have.

    Args:
        location: The keys and indices that lead to the field, beginning with the number of the message.
        problem: What is wrong with the field, without its content.
        shown: The content, where it helps those who may see it.
    """

    reason = "InvalidTasks"

    def __init__(self, location: _Location, problem: str, shown: Any = None) -> None:
        self.location = location
        self.problem = problem
        self.shown = shown
        super().__init__(f"{self.path}: {problem}")

    @property
    def path(self) -> str:
        """The location as messages show it, such as `[1].content`."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.location)


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages in the form of a task. Those in this form already are returned as they are.

    Raises:
        MessageRefused: A message is not an object, has an unknown role, holds something that cannot be shown
            to a model or arguments that are not an object, or names a call that no message before it makes.
    """
    result: list[dict[str, Any]] = []
    ids: set[Any] = set()
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise MessageRefused((number,), "must be an object with role and content")
        plain = _message(message, (number,))
        call_id = plain.get("tool_call_id")
        if isinstance(call_id, str) and call_id not in ids:
            raise MessageRefused(
                (number, "tool_call_id"), "no message before this one makes a call of this id"
            )
        calls = plain.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(call.get("id"), str):
                ids.add(call["id"])
        result.append(plain)
    return result


def _message(message: Mapping[str, Any], location: _Location) -> dict[str, Any]:
    plain = _present(message)
    role = plain.get("role")
    if role not in ROLES:
        raise MessageRefused((*location, "role"), f"must be one of {', '.join(ROLES)}", role)
    if role == "developer":
        plain["role"] = "system"
    for name, problem in _REFUSED.items():
        if name in plain:
            raise MessageRefused((*location, name), problem)
    if isinstance(plain.get("content"), list):
        plain["content"] = _joined(plain["content"], (*location, "content"))
    fields = {name: plain.pop(name) for name in _THOUGHTS if name in plain}
    thoughts = {name: text for name, text in fields.items() if text != ""}
    if thoughts:
        first, *others = thoughts
        for name in others:
            if thoughts[name] != thoughts[first]:
                raise MessageRefused((*location, name), f"must be the same as {first!r}, which is here, too")
        plain["reasoning_content"] = thoughts[first]
    if plain.get("tool_calls") == []:
        del plain["tool_calls"]
    for name, (speaker, problem) in _SPEAKERS.items():
        if name in plain and role != speaker:
            raise MessageRefused((*location, name), problem)
    if isinstance(plain.get("tool_calls"), list):
        at = (*location, "tool_calls")
        plain["tool_calls"] = [_call(call, number, at) for number, call in enumerate(plain["tool_calls"])]
    return plain


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _joined(parts: Sequence[Any], location: _Location) -> str:
    texts: list[str] = []
    for number, part in enumerate(parts):
        plain = _present(part) if isinstance(part, dict) else {}
        kind = plain.get("type")
        if kind != "text":
            problem = "must be 'text': a model gets only texts here, and no image, audio or file"
            raise MessageRefused((*location, number, "type"), problem, kind)
        if plain.keys() != {"type", "text"} or not isinstance(plain["text"], str):
            raise MessageRefused((*location, number), 'must be {"type": "text", "text": "…"}')
        texts.append(plain["text"])
    return "\n".join(texts)


def _call(call: Any, number: int, location: _Location) -> Any:
    """Return a call. `index`, which streamed calls have, is left out if it is the call's position."""
    if not isinstance(call, dict):
        return call
    plain = _present(call)
    if plain.pop("index", number) != number:
        raise MessageRefused((*location, number, "index"), "must be the place of the call in its list")
    function = plain.get("function")
    if isinstance(function, dict):
        function = _present(function)
        if isinstance(function.get("arguments"), str):
            at = (*location, number, "function", "arguments")
            function["arguments"] = _decoded(function["arguments"], at)
        plain["function"] = function
    return plain


def _decoded(text: str, location: _Location) -> dict[str, Any]:
    """Return the object that a text of arguments stands for. An empty text means no arguments."""
    if not text:
        return {}
    if len(text) > MAX_ARGUMENTS:
        raise MessageRefused(location, f"is longer than {MAX_ARGUMENTS} characters")
    try:
        arguments = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except MessageRefused as error:
        raise MessageRefused(location, error.problem) from error
    except (ValueError, RecursionError) as error:
        raise MessageRefused(location, "is a text that is not JSON") from error
    if not isinstance(arguments, dict):
        raise MessageRefused(location, "is not the text of a JSON object")
    return arguments


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):  # Readers of JSON differ in which of the values they use.
        raise MessageRefused((), "has the same key twice in one object")
    return members


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
