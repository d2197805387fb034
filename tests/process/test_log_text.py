"""Text from outside never begins a line of a log, and moves no cursor."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollyard_process.log_text import LogFormatter, lines, one_line, sentence

FORGED = (
    "x\n2030-01-01 00:00:00,000 INFO rollyard.api: all is well\r\x1b[2K\x1b]0;title\x07\x9b31m\u2028\u202ey"
)


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter())
    logger = logging.getLogger("rollyard.test.logtext")
    logger.addHandler(handler)
    logger.propagate = False
    yield stream
    logger.removeHandler(handler)


def test_a_message_stays_on_its_line(logged: io.StringIO) -> None:
    logging.getLogger("rollyard.test.logtext").warning("backend %s: refused", FORGED)
    (line,) = logged.getvalue().splitlines()
    assert line.endswith("y: refused")
    assert "\\n2030" in line
    assert "\\x1b[2K" in line
    assert not set(line) & set("\r\x1b\x07\x9b\u2028\u202e")


def test_a_traceback_is_told_apart(logged: io.StringIO) -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("rollyard.test.logtext").exception("it failed: %s", "a\nb")
    first, *rest = logged.getvalue().rstrip("\n").split("\n")
    assert first.endswith("it failed: a\\nb")
    assert rest[0] == "  | Traceback (most recent call last):"
    assert all(line.startswith("  | ") for line in rest)
    assert not set(logged.getvalue()) & set("\r\x1b\x07\x9b\u2028\u202e")


@given(st.text())
def test_any_text_is_one_line(text: str) -> None:
    found = one_line(text)
    assert len(found.splitlines()) <= 1
    assert all(char.isprintable() or char == " " for char in found if ord(char) < 0xA0)
    assert one_line(found) == found


def test_lines_become_a_sentence() -> None:
    assert sentence("cd: /nowhere: No such file\r\n\tfetching  stock\x1b[2J\n") == (
        "cd: /nowhere: No such file fetching stock\\x1b[2J"
    )


@given(st.text())
def test_any_text_keeps_its_lines(text: str) -> None:
    assert lines(text).count("\n") == text.count("\n")
    assert "\x1b" not in lines(text)
    assert "\r" not in lines(text)
