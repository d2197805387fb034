"""The conversations of a harness: its own one first, each branch beside it, and how the harness ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from rollyard_testing.browser.plane import ENDED, HARNESS, Plane
from rollyard_testing.crds.conversations import harness_record

pytestmark = pytest.mark.page
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}


def _address(plane: Plane, job: str = HARNESS) -> str:
    with plane.served.http() as http:
        path = f"/v1/rolloutjobs/{job}/rollouts"
        answer = http.get(path, params={"slim": "true", "status": "succeeded"}).raise_for_status()
    return plane.served.rollout(job, answer.json()["items"][0]["id"])


def _texts(page: Page) -> list[str]:
    expect(page.locator(".waiting:not(:empty)")).to_have_count(0)
    return page.locator("article.message .text").all_text_contents()


def test_the_own_conversation_is_first_and_each_branch_is_a_link_away(
    plane: Plane, look: Callable[..., Any]
) -> None:
    record = harness_record()
    page = look(plane.served).at(_address(plane))
    branches = page.get_by_role("navigation", name="5 conversations")
    rows = branches.get_by_role("listitem")
    expect(rows).to_have_text(
        [
            re.compile(
                "4: own conversation.*✓ trained on.*4 messages, 1 turn, 3 tokens.*rewrites conversation 0"
            ),
            re.compile(
                "0: another version of the main conversation.*✓ trained on.*5 messages, 2 turns, 5 tokens"
            ),
            re.compile("1: sub-agent.*✓ trained on.*2 messages, 1 turn, 4 tokens.*began in conversation 0"),
            re.compile("2: calls of the policy itself.*– not trained on.*2 messages, 1 turn, 2 tokens"),
            re.compile("3: title.*– not trained on.*left conversation 0 after message 2"),
        ]
    )
    assert _texts(page) == [message["content"] for message in record["messages"]]
    branches.get_by_role("link", name="2: calls of the policy itself").click()
    expect(page).to_have_url(re.compile(r"\?conversation=2$"))
    expect(page.get_by_text("Say that I passed.")).to_be_visible()
    assert _texts(page) == ["Say that I passed.", "You passed."]
    current = branches.locator("[aria-current]")
    expect(current).to_have_text("2: calls of the policy itself")
    # Where a branch left its parent is a link to the message.
    branches.get_by_role("link", name="conversation 0 after message 2").click()
    chosen = page.locator("article.chosen")
    expect(chosen).to_have_text(re.compile("Fix add"))
    expect(chosen).to_be_in_viewport()
    turn = page.get_by_label("Message 3, assistant")
    expect(turn).to_contain_text("turn 13 tokens")
    expect(turn).to_contain_text("bash")
    page.go_back()
    expect(page.get_by_text("Say that I passed.")).to_be_visible()
    page.get_by_role("tab", name=re.compile("^Tokens")).click()
    expect(
        page.get_by_text("Segment 3 of 5, conversation 2: calls of the policy itself, not trained on")
    ).to_have_count(2)
    expect(page.get_by_text("Segment 5 of 5, conversation 4: own conversation: response")).to_have_count(1)
    page.get_by_role("tab", name=re.compile("^Conversation")).click()
    expect(current).to_have_text("4: own conversation")


def test_the_timeline_lists_the_turns_of_each_conversation(plane: Plane, look: Callable[..., Any]) -> None:
    page = look(plane.served).at(f"{_address(plane)}?tab=timeline")
    sections = page.get_by_role("region", name=re.compile("^Turns"))
    expect(sections.get_by_role("heading")).to_have_text(
        [
            "Turns of conversation 4: own conversation",
            "Turns of conversation 0: another version of the main conversation",
            "Turns of conversation 1: sub-agent",
            "Turns of conversation 2: calls of the policy itself",
            "Turns of conversation 3: title",
        ]
    )
    rows = page.get_by_role("region", name=re.compile("^Turns of conversation 0")).locator("tbody tr")
    expect(rows).to_have_text([re.compile("^1.*3bash$"), re.compile("^2.*2–$")])
    page.goto(f"{_address(plane, ENDED)}?tab=timeline")
    expect(sections.get_by_role("heading")).to_have_text(["Turns"])


def test_how_the_harness_ended_and_what_it_printed_is_shown(plane: Plane, look: Callable[..., Any]) -> None:
    page = look(plane.served).at(_address(plane))
    harness = page.get_by_role("region", name="Harness mini-swe-agent")
    expect(harness).to_contain_text("exit status 0")
    expect(page.get_by_text("Sampled tokens")).to_be_visible()
    expect(page.locator("dl.facts")).to_contain_text("16, 12 to train on")
    output = page.get_by_label("Output of the harness")
    expect(output).not_to_be_visible()
    harness.get_by_text("Output").click()
    expect(output).to_have_text("⟦ESC⟧[31mstep 1⟦ESC⟧[0m")
    harness.get_by_text("Log").click()
    expect(page.get_by_label("Log of the harness")).to_have_text("started")


def test_other_rollouts_have_no_list_of_conversations(plane: Plane, look: Callable[..., Any]) -> None:
    page = look(plane.served).at(f"{_address(plane, ENDED)}?conversation=7")
    expect(page.locator("article.message").first).to_be_visible()
    expect(page.locator(".branches, .harness")).to_have_count(0)


def test_a_phone_shows_the_conversations_without_scrolling_sideways(
    plane: Plane, look: Callable[..., Any]
) -> None:
    page = look(plane.served, **PHONE).at(_address(plane))
    expect(page.locator("article.message").first).to_be_visible()
    page.get_by_text("Output").click()
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1]
