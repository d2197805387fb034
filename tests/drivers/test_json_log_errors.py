"""The line that says why a program ended, found in a log whose lines are JSON."""

from __future__ import annotations

import io
import logging

from rollyard_drivers.reconcile.log_errors import last_line, telling
from rollyard_process.log_text import JsonFormatter


def _log() -> str:
    """Return what a process writes that fails with an exception and then says something else."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("rollyard.test-errors")
    logger.propagate = False
    logger.addHandler(handler)
    try:
        logger.warning("first")
        try:
            raise OSError("no space left on the disk")
        except OSError:
            logger.exception("the worker failed")
        logger.warning("stopped")
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    return stream.getvalue()


def test_the_error_of_a_traceback_is_found_in_its_json_line() -> None:
    assert telling(_log()) == "OSError: no space left on the disk"


def test_the_last_line_is_the_message_of_the_last_record() -> None:
    assert last_line(_log()) == "WARNING rollyard.test-errors: stopped"


def test_lines_that_are_no_records_stay_as_they_are() -> None:
    broken = '{"time": "2026-11-25T07:40:12", "message": "cut o'
    assert last_line(f"{_log()}{broken}\n") == broken
    assert last_line("plain\n[1, 2]\n") == "[1, 2]"
    deep = '{"time": ' + "[" * 30_000
    assert last_line(deep) == deep
    assert telling("Traceback (most recent call last):\nValueError: plain\n") == "ValueError: plain"
