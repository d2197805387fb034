"""Reading the task files that jobs name, within limits of time, size and number.

The bytes of a Parquet file decide how much memory its reader allocates, so no such file is read in the
control plane's own process: a separate process converts it to JSON lines. The process has limits on its
memory and its time, no arguments from outside and no environment with secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rollyard_crds.fields.skipped_rows import SkippedRows
from rollyard_crds.rolloutjob import TaskSource
from rollyard_tasks.formats.parquet_rows import MAGIC, PIECE_BYTES, check_exit, command
from rollyard_tasks.row_texts import FileRefused
from rollyard_tasks.task_file import MAX_FILE_BYTES, KeptTasks, TaskFile
from rollyard_tasks.task_list import MAX_SPECS_BYTES, TaskListError, parse_specs

from rollyard_api.core.codec import pack, unpack
from rollyard_api.core.limits import Limit
from rollyard_api.core.problems import ApiError, Invalid, LimitReached, Unavailable
from rollyard_api.jobs.allow_lists import FIELD, AllowList, blob_of, shown
from rollyard_api.jobs.source_readers import Blocking, SourceUnreadable, pieces
from rollyard_api.jobs.tasks import TaskRow, refusing

PARSERS: Final = 2
"""The number of threads that decompress and check. They never wait for anything."""
CONVERTERS: Final = 2
"""The number of processes that convert Parquet files at once. Other files wait within their time limit."""
_RETRY: Final = {"Retry-After": "1"}
STEP_SECONDS: Final = 0.1
"""The time for which one file has a thread, in seconds."""


@dataclass(frozen=True, slots=True)
class TaskFileLimits:
    """The limits on what is read for jobs."""

    file_bytes: int = MAX_FILE_BYTES
    """The largest size of one task file after decompression, in bytes."""
    seconds: float = 60.0
    """The number of seconds within which one file must be read."""
    per_namespace: int = 2
    """The number of files that may be read at the same time for the jobs of one namespace."""
    external: int = 16
    """The number of files, web servers and buckets that may be read at the same time in all. Each may
    block a thread."""
    uploads: int = 16
    """The number of uploads that may be read at the same time in all."""


Pieces = Callable[[str, str], AsyncGenerator[bytes, None]]
"""A function that yields the bytes of an upload, which is named by its namespace and SHA-256."""


def _busy(namespace: str | None, most: int) -> ApiError:
    advice, reason = "submit again in a moment", "SourcesBusy"
    if namespace is None:
        return Unavailable(f"too many task files are being read; {advice}", reason=reason, headers=_RETRY)
    text = f"{most} task files are being read for jobs of namespace {namespace!r}, and no more are at once"
    return LimitReached(f"{text}; {advice}", reason=reason, headers=_RETRY)


class TaskReader:
    """The only way from a URL in a job to its tasks.

    Until it answers, a source that hangs costs its own namespace a slot, and one thread of a pool that serves
    nothing else. Uploads are read apart from these sources.
    """

    def __init__(self, allowed: AllowList, limits: TaskFileLimits, uploads: Pieces) -> None:
        self._allowed = allowed
        self._limits = limits
        self._uploads = uploads
        each = limits.per_namespace
        self._external = Limit("task files", each=each, total=limits.external, refusal=_busy)
        self._uploaded = Limit("uploaded task files", each=each, total=limits.uploads, refusal=_busy)
        self._waiting = ThreadPoolExecutor(limits.external, thread_name_prefix="source")
        self._converting = asyncio.Semaphore(CONVERTERS)
        self._parsers = ThreadPoolExecutor(PARSERS, thread_name_prefix="tasks")

    async def read(
        self, url: str, namespace: str, options: TaskSource | None = None, skipped: SkippedRows | None = None
    ) -> KeptTasks[TaskRow]:
        """Return the tasks of a file behind a URL, of any kind that `FileRows` reads, or in Parquet.

        Args:
            url: The URL as the job names it.
            namespace: The namespace of the job.
            options: The part of the job's spec with the format and the options.
            skipped: Takes the rows that are left out, where the options say `onBadRow: skip`.

        Raises:
            Invalid: The installer's list does not contain the URL, or a place that it leads to; or the file
                cannot be read in time, or a line is refused and not skipped. In each case, the whole list is
                refused.
            LimitReached, Unavailable: Too many files are being read.
        """
        specs = await self._specs(options, namespace)
        most = self._limits.file_bytes
        make_file = partial(TaskFile, options, pack, unpack, max_bytes=most, specs=specs, skipped=skipped)
        digest = blob_of(url)
        if digest is not None:
            with self._uploaded.held(namespace):
                return await self._collect(url, self._uploads(namespace, digest), make_file)
        source = self._allowed.source(url, namespace)
        turn = ExitStack()
        turn.enter_context(self._external.held(namespace))
        blocking = Blocking(self._waiting, turn.close)
        try:
            # Messages must not quote a file of the installer, which the author of the job may not know.
            data = pieces(source, self._allowed, namespace, blocking)
            return await self._collect(url, data, partial(make_file, quote=False))
        finally:
            blocking.finish()

    async def _specs(self, options: TaskSource | None, namespace: str) -> Mapping[str, Any] | None:
        """Return the content of the upload `specs`, which the format needs beside the rows."""
        if options is None or options.specs is None:
            return None
        digest = blob_of(options.specs)
        if digest is None:
            raise _refused_specs("must be an upload, such as `rollyard submit` makes of a file")
        content = bytearray()
        try:
            with self._uploaded.held(namespace), refusing("spec.tasks."):
                async with (
                    asyncio.timeout(self._limits.seconds),
                    aclosing(self._uploads(namespace, digest)) as data,
                ):
                    async for piece in data:
                        content += piece
                        if len(content) > MAX_SPECS_BYTES:
                            break
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._parsers, parse_specs, bytes(content))
        except TimeoutError as error:
            raise _refused_specs(f"was not read within {self._limits.seconds:g} seconds") from error

    async def _collect(
        self, url: str, data: AsyncGenerator[bytes, None], make_file: Callable[..., TaskFile]
    ) -> KeptTasks[TaskRow]:
        """Return the tasks in these bytes, as the file that `make_file` returns reads them."""
        seconds, loop = self._limits.seconds, asyncio.get_running_loop()
        deadline = time.monotonic() + seconds
        field = f"{FIELD}: {shown(url)}"
        try:
            with refusing(f"{field}: "):
                async with asyncio.timeout(seconds), aclosing(data):
                    start = await _first_bytes(data)
                    if start.startswith(MAGIC):
                        file = make_file(unit="row")
                        rows = parquet_lines(start, data, self._limits.file_bytes, self._parsers)
                        async with self._converting, aclosing(rows):
                            await self._feed(file, rows, deadline)
                    else:
                        file = make_file()
                        await self._check(file.feed(start), deadline)
                        await self._feed(file, data, deadline)
                    return await loop.run_in_executor(self._parsers, file.tasks, TaskRow, deadline)
        except TimeoutError as error:
            why = f"it was not read within {seconds:g} seconds"
            raise Invalid.of(f"{field} cannot be read: {why}", reason=TaskListError.reason) from error
        except SourceUnreadable as error:
            raise Invalid.of(f"{field} cannot be read: {error}", reason=TaskListError.reason) from error

    async def _feed(self, file: TaskFile, data: AsyncGenerator[bytes, None], deadline: float) -> None:
        if file.full:
            return
        async for piece in data:
            await self._check(file.feed(piece), deadline)
            if file.full:
                return
        await self._check(file.end(), deadline)

    async def _check(self, rows: Iterator[None], deadline: float) -> None:
        """Check the rows of a piece in short steps, so that the files that are being read share the threads.

        A small piece of a compressed file may expand to a large text.
        """
        step = partial(_step, rows, deadline)
        while not await asyncio.get_running_loop().run_in_executor(self._parsers, step):
            pass

    def close(self) -> None:
        """Stop the threads without waiting for sources that hang."""
        self._waiting.shutdown(wait=False)
        self._parsers.shutdown(wait=False, cancel_futures=True)


def _step(rows: Iterator[None], deadline: float) -> bool:
    """Check rows for at most STEP_SECONDS, and return whether all of them have been checked.

    Raises:
        TaskListError: A row is refused, or the file is too long or damaged.
        TimeoutError: The deadline has passed.
    """
    turn = time.monotonic() + STEP_SECONDS
    for _ in rows:
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError
        if now > turn:
            return False
    return True


def _refused_specs(problem: str) -> Invalid:
    return Invalid.of(f"spec.tasks.specs: {problem}", reason="InvalidTasks")


async def _first_bytes(data: AsyncGenerator[bytes, None]) -> bytes:
    """Return the first pieces of a file, which are enough to distinguish Parquet from a text."""
    start = b""
    async for piece in data:
        start += piece
        if len(start) >= len(MAGIC):
            break
    return start


async def parquet_lines(
    start: bytes, rest: AsyncIterator[bytes], max_bytes: int, disk: Executor
) -> AsyncGenerator[bytes, None]:
    """Yield the rows of a Parquet file as pieces of JSON lines.

    Args:
        start: The first bytes of the file.
        rest: The bytes after them.
        max_bytes: The largest size of the file in bytes.
        disk: The executor in which the file is written to a temporary folder.

    Raises:
        FileRefused: The file is too long, damaged, or needs too much memory.
    """
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryFile() as file:
        size, piece = 0, start
        while piece:
            size += len(piece)
            if size > max_bytes:
                raise FileRefused(f"holds more than {max_bytes} bytes")
            await loop.run_in_executor(disk, file.write, piece)
            piece = await anext(rest, b"")
        await loop.run_in_executor(disk, file.flush)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        arguments, environment = command()
        child = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=file,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=PIECE_BYTES,
            env=environment,
        )
    assert child.stdout is not None
    try:
        while piece := await child.stdout.read(PIECE_BYTES):
            yield piece
        code = await child.wait()
    finally:
        # The consumer may have stopped in the middle of the file.
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            # asyncio sees the end of a process only after the end of its output, and it reads no output while
            # its buffer is full. What is left is at most that buffer and the content of the pipe.
            while await child.stdout.read(PIECE_BYTES):
                pass
            await child.wait()
    check_exit(code)
