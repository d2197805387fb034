"""The page when something else goes wrong: it says so, keeps what it shows, and comes back by itself."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from rollyard_testing.browser.plane import ENDED, HALF, Plane
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

pytestmark = pytest.mark.page

DAYS = 86_400.0


def _live(page: Any) -> Any:
    return page.locator(".live")


def test_a_job_that_is_deleted_under_the_reader_is_said_to_be_gone(
    own_plane: Plane, look: Callable[..., Any]
) -> None:
    served = own_plane.served
    window = look(served)
    page = window.at(served.job(HALF))
    overview = window.context.new_page()
    overview.goto(f"{served.url}/")
    expect(overview.get_by_role("link", name=HALF, exact=True)).to_be_visible()
    for each in (page, overview):
        expect(_live(each)).to_have_text("Live")
    with served.http() as http:
        http.delete(f"/v1/rolloutjobs/{HALF}").raise_for_status()
    expect(page.get_by_role("main")).to_contain_text("This job was deleted.")
    expect(overview.get_by_role("link", name=HALF, exact=True)).to_have_count(0)
    expect(overview.get_by_role("link", name=ENDED, exact=True)).to_be_visible()
    page.get_by_role("link", name="Go to the overview").click()
    expect(page.get_by_role("link", name=ENDED, exact=True)).to_be_visible()


def test_a_restarted_control_plane_is_found_again_and_shows_what_is_new(
    own_plane: Plane, look: Callable[..., Any]
) -> None:
    served = own_plane.served
    page = look(served).at(f"{served.url}/")
    expect(page.get_by_role("link", name=HALF, exact=True)).to_be_visible()
    expect(_live(page)).to_have_text("Live")
    page.evaluate("window.sameDocument = true")
    own_plane.stop(signal.SIGKILL)
    expect(page.get_by_role("alert").filter(has_text="Reconnecting")).to_be_visible()
    # What was read stays on the screen.
    expect(page.get_by_role("link", name=HALF, exact=True)).to_be_visible()
    own_plane.start()
    with served.http() as http:
        job = http.get(f"/v1/rolloutjobs/{ENDED}").raise_for_status().json()
        spec = job["spec"] | {"tasks": {"inline": [{"id": "fresh", "prompt": "p"}]}}
        spec.pop("backendRef", None)
        manifest = job_manifest("fresh", spec)
        http.post("/v1/rolloutjobs", json=manifest).raise_for_status()
    expect(page.get_by_role("link", name="fresh", exact=True)).to_be_visible()
    expect(_live(page)).to_have_text("Live")
    expect(page.get_by_role("alert")).to_have_count(0)
    assert page.evaluate("window.sameDocument") is True


@pytest.mark.parametrize("days", [-3, 400])
def test_ages_are_right_though_the_clock_of_the_reader_is_not(
    plane: Plane, look: Callable[..., Any], days: int
) -> None:
    served = plane.served
    window = look(served)
    window.page.clock.set_system_time(time.time() + days * DAYS)
    page = window.at(f"{served.url}/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=ENDED, exact=True))
    # The job was created an hour and some minutes ago.
    age = row.get_by_role("cell").last
    expect(age).to_have_text(re.compile(r"^1 h .*ago$"))
    shown = " ".join(row.get_by_role("cell").all_inner_texts())
    assert not re.search(r"\b\d+ d\b|\bin \d", shown), shown
    page = window.at(f"{served.job(ENDED)}?tab=rollouts")
    first = page.get_by_role("table", name="Rollouts").locator("[role=row]:not(.list-head)").first
    expect(first).to_be_visible()
    assert not re.search(r"\b\d+ d\b|\bin \d", first.inner_text()), first.inner_text()


def test_a_store_that_hangs_is_said_to_be_slow_and_is_asked_again(
    own_plane: Plane, look: Callable[..., Any]
) -> None:
    served = own_plane.served
    with served.http() as http:
        path = f"/v1/rolloutjobs/{ENDED}/rollouts"
        rows = http.get(path, params={"slim": "true", "limit": 1}).raise_for_status().json()["items"]
    window = look(served)
    parts = sorted((own_plane.state / "trajectories").rglob(f"{ENDED}-*/part-*"))
    assert parts
    # A reader of a pipe waits for its writer: the store hangs, as a file system does that has gone away.
    for part in parts:
        part.rename(part.with_name(f"{part.name}.kept"))
        os.mkfifo(part)
    page = window.at(served.job(ENDED))
    # What needs no record is there all the same.
    expect(page.locator("[data-row]").first).to_be_visible()
    page.goto(served.rollout(ENDED, rows[0]["id"]))
    alert = page.get_by_role("alert").first
    expect(alert).to_contain_text("The store answers slowly.")
    for part in parts:
        _restore(part)
    page.get_by_role("button", name="Try again").first.click()
    expect(page.get_by_role("article").first).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def _restore(part: Path) -> None:
    """Put the file back in the place of the pipe, and let those go that wait for the pipe."""
    pipe = part.with_name(f"{part.name}.pipe")
    part.rename(pipe)
    part.with_name(f"{part.name}.kept").rename(part)
    deadline = time.monotonic() + patience(5)
    while time.monotonic() < deadline:
        try:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            # Nobody waits any more.
            return
        time.sleep(0.01)


def test_a_control_plane_that_is_down_at_the_start_is_found_later(
    own_plane: Plane, look: Callable[..., Any]
) -> None:
    served = own_plane.served
    window = look(served)
    page = window.at(served.job(HALF))
    expect(page.locator("[data-row]").first).to_be_visible()
    own_plane.stop()
    page.get_by_role("tab", name="Rollouts").click()
    expect(page.get_by_role("alert").first).to_be_visible()
    own_plane.start()
    expect(_live(page)).to_have_text("Live")
    expect(
        page.get_by_role("tabpanel")
        .get_by_role("table", name="Rollouts")
        .or_(page.get_by_text("No rollout has ended yet."))
        .first
    ).to_be_visible()
