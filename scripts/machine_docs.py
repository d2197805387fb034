"""Write the states of a rollout and the failure policy into docs/architecture.md, as the code has them."""

from __future__ import annotations

from pathlib import Path

from rollyard_api.machine import failure_policy, states

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"


def sections() -> dict[str, str]:
    """Return what stands after each marker of the page, up to the marker of the end."""
    return {
        "<!-- transitions -->\n": f"```mermaid\n{states.picture()}```\n",
        "<!-- failure policy -->\n": failure_policy.table(),
    }


def current(page: str) -> str:
    """Return the page with its sections as the code has them."""
    for marker, text in sections().items():
        before, rest = page.split(marker)
        page = f"{before}{marker}{text}{rest[rest.index('<!-- end -->') :]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(current(PAGE.read_text()))
