"""Filters, orders and selections of the page: the server does the work, and the address holds them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from rollyard_testing.browser.plane import ENDED, HALF, Filled, Plane
from rollyard_testing.page.ordinary import SAMPLES, WORDS

pytestmark = pytest.mark.page

FIRST_TASK = '[role=grid] [data-row="0"] [data-key=task]'


def test_orders_and_filters_of_groups_come_from_the_server(
    plane: Plane, look: Callable[..., Any], store: Filled
) -> None:
    served = plane.served
    window = look(served)
    page = window.at(served.job(ENDED))
    expect(page.locator(FIRST_TASK)).to_have_text("task-00000")
    with served.http() as http:
        for label, value, params in (
            ("Order", "-reward", {"sort": "-reward"}),
            ("Order", "variance", {"sort": "variance"}),
            ("Signal", "true", {"sort": "variance", "informative": "true"}),
            ("With samples", "failed", {"sort": "variance", "informative": "true", "status": "failed"}),
        ):
            page.get_by_role("tabpanel").get_by_role("combobox", name=label).select_option(value)
            path = f"/v1/rolloutjobs/{ENDED}/grid"
            items = http.get(path, params={**params, "limit": 500}).raise_for_status().json()["items"]
            expect(page.locator(FIRST_TASK)).to_have_text(items[0]["task_id"])
            expect(page.get_by_role("tabpanel").get_by_role("status").first).to_contain_text(
                f"{len(items)} groups"
            )
    # Another window at the same address shows the same.
    url = page.url
    assert "informative=true" in url
    other = look(served).at(url)
    expect(other.locator(FIRST_TASK)).to_have_text(items[0]["task_id"])
    # The back button takes back one choice after the other.
    page.go_back()
    expect(page.get_by_role("tabpanel").get_by_role("combobox", name="With samples")).to_have_value("")
    page.go_back()
    expect(page.get_by_role("tabpanel").get_by_role("combobox", name="Signal")).to_have_value("")


def test_a_search_finds_a_task(plane: Plane, look: Callable[..., Any]) -> None:
    page = look(plane.served).at(plane.served.job(ENDED))
    page.get_by_label("Search by task").fill("task-00017")
    expect(page.locator(FIRST_TASK)).to_have_text("task-00017")
    expect(page.locator("[data-row]")).to_have_count(1)
    expect(page).to_have_url(re.compile("search=task-00017"))
    page.get_by_label("Search by task").fill("nothing has this name")
    expect(page.get_by_role("main")).to_contain_text("No group matches these filters.")
    page.get_by_role("button", name="Remove the filters").click()
    expect(page.locator(FIRST_TASK)).to_have_text("task-00000")


def test_rollouts_are_found_by_words_of_their_conversation(plane: Plane, look: Callable[..., Any]) -> None:
    served = plane.served
    page = look(served).at(served.job(ENDED) + "?tab=rollouts")
    table = page.get_by_role("table", name="Rollouts")
    expect(table).to_be_visible()
    page.get_by_label("Words of the conversation").fill(f"{WORDS[1]} lines")
    expect(page).to_have_url(re.compile("search="))
    number = sum(no % len(WORDS) == 1 for no in range(40)) * SAMPLES
    expect(page.get_by_role("tabpanel").get_by_role("status").first).to_contain_text(f"{number} rollouts")
    tasks = table.locator("[role=row] [role=cell]:first-child").all_inner_texts()
    assert tasks
    for text in tasks:
        found = re.match(r"task-(\d+)", text)
        assert found is not None, text
        assert int(found[1]) % len(WORDS) == 1


def test_a_reason_of_failures_leads_to_its_rollouts(
    plane: Plane, look: Callable[..., Any], store: Filled
) -> None:
    page = look(plane.served).at(plane.served.job(ENDED))
    failures = page.get_by_role("region", name="Failures by reason")
    expect(failures.locator("li a").first).to_be_visible()
    counts = [int(text) for text in failures.locator("li b.number").all_inner_texts()]
    assert sum(counts) == store.ended.failed
    link = failures.locator("li a").first
    reason = link.inner_text()
    link.click()
    expect(page).to_have_url(re.compile(f"reason={reason}"))
    rows = page.get_by_role("table", name="Rollouts").locator("[role=row]:not(.list-head)")
    expect(rows).to_have_count(counts[0])
    expect(page.get_by_role("button", name=f"Remove the filter reason {reason}")).to_be_visible()
    # By key one comes from a failed sample to the next one.
    rows.first.get_by_role("link").first.click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text(reason)


def test_a_bar_of_the_histogram_leads_to_its_rewards(
    plane: Plane, look: Callable[..., Any], store: Filled
) -> None:
    page = look(plane.served).at(plane.served.job(ENDED))
    rewards = page.get_by_role("region", name="Rewards", exact=True)
    expect(rewards).to_contain_text(f"{sum(store.ended.rewards.values())} rewards")
    bar = rewards.get_by_role("button").last
    bar.click()
    expect(page).to_have_url(re.compile(r"min=.*tab=rollouts|tab=rollouts.*min="))
    table = page.get_by_role("table", name="Rollouts")
    expect(table.locator("[role=row]:not(.list-head)").first).to_be_visible()
    shown = {float(text) for text in table.locator(".reward-chip").all_inner_texts()}
    assert shown == {1.0}


def test_what_waits_is_shown_as_waiting(plane: Plane, look: Callable[..., Any], store: Filled) -> None:
    page = look(plane.served).at(plane.served.job(HALF))
    waiting = store.half.rollouts // 2
    expect(page.locator("[data-row] .cell").first).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text(re.compile(rf"waiting\s*{waiting}"))
    page.get_by_role("tabpanel").get_by_role("combobox", name="With samples").select_option("queued")
    expect(page.locator("[data-row] .cell-q").first).to_be_visible()
    expect(page.locator("[data-row] [class*=shade]")).to_have_count(0)
