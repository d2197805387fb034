"""Where the code of a handler was, in the words of its author: the file that Rollyard has called."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from typing import Final

_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A frame in what the standard library's `faulthandler` writes."""
_LIBRARY: Final = sysconfig.get_paths()["stdlib"] + "/"
_ASYNCIO: Final = _LIBRARY + "asyncio/"
_THREADS: Final = _LIBRARY + "concurrent/"
_IMPORT: Final = (_LIBRARY + "importlib/", "<frozen importlib")
_PACKAGES: Final = (sysconfig.get_paths()["purelib"] + "/", sysconfig.get_paths()["platlib"] + "/")
_OURS: Final = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + "/"


def message_of(error: BaseException, limit: int | None = None) -> str:
    """Return an exception as `TYPE: MESSAGE (FILE, line N, in FUNCTION)`.

    Args:
        error: The exception.
        limit: The most characters of the part before the place. The default is no limit.
    """
    frames = [
        (frame.filename, frame.lineno or 0, frame.name) for frame in traceback.extract_tb(error.__traceback__)
    ]
    ours = (_OURS, _ASYNCIO, _THREADS, *_IMPORT)
    outside = [frame for frame in frames if not frame[0].startswith(ours)]
    location = _last_place(outside or frames[-1:])
    return f"{type(error).__name__}: {error}"[:limit] + (f" ({location})" if location else "")


def blocked_at(dump: str) -> str:
    """Return where a process was at work, as `FILE, line N, in FUNCTION`; "" if its event loop waited.

    Args:
        dump: What `faulthandler` wrote in that process.
    """
    frames: list[tuple[str, int, str]] = []
    for file, line, function in _FRAME.findall(dump):
        if file.startswith(_ASYNCIO):
            break
        installed = file.startswith(_PACKAGES)
        if not file.startswith((_OURS, "<frozen")) and (installed or not file.startswith(_LIBRARY)):
            frames.insert(0, (file, int(line), function))
    return _last_place(frames)


def blocked(error: TimeoutError) -> str:
    """Return the note that a handler was blocked when the time was up, or "" if it was not.

    Args:
        error: What `asyncio.timeout` raised. Its cause is the `CancelledError` that has the note.
    """
    return "; ".join(getattr(error.__cause__, "__notes__", ()))


def _last_place(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return the last place in the file of the first frame."""
    for file, line, function in reversed(frames):
        if file == frames[0][0]:
            return f"{os.path.basename(file)}, line {line}, in {function}"
    return ""
