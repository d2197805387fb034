"""A parser of server-sent events, and the events of a job that they carry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson

MAX_LINE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One event of a job: `transition`, `counts`, `dropped` (the reader fell behind) or `end`."""

    name: str
    data: dict[str, Any]
    id: str = ""


class Parser:
    """A parser from lines to events, as the HTML standard says ("event stream interpretation")."""

    def __init__(self) -> None:
        self._name = ""
        self._id = ""
        self._data: list[str] = []

    def feed(self, line: str) -> Iterator[JobEvent]:
        """Take one line without its newline, and yield the event that the line completes, if any."""
        if not line:
            if self._data:
                yield JobEvent(self._name or "message", orjson.loads("\n".join(self._data)), self._id)
            self._name, self._data, self._id = "", [], ""
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._name = value
        elif name == "data":
            self._data.append(value[:MAX_LINE])
        elif name == "id":
            self._id = value
