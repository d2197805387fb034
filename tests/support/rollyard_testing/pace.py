"""How fast this machine is just now, by which the tests scale their waits and limits."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Final

_VARIABLE: Final = "ROLLYARD_TEST_PACE"
_USUAL_SECONDS: Final = 0.2
"""What `_WORK` takes on each of two usual cores at once (CPython 3.11 at some 3 GHz)."""
_SLOWEST: Final = 6.0
"""A machine that is slower still is in trouble, and waiting longer would only hide it."""
_WORK: Final = """
import time
def work(state):
    for _ in range(2_500_000):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
begin = time.perf_counter()
work(1)
print(time.perf_counter() - begin)
"""


@cache
def pace() -> float:
    """Return how many times longer than on an idle machine of usual speed work takes here; 1 to 6.

    A fixed piece of work is timed on every core at once, so that a quota on processor time counts, too. It
    is measured once: processes that this one starts read the result from their environment.
    """
    if _VARIABLE not in os.environ:
        command = [sys.executable, "-S", "-c", _WORK]
        workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(os.cpu_count() or 1)]
        slowest = max(float(worker.communicate(timeout=120)[0]) for worker in workers)
        os.environ[_VARIABLE] = f"{min(max(slowest / _USUAL_SECONDS, 1.0), _SLOWEST):.2f}"
    return float(os.environ[_VARIABLE])


def patience(seconds: float) -> float:
    """Return how many seconds a wait may last here that may last `seconds` on a usual, idle machine."""
    return seconds * pace()
