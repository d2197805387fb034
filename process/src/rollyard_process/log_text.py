"""Text from outside in log lines and on terminals, where it must not begin a line or move the cursor.

Names, messages, URLs and headers of requests, and what programs and servers say, reach logs and
terminals. A newline in them would forge a line, and an escape sequence would change what is read.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

from rollyard_process.telemetry import options, scope

LINE_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Control characters, separators of lines and paragraphs, and those that change the direction of text.
_DIRECTIONS: Final = "\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069"
_CONTROLS: Final = f"\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029{_DIRECTIONS}"
_UNSEEN: Final = re.compile(f"[\\t\\n{_CONTROLS}]")
_UNSEEN_IN_LINES: Final = re.compile(f"[{_CONTROLS}]")
_OF_TRACEBACK: Final = "  | "
MAX_MESSAGE: Final = 16_384
"""The largest number of characters of a message in a JSON line. Collectors of logs cut longer lines."""
_FIELDS: Final = ("namespace", "job", "rollout", "stage", "attempt", "trace_id")


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def one_line(text: str) -> str:
    """Return the text with every control character escaped as in a Python string: a newline as `\\n`."""
    return _UNSEEN.sub(_escape, text)


def sentence(text: str) -> str:
    """Return the text as one line for people: each run of spaces, tabs and newlines is one space."""
    return one_line(" ".join(text.split()))


def lines(text: str) -> str:
    """Do the same for text of several lines, in which tabs and newlines stay as they are."""
    return _UNSEEN_IN_LINES.sub(_escape, text)


class LogFormatter(logging.Formatter):
    """Formats each record as one line; the lines of a traceback follow it, each marked by `|`."""

    def __init__(self) -> None:
        super().__init__(LINE_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, with control characters escaped."""
        record.message = record.getMessage()
        record.asctime = self.formatTime(record, self.datefmt)
        output = [one_line(self.formatMessage(record))]
        for text in (
            self.formatException(record.exc_info) if record.exc_info else "",
            self.formatStack(record.stack_info) if record.stack_info else "",
        ):
            output += [f"{_OF_TRACEBACK}{one_line(line)}" for line in text.split("\n") if text]
        return "\n".join(output)


class JsonFormatter(logging.Formatter):
    """Formats each record as one line with a JSON object, whose text is ASCII.

    The object has `time` (UTC), `level`, `logger` and `message`, and `exception` if there is one. A record of
    a task that works on a rollout also has `namespace`, `job`, `rollout`, `stage`, `attempt` and `trace_id`.
    So has a record whose `extra` holds them.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON, with control characters escaped."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": one_line(record.getMessage()[:MAX_MESSAGE]),
        }
        current = scope.current()
        if current is not None:
            fields |= {
                "namespace": current.namespace,
                "job": current.job,
                "rollout": current.rollout,
                "stage": current.stage,
                "attempt": current.attempt,
                "trace_id": current.trace,
            }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                fields[name] = one_line(value[:MAX_MESSAGE]) if isinstance(value, str) else value
        if record.exc_info:
            fields["exception"] = lines(self.formatException(record.exc_info)[-MAX_MESSAGE:])
        if record.stack_info:
            fields["stack"] = lines(self.formatStack(record.stack_info)[-MAX_MESSAGE:])
        return json.dumps(fields, default=str)


def log_to(stream: TextIO | None = None, level: int | str = logging.INFO, form: str | None = None) -> None:
    """Send all log records of this process to a stream (standard error).

    Args:
        stream: The stream.
        level: The lowest level that is sent.
        form: `text` or `json`. The default is the value of the variable ROLLYARD_LOG_FORMAT, else `text`.

    Raises:
        TraceOptionError: There is no such form.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if options.log_form(form) == "json" else LogFormatter())
    logging.basicConfig(level=level, handlers=[handler])
