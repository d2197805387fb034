"""The format `chat`: TRL's prompts (`prompt`), and OpenAI's chats for fine-tuning (`messages`)."""

from __future__ import annotations

import json
from typing import Any, Final

from rollyard_tasks.formats.answers import answer_fields
from rollyard_tasks.formats.ids import row_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat

_ANSWERS: Final = ("answer", "ground_truth", "solution")
"""Columns with the answer. The first that a row has is used, because a solution may have text around it."""
_REFERENCE: Final = "reference"


class ChatTaskFormat(TaskFormat):
    """Reads rows whose conversation is `prompt`, or else `messages`.

    `prompt` is a text or a list of messages. A last message of the assistant in `messages` is what a model is
    to be tuned to say. It is not part of the task's conversation. Its text is the answer if no column is, and
    a message that is or has more than that is in the metadata as `reference`. Columns that are not read are
    there as well, under their own names.
    """

    columns = (("messages",), ("prompt",))

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row, with its `id` where it has one."""
        reference: dict[str, Any] | None = None
        column = "prompt" if "prompt" in row.values else "messages"
        if column == "prompt" and not _is_conversation(row.values["prompt"]):
            fields: dict[str, Any] = {"prompt": row.text("prompt")}
        else:
            messages = row.chat(column)
            if column == "messages" and messages[-1]["role"] == "assistant":
                reference = messages.pop()
            if not messages or messages[-1]["role"] == "assistant":
                raise RowRefused(
                    row.name(column),
                    "must end with a message that is not an assistant's, which would have to be continued; "
                    "after it, 'messages' may have one answer",
                )
            fields = {"messages": messages}
        answer = _answer(row)
        if not answer and reference is not None and "tool_calls" not in reference:
            answer = {"answer": reference["content"]} if reference.get("content") else {}
            reference = reference if reference.keys() - {"role", "content"} else None
        fields |= {**answer, **row_id(row, "id")}
        fields["metadata"] = row.rest() | ({_REFERENCE: reference} if reference is not None else {})
        return fields


def _is_conversation(value: Any) -> bool:
    """Return whether a prompt is a list of messages, which is JSON in a table of texts."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
        return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)
    return isinstance(value, list)


def _answer(row: Row) -> dict[str, Any]:
    """Return the answer that a column of the row has, or the accepted answers that it lists."""
    name = next((name for name in _ANSWERS if name in row.values), None)
    return {} if name is None else answer_fields(row, name)
