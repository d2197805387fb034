"""Seeds: each request has its own, derived from the job's base seed, which makes a run repeatable."""

from __future__ import annotations

import hashlib
import struct


def request_seed(base: int, task_id: str, sample_index: int, turn: int, part: int = 0) -> int:
    """Return a seed in [0, 2**31) for one request of one turn.

    `part` numbers the requests of one turn, because another request continues a turn that a weight update has
    cut. The seed has 31 bits, because backends read seeds as signed 32-bit numbers.
    """
    text = task_id.encode()
    packed = struct.pack(">QIIII", base, len(text), sample_index, turn, part) + text
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "big") >> 1
