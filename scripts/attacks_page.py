"""Write docs/reference/attacks.md from the marks of the tests: each attack, and what stops it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "attacks.md"


class Collector:
    """A pytest plugin that keeps the tests which carry the mark `attack`."""

    def __init__(self) -> None:
        self.items: list[pytest.Item] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keep a marked test. Later hooks put tests into another order, and leave some of them out."""
        if item.get_closest_marker("attack"):
            self.items.append(item)


def current() -> str:
    """Return the page as the tests have it now, which pytest collects in this process.

    Raises:
        SystemExit: The tests cannot be collected.
    """
    collector = Collector()
    marked = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "mark.attack" in path.read_text()]
    names = [str(path.relative_to(ROOT)) for path in marked]
    os.chdir(ROOT)
    status = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *names], [collector])
    if status is not pytest.ExitCode.OK:
        raise SystemExit(f"{PAGE.name}: the tests cannot be collected")
    # pytest rewrites the asserts of modules that it is the first to import.
    from rollyard_testing.adversary.defences import page

    return page(collector.items)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(current())
    elif current() != PAGE.read_text():
        raise SystemExit(f"{PAGE} is not current: run `make docs`, or scripts/attacks_page.py alone")
