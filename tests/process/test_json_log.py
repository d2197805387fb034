"""Log lines as JSON: one line a record, whatever its text is, with the rollout of the task that wrote it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rollyard_process.log_text import MAX_MESSAGE, JsonFormatter
from rollyard_process.telemetry.identity import trace_id
from rollyard_process.telemetry.scope import RolloutScope, entered

Read = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, Read]]:
    """Yield a logger, and a function that returns its lines. Each must be one JSON object in ASCII."""
    stream, logger = io.StringIO(), logging.Logger("rollyard.test-json")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)

    def read() -> list[dict[str, Any]]:
        text = stream.getvalue()
        assert text.isascii()
        assert text.isprintable() or set(text) - set(" \n") <= {chr(code) for code in range(33, 127)}
        return [json.loads(line) for line in text.splitlines()]

    yield logger, read
    logger.removeHandler(handler)


HOSTILE = (
    "a\nb",
    'a\r\n{"level": "CRITICAL", "message": "forged"}',
    "\x1b[2Jcleared",
    "\u202eright to left",
    "line\u2028separator",
    "\x00nul",
    "\ud800 lone surrogate",
    '"quotes" and \\',
    {"a": "\n"},
)


@pytest.mark.attack(
    "a message, URL or name with a newline forges a log line, or an escape sequence hides one",
    boundary="control plane",
    surface="logs of control plane, operator, workers and engine",
    stopped_by="one formatter escapes control characters; lines of a traceback are marked; with "
    "`--log-format json` each record is one line of ASCII",
)
@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_a_record_is_one_line(log: tuple[logging.Logger, Read], text: object) -> None:
    logger, read = log
    logger.warning("worker said %s", text, extra={"rollout": str(text)})
    (line,) = read()
    assert line["level"] == "WARNING"
    assert line["logger"] == "rollyard.test-json"
    assert line["message"].startswith("worker said ")
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2028" for c in line["message"])


def test_a_message_of_a_megabyte_is_cut(log: tuple[logging.Logger, Read]) -> None:
    logger, read = log
    logger.warning("x" * (1 << 20))
    (line,) = read()
    assert line["message"] == "x" * MAX_MESSAGE


def test_an_exception_keeps_its_lines_in_one_line(log: tuple[logging.Logger, Read]) -> None:
    logger, read = log
    try:
        raise ValueError("bad\x1b[1m thing")
    except ValueError:
        logger.exception("failed")
    (line,) = read()
    assert line["exception"].splitlines()[0] == "Traceback (most recent call last):"
    assert line["exception"].splitlines()[-1] == "ValueError: bad\\x1b[1m thing"


async def test_each_task_has_its_own_rollout(log: tuple[logging.Logger, Read]) -> None:
    logger, read = log

    async def work(number: int) -> None:
        with entered(RolloutScope("team", "job", f"job-1-0-{number}", "run", 5, number)):
            await asyncio.sleep(0)
            logger.info("hello")
            await asyncio.to_thread(logger.info, "from a thread")

    logger.setLevel(logging.INFO)
    await asyncio.gather(*(work(number) for number in range(3)))
    logger.info("outside")
    *inside, outside = read()
    assert "rollout" not in outside
    assert len(inside) == 6
    for line in inside:
        assert line["trace_id"] == trace_id(line["rollout"])
        assert (line["namespace"], line["job"], line["stage"]) == ("team", "job", "run")
        assert line["rollout"] == f"job-1-0-{line['attempt']}"


def test_the_flag_sets_the_form_for_a_whole_process() -> None:
    code = "import logging; from rollyard_process.log_text import log_to; log_to(); "
    code += "logging.getLogger('a').warning('b\\nc')"
    for form, expected in (("json", "b\\nc"), ("text", None)):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "ROLLYARD_LOG_FORMAT": form},
            check=True,
        )
        if expected is None:
            assert done.stderr.endswith("WARNING a: b\\nc\n")
        else:
            assert json.loads(done.stderr)["message"] == expected
