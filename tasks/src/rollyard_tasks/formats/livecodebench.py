"""The format `livecodebench`: question_content, starter_code, public and private test cases, and metadata."""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib
from typing import Any, Final

from rollyard_tasks.file_rows import json_value
from rollyard_tasks.formats.contests import CONTEST_PREFIX, request
from rollyard_tasks.formats.ids import task_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat

_KEPT: Final = ("question_title", "platform", "contest_id", "contest_date", "difficulty")
MAX_PICKLED_BYTES: Final = 48 << 20
"""The largest size of pickled tests after decompression, in bytes."""
_TEXTS: Final = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_HARMLESS: Final = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})


class LiveCodeBenchFormat(TaskFormat):
    """Reads programming contests with public and private tests; the handler is `code`.

    Private tests are a JSON text, or the same pickled, compressed and in base64, which is read without
    unpickling. Numbers are compared with a tolerance.
    """

    columns = (("question_content", "public_test_cases"),)

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row. Its tests call a function if its metadata names one."""
        metadata = row.row("metadata", optional=True)
        name = metadata.text("func_name", "") or None
        cases = _cases(row, "public_test_cases") + _cases(row, "private_test_cases")
        if not cases:
            raise RowRefused("private_test_cases", "must not be empty")
        ask = request(row.text("starter_code", ""), name)
        tests = {"entry_point": name, "prefix": CONTEST_PREFIX, "cases": cases, "compare": "numeric"}
        task: dict[str, Any] = {
            "prompt": f"{row.text('question_content')}\n\n{ask}",
            "tests": {key: value for key, value in tests.items() if value is not None},
            "metadata": {key: str(row.values[key]) for key in _KEPT if key in row.values},
        }
        if "question_id" in row.values:
            task["id"] = task_id("livecodebench", row.values["question_id"])
        return task


def _cases(row: Row, field: str) -> list[dict[str, str]]:
    value = row.values.get(field)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        del value  # The text that it holds is as large, and has to be parsed.
        value = _pickled_text(row.values.pop(field), field)
    if isinstance(value, str):
        try:
            value = json_value(value)
        except ValueError as error:
            raise RowRefused(field, "is a text that is not JSON") from error
    if value is None and field == "private_test_cases":
        return []
    if not isinstance(value, list):
        raise RowRefused(field, "must be a list")
    cases = []
    for index, case in enumerate(value):
        if not isinstance(case, dict):
            raise RowRefused(f"{field}[{index}]", "must be an object with input and output")
        case_row = Row(case, row.number, f"{field}[{index}]")
        cases.append({"input": case_row.text("input", ""), "output": case_row.text("output", "")})
    return cases


def _pickled_text(data: str, field: str) -> str:
    """Return the text in a compressed pickle that is written in base64.

    The pickle's instructions are listed and never executed. Only those of a single text are permitted.

    Raises:
        RowRefused: The data holds anything else, or is too long.
    """
    try:
        packed = base64.b64decode(data, validate=True)
        del data  # Each of the forms may be large.
        unpacker = zlib.decompressobj()
        raw = unpacker.decompress(packed, MAX_PICKLED_BYTES)
    except (binascii.Error, zlib.error, ValueError) as error:
        raise RowRefused(field, "is not compressed data in base64") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise RowRefused(field, f"is damaged, or longer than {MAX_PICKLED_BYTES} bytes")
    del packed
    texts: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(raw):
            if operation.name in _TEXTS:
                texts.append(str(argument))
            elif operation.name not in _HARMLESS:
                raise RowRefused(field, "holds something other than a text, and is not loaded")
    except RowRefused:
        raise
    except Exception as error:
        raise RowRefused(field, "is not a pickle") from error
    if len(texts) != 1:
        raise RowRefused(field, "holds something other than a text, and is not loaded")
    return texts[0]
