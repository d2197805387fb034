"""Parquet files are read in batches of rows, which become JSON lines.

`python -m rollyard_crds.task_formats.parquet_rows` does so in a process of its own, for a file on standard
input. A hostile file then uses up the memory of that process only.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

from rollyard_crds.errors import CrdsError

MAGIC: Final = b"PAR1"
"""The first bytes of a Parquet file. No JSON text begins with them."""
BATCH_ROWS: Final = 64
MEMORY_BYTES: Final = 2 << 30
"""The address space of the process that reads a foreign file, in bytes."""
MISSING, UNREADABLE, TOO_LARGE = 3, 4, 5
"""The exit codes of the process: pyarrow is missing, the file is broken, or it needs too much memory."""


class ParquetProblem(CrdsError, ValueError):
    """A Parquet file that cannot be read; `code` is the exit code that stands for the problem."""

    reason = "InvalidTasks"

    def __init__(self, code: int) -> None:
        super().__init__(PROBLEMS.get(code, PROBLEMS[UNREADABLE]))
        self.code = code


PROBLEMS: Final = {
    MISSING: "reading Parquet needs pyarrow: pip install 'rollyard[parquet]'",
    UNREADABLE: "the Parquet file is damaged",
    TOO_LARGE: f"the Parquet file needs more than {MEMORY_BYTES >> 30} GiB of memory",
}
"""The problem that each exit code stands for."""


def json_lines(file: BinaryIO) -> Iterator[str]:
    """Yield each row of a Parquet file as a line of JSON, without a line end.

    Raises:
        ParquetProblem: pyarrow is not installed, or the file cannot be read.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise ParquetProblem(MISSING) from error
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS, use_threads=False):
            for row in batch.to_pylist():
                yield json.dumps(row, default=_plain)
    except (MemoryError, arrow.ArrowMemoryError) as error:
        raise ParquetProblem(TOO_LARGE) from error
    except (arrow.ArrowException, OSError, ValueError, TypeError, RecursionError) as error:
        raise ParquetProblem(UNREADABLE) from error


def _plain(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def main() -> int:
    """Write the rows of the file on standard input to standard output, and return the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    code = 0
    try:
        for line in json_lines(sys.stdin.buffer):
            sys.stdout.write(line + "\n")
    except ParquetProblem as problem:
        code = problem.code
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    # Arrow aborts one in 400 processes that end in the usual way, although all rows were written ("terminate
    # called without an active exception").
    os._exit(main())
