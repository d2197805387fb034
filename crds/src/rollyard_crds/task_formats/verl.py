"""The format `verl`: data_source, prompt, reward_model and extra_info, as verl and DAPO write them."""

from __future__ import annotations

import json
from typing import Any

from rollyard_crds.task_formats.ids import task_id
from rollyard_crds.task_formats.interface import Row, RowRefused, TaskFormat


class VerlFormat(TaskFormat):
    """Reads rows with a conversation and `reward_model.ground_truth`.

    The ground truth is the task's answer. Where it is a JSON list of texts, as Skywork writes it, its only
    element is.
    """

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row, whose id is `data_source/split/index` where the row has all three."""
        source = row.text("data_source")
        extra = row.row("extra_info", optional=True)
        found: dict[str, Any] = {"messages": _messages(row)}
        found["answer"] = _answer(row.row("reward_model"))
        split, index = extra.values.get("split"), extra.values.get("index")
        if split is not None and index is not None:
            found["id"] = task_id(source, split, index)
        found["metadata"] = {"data_source": source, "extra_info": dict(extra.values)}
        if row.values.get("ability") is not None:
            found["metadata"]["ability"] = row.values["ability"]
        return found


def _messages(row: Row) -> list[dict[str, Any]]:
    messages = []
    for place, message in enumerate(row.items("prompt")):
        if not isinstance(message, dict):
            raise RowRefused(f"prompt[{place}]", "must be an object with role and content")
        said = Row(message, row.number, f"prompt[{place}]")
        messages.append({"role": said.text("role"), "content": said.text("content", "")})
    if not messages:
        raise RowRefused("prompt", "must not be empty")
    return messages


def _answer(reward: Row) -> str:
    truth = reward.values.get("ground_truth")
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return str(truth)
    text = reward.text("ground_truth")
    if not text.startswith("["):
        return text
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return text  # An interval such as [0, 1) is an answer.
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        return text
    if len(listed) != 1:
        raise RowRefused(reward.name("ground_truth"), "must be one answer, not a list of several")
    return str(listed[0])
