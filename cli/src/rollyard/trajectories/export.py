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
"""The suffixes of files with JSON lines."""


def write_lines(lines: Iterator[bytes], path: Path) -> int:
    """Write lines to a .jsonl or .jsonl.gz file, and return their number.

    Raises:
        UsageProblem: The file's name has another suffix.
        CliError: The file cannot be written.
    """
    if not path.name.endswith(LINES):
        raise UsageProblem(f"--output must end in .jsonl or .jsonl.gz (got {path.name!r})")
    count = 0
    with _whole(path) as file:
        packed = gzip.GzipFile(fileobj=file, mode="wb") if path.suffix == ".gz" else None
        with packed or contextlib.nullcontext(file) as out:
            for line in lines:
                out.write(line + b"\n")
                count += 1
    return count


def write(client: Client, name: str, namespace: str, path: Path, follow: bool = False) -> int:
    """Write a .parquet, .jsonl or .jsonl.gz file, and return the number of its trajectories.

    Raises:
        UsageProblem: The file's name has another suffix.
        CliError: The file cannot be written.
    """
    if path.name.endswith(LINES):
        trajectories = client.trajectories(name, follow=follow, namespace=namespace)
        return write_lines((trajectory.line() for trajectory in trajectories), path)
    if path.suffix != ".parquet":
        raise UsageProblem(f"--output must end in .parquet, .jsonl or .jsonl.gz (got {path.name!r})")
    with _whole(path) as file:
        return _parquet(client, name, namespace, file)


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise CliError(f"{path}: cannot be written: {error.strerror or error}") from error


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
