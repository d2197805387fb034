"""Long tables of words, which are written as texts."""

from __future__ import annotations


def words(*lines: str) -> frozenset[str]:
    """Return the words of some lines, which spaces separate."""
    return frozenset(" ".join(lines).split())


def pairs(*lines: str) -> dict[str, str]:
    """Return the words of some lines, each written as `KEY=VALUE`, in their order."""
    return dict(pair.split("=", 1) for pair in " ".join(lines).split())


def definitions(*lines: str) -> dict[str, tuple[float, str]]:
    """Return the definitions of some lines, each written as `UNIT=SIZE OTHER UNITS` between commas."""
    rows: dict[str, tuple[float, str]] = {}
    for row in ",".join(lines).split(","):
        symbol, _, definition = row.strip().partition("=")
        size, _, units = definition.partition(" ")
        rows[symbol] = (float(size), units)
    return rows
