"""Lists of rollouts that the control plane sorts and searches, by the command line and the client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from rollyard.main import main
from rollyard_client import Client, RolloutQuery
from rollyard_testing.api.control_plane import StartedControlPlane, a_control_plane
from rollyard_testing.api.plane import Worker
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

MANIFEST = job_manifest(
    "job",
    {
        "tasks": {"inline": [{"id": f"t{i}", "prompt": "p"} for i in range(4)]},
        "handler": "shell",
        "agent": {"type": "oracle"},
    },
)


async def _finish(plane: StartedControlPlane) -> None:
    """Submit the job, and take its rollouts to their ends."""
    headers = {"Authorization": f"Bearer {plane.tokens['admin']}"}
    async with httpx.AsyncClient(base_url=plane.url, headers=headers, timeout=patience(60)) as http:
        assert (await http.post("/v1/rolloutjobs", json=MANIFEST)).status_code == 201
        worker = Worker(http)
        while leases := await worker.lease(init=9, run=9, eval=9):
            for lease in leases:
                number, result = int(lease["task"]["id"][1:]), worker.result(lease)
                if (number, lease["stage"]) == (3, "run"):
                    await worker.fail(lease, "TestBroken", message="it broke", retryable=False)
                    continue
                if lease["stage"] == "run":
                    said = {"role": "assistant", "content": f"animal number{number}"}
                    result["trajectory"]["messages"] = [said]
                elif lease["stage"] == "eval":
                    result["reward"] = number / 10
                assert await worker.complete(result) == ["accepted"]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedControlPlane]:
    """Yield a control plane with an ended job: rewards 0, 0.1 and 0.2, and one failed rollout."""
    folder: Path = tmp_path_factory.mktemp("plane")
    with a_control_plane(folder, ready_seconds=170, end_seconds=60) as plane:
        asyncio.run(_finish(plane))
        yield plane


@pytest.fixture
def arguments(started: StartedControlPlane, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the options with which a command reaches the control plane, as a viewer."""
    monkeypatch.setenv("ROLLYARD_TOKEN", started.tokens["viewer"])
    return ["--url", started.url]


def test_a_viewer_lists_rollouts_in_any_order(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", "job", "--list", "--sort", "-reward", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["ROLLOUT", "TASK", "SAMPLE"]
    assert [line.split()[1] for line in lines[1:]] == ["t2", "t1", "t0", "t3"]
    assert main(["view", "job", "--list", "--reason", "TestBroken", *arguments]) == 0
    (_, line) = capsys.readouterr().out.splitlines()
    assert "failed" in line
    assert line.endswith("TestBroken")
    assert main(["view", "job", "--list", "--min-reward", "0.05", "--max-reward", "0.15", *arguments]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_filters_belong_to_a_list(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lists = (["job", "--sort", "reward"], ["job", "r", "--list", "--task", "t0"], ["job", "--search", "x"])
    for wrong in lists:
        assert main(["view", *wrong, *arguments]) == 2
        assert "give it with NAME and --list" in capsys.readouterr().err


def test_the_client_searches_and_reads_statistics(started: StartedControlPlane) -> None:
    with Client(started.url, started.tokens["viewer"]) as client:
        found: list[str] = []
        until = time.monotonic() + patience(60)
        while not found and time.monotonic() < until:  # Words come with the records into the store.
            time.sleep(0.1)
            found = [row.task_id for row in client.rollout_rows("job", RolloutQuery(search="ANIMAL number1"))]
        assert found == ["t1"]
        assert len(list(client.rollout_rows("job"))) == 4
        statistics = client.statistics("job")
        assert (statistics.upto, statistics.rewards.n, sum(statistics.rewards.bins)) == (4, 3, 3)
        assert sum(bucket.n for bucket in statistics.by_time) == 4
        assert statistics.stages["run"].n == 4
        (failure,) = statistics.failures
        assert (failure.reason, failure.message, failure.n) == ("TestBroken", "it broke", 1)
        overview = client.overview()
        assert sum(overview.phases.values()) == 1
        assert overview.queues["run"].active == 0
        assert overview.rates.bucket_seconds * len(overview.rates.rollouts) == 900
        assert {worker.name for worker in overview.workers} == {"w"}


def test_a_job_that_is_submitted_again_is_unchanged_and_one_that_is_deleted_is_gone(
    started: StartedControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ROLLYARD_TOKEN", started.tokens["admin"])
    file, arguments = tmp_path / "job.json", ["--url", started.url]
    file.write_text(json.dumps(MANIFEST | {"metadata": {"name": "again"}}))
    for expected in ("again submitted (4 rollouts)", "again unchanged (Pending, 4 rollouts)"):
        assert main(["submit", "-f", str(file), *arguments]) == 0
        assert f"rolloutjob/{expected}" in capsys.readouterr().out
    assert main(["delete", "rj", *arguments]) == 2
    assert "give the NAME too" in capsys.readouterr().err
    assert main(["delete", "again", *arguments]) == 0
    assert capsys.readouterr().out == "rolloutjob/again deleted\n"
    assert main(["delete", "again", *arguments]) == 1
    assert "again" in capsys.readouterr().err
    assert main(["delete", "bp", "nowhere", *arguments]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_describe_reads_failures_from_the_statistics(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["describe", "job", "job", *arguments]) == 0
    assert "1 × TestBroken: it broke" in capsys.readouterr().out
