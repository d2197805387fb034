"""How deep lists and objects of a decoded document nest."""

from __future__ import annotations

from itertools import chain
from typing import Any


def deeper_than(document: Any, most: int) -> bool:
    """Return whether lists and dicts nest more than `most` deep. No depth exhausts the stack."""
    level: list[Any] = [document]
    for _ in range(most + 1):
        level = [
            value
            for value in level
            if type(value) is dict or type(value) is list  # as JSON gives them
        ]
        if not level:
            return False
        level = list(chain.from_iterable(v.values() if type(v) is dict else v for v in level))
    return True
