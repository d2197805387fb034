"""The page in a real browser, with 100,000 rollouts in the store, and what it costs the control plane."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Final

from rollyard_testing.browser.chromium import a_browser, problem
from rollyard_testing.browser.plane import a_plane
from rollyard_testing.browser.signin import Served, cookies_of
from rollyard_testing.page.conversations import TINY_POLICY
from rollyard_testing.page.ordinary import LONG_GROUP, LONG_TOKENS, VERSIONS, Ordinary, ordinary_job
from rollyard_testing.page.store import opened

from rollyard_bench import page_cost, page_views
from rollyard_bench.page_views import Stage
from rollyard_bench.processes import Missing, ProgramFailed
from rollyard_bench.results import Measurement, Settings

GROUPS: Final = 12_500
NAME: Final = "large"
KEPT_SECONDS: Final = 300.0


async def _fill(state: Path) -> Ordinary:
    async with opened(state) as store:
        await store.pool("default", TINY_POLICY, VERSIONS)
        return await ordinary_job(store, NAME, GROUPS, time.time(), pool="default", long=True)


def _wait_until_kept(served: Served, rollouts: int) -> None:
    """Wait until the control plane has counted all rollouts into the job's statistics."""
    deadline = time.monotonic() + KEPT_SECONDS
    with served.http() as http:
        while True:
            kept = http.get(f"/v1/rolloutjobs/{NAME}/statistics").raise_for_status().json()["upto"]
            if kept == rollouts:
                return
            if time.monotonic() > deadline:
                raise ProgramFailed(f"the statistics hold {kept} of {rollouts} rollouts")
            time.sleep(0.5)


def _play(settings: Settings) -> list[Measurement]:
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as folder:
        state = Path(folder) / "state"
        made = asyncio.run(_fill(state))
        with a_plane(state) as plane, a_browser(["--enable-precise-memory-info"]) as browser:
            served = plane.served
            _wait_until_kept(served, made.rollouts)
            stage = Stage(
                browser=browser,
                served=served,
                cookies=cookies_of(browser, served),
                job=NAME,
                groups=GROUPS,
                rollout=page_views.long_rollout(served, NAME, f"task-{LONG_GROUP:05d}"),
                rounds=2 if settings.quick else 5,
            )
            seconds, rounds = (10.0, 1) if settings.quick else (20.0, 3)
            return [
                page_views.first_view(stage),
                page_views.filters(stage),
                page_views.trajectory(stage, LONG_TOKENS),
                page_cost.measure(plane, browser, stage.cookies, seconds=seconds, rounds=rounds),
            ]


async def measure(settings: Settings) -> list[Measurement]:
    """Fill a store, start a control plane on it, and measure the views and the cost of open pages."""
    reason = problem()
    if reason is not None:
        raise Missing(reason)
    return await asyncio.to_thread(_play, settings)
