"""The parts of a failed test that people are shown. The policy chose much of them, so they decide nothing.

Every function takes a bounded time, and returns a short text, whatever it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

_LENGTH: Final = 200
"""The largest number of characters of a value."""
_DEPTH: Final = 3
"""How deep a nested value is shown."""
_ITEMS: Final = 8
"""The largest number of items of a list, and of calls of a test, that are shown."""
_TEST: Final = 1000
"""The largest number of characters of a test."""
_END: Final = 800
"""The largest number of characters of the end of an output."""
_BRACKETS: Final[Mapping[str, str]] = {"l": "[]", "t": "()", "s": "{}", "z": "{}", "y": "<>"}


def short(text: str, length: int = _LENGTH) -> str:
    """Return the start of a text, with "…" where the rest is left out."""
    return text if len(text) <= length else f"{text[:length]}…"


def quoted(text: str) -> str:
    """Return the start of a text as Python would write it."""
    return short(repr(text[: _LENGTH + 1]))


def value(encoded: Any, depth: int = 0) -> str:
    """Return the start of a value, which has the form of `sandboxed.encode` or any other of JSON."""
    if isinstance(encoded, str):
        return quoted(encoded)
    if not isinstance(encoded, dict):
        return short(str(encoded)) if isinstance(encoded, bool | float | None) else f"<{_kind(encoded)}>"
    mark, content = next(iter(encoded.items()), ("", None))
    if isinstance(content, list) and (mark in _BRACKETS or mark == "d"):
        if depth >= _DEPTH:
            return "…"
        if mark == "d":
            return _joined((_pair(item, depth) for item in content), len(content), "{}")
        return _joined((value(item, depth + 1) for item in content), len(content), _BRACKETS[mark])
    if mark == "x" and isinstance(content, list) and len(content) == 2:
        return short(f"{_kind(content[0])}({value(content[1], depth)})")
    if mark == "i" and isinstance(content, str):
        return _whole(content)
    return short(content) if mark == "f" and isinstance(content, str) else f"<{_kind(content)}>"


def calls(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each of the first calls of the policy's function: what it returned or raised.

    Args:
        results: An object with the key `v` (an encoded value) or `e` (the name of an exception) for each
            call.
    """
    lines = [
        f"call {number} returned {value(result['v'])}"
        if "v" in result
        else f"call {number} raised {_kind(result.get('e'))}"
        for number, result in enumerate(results[:_ITEMS], 1)
    ]
    return "\n".join(lines)


def test(program: str) -> str:
    """Return the start of a test."""
    return short(program.strip(), _TEST)


def end(output: str) -> str:
    """Return the last lines of what a program printed, from its traceback on if that is short."""
    lines = output[-_END:].strip().splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call")]
    return "\n".join(lines[starts[-1] :] if starts else lines)


def _pair(item: Any, depth: int) -> str:
    if not isinstance(item, list) or len(item) != 2:
        return "…"
    return f"{value(item[0], depth + 1)}: {value(item[1], depth + 1)}"


def _joined(items: Iterable[str], count: int, brackets: str) -> str:
    shown = [*islice(items, _ITEMS), *(["…"] if count > _ITEMS else [])]
    return short(f"{brackets[0]}{', '.join(shown)}{brackets[1]}")


def _whole(digits: str) -> str:
    try:
        return str(int(digits, 16)) if len(digits) <= 64 else f"a number of {len(digits)} hexadecimal digits"
    except ValueError:
        return "…"


def _kind(content: Any) -> str:
    """Return the kind of a value, if there is nothing better to show."""
    return short(content, 50) if isinstance(content, str) else type(content).__name__
