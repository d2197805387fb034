"""What axe finds wrong with a page for people who use it without a mouse, or cannot see it well."""

from __future__ import annotations

from typing import Any, Final

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

_WCAG_AA: Final = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
_SERIOUS: Final = ("serious", "critical")


def faults(page: Page) -> list[str]:
    """Return the serious and critical faults of a page by WCAG 2 AA, each with its first places."""
    options = {"resultTypes": ["violations"], "runOnly": {"type": "tag", "values": _WCAG_AA}}
    found: list[dict[str, Any]] = Axe().run(page, options=options).response["violations"]
    return [
        f"{fault['id']} ({fault['impact']}): {fault['help']}: "
        + "; ".join(f"{' '.join(map(str, node['target']))}: {_why(node)}" for node in fault["nodes"][:3])
        for fault in found
        if fault["impact"] in _SERIOUS
    ]


def _why(node: dict[str, Any]) -> str:
    return " ".join(str(check["message"]) for kind in ("any", "all", "none") for check in node[kind])[:300]
