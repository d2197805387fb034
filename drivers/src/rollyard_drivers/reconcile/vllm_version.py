"""The versions of vLLM that Rollyard can start. The functions are pure."""

from __future__ import annotations

import re
from typing import Final

MINIMUM: Final = (0, 30)
"""The first release that has `--enable-scale-out`, which every server is started with."""
MINIMUM_TEXT: Final = ".".join(map(str, (*MINIMUM, 0)))
_RELEASE: Final = re.compile(r"(\d+)\.(\d+)")
_UNKNOWN_FLAG: Final = re.compile(r"unrecognized arguments: .*--enable-scale-out\b")


def is_too_old(version: str) -> bool:
    """Return whether a version such as `0.26.0` or `0.31.1.dev4+cu130` is below the minimum.

    A version that does not begin with two numbers is not judged.
    """
    match = _RELEASE.match(version)
    return match is not None and (int(match[1]), int(match[2])) < MINIMUM


def with_hint(error: str) -> str:
    """Return the error of a server that ended, with an explanation if its vLLM does not know the flag."""
    if not _UNKNOWN_FLAG.search(error):
        return error
    return f"this vLLM is too old, Rollyard needs {MINIMUM_TEXT} or newer ({error})"
