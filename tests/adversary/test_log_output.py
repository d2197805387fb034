"""What policies, models and workers write into logs and events does not reach a terminal as it is."""

from __future__ import annotations

import os
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from rollyard.commands import jobs
from rollyard.commands.logs import MAX_LINE, FollowedLog
from rollyard.main import main
from rollyard_client import Client
from rollyard_client.sse import JobEvent

pytestmark = pytest.mark.attack(boundary="control plane", surface="terminals")

HOSTILE = b"\x1b[2J\x1b]0;title\x07\x1b]52;c;cm0gLXJmIH4=\x07 \xe2\x80\xae\xc2\x9b31m\r\x08\xff ok"
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the logs of the home that commands use."""
    for name in ("ROLLYARD_URL", "ROLLYARD_KUBERNETES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "home"))
    made = tmp_path / "home" / "logs"
    made.mkdir(parents=True)
    return made


@pytest.mark.attack(
    "a log line moves the cursor, sets the clipboard, turns text around or is not UTF-8",
    stopped_by="`rollyard logs` escapes control characters and directions, line by line",
)
def test_a_log_does_not_reach_the_terminal_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "job-22222222-worker-0.log"
    path.write_bytes(b"before\n" + HOSTILE + b"\nafter\n")
    path.with_name("job-22222222-worker-1.log").write_bytes(HOSTILE)
    for words in (["job"], ["worker/job-22222222-worker-0"], ["job", "--since", "1h"]):
        assert main(["logs", *words]) == 0
        shown = capsys.readouterr()
        assert not UNSEEN.search(shown.out + shown.err)
        assert "\\x1b]52;c;" in shown.out
        assert shown.out.count("after\n") == 1


@pytest.mark.attack(
    "a log is one line without an end",
    stopped_by="lines are printed in parts of 16 KiB, and at most the last 16 MiB of a file are read",
)
def test_an_endless_line_is_printed_in_parts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "job-22222222-worker-0.log"
    with path.open("wb") as file:
        # The beginning is a hole of a gigabyte, which no disk holds.
        file.truncate(1 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"x" * (4 * MAX_LINE))
    tracemalloc.start()
    try:
        assert main(["logs", "job", "--tail", "3"]) == 0
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines] == [MAX_LINE] * 3
    with closing(FollowedLog(path, 1 << 30)) as log:
        assert [len(part) for part in log.lines()] == [MAX_LINE] * 4


@pytest.mark.attack(
    "the log of a pod, or an error of kubectl, holds control characters",
    stopped_by="both are escaped, and read in parts of 16 KiB",
)
def test_neither_does_that_of_a_pod(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kubectl = tmp_path / "kubectl"
    (tmp_path / "said").write_bytes(HOSTILE + b"\n" + b"x" * (2 * MAX_LINE))
    kubectl.write_text(
        f"#!/bin/sh\ncd {tmp_path}\ncase $1 in config) echo mine;; logs) cat said; cat said >&2;; esac\n"
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main(["logs", "--kubernetes", "job"]) == 0
    shown = capsys.readouterr()
    assert not UNSEEN.search(shown.out + shown.err)
    assert max(map(len, shown.out.splitlines())) == MAX_LINE


@pytest.mark.attack(
    "a worker gives a reason, or an id, with control characters and a forged line",
    stopped_by="`rollyard events` prints each event as one line, escaped",
)
def test_an_event_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTILE.decode(errors="replace") + "\n2030-01-01T00:00:00Z  the job has ended"

    class Hostile:
        namespace = "default"

        def events(self, _name: str, **_more: Any) -> Iterator[JobEvent]:
            data = {"rollout": text, "stage": text, "status": text, "reward": None, "reason": text}
            yield JobEvent("transition", data)
            yield JobEvent("end", {})

    jobs._follow(cast(Client, Hostile()), "job")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2
    assert not UNSEEN.search(shown)
