"""The page in a real browser, with 100,000 rollouts in the store, and what it costs the control plane.

A reader waits for first views, filters, and a long trajectory.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from playwright.sync_api import Browser, Page
from rollyard_testing.browser.chromium import a_browser, problem
from rollyard_testing.browser.plane import a_plane
from rollyard_testing.browser.signin import Served, a_context, cookies_of
from rollyard_testing.page.conversations import TINY_POLICY
from rollyard_testing.page.ordinary import LONG_GROUP, LONG_TOKENS, VERSIONS, Ordinary, ordinary_job
from rollyard_testing.page.store import opened
from rollyard_testing.waiting import until

from rollyard_bench import page_cost
from rollyard_bench.processes import Missing, ProgramFailed
from rollyard_bench.results import Baseline, Measurement, Settings

GROUPS: Final = 12_500
NAME: Final = "large"
KEPT_SECONDS: Final = 300.0
LIMIT_MS: Final = 120_000
"""The time after which a step in the browser has failed."""
_CELLS: Final = "document.querySelectorAll('[role=grid] [data-row] [data-key=sample]').length >= 40"
_JOB_SHOWN: Final = f"{_CELLS} && document.querySelectorAll('.panel').length >= 2"
_TOKENS_SHOWN: Final = "document.querySelectorAll('.token-line [data-start]').length >= 20"

# An init script runs before the page's own, so it sees the first frame in which the condition holds.
_WHEN_SHOWN: Final = """
window.__shown = new Promise((resolve, reject) => {
  const look = () => {
    if (%s) resolve(performance.now());
    else if (performance.now() > 60000) reject(new Error("nothing was shown within a minute"));
    else requestAnimationFrame(look);
  };
  document.addEventListener("DOMContentLoaded", () => requestAnimationFrame(look));
});
"""
_CHOOSE: Final = """
([label, value, first]) => new Promise((resolve, reject) => {
  const field = [...document.querySelectorAll("select, input")].find(each =>
    (each.getAttribute("aria-label") ?? each.closest("label")?.textContent ?? "").trim().startsWith(label));
  if (!field) return reject(new Error(`there is no field ${label}`));
  const begin = performance.now();
  field.value = value;
  field.dispatchEvent(new Event("input", {bubbles: true}));
  field.dispatchEvent(new Event("change", {bubbles: true}));
  const look = () => {
    const shown = document.querySelector('[role=grid] [data-row="0"] [data-key=task]')?.textContent;
    if (shown === first) resolve(performance.now() - begin);
    else if (performance.now() - begin > 60000) reject(new Error(`${shown} is shown, and not ${first}`));
    else requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the views are measured."""

    browser: Browser
    served: Served
    cookies: Any
    """The state of a context that has signed in."""
    rollout: str
    """The rollout with the long trajectory."""
    rounds: int


def _until(page: Page, condition: str) -> None:
    # A function needs no `eval`, which the page's policy forbids.
    page.wait_for_function(f"() => ({condition})", timeout=LIMIT_MS)


def _shown(stage: Stage, url: str, condition: str) -> list[float]:
    """Return the milliseconds from a navigation until a condition holds, in a browser without a cache."""
    times = []
    for _ in range(stage.rounds + 1):
        with a_context(stage.browser, stage.served, storage_state=stage.cookies) as (context, witness):
            page = context.new_page()
            page.add_init_script(_WHEN_SHOWN % condition)
            page.goto(url)
            times.append(float(page.evaluate("window.__shown")))
            if faults := witness.faults():
                raise ProgramFailed(f"{url}: {'; '.join(faults)}")
    # The first one also warms what the control plane keeps.
    return times[1:]


def _called(stage: Stage, path: str, **params: Any) -> tuple[float, Any]:
    """Return the milliseconds of a call without a browser, the median of some, and its parsed answer."""
    times = []
    with stage.served.http() as http:
        for _ in range(stage.rounds):
            begin = time.perf_counter()
            answer = http.get(path, params=params).raise_for_status().json()
            times.append((time.perf_counter() - begin) * 1e3)
    return median(times), answer


def _first_view(stage: Stage) -> Measurement:
    """Measure a job's view from the navigation until its groups and statistics are drawn."""
    times = _shown(stage, stage.served.job(NAME), _JOB_SHOWN)
    overview = _shown(
        stage, f"{stage.served.url}/", "document.querySelectorAll('table a[href*=\"/jobs/\"]').length"
    )
    bare = _shown(stage, f"{stage.served.url}/healthz", "true")
    how = (
        f"the view of a job with {GROUPS:,} groups × 8, from the navigation of a browser without a "
        f"cache until its grid and its panels are drawn, {len(times)} times: {_list(times)} ms; the "
        f"overview: {_list(overview)} ms; the baseline is the same for /healthz"
    )
    return Measurement("page_first_view", median(times) / 1e3, Baseline("/healthz", median(bare) / 1e3), how)


def _filters(stage: Stage) -> Measurement:
    """Measure the time from another filter or order until the grid shows the new first group."""
    path = f"/v1/rolloutjobs/{NAME}/grid"
    steps: list[tuple[str, str, dict[str, str]]] = [
        ("Order", "-reward", {"sort": "-reward"}),
        ("Order", "reward", {"sort": "reward"}),
        ("With samples", "failed", {"sort": "reward", "status": "failed"}),
        ("Order", "variance", {"sort": "variance", "status": "failed"}),
        ("Signal", "true", {"sort": "variance", "status": "failed", "informative": "true"}),
        ("With samples", "", {"sort": "variance", "informative": "true"}),
        ("Order", "ended", {"sort": "ended", "informative": "true"}),
        ("Signal", "", {"sort": "ended"}),
        ("Order", "no", {"sort": "no"}),
    ]
    times: list[float] = []
    calls: list[float] = []
    by_step: dict[str, list[float]] = {}
    with a_context(stage.browser, stage.served, storage_state=stage.cookies) as (context, _):
        page = context.new_page()
        page.goto(stage.served.job(NAME))
        _until(page, _CELLS)
        before = page.inner_text('[role=grid] [data-row="0"] [data-key=task]')
        for _ in range(stage.rounds):
            for label, value, params in steps:
                seconds, answer = _called(stage, path, **params, limit=500)
                first = answer["items"][0]["task_id"]
                if first == before:
                    # Nothing would be seen to change, so this step is not timed.
                    page.evaluate(_CHOOSE, [label, value, first])
                    page.wait_for_load_state("networkidle")
                    continue
                took = float(page.evaluate(_CHOOSE, [label, value, first]))
                times.append(took)
                by_step.setdefault(f"{label} {value or 'any'}", []).append(took)
                calls.append(seconds)
                before = first
    how = (
        "another order or filter is chosen until the grid shows the first group of the answer, "
        f"{len(times)} times; "
        + ", ".join(f"{name}: {median(each):.0f} ms" for name, each in by_step.items())
        + f"; slowest {max(times):.0f} ms; the baseline is the call alone, without a browser"
    )
    return Measurement("page_filter", median(times), Baseline("the call", median(calls)), how)


def _trajectory(stage: Stage) -> Measurement:
    """Measure the first view of a long trajectory's tokens."""
    url = f"{stage.served.rollout(NAME, stage.rollout)}?tab=tokens"
    times = _shown(stage, url, _TOKENS_SHOWN)
    record, _ = _called(stage, f"/v1/rolloutjobs/{NAME}/rollouts/{stage.rollout}")
    how = (
        f"the tokens of a trajectory of {LONG_TOKENS:,}, from the navigation of a browser without a cache "
        f"until they are drawn, {len(times)} times: {_list(times)} ms; the baseline is the whole record "
        "without a browser, parsed"
    )
    return Measurement("page_trajectory", median(times) / 1e3, Baseline("the record", record / 1e3), how)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.0f}" for value in values)


def _long_rollout(served: Served) -> str:
    """Return the id of the rollout with the long trajectory."""
    task = f"task-{LONG_GROUP:05d}"
    with served.http() as http:
        grid = http.get(f"/v1/rolloutjobs/{NAME}/grid", params={"task": task}).raise_for_status().json()
    return str(grid["prefix"] + grid["items"][0]["samples"][0][0])


async def _fill(state: Path) -> Ordinary:
    async with opened(state) as store:
        await store.pool("default", TINY_POLICY, VERSIONS)
        return await ordinary_job(store, NAME, GROUPS, time.time(), pool="default", long=True)


def _wait_until_kept(served: Served, rollouts: int) -> None:
    """Wait until the control plane has counted all rollouts into the job's statistics."""
    path = f"/v1/rolloutjobs/{NAME}/statistics"
    with served.http() as http:
        until(
            lambda: http.get(path).raise_for_status().json()["upto"] == rollouts,
            KEPT_SECONDS,
            f"{rollouts} rollouts in the statistics",
            0.5,
        )


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
                rollout=_long_rollout(served),
                rounds=2 if settings.quick else 5,
            )
            seconds, rounds = (10.0, 1) if settings.quick else (12.0, 3)
            return [
                _first_view(stage),
                _filters(stage),
                _trajectory(stage),
                page_cost.measure(plane, browser, stage.cookies, seconds=seconds, rounds=rounds),
            ]


async def measure(settings: Settings) -> list[Measurement]:
    """Fill a store, start a control plane on it, and measure the views and the cost of open pages."""
    reason = problem()
    if reason is not None:
        raise Missing(reason)
    return await asyncio.to_thread(_play, settings)
