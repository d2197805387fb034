"""What every folder of tests shares: real components are there, or their absence is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import NoReturn

import pytest

Missing = Callable[[str], NoReturn]


@pytest.fixture(scope="session")
def missing() -> Missing:
    """Call with a reason where a real component is absent: skips, or fails under ROLLYARD_REQUIRE_REAL=1."""

    def tell(reason: str) -> NoReturn:
        if os.environ.get("ROLLYARD_REQUIRE_REAL") == "1":
            pytest.fail(reason)
        pytest.skip(reason)

    return tell


@pytest.fixture(scope="session")
def bubblewrap_works(missing: Missing) -> None:
    """Bubblewrap makes sandboxes here."""
    program = shutil.which("bwrap")
    if program is None:
        missing("bubblewrap is not installed (Debian: apt install bubblewrap)")
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "true"]
    probe = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if probe.returncode != 0:
        missing(f"bubblewrap is not usable here: {probe.stderr.strip()}")
