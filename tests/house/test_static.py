"""Linters, types, import contracts, and what is generated: the page's bundle and the sync client."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from rollyard_testing.pace import patience

pytestmark = pytest.mark.static

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
MYPY_SECONDS = 580.0  # It has no cache on a fresh machine.


@pytest.mark.parametrize(
    "command",
    [
        (BIN / "mypy",),
        (BIN / "ruff", "check", "."),
        (BIN / "ruff", "format", "--check", "."),
        (BIN / "lint-imports",),
        (ROOT / "scripts" / "page", "--check"),
        (sys.executable, ROOT / "scripts" / "sync-client", "--check"),
    ],
    ids=["types", "lint", "format", "imports", "page", "sync client"],
)
def test_it_has_nothing_to_say(command: tuple[str | Path, ...]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(MYPY_SECONDS))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
