"""A handler of an installed package, in a folder of the path."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

MODULE = "judge"
BEFORE = """
import asyncio, os, sys, time
from pathlib import Path
from rollyard_pipeline.handlers import Evaluation, Handler, StageContext

"""
"""The lines before the source of a handler."""


def install_handler(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the class `Judge` of `source` as the handler `steered`, until the end of the test."""
    (folder / f"{MODULE}.py").write_text(BEFORE + source)
    about = folder / "judge-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: judge\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[rollyard.handlers]\nsteered = {MODULE}:Judge\n")
    monkeypatch.syspath_prepend(folder)
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), path))))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def line_of(source: str, part: str) -> int:
    """Return the number of the line of `judge.py` in which `part` stands."""
    lines = (BEFORE + source).splitlines()
    (found,) = (number for number, line in enumerate(lines, 1) if part in line)
    return found
