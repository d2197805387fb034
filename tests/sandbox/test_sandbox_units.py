"""The pure parts: capture, frames, quoting, errors."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollyard_sandbox import errors, proof
from rollyard_sandbox.execution import processes
from rollyard_sandbox.execution.commands import Capture
from rollyard_sandbox.execution.event_loop import EventLoop
from rollyard_sandbox.execution.shell import parse_report, single_quoted, typed_line
from rollyard_sandbox.frames import FrameReader, encode
from rollyard_sandbox.server.operations import Operations
from rollyard_sandbox.server.options import ServerOptions
from rollyard_testing.pace import patience


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(0, 200))
def test_capture_keeps_head_and_tail(chunks: list[bytes], limit: int) -> None:
    capture = Capture(limit)
    for chunk in chunks:
        capture.add(chunk)
    full = b"".join(chunks)
    kept, omitted = capture.finish()
    assert capture.total == len(full)
    if len(full) <= limit:
        assert (kept, omitted) == (full, 0)
    else:
        head, tail = limit - limit // 2, limit // 2
        assert omitted == len(full) - limit
        assert kept == full[:head] + b"\n[... %d bytes omitted ...]\n" % omitted + full[len(full) - tail :]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.binary(max_size=90)),
        max_size=3,
    ),
    st.integers(1, 40),
)
def test_frames_survive_any_cutting(messages: list[tuple[dict[str, int], bytes]], step: int) -> None:
    stream = b"".join(encode(header, body) for header, body in messages)
    reader = FrameReader()
    received = [frame for i in range(0, len(stream), step) for frame in reader.feed(stream[i : i + step])]
    assert received == messages


def test_frames_too_large_are_refused_before_they_are_stored() -> None:
    with pytest.raises(errors.CommandTooLarge):
        encode({}, b"x" * (64 * 1024 * 1024 + 1))
    with pytest.raises(errors.ProtocolError):
        list(FrameReader(max_body=10).feed(encode({}, b"x" * 11)[:8]))
    header = {"a": "x" * (256 * 1024 - len('{"a":""}'))}
    ((found, body),) = FrameReader(max_body=10).feed(encode(header, b"x" * 10))
    assert (found, body) == (header, b"x" * 10)
    header["a"] += "x"
    with pytest.raises(errors.CommandTooLarge):
        encode(header)
    with pytest.raises(errors.ProtocolError):
        list(FrameReader().feed(struct.pack("!II", 256 * 1024 + 1, 0)))
    reader = FrameReader(max_body=10)
    reader.allow_body(11)
    assert list(reader.feed(encode({}, b"x" * 11))) == [({}, b"x" * 11)]
    assert not reader.unfinished
    assert list(reader.feed(encode({})[:3])) == []
    assert reader.unfinished


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=1, max_size=200).filter(lambda data: b"\0" not in data))
def test_typed_lines_say_exactly_the_command(data: bytes) -> None:
    line = typed_line(data)
    assert all(0x20 <= byte < 0x7F for byte in line)
    word = line.removeprefix(b"\\builtin eval -- ")
    done = subprocess.run(["bash", "-c", b"printf %s " + word], capture_output=True, check=True)
    assert done.stdout == data


def test_long_lines_are_not_typed() -> None:
    assert typed_line(b"x" * 3500) is not None
    assert typed_line(b"x" * 3501) is None
    assert typed_line(b"\n" * 3000) is None


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30))
def test_single_quoted_has_no_special_characters(text: str) -> None:
    quoted = single_quoted(text)
    assert quoted.startswith("'")
    assert quoted.replace("'\\''", "").strip("'") == text.replace("'", "")


@pytest.mark.parametrize("message", [b"", b"x", b"1", b"a b", b"-1 00000001", b"x 1", b"\xff \xff"])
def test_messages_that_are_no_reports(message: bytes) -> None:
    assert parse_report(message) is None


def test_reports() -> None:
    report = parse_report(b"x3 00000007 /a b")
    assert (report.status, report.number, report.leaving, report.cwd) == (3, "00000007", True, "/a b")
    report = parse_report(b"0 ")
    assert (report.status, report.number, report.leaving) == (0, "", False)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "from_wire"])
def test_errors_survive_the_wire(name: str) -> None:
    cls = getattr(errors, name)
    raised = errors.from_wire(cls.reason, "text")
    assert (type(raised), raised.reason, str(raised)) == (cls, cls.reason, "text")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOENT, "FileNotFound"), (errno.EISDIR, "IsADirectory"), (errno.ENOTDIR, "NotADirectory"),
        (errno.EACCES, "PermissionDenied"), (errno.EPERM, "PermissionDenied"), (errno.EROFS, "ReadOnly"),
        (errno.ENOSPC, "DiskFull"), (errno.EDQUOT, "DiskFull"), (errno.EFBIG, "FileTooLarge"),
        (errno.ENAMETOOLONG, "NameTooLong"), (errno.ELOOP, "SymlinkLoop"), (errno.ENOTEMPTY, "NotEmpty"),
        (errno.EMFILE, "TooManyOpenFiles"), (errno.ENFILE, "TooManyOpenFiles"),
        (errno.EIO, "InputOutputError"), (errno.EBADF, "FileError"), (None, "FileError"),
    ],
)  # fmt: skip
def test_every_error_of_a_file_has_its_reason_on_both_ends(number: int | None, reason: str) -> None:
    error = errors.file_error(OSError(number, "why") if number is not None else OSError("why"), "/x")
    assert (error.reason, str(error)) == (reason, "/x: why")
    received = errors.from_wire(error.reason, str(error))
    assert (type(received), received.reason) == (errors.FileError, reason)


@pytest.mark.parametrize("reason", ["NotAFile", "TooManyEntries", "WouldBlock"])
def test_other_reasons_of_files(reason: str) -> None:
    assert type(errors.from_wire(reason, "x")) is errors.FileError


@pytest.mark.parametrize("reason", ["ConfinementFailed", "ProgramNotFound", "ResourceExhausted"])
def test_other_reasons_of_launches(reason: str) -> None:
    assert type(errors.from_wire(reason, "x")) is errors.LaunchError


def test_a_proof_fits_one_secret_one_purpose_and_one_challenge() -> None:
    shown, key = proof.derived("token")
    assert proof.derived("token") == (shown, key)
    assert {shown, key.hex()}.isdisjoint({*proof.derived("other"), "token"})
    assert shown != key.hex()
    answers = {
        proof.answer(secret, purpose, challenge)
        for secret in (key, b"other")
        for purpose in ("hello", "begin_eval /p", "begin_eval /q")
        for challenge in ("a", "b", "x" * 256)
    }
    assert len(answers) == 18
    for wrong in ("x" * 257, None, 1, b"a"):
        assert proof.answer(key, "hello", wrong) == ""


@pytest.mark.parametrize("size", [0, 31, 32, 33])
def test_a_secret_has_its_whole_length(size: int) -> None:
    read, write = os.pipe()
    os.write(write, b"s" * size)
    os.close(write)
    if size == proof.SECRET_BYTES:
        assert proof.read_secret(read) == b"s" * size
    else:
        with pytest.raises(ValueError, match=f"has {size} bytes"):
            proof.read_secret(read)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_unknown_reasons_are_kept() -> None:
    raised = errors.from_wire("FromTheFuture", "text")
    assert (type(raised), raised.reason) == (errors.SandboxError, "FromTheFuture")


def test_no_evaluation_begins_beside_a_process_that_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not matter how many others were killed."""
    survivors = [1]
    monkeypatch.setattr(processes, "kill_everything", lambda *_, **__: 3)
    monkeypatch.setattr(processes, "alive_below", lambda *_, **__: survivors)
    protections: Any = SimpleNamespace(namespaces=None)
    options = ServerOptions(listen=[], workdir=str(tmp_path))
    operations = Operations(EventLoop(), options, protections, lambda: None)
    said: list[Any] = []
    connection: Any = SimpleNamespace(
        in_flight={},
        refuse=lambda _request, error: said.append(error.reason),
        answer=lambda _request, fields, _body: said.append(os.path.isdir(fields["folder"])),
    )
    operations.handle(connection, {"id": 1, "op": "begin_eval"}, b"")
    survivors.clear()
    operations.handle(connection, {"id": 2, "op": "begin_eval"}, b"")
    operations._places.remove()
    assert said == ["ProcessesSurvive", True]


def test_a_signal_that_a_process_of_this_namespace_sends_does_not_come_from_outside() -> None:
    """It has a number here. In a process of its own, because the signal is blocked from then on."""
    code = """
import os, signal
from rollyard_sandbox.execution.event_loop import OutsideSignals
outside = OutsideSignals([signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
print(outside.read())
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patience(30))
    assert (said.stdout, said.returncode) == ("set()\n", 0), said.stderr
