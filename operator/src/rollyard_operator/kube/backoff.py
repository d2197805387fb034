"""The pause after failures in a row."""

from __future__ import annotations

import random

FIRST_SECONDS = 0.25
LONGEST_SECONDS = 15.0


def backoff(failures: int) -> float:
    """Seconds to wait after this many failures in a row: doubling, bounded, a quarter of it jitter."""
    whole = min(LONGEST_SECONDS, FIRST_SECONDS * 2.0 ** min(failures, 30))
    return whole * (0.75 + random.random() / 4)
