"""Parquet files are read in batches of rows, which become JSON lines.

`python -m rollyard_tasks.formats.parquet_rows` does so in a process of its own, for a file on standard
input. A hostile file then uses up the memory of that process only.
"""

from __future__ import annotations

import base64
import json
import os
import resource
import subprocess
import sys
from collections.abc import Generator, Iterator
from typing import Any, BinaryIO, Final

from rollyard_tasks.row_texts import FileRefused

MAGIC: Final = b"PAR1"
"""The first bytes of a Parquet file. No JSON text begins with them."""
BATCH_ROWS: Final = 64
MEMORY_BYTES: Final = 2 << 30
"""The address space of the process that reads a foreign file, in bytes."""
PIECE_BYTES: Final = 256 << 10
"""The size of the pieces in which the output of the process is read, in bytes."""
MISSING, UNREADABLE, TOO_LARGE, KEYS = 3, 4, 5, 6
"""The exit codes of the process: pyarrow is missing, the file is damaged, it needs too much memory, or keys
of its maps cannot be written in JSON."""
_BATCH_BYTES: Final = 16 << 20
"""The size of a batch above which its rows are converted one by one, in bytes."""
_KEPT: Final = ("LANG", "LC_ALL", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV")
"""The variables that the process gets."""


class ParquetProblem(FileRefused):
    """A Parquet file that cannot be read; `code` is the exit code that stands for the problem."""

    def __init__(self, code: int) -> None:
        super().__init__(PROBLEMS.get(code, PROBLEMS[UNREADABLE]))
        self.code = code


PROBLEMS: Final = {
    MISSING: "reading Parquet needs pyarrow: pip install 'rollyard[parquet]'",
    UNREADABLE: "the Parquet file is damaged",
    TOO_LARGE: f"the Parquet file needs more than {MEMORY_BYTES >> 30} GiB of memory",
    KEYS: "the Parquet file has a map whose keys are neither texts nor numbers",
}
"""The problem that each exit code stands for."""


def json_lines(file: BinaryIO) -> Iterator[str]:
    """Yield each row of a Parquet file as a line of JSON, without a line end.

    Maps become objects, and decimals and dates become texts. A binary value becomes {"base64": TEXT}, so that
    no format takes it for a text.

    Raises:
        ParquetProblem: pyarrow is not installed, or the file cannot be read.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise ParquetProblem(MISSING) from error
    try:
        source = parquet.ParquetFile(file)
        # Only where there are maps, because the conversion takes five times as long then.
        maps = "lossy" if any(map(_has_map, source.schema_arrow.types)) else None
        for batch in source.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
            step = 1 if batch.nbytes > _BATCH_BYTES else BATCH_ROWS
            for at in range(0, batch.num_rows, step):
                for row in batch.slice(at, step).to_pylist(maps_as_pydicts=maps):
                    yield json.dumps(row, default=_plain)
    except (MemoryError, arrow.ArrowMemoryError) as error:
        raise ParquetProblem(TOO_LARGE) from error
    except TypeError as error:
        raise ParquetProblem(KEYS) from error
    except (arrow.ArrowException, OSError, ValueError, RecursionError) as error:
        raise ParquetProblem(UNREADABLE) from error


def _has_map(column: Any) -> bool:
    """Return whether values of an Arrow type hold maps."""
    inner = [column.field(index).type for index in range(column.num_fields)]
    return str(column).startswith("map<") or any(map(_has_map, inner))


def _plain(value: Any) -> Any:
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else str(value)


def command() -> tuple[list[str], dict[str, str]]:
    """Return the arguments and the environment of the process."""
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    return [sys.executable, "-P", "-m", "rollyard_tasks.formats.parquet_rows"], environment


def check_exit(code: int) -> None:
    """Check how the process ended.

    Raises:
        ParquetProblem: The process has not written all rows.
    """
    if code != 0:
        # A process that reaches its memory limit may die in various ways.
        raise ParquetProblem(TOO_LARGE if code < 0 else code)


def converted(file: BinaryIO) -> Generator[bytes, None, None]:
    """Yield the rows of a Parquet file as pieces of JSON lines, which a process of its own writes.

    Raises:
        ParquetProblem: The file cannot be read.
    """
    arguments, environment = command()
    with subprocess.Popen(
        arguments, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as child:
        assert child.stdout is not None
        try:
            while piece := child.stdout.read(PIECE_BYTES):
                yield piece
        except GeneratorExit:
            child.kill()  # The consumer has stopped in the middle of the file.
            raise
    check_exit(child.returncode)


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
    # Arrow aborts one in 400 of the processes that end in the usual way, after all rows were written
    # ("terminate called without an active exception").
    os._exit(main())
