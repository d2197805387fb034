"""Every view of the page, on live data of the quickstart that `rollyard up` runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from rollyard_testing.browser.live import SECONDS, Live, quickstart

JOB = "quickstart"
TASKS, SAMPLES = 6, 4

pytestmark = pytest.mark.page


@pytest.fixture(scope="module")
def records(live: Live) -> list[dict[str, Any]]:
    """Return the trajectories of the job, as a trainer gets them."""
    with live.served.http() as http:
        answer = http.get(f"/v1/rolloutjobs/{JOB}/trajectories", params={"limit": 1000}).raise_for_status()
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert len(found) == TASKS * SAMPLES
    return found


@pytest.fixture(scope="module")
def record(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the trajectory that is looked at: one with a tool call and a reward."""
    found: dict[str, Any] = next(
        r for r in records if r["turns"][0]["tool_calls"] and r["reward"] is not None
    )
    return found


def _groups(records: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    found: dict[str, list[float | None]] = {}
    for record in records:
        found.setdefault(record["task_id"], []).append(record["reward"])
    return found


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _line(page: Page, name: str) -> Any:
    """Return the row of a job in the overview's list."""
    jobs = page.get_by_role("region", name="Jobs", exact=True)
    return jobs.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def test_the_overview_shows_jobs_pools_and_queues(live: Live, look: Callable[..., Any]) -> None:
    page = look(live.served, fresh=True).page
    row = _line(page, JOB)
    expect(row).to_contain_text("Succeeded")
    expect(row).to_contain_text(f"{TASKS * SAMPLES} of {TASKS * SAMPLES}")
    with live.served.http() as http:
        backend = http.get("/v1/backendpools/default").json()["status"]["backends"][0]
    expect(page.get_by_role("main")).to_contain_text(backend["url"].removeprefix("http://"))
    for stage in ("init", "run", "eval"):
        expect(page.get_by_role("main")).to_contain_text(re.compile(stage, re.IGNORECASE))


def test_a_job_that_starts_and_ends_is_seen_without_a_reload(live: Live, look: Callable[..., Any]) -> None:
    window = look(live.served)
    page = window.at(f"{live.served.url}/")
    expect(_line(page, JOB)).to_be_visible()
    expect(page.get_by_text("Live", exact=True)).to_be_visible()
    page.evaluate("window.sameDocument = true")
    live.submit("later", 2, 4)
    expect(_line(page, "later")).to_be_visible()
    _line(page, "later").get_by_role("link").first.click()
    # The cells of the grid fill as rollouts end.
    cells = page.locator("[data-row] [data-key=sample]")
    expect(cells).to_have_count(8)
    live.wait("later")
    expect(page.get_by_role("main")).to_contain_text("Succeeded")
    expect(page.locator("[data-row] .cell-q, [data-row] .cell-l")).to_have_count(0)
    assert page.evaluate("window.sameDocument") is True


def test_a_job_shows_its_rewards_its_groups_and_its_times(
    live: Live, look: Callable[..., Any], records: list[dict[str, Any]]
) -> None:
    page = look(live.served).at(live.served.job(JOB))
    expect(page.get_by_role("heading", name=JOB)).to_be_visible()
    expect(page.locator("[data-row] [data-key=sample]")).to_have_count(TASKS * SAMPLES)
    groups = _groups(records)
    varied = {
        task
        for task, rewards in groups.items()
        if len({reward for reward in rewards if reward is not None}) > 1
    }
    marked = page.locator("[data-row]").filter(has=page.locator(".informative"))
    expect(marked).to_have_count(len(varied))
    assert set(marked.locator("[data-key=task]").all_inner_texts()) == varied
    rewards = [record["reward"] for record in records if record["reward"] is not None]
    panel = page.get_by_role("region", name="Rewards", exact=True)
    found = re.search(r"mean ([\d.,]+), ([\d,]+) rewards", panel.inner_text())
    assert found is not None, panel.inner_text()
    assert _number(found[1]) == pytest.approx(mean(rewards), abs=6e-4)
    assert _number(found[2]) == len(rewards)
    times = page.get_by_role("region", name="Where the time goes")
    expect(times).to_contain_text("own code")
    sampled = sum(sum(segment["loss_mask"]) for record in records for segment in record["segments"])
    shown = times.locator(".figures b").first.inner_text()
    factor = {"K": 1e3, "M": 1e6}.get(shown[-1], 1.0)
    assert _number(shown.rstrip("KM")) * factor == pytest.approx(sampled, rel=0.05)


def test_the_timeline_of_a_job_is_drawn_and_its_words_say_the_same(
    live: Live, look: Callable[..., Any]
) -> None:
    page = look(live.served).at(live.served.job(JOB))
    page.get_by_role("tab", name="Timeline").click()
    canvas = page.get_by_role("tabpanel").locator("canvas").first
    expect(canvas).to_be_visible()
    colours = canvas.evaluate(
        """element => {
          const {data} = element.getContext("2d").getImageData(0, 0, element.width, element.height);
          const pixels = new Uint32Array(data.buffer);
          return new Set(pixels.filter(pixel => pixel >>> 24)).size;
        }"""
    )
    assert colours > 3
    page.get_by_role("tabpanel").locator("summary").click()
    expect(page.get_by_role("tabpanel").locator("ol li").first).to_contain_text("run")


def test_a_group_shows_its_samples_by_reward_and_where_two_part_ways(
    live: Live, look: Callable[..., Any], records: list[dict[str, Any]]
) -> None:
    groups = _groups(records)
    task = next((t for t, rewards in groups.items() if len(set(rewards)) > 1), next(iter(groups)))
    page = look(live.served).at(live.served.group(JOB, task))
    expect(page.get_by_role("article")).to_have_count(SAMPLES)
    chips = page.locator("article header .reward-chip").all_inner_texts()
    shown = [float(text) for text in chips]
    assert shown == sorted(shown, reverse=True)
    assert sorted(shown) == pytest.approx(sorted(r for r in groups[task] if r is not None), abs=6e-4)
    panel = page.get_by_role("region", name="Where two samples part ways")
    chosen = [int(panel.get_by_role("combobox", name=side).input_value()) for side in ("Left", "Right")]
    samples = {r["sample_index"]: r["segments"][0] for r in records if r["task_id"] == task}
    one, other = (samples[number]["prompt_ids"] + samples[number]["response_ids"] for number in chosen)
    place = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if place is None:
        expect(panel).to_contain_text("All their tokens are the same")
    else:
        expect(panel).to_contain_text(re.compile(rf"token\s+{place:,}\s+of segment 1"))
        marks = panel.locator("mark")
        expect(marks).to_have_count(2)
        assert f"id {one[place]})" in marks.nth(0).inner_text()
        assert f"id {other[place]})" in marks.nth(1).inner_text()


def test_a_trajectory_shows_its_conversation(
    live: Live, look: Callable[..., Any], record: dict[str, Any]
) -> None:
    page = look(live.served).at(live.served.rollout(JOB, record["id"]))
    messages = page.get_by_role("article")
    expect(messages).to_have_count(len(record["messages"]))
    for place, message in enumerate(record["messages"]):
        shown = messages.nth(place)
        expect(shown).to_contain_text(message["role"])
        for line in message["content"].splitlines()[:3]:
            expect(shown).to_contain_text(line.strip())
        for call in message.get("tool_calls") or ():
            expect(shown).to_contain_text(call["function"]["name"])


def test_a_trajectory_shows_its_tokens_exactly(
    live: Live, look: Callable[..., Any], record: dict[str, Any]
) -> None:
    page = look(live.served).at(live.served.rollout(JOB, record["id"]) + "?tab=tokens")
    segment = record["segments"][0]
    prompt = len(segment["prompt_ids"])
    sampled = segment["loss_mask"].index(1)
    expect(page.locator(".token-line .s").first).to_be_visible()
    # A token is chosen by the address, and by the keyboard from there.
    page.goto(live.served.rollout(JOB, record["id"]) + f"?tab=tokens&segment=0&token={prompt + sampled}")
    detail = page.locator("dl.token-detail")
    expect(detail).to_contain_text(str(segment["response_ids"][sampled]))
    expect(detail).to_contain_text("1, sampled")
    expect(detail).to_contain_text(segment["policy_versions"][sampled])
    expect(detail).not_to_contain_text("≈")
    shown = re.search(r"Log-probability\s*(-?[\d.e-]+)", detail.inner_text())
    assert shown is not None, detail.inner_text()
    assert float(shown[1]) == pytest.approx(segment["logprobs"][sampled], rel=1e-6, abs=1e-7)
    page.locator(".token-lines").focus()
    page.keyboard.press("ArrowRight")
    expect(detail).to_contain_text(str(segment["response_ids"][sampled + 1]))
    for colouring, look_of_sampled in (("mask", ".mask"), ("version", "[class*=ver]")):
        page.get_by_role("combobox", name="Colour").select_option(colouring)
        expect(page.locator(f".token-line .s{look_of_sampled}").first).to_be_visible()


def test_a_trajectory_shows_its_timeline_its_evaluation_and_its_record(
    live: Live, look: Callable[..., Any], record: dict[str, Any]
) -> None:
    window = look(live.served)
    page = window.at(live.served.rollout(JOB, record["id"]))
    page.get_by_role("tab", name="Timeline").click()
    expect(page.get_by_role("list", name="Stages in time").get_by_role("listitem")).to_have_count(6)
    expect(page.get_by_role("tabpanel")).to_contain_text("each stage succeeded at its first try")
    page.get_by_role("tab", name="Eval").click()
    verdict = page.get_by_role("region", name="What Eval said")
    expect(verdict).to_contain_text(re.compile(rf"reward\s+{record['reward']:g}"))
    saw = page.get_by_role("region", name="What Eval saw and kept")
    if record.get("reward_output"):
        expect(saw).to_contain_text(record["reward_output"].splitlines()[-1])
    else:
        expect(saw).to_contain_text("The evaluation printed nothing.")
    page.get_by_role("tab", name="Raw").click()
    expect(page.get_by_label("The record as JSON")).to_contain_text(f'"id": "{record["id"]}"')
    with page.expect_download() as started:
        page.get_by_role("link", name="Download the record").click()
    assert json.loads(started.value.path().read_text()) == record
    assert started.value.suggested_filename == f"{record['id']}.json"


def test_a_job_that_goes_wrong_says_what_to_do(live: Live, look: Callable[..., Any], tmp_path: Path) -> None:
    job = quickstart("advised", 4, 4)
    job["spec"]["sampling"]["maxTokens"] = 2
    manifest = tmp_path / "job.json"
    manifest.write_text(json.dumps(job))
    page = look(live.served).at(f"{live.served.url}/")

    def rollyard(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "rollyard", *words], capture_output=True, text=True, check=True,
            env={**os.environ, "ROLLYARD_HOME": str(live.yard.home)}, timeout=SECONDS,
        )  # fmt: skip
        return done.stdout

    printed = rollyard("submit", "-f", str(manifest), "--wait")
    sentences = {one["message"] for one in live.job("advised")["status"]["advice"]}
    truncated = "16 of 16 rollouts were truncated by maxTokens (2): raise sampling.maxTokens"
    equal = (
        "the reward is 0 in all of 16 rollouts, so there is nothing to learn from: look at some with "
        "`rollyard view advised --failed`"
    )
    assert sentences == {truncated, equal}
    # It was printed once, with the numbers of that moment.
    assert len(re.findall("Advice: .* truncated by maxTokens", printed)) == 1, printed
    assert printed.count(f"Advice: {equal}\n") == 1, printed
    described = rollyard("describe", "advised")
    for sentence in sentences:
        assert re.search(rf"Advice: +{re.escape(sentence)}\n", described), described
    page.goto(live.served.job("advised"))
    shown = page.get_by_role("list", name="Advice").get_by_role("listitem")
    expect(shown).to_have_count(2)
    assert set(shown.all_inner_texts()) == sentences
    assert rollyard("view", "advised", "--failed"), "what the advice names is a command"


def test_keys_lead_to_the_next_sample_and_back_up(
    live: Live, look: Callable[..., Any], record: dict[str, Any]
) -> None:
    served = live.served
    with served.http() as http:
        brief = http.get(f"/v1/rolloutjobs/{JOB}/rollouts/{record['id']}/brief").raise_for_status().json()
    after, before = brief["neighbours"]["sample_after"], brief["neighbours"]["sample_before"]
    key, other = ("]", after) if after else ("[", before)
    page = look(served).at(served.rollout(JOB, record["id"]) + "?tab=eval")
    expect(page.get_by_role("region", name="What Eval said")).to_be_visible()
    page.keyboard.press(key)
    expect(page).to_have_url(served.rollout(JOB, other) + "?tab=eval")
    expect(page.get_by_role("main").locator("dd").filter(has_text=other)).to_be_visible()
    page.keyboard.press("u")
    expect(page).to_have_url(re.compile(r"/groups/[^/]+$"))
    # The address changes before the view that has the next key is there.
    expect(page.locator("#group-title")).to_be_visible()
    page.keyboard.press("u")
    expect(page).to_have_url(served.job(JOB))
    expect(page.locator("#job-title")).to_be_visible()
    page.keyboard.press("g")
    expect(page).to_have_url(f"{served.url}/")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
