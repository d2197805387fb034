"""One trainer works on a run at a time, and the kernel lets the next one in when a process is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tinygrpo.errors import RunTaken
from tinygrpo.run_lock import run_lock

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tinygrpo.run_lock import run_lock
with run_lock(Path(sys.argv[2]), 0):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    """Return a process that holds the lock of the folder."""
    example = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(example), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_second_trainer_is_refused_and_waits_no_longer_than_it_may(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    started = time.monotonic()
    with pytest.raises(RunTaken, match="another trainer works in"), run_lock(tmp_path, 0.5):
        pass
    assert time.monotonic() - started >= 0.5
    end(holder)


def test_a_killed_trainer_leaves_no_lock(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    end(holder)
    with run_lock(tmp_path, 0):
        pass


def test_the_folder_is_made(tmp_path: Path) -> None:
    with run_lock(tmp_path / "run" / "a", 0):
        assert (tmp_path / "run" / "a").is_dir()
