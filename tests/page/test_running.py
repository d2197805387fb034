"""Rollouts that are still running, and the workers that hold them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect
from rollyard_testing.browser.plane import Plane
from rollyard_testing.browser.witness import attacks_seen
from rollyard_testing.pace import patience
from rollyard_testing.page.attacks import TEXTS
from rollyard_testing.page.worker import Puppet, untended_job
from rollyard_testing.waiting import until

pytestmark = pytest.mark.page

JOB = "watched"


def test_a_running_rollout_is_watched_until_its_record_is_there(
    own_plane: Plane, look: Callable[..., Any]
) -> None:
    served = own_plane.served
    with served.http() as http:
        http.post("/v1/rolloutjobs", json=untended_job(JOB, 1, 2)).raise_for_status()
        worker = Puppet(http, JOB)
        worker.complete(worker.lease("init"))
        lease = worker.lease("run")
        assert worker.beat(lease, []) == []
        page = look(served).at(served.rollout(JOB, lease["rollout"]))
        expect(page.get_by_role("heading", level=1)).to_contain_text(lease["rollout"])
        # The worker learns with a heartbeat that somebody watches, and sends what it has.
        until(
            lambda: lease["rollout"] in worker.beat(lease, []),
            patience(60),
            "the worker does not learn that its rollout is watched",
        )
        texts = ["I look for the file.", TEXTS["script"], TEXTS["direction"]]
        worker.beat(lease, texts)
        turns = page.get_by_role("article")
        expect(turns).to_have_count(len(texts))
        expect(turns.nth(0)).to_contain_text("I look for the file.")
        expect(turns.nth(1)).to_contain_text("<script data-attack>")
        expect(turns.nth(2)).to_contain_text("U+202E")
        assert attacks_seen(page) == []
        worker.complete(lease)
        worker.complete(worker.lease("eval"), 0.25)
    # The page shows the record by itself.
    expect(page.get_by_role("tab", name=re.compile("^Tokens"))).to_be_visible()
    expect(page.get_by_role("main")).to_contain_text(re.compile(r"reward\s+0\.25"))


def test_a_worker_leads_to_the_rollouts_that_it_holds(own_plane: Plane, look: Callable[..., Any]) -> None:
    served = own_plane.served
    with served.http() as http:
        http.post("/v1/rolloutjobs", json=untended_job(JOB, 1, 2)).raise_for_status()
        worker = Puppet(http, JOB, "node-of-puppets")
        worker.complete(worker.lease("init"))
        lease = worker.lease("run")
        page = look(served).at(f"{served.url}/")
        node = page.get_by_role("list", name="Nodes").get_by_role("button").filter(has_text="node-of-puppets")
        expect(node).to_contain_text("1 rollout")
        if node.get_attribute("aria-expanded") != "true":
            node.click()
        page.locator("button.disclosure").filter(has_text="node-of-puppets").click()
        held = page.locator("ul.held").get_by_role("link", name=re.compile(r"task-0000 #\d"))
        expect(held).to_be_visible()
        held.click()
        expect(page).to_have_url(re.compile(re.escape(lease["rollout"])))
        expect(page.get_by_role("main")).to_contain_text("node-of-puppets")
