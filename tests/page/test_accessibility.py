"""The page for people who use a keyboard or a screen reader, prefer dark, or have a small screen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from rollyard_testing.browser.plane import ENDED, HALF, HARNESS, Plane
from rollyard_testing.browser.signin import Served

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


pytestmark = pytest.mark.page

PHONE = {
    "viewport": {"width": 390, "height": 844},
    "device_scale_factor": 2,
    "has_touch": True,
    "is_mobile": True,
}
VIEWS = (
    "overview",
    "no such job",
    "groups",
    "no groups",
    "rollouts",
    "gantt",
    "group",
    "conversation",
    "tokens",
    "timeline",
    "eval",
    "raw",
    "waiting job",
    "branches",
)


@pytest.fixture(scope="module")
def rollout(plane: Plane) -> str:
    """Return the id of an ended rollout with an attempt that did not end well."""
    with plane.served.http() as http:
        path = f"/v1/rolloutjobs/{ENDED}/rollouts"
        answer = http.get(path, params={"slim": "true", "status": "failed"}).raise_for_status()
    found: str = answer.json()["items"][0]["id"]
    return found


def _address(served: Served, view: str, rollout: str) -> str:
    match view:
        case "overview":
            return f"{served.url}/"
        case "no such job":
            return served.job("nowhere")
        case "waiting job":
            return served.job(HALF)
        case "branches":
            with served.http() as http:
                answer = http.get(f"/v1/rolloutjobs/{HARNESS}/rollouts", params={"slim": "true"})
            return f"{served.rollout(HARNESS, answer.json()['items'][0]['id'])}?conversation=0&message=2"
        case "groups":
            return served.job(ENDED)
        case "no groups":
            return f"{served.job(ENDED)}?search=none"
        case "rollouts" | "gantt":
            return f"{served.job(ENDED)}?tab={view}"
        case "group":
            return served.group(ENDED, "task-00002")
        case _:
            return f"{served.rollout(ENDED, rollout)}?tab={view}"


def _settled(page: Page) -> None:
    expect(page.get_by_role("main")).not_to_be_empty()
    expect(page.locator(".waiting")).to_have_count(0)
    page.wait_for_load_state("load")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
def test_axe_finds_no_serious_fault(
    plane: Plane, look: Callable[..., Any], rollout: str, scheme: str
) -> None:
    window = look(plane.served, color_scheme=scheme)
    found: dict[str, list[str]] = {}
    background = set()
    for view in VIEWS:
        page = window.at(_address(plane.served, view, rollout))
        _settled(page)
        found[view] = faults(page)
        background.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    found["keys"] = faults(page)
    window.context.clear_cookies()
    page = window.at(f"{plane.served.url}/")
    expect(page.get_by_role("heading", name="Sign in from a terminal")).to_be_visible()
    found["sign-in"] = faults(page)
    assert {view: each for view, each in found.items() if each} == {}
    # The page follows what the reader prefers.
    (colour,) = background
    brightness = sum(int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]) / 3
    assert (brightness > 128) == (scheme == "light")


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_a_view_without_scrolling_sideways(
    plane: Plane, look: Callable[..., Any], rollout: str, view: str
) -> None:
    page = look(plane.served, **PHONE).at(_address(plane.served, view, rollout))
    _settled(page)
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1]


def test_the_grid_is_walked_by_arrow_keys(plane: Plane, look: Callable[..., Any]) -> None:
    page = look(plane.served).at(plane.served.job(ENDED))
    grid = page.get_by_role("grid")
    expect(grid.locator("[data-row]").first).to_be_visible()
    grid.focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(":focus")).to_have_text("task-00000")
    page.keyboard.press("ArrowDown")
    expect(page.locator(":focus")).to_have_text("task-00001")
    page.keyboard.press("ArrowRight")
    expect(page.locator(":focus")).to_have_attribute("data-key", "sample")
    page.keyboard.press("End")
    # The list scrolls along, and what has the focus can be seen.
    expect(page.locator('[data-row="39"] :focus')).to_be_in_viewport()
    page.keyboard.press("Home")
    expect(page.locator('[data-row="0"] :focus')).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_contain_text("task-00000")


def test_everything_is_reached_by_the_tab_key_and_the_focus_is_seen(
    plane: Plane, look: Callable[..., Any]
) -> None:
    page = look(plane.served).at(f"{plane.served.url}/")
    expect(page.get_by_role("link", name=ENDED, exact=True)).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.locator(":focus")).to_have_text("Skip to the content")
    expect(page.locator(":focus")).to_be_in_viewport()
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(
            """() => {
              const e = document.activeElement, s = getComputedStyle(e);
              const drawn = s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0;
              return [e.textContent.trim(), drawn || s.boxShadow !== "none"];
            }"""
        )
        assert outline, f"nothing shows that {name!r} has the focus"
        seen.append(name)
        if name == ENDED:
            break
    else:
        pytest.fail(f"the job was not reached: {seen}")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name=ENDED)).to_be_visible()


def test_the_theme_is_chosen_and_kept(plane: Plane, look: Callable[..., Any]) -> None:
    page = look(plane.served, color_scheme="light").at(f"{plane.served.url}/")
    light = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    button = page.get_by_role("button", name="Theme")
    while "dark" not in button.inner_text().lower():
        button.click()
    dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert dark != light
    page.reload()
    expect(page.get_by_role("button", name="Theme")).to_contain_text("dark")
    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == dark
