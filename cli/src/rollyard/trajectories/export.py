"""The export of a job's trajectories to a file, which is written as a whole or not at all."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from rollyard.errors import CliError, UsageProblem

if TYPE_CHECKING:
    from rollyard_client import Client


LINES: Final = (".jsonl", ".jsonl.gz")
"""The endings of files with JSON lines."""


def write_lines(lines: Iterator[bytes], path: Path) -> int:
    """Write lines to a .jsonl or .jsonl.gz file, and return their number.

    Raises:
        UsageProblem: The file's name has another ending.
        CliError: The file cannot be written.
    """
    if not path.name.endswith(LINES):
        raise UsageProblem(f"--output must end in .jsonl or .jsonl.gz (got {path.name!r})")
    count = 0
    try:
        with _whole(path) as file, _packed(file, path.suffix == ".gz") as out:
            for line in lines:
                out.write(line + b"\n")
                count += 1
    except OSError as error:
        raise CliError(f"{path}: cannot be written: {error.strerror or error}") from error
    return count


def _packed(file: IO[bytes], packed: bool) -> contextlib.AbstractContextManager[IO[bytes] | gzip.GzipFile]:
    return gzip.GzipFile(fileobj=file, mode="wb") if packed else contextlib.nullcontext(file)


def write(client: Client, name: str, namespace: str, path: Path, follow: bool = False) -> int:
    """Write a .parquet, .jsonl or .jsonl.gz file, and return the number of its trajectories.

    Raises:
        UsageProblem: The file's name has another ending.
        CliError: The file cannot be written.
    """
    if not path.name.endswith((".parquet", *LINES)):
        raise UsageProblem(f"--output must end in .parquet, .jsonl or .jsonl.gz (got {path.name!r})")
    try:
        with _whole(path) as file:
            if path.suffix == ".parquet":
                return _parquet(client, name, namespace, file)
            return _lines(client, name, namespace, file, path.suffix == ".gz", follow)
    except OSError as error:
        raise CliError(f"{path}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _lines(client: Client, name: str, namespace: str, file: IO[bytes], packed: bool, follow: bool) -> int:
    count = 0
    with _packed(file, packed) as out:
        for trajectory in client.trajectories(name, follow=follow, namespace=namespace):
            out.write(trajectory.line() + b"\n")
            count += 1
    return count


def _parquet(client: Client, name: str, namespace: str, file: IO[bytes]) -> int:
    import pyarrow.parquet

    count = 0
    writer = None
    try:
        for part in client.parquet(name, namespace=namespace):
            table = pyarrow.parquet.read_table(io.BytesIO(part))
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(file, table.schema, compression="zstd")
            if table.num_rows:
                writer.write_table(table)
            count += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return count
