"""The checks of form, which say 1 or 0 about what the policy wrote.

A pattern can need an enormous time for some texts, and the `re` module cannot be interrupted. A separate
process therefore searches for patterns: `python -m rollyard_pipeline.rewards.format_checks` reads one
`{"pattern": …, "texts": […]}` per line, and writes `{"found": …}`: whether every text matches.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Final

from rollyard_crds.fields.reward import FormatCheck
from rollyard_crds.task import Task
from rollyard_crds.trajectory import RunRecord

from rollyard_pipeline.child_processes import ChildProcesses, begin_child
from rollyard_pipeline.errors import ChildTimeout
from rollyard_pipeline.handlers.base import said_by_policy

_SECONDS: Final = 10.0
"""The limit of one search in seconds. Usual patterns need less than a millisecond."""


class FormatChecks:
    """Checks forms, and keeps the processes that search for patterns.

    Args:
        seconds: The limit of one search in seconds.
    """

    def __init__(self, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        self._children = ChildProcesses(
            __name__,
            what="the search for a pattern",
            failed="FormatCheckFailed",
            timeout="FormatCheckTimeout",
        )

    async def kept(self, check: FormatCheck, texts: Sequence[str]) -> tuple[bool, bool]:
        """Return whether the form is kept, and whether this could be decided in time.

        What cannot be decided in time is not kept: a policy could otherwise gain from a text that takes long.

        Raises:
            ChildFailed: The processes cannot be started, or die whatever the text is.
        """
        if not texts:
            return False, True
        chosen = [texts[-1]] if check.messages == "last" else list(texts)
        if check.tags is not None:
            return all(has_tags(text, check.tags) for text in chosen), True
        request = {"pattern": check.pattern, "texts": chosen}
        try:
            answer = await self._children.ask_or_blame(request, self._seconds, {**request, "texts": [""]})
        except ChildTimeout:
            answer = None
        return (False, False) if answer is None else (bool(answer.get("found")), True)

    async def close(self) -> None:
        """End the processes."""
        await self._children.close()


def own_texts(task: Task, trajectory: RunRecord | None) -> list[str]:
    """Return the contents of the policy's messages, without those that the task begins with.

    A mark with which the prompt opened the thought, such as `<think>`, comes first.
    """
    if trajectory is None:
        return []
    messages = said_by_policy(task, trajectory)
    thoughts = [turn.thought if turn is not None else None for _, turn in messages]
    return [
        message.content if thought is None else thought.opened + message.content
        for (message, _), thought in zip(messages, thoughts, strict=True)
    ]


def has_tags(text: str, tags: Sequence[str]) -> bool:
    """Return whether each tag is opened and closed exactly once, one after the other."""
    at = 0
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            index = text.find(mark, at)
            if index < 0 or text.count(mark) != 1:
                return False
            at = index + len(mark)
    return True


_MEMORY: Final = 1 << 30  # The size of the address space in bytes.


def main() -> None:
    """Answer requests until the input ends. This is the main function of the process."""
    begin_child(_MEMORY)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pattern = re.compile(request["pattern"], re.DOTALL)
        try:
            matched = all(pattern.search(text) is not None for text in request["texts"])
        except (MemoryError, RecursionError):
            matched = False
        print(json.dumps({"found": matched}), flush=True)


if __name__ == "__main__":
    main()
