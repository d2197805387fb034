"""Sanitizing of a model's values for JSON and for databases. The token ids remain the original record."""

from __future__ import annotations

import math
from typing import Any, Final

MAX_DEPTH: Final = 64
_INT64: Final = range(-(1 << 63), 1 << 63)


def clean_text(text: str, limit: int | None = None) -> str:
    """Return `text` with U+FFFD for NUL and lone surrogates, cut to at most `limit` characters."""
    if "\0" in text:
        text = text.replace("\0", "�")
    try:
        text.encode()
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text if limit is None or len(text) <= limit else text[:limit]


def clean_value(value: Any, depth: int = 0) -> Any:
    """Return a parsed JSON value with clean text, and with integers beyond 64 bits as floats.

    Raises:
        ValueError: The value is nested deeper than MAX_DEPTH.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    match value:
        case str():
            return clean_text(value)
        case dict():
            return {clean_text(str(key)): clean_value(item, depth + 1) for key, item in value.items()}
        case list():
            return [clean_value(item, depth + 1) for item in value]
        case float() if not math.isfinite(value):
            return str(value)  # JSON has no number for it.
        case int() if not isinstance(value, bool) and value not in _INT64:
            return float(value) if abs(value) < 1 << 1000 else str(value)[:64]
        case _:
            return value
