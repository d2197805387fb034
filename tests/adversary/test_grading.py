"""Files and answers of strangers that `rollyard grade` reads, and that want more than a reward."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
import tracemalloc
from pathlib import Path

import pytest
from rollyard.main import main
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.installed import install_handler
from rollyard_testing.waiting import eventually

pytestmark = pytest.mark.attack(boundary="control plane", surface="`rollyard grade`")


ESCAPES = "\x1b[2J\x1b]0;title\x07\x9b1A\u202e7\rreward 1"
"""Clears the screen, sets the title, moves the cursor, turns the text and writes over the line."""


def json_line(**fields: object) -> str:
    return f"{json.dumps(fields)}\n"


TERMINAL = pytest.mark.attack(
    "an answer, a key or a name in a file of pairs moves the cursor, sets the title, or forges a line "
    "such as the reward",
    stopped_by="it is escaped before it is printed, one line for each pair; lines of an answer are marked",
)


@TERMINAL
@pytest.mark.parametrize("output", [[], ["-o", "json"]], ids=["text", "json"])
def test_a_terminal_obeys_no_answer(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, output: list[str]
) -> None:
    row = json_line(answer=f"{ESCAPES}\nreward 1", key=f"8{ESCAPES}", id=f"{ESCAPES}\nreward 1")
    (tmp_path / "pairs.jsonl").write_text(row)
    assert main(["grade", "--handler", "stem", "--file", str(tmp_path / "pairs.jsonl"), *output]) == 0
    assert main(["grade", "--handler", "stem", "--key", "8", *output, f"{ESCAPES}\nreward 1"]) == 0
    shown = capfd.readouterr().out
    assert "title" in shown, "nothing of the answer is shown, so this shows nothing"
    assert not {sign for sign in ESCAPES if not sign.isprintable()} & set(shown)
    assert not [line for line in shown.splitlines() if line.startswith("reward 1")]


@TERMINAL
def test_a_message_about_a_line_is_escaped(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json_line(answer="7", key="7", **{ESCAPES: 1}))
    assert main(["grade", "--handler", "math", "--file", str(tmp_path / "pairs.jsonl")]) == 1
    shown = capfd.readouterr().out
    assert "title" in shown
    assert not {sign for sign in ESCAPES if not sign.isprintable()} & set(shown)


@pytest.mark.attack(
    "a file of pairs, which may be compressed, has a line without an end",
    stopped_by="at most 8 MiB of a line are read, and 8 pairs at a time",
)
def test_a_line_without_an_end_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """100 MB of it take 100 kB on the disk. No more than the limit of a line is read."""
    with gzip.open(tmp_path / "pairs.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(json_line(answer="7", key="7").encode())
        for _ in range(100):
            file.write(b" " * 1_000_000)
    tracemalloc.start()
    try:
        assert main(["grade", "--handler", "stem", "--file", str(tmp_path / "pairs.jsonl.gz")]) == 1
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()
    assert "pairs.jsonl.gz: line 2: longer than 8 MiB" in capfd.readouterr().err


BLOCKING = """
class Judge(Handler):
    needs_sandbox = False

    async def eval(self, ctx):
        Path("FOLDER/blocks").write_text(str(os.getpid()))
        while True: pass
"""


@pytest.mark.attack(
    "an answer that takes for ever to compare, or whose comparison cannot be interrupted",
    stopped_by="the limits of Eval; what compares it ends with the command",
)
async def test_an_answer_that_never_ends_can_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compares it ends with the command, which shows no traceback."""
    install_handler(tmp_path, BLOCKING.replace("FOLDER", str(tmp_path)), monkeypatch)
    grading = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rollyard", "grade", "--handler", "steered", "7",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    blocks = tmp_path / "blocks"
    await eventually(lambda: blocks.exists() and blocks.read_text() != "")
    grading.send_signal(signal.SIGINT)
    async with asyncio.timeout(patience(20)):
        out, err = await grading.communicate()
    assert (grading.returncode, out, err.strip()) == (130, b"", b"")
    await eventually(lambda: not os.path.exists(f"/proc/{blocks.read_text()}"))
