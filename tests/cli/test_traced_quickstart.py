"""The quickstart with traces and JSON logs: spans add up to timings, also if a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard.connection import connect
from rollyard_process.telemetry.identity import trace_id
from rollyard_testing.pace import patience
from rollyard_testing.traces.receiver import GotSpan, Receiver, problems_of_tree, receiving

STAGES = ("init", "run", "eval")
NEAR = 0.05
"""How far the sum of spans may be from the timings, as a share."""
TINY = 0.004
"""How far it may be in any case, in seconds, as timings of some milliseconds are rounded."""
SETTLED_SECONDS = 1.0
"""How long the rollouts of a stopped worker must stay the same until its last requests count as done."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture
def sandbox(bubblewrap_problem: str | None) -> str:
    """Return `bubblewrap` where it works; with ROLLYARD_REQUIRE_REAL=1 it must."""
    if bubblewrap_problem is None:
        return "bubblewrap"
    if os.environ.get("ROLLYARD_REQUIRE_REAL") == "1":
        pytest.fail(bubblewrap_problem)
    return "process"


def start(folder: Path, url: str, sandbox: str, tasks: int, samples: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rollyard", "quickstart", "--out", str(folder), "--sandbox", sandbox]
    command += ["--tasks", str(tasks), "--samples", str(samples), "--home", str(folder / "home")]
    env = {**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "ROLLYARD_LOG_FORMAT": "json"}
    with (folder / "output").open("wb") as output:
        return subprocess.Popen(command, env=env, stdout=output, stderr=output)


def done(process: subprocess.Popen[bytes], folder: Path) -> list[dict[str, Any]]:
    """Wait for the end of the quickstart, and return its trajectories."""
    try:
        assert process.wait(patience(300)) == 0, (folder / "output").read_text()[-4000:]
    finally:
        process.kill()
    lines = (folder / "trajectories.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def total(spans: list[GotSpan], name: str) -> float:
    return sum(span.seconds for span in spans if span.name.partition(" ")[0] == name)


def check_sums(spans: list[GotSpan], record: dict[str, Any], *, of_workers: bool = True) -> None:
    """Compare the spans of one rollout with its timings."""
    timings = record["timings"]
    for stage in STAGES:
        queued = sum(span.seconds for span in spans if span.name == f"queue {stage}")
        assert queued == pytest.approx(timings[stage]["queued_seconds"], rel=NEAR, abs=TINY)
        assert total(spans, stage) == pytest.approx(timings[stage]["active_seconds"], rel=NEAR, abs=TINY)
        leases = [span for span in spans if span.name == stage]
        assert len(leases) == timings[stage]["attempts"]
    (root,) = [span for span in spans if not span.parent]
    both = sum(timings[stage][f"{part}_seconds"] for stage in STAGES for part in ("queued", "active"))
    assert root.seconds == pytest.approx(both, rel=NEAR, abs=TINY)
    if not of_workers:
        return
    pauses = total(spans, "weights") + total(spans, "backend")
    assert total(spans, "chat") - pauses == pytest.approx(timings["model_seconds"], rel=NEAR, abs=TINY)
    assert total(spans, "execute_tool") == pytest.approx(timings["tool_seconds"], rel=NEAR, abs=TINY)
    assert len([span for span in spans if span.name.startswith("chat ")]) == len(record["turns"])
    calls = sum(len(turn["tool_calls"]) for turn in record["turns"])
    assert len([span for span in spans if span.name.startswith("execute_tool ")]) == calls


def check_logs(folder: Path) -> None:
    """Check that each line of the processes' logs is a JSON object, and that some name their rollout."""
    logs = [folder / "home" / "up.log", *(folder / "home" / "logs").glob("*.log")]
    assert {"control-plane.log"} <= {path.name for path in logs}
    for path in logs:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            assert {"time", "level", "logger", "message"} <= record.keys(), line
            if "rollout" in record:
                assert record["trace_id"] == trace_id(record["rollout"])


@pytest.mark.nightly
def test_the_spans_of_a_quickstart_add_up_to_its_timings(
    tmp_path: Path, receiver: Receiver, sandbox: str
) -> None:
    records = done(start(tmp_path, receiver.url, sandbox, 4, 2), tmp_path)
    assert len(records) == 8
    traces = receiver.traces()
    assert set(traces) == {trace_id(record["id"]) for record in records}
    for record in records:
        spans = traces[trace_id(record["id"])]
        assert problems_of_tree(spans) == []
        check_sums(spans, record)
        names = {span.name.partition(" ")[0] for span in spans}
        assert {"invoke_agent", "queue", "init", "run", "eval", "chat", "start"} <= names
        assert {span.service for span in spans} == {"rollyard-control-plane", "rollyard-worker"}
        stages = {span.id: span.name for span in spans if span.name in STAGES}
        for span in spans:
            if span.name.startswith(("chat ", "execute_tool ")):
                assert stages[span.parent] == "run"
    assert b"submit" in b"".join(receiver.bodies), "names of tools are exported"
    for record in records:
        for message in record["messages"]:
            words = str(message.get("content") or "").strip()
            # Nothing of what the model or its tools have written leaves the installation.
            assert len(words) < 24 or words.encode() not in b"".join(receiver.bodies)
    check_logs(tmp_path)


def _worker(folder: Path) -> int | None:
    """Return the pid of a stage worker that works on the job."""
    for path in (folder / "home" / "pids").glob("quickstart*worker*.json"):
        pid: int = json.loads(path.read_text())["pid"]
        return pid
    return None


def _held(folder: Path) -> dict[str, str | None]:
    """Return the stages of the rollouts that the worker holds, by rollout."""
    with connect(None, folder / "home", "default") as client:
        return {rollout.id: rollout.stage for rollout in client.rollouts("quickstart", status="leased")}


def killed_at_work(process: subprocess.Popen[bytes], folder: Path) -> set[str]:
    """Kill the worker while it holds rollouts, one of them at least in Run, and return which it holds.

    The worker is stopped before one looks, so that it completes nothing between the look and its death.
    """
    end = time.monotonic() + patience(200.0)
    while time.monotonic() < end:
        assert process.poll() is None, (folder / "output").read_text()[-4000:]
        pid = _worker(folder)
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
            held = _held(folder)
            if "run" in held.values():
                held = _settled(folder, held)
            if "run" in held.values():
                os.kill(pid, signal.SIGKILL)
                return set(held)
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)
    raise AssertionError("the worker was never seen with a rollout in Run")


def _settled(folder: Path, held: dict[str, str | None]) -> dict[str, str | None]:
    """Return what a stopped worker holds once its last requests, already sent, have been dealt with."""
    quiet = time.monotonic() + SETTLED_SECONDS
    while time.monotonic() < quiet:
        now = _held(folder)
        if now != held:
            held, quiet = now, time.monotonic() + SETTLED_SECONDS
        time.sleep(0.05)
    return held


def test_a_killed_worker_leaves_one_tree(tmp_path: Path, receiver: Receiver, sandbox: str) -> None:
    """The killed process never sends its last spans, and its rollouts are run again."""
    process = start(tmp_path, receiver.url, sandbox, 12, 4)
    try:
        held = killed_at_work(process, tmp_path)
    except BaseException:
        process.kill()
        raise
    killed = time.time()
    records = done(process, tmp_path)
    assert len(records) == 48
    traces = receiver.traces()
    again = set()
    for record in records:
        spans = traces[trace_id(record["id"])]
        assert problems_of_tree(spans) == [], record["id"]
        if any(span.failed and span.name in STAGES and span.start < killed for span in spans):
            again.add(record["id"])
        # The last two seconds of spans of the killed worker are lost, and nothing else is.
        late = all(span.start > killed for span in spans if span.name == "run")
        check_sums(spans, record, of_workers=late)
    assert again & held, "no rollout that the killed worker held was run again"
