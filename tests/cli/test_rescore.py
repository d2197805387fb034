"""`rollyard rescore`: kept trajectories are evaluated again, and the control plane keeps what it has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard.jobs.rescoring import RewardChanges
from rollyard.main import main
from rollyard.trajectories.export import write
from rollyard.trajectories.reading import read_file
from rollyard_client import Client
from rollyard_crds.trajectory import RescoredTrajectory, Trajectory
from rollyard_testing.api.control_plane import StartedControlPlane, a_control_plane
from rollyard_testing.api.plane import Worker
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

SAID = ["the answer is 4", "I do not know", "```python\nprint(2 + 2)  # \\boxed{8/2}\n```", "(failed)"]
SEGMENT = {"prompt_ids": [1], "response_ids": [2] * 10, "loss_mask": [1] * 10, "logprobs": [-0.5] * 10,
           "policy_versions": ["v"] * 10}  # fmt: skip

OFTEN_EMPTY = {"attempts", "attempts_dropped", "reward_reason", "reward_output"}


async def _finish(plane: StartedControlPlane) -> None:
    """Take the rollouts of the only job to their ends."""
    headers = {"Authorization": f"Bearer {plane.tokens['worker']}"}
    async with httpx.AsyncClient(base_url=plane.url, headers=headers, timeout=patience(60)) as http:
        worker = Worker(http)
        while leases := await worker.lease(init=16, run=16, eval=16):
            for lease in leases:
                said, result = SAID[int(lease["task"]["id"][1:])], worker.result(lease)
                if lease["stage"] == "run":
                    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": said}]
                    result["trajectory"] |= {"segments": [SEGMENT], "messages": messages}
                elif lease["stage"] == "eval" and said == "(failed)":
                    assert await worker.fail(lease, "VerifierFailed", retryable=False) == "accepted"
                    continue
                elif lease["stage"] == "eval":
                    result |= {"reward": 0.25, "reward_components": {"old": 1.0}}
                    result["reward_reason"] = "TestTimeout"
                assert await worker.complete(result) == ["accepted"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedControlPlane]:
    """Yield a control plane with the ended job `kept`: three rewards of 0.25, and one rollout that failed."""
    tests = {"cases": [{"input": "", "output": "4"}]}
    tasks = [
        {"id": f"t{number}", "prompt": "2 + 2?", "answer": "4", "tests": tests} for number in range(len(SAID))
    ]
    manifest = job_manifest("kept", {
            "tasks": {"inline": tasks}, "handler": "math", "agent": {"type": "oracle"},
            "failurePolicy": {"maxFailedFraction": 1.0},
        })  # fmt: skip
    with a_control_plane(tmp_path_factory.mktemp("api"), ready_seconds=60, end_seconds=20) as plane:
        with Client(plane.url, plane.tokens["admin"]) as client:
            client.submit(manifest)
        asyncio.run(_finish(plane))
        yield plane


@pytest.fixture
def run(
    finished: StartedControlPlane,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Any:
    monkeypatch.setenv("ROLLYARD_URL", finished.url)
    monkeypatch.setenv("ROLLYARD_TOKEN", finished.tokens["admin"])

    def rescore(name: str = "kept", handler: str = "math", **options: Any) -> tuple[int, str]:
        options = {"output": tmp_path / "new.jsonl", **options}
        words = ["rescore", name, "--handler", handler]
        for option, value in options.items():
            words += [f"--{option}", str(value)] if value is not None else []
        status = main(words)
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return rescore


def rewards(path: Path) -> list[float | None]:
    return [one.reward for one in read_file(path)]


def kept(server: StartedControlPlane) -> list[dict[str, Any]]:
    with Client(server.url, server.tokens["admin"]) as client:
        return [one.model_dump() for one in client.trajectories("kept")]


def test_files_of_trajectories_have_the_fields_of_the_calls(
    run: Any, finished: StartedControlPlane, tmp_path: Path
) -> None:
    """What most records leave empty is left out of all of them, as the documentation says."""
    headers = {"Authorization": f"Bearer {finished.tokens['admin']}", "Accept": "application/x-ndjson"}
    url = f"{finished.url}/v1/rolloutjobs/kept/trajectories"
    answered = httpx.get(url, headers=headers, timeout=patience(60), trust_env=False).text.splitlines()
    with Client(finished.url, finished.tokens["admin"]) as client:
        write(client, "kept", "default", tmp_path / "kept.jsonl")
    exported = (tmp_path / "kept.jsonl").read_text().splitlines()
    found = [OFTEN_EMPTY & json.loads(line).keys() for line in exported]
    assert found == [OFTEN_EMPTY & json.loads(line).keys() for line in answered]
    assert found == [{"reward_reason"}] * 3 + [{"attempts", "attempts_dropped"}]
    assert run()[0] == 0
    rescored = (tmp_path / "new.jsonl").read_text().splitlines()
    assert ["attempts" in json.loads(line) for line in rescored] == [False, False, False, True]


def test_rewards_are_made_again_and_the_first_ones_are_kept(
    run: Any, finished: StartedControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = kept(finished)
    status, said = run()
    assert (status, f"The trajectories are in {tmp_path / 'new.jsonl'}." in said) == (0, True), said
    found = list(read_file(tmp_path / "new.jsonl"))
    assert [one.id for one in found] == [one["id"] for one in before], (
        "the order is that of the control plane"
    )
    by_task = {one.task_id: one for one in found}
    assert [by_task[f"t{number}"].reward for number in range(4)] == [1.0, 0.0, 1.0, None]
    first, last = by_task["t0"], by_task["t3"]
    assert isinstance(first, RescoredTrajectory)
    assert first.rescored is not None
    assert (first.rescored.handler, first.rescored.reward) == ("math", 0.25)
    assert (first.rescored.reward_components, first.rescored.reward_reason) == ({"old": 1.0}, "TestTimeout")
    assert "@" in first.rescored.by
    assert (first.reward_components, first.reward_reason) == ({"answered": 1.0}, "")
    assert first.segments == RescoredTrajectory.model_validate(before[0]).segments
    # A failure of the infrastructure is no reward now either.
    assert isinstance(last, RescoredTrajectory)
    assert (last.status, last.reason, last.rescored) == ("failed", "VerifierFailed", None)
    assert kept(finished) == before
    assert main(["view", "--from", str(tmp_path / "new.jsonl"), "t0"]) == 0
    assert "evaluated again with math" in capsys.readouterr().out


def test_the_changes_are_counted(run: Any, finished: StartedControlPlane, tmp_path: Path) -> None:
    """Without `--output` they are all that there is."""
    before = kept(finished)
    status, said = run(handler="stem", output=None)
    assert (status, said.splitlines()) == (
        0,
        [
            "Of 4 trajectories, 3 rewards changed and 0 are the same; 0 could not be evaluated, and 1 had no "
            "reward.",
            "  0.25 → 0: 2",
            "  0.25 → 1: 1",
        ],
    )
    assert list(tmp_path.iterdir()) == []
    assert kept(finished) == before


@pytest.mark.parametrize(
    ("before", "now", "counted"),
    [
        (
            0.3,
            0.1 + 0.2,
            "0 rewards changed and 1 are the same; 0 could not be evaluated, and 0 had no reward.",
        ),
        (
            0.3,
            0.3 + 2e-9,
            "1 rewards changed and 0 are the same; 0 could not be evaluated, and 0 had no reward.",
        ),
        (0.3, None, "0 rewards changed and 0 are the same; 1 could not be evaluated, and 0 had no reward."),
        (None, None, "0 rewards changed and 0 are the same; 0 could not be evaluated, and 1 had no reward."),
    ],
)
def test_rewards_that_differ_by_rounding_are_the_same(
    before: float | None, now: float | None, counted: str
) -> None:
    def record(reward: float | None) -> Trajectory:
        status = "failed" if reward is None else "succeeded"
        return Trajectory(
            id="r", job="j", task_id="t", group_id="g", sample_index=0, reward=reward, status=status
        )

    changes = RewardChanges()
    changes.add(record(before), record(now))
    assert next(changes.lines()) == f"Of 1 trajectories, {counted}"


def test_many_different_changes_do_not_fill_a_report() -> None:
    record = {"id": "r", "job": "j", "task_id": "t", "group_id": "g", "sample_index": 0}
    changes = RewardChanges()
    for number in range(1000):
        now = Trajectory.model_validate({**record, "reward": number + 1.0})
        changes.add(Trajectory.model_validate({**record, "reward": 0.0}), now)
    first, most, *others = changes.lines()
    assert first.startswith("Of 1000 trajectories, 1000 rewards changed and 0 are the same")
    assert most == "  other changes: 980"
    assert len(others) == 20


def test_failures_are_shown_with_their_reasons() -> None:
    """The most frequent first, each with the first message, and many of them do not fill a report."""
    record = {"id": "r", "job": "j", "task_id": "t", "group_id": "g", "sample_index": 0}
    before = Trajectory.model_validate({**record, "reward": 1.0})
    changes = RewardChanges()
    messages = [
        ("KeyLost", "KeyLost: of a"),
        *[("InternalError", f"ValueError: row {row}") for row in range(2)],
    ]
    for reason, message in messages:
        failed = {**record, "status": "failed", "reason": reason, "message": message}
        changes.add(before, Trajectory.model_validate(failed))
    assert list(changes.lines())[1:] == [
        "  not evaluated, InternalError (ValueError): 2, such as: row 0",
        "  not evaluated, KeyLost: 1, such as: of a",
    ]
    for number in range(1000):
        failed = {**record, "status": "failed", "reason": f"R{number}", "message": f"R{number}: {'x' * 5000}"}
        changes.add(before, Trajectory.model_validate(failed))
    shown = list(changes.lines())
    assert shown[1].startswith("  not evaluated, other reasons: 992, such as: xxx")
    assert len(shown) == 12
    assert max(map(len, shown)) < 400


def test_a_second_time_gives_the_same(run: Any, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert run(output=tmp_path / name)[0] == 0
    assert rewards(tmp_path / "a.jsonl") == rewards(tmp_path / "b.jsonl.gz")


def test_another_section_reward_counts(run: Any, tmp_path: Path) -> None:
    section = tmp_path / "reward.yaml"
    section.write_text(
        "reward:\n  weights: {handler: 1.0, boxed: 0.5}\n"
        "  overlong: {maxTokens: 20, bufferTokens: 20}\n"
        "  format: [{name: boxed, pattern: 'boxed'}]\n"
    )
    assert run(reward=section)[0] == 0
    found = {one.task_id: one for one in read_file(tmp_path / "new.jsonl")}
    assert [found[f"t{number}"].reward for number in range(3)] == [0.5, -0.5, 1.0]
    assert found["t2"].reward_components == {"answered": 1.0, "handler": 1.0, "overlong": -0.5, "boxed": 1.0}


def test_what_cannot_be_evaluated_is_failed_and_never_0(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising_function.py").write_text("class F:\n    def score(self, episode):\n        1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    from rollyard_pipeline.registry import Registry

    monkeypatch.setattr(Registry, "target", lambda *_: "raising_function:F")
    section = tmp_path / "reward.yaml"
    section.write_text("function: {name: raising}\n")
    status, said = run(reward=section)
    assert status == 1
    *_, why, _, last = said.splitlines()
    assert why.startswith("  not evaluated, RewardFunctionFailed: 3, such as: ")
    assert "ZeroDivisionError" in why
    assert last == "rollyard: 3 trajectories could not be evaluated, for the reasons above"
    for one in read_file(tmp_path / "new.jsonl"):
        assert (one.status, one.reward) == ("failed", None)
        if one.task_id != "t3":
            assert one.reason == "RewardFunctionFailed"
            assert "ZeroDivisionError" in one.message


def test_a_program_is_run_again_in_a_sandbox(run: Any, tmp_path: Path, bubblewrap_works: None) -> None:
    status, said = run(handler="code")
    assert status == 0, said
    found = {one.task_id: (one.status, one.reward) for one in read_file(tmp_path / "new.jsonl")}
    assert found == {
        "t0": ("succeeded", 0.0), "t1": ("succeeded", 0.0), "t2": ("succeeded", 1.0), "t3": ("failed", None),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "reward", "words"),
    [
        ({"name": "nosuch"}, None, "no RolloutJob 'nosuch'"),
        (
            {"handler": "shell"},
            None,
            "the handler 'shell' judges what Run left in its sandbox, which is not here",
        ),
        ({"handler": "harbor"}, None, "only handlers that judge the answer can evaluate without a rollout"),
        ({"handler": "nobodys"}, None, "no handler 'nobodys' is installed"),
        ({}, "weights: {style: 1.0}", "spec.reward.weights: there is no component 'style'"),
        ({}, "overlong: {maxTokens: 8, bufferTokens: -1}", "reward.overlong.bufferTokens"),
        ({}, "service: {url: 'http://a/'}", "reward services during Eval only"),
        ({}, "function: {name: nobodys}", "no reward function 'nobodys' is installed"),
        ({}, "- 1", "reward"),
        ({"output": Path("x.parquet")}, None, "--output must end in .jsonl or .jsonl.gz"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    run: Any, tmp_path: Path, arguments: dict[str, Any], reward: str | None, words: str
) -> None:
    if reward is not None:
        (tmp_path / "reward.yaml").write_text(reward)
        arguments = {**arguments, "reward": tmp_path / "reward.yaml"}
    status, said = run(**arguments)
    assert status in (1, 2)
    assert words in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "new.jsonl").exists()


@pytest.mark.attack(
    "a worker or driver reads hidden tests of a job",
    boundary="control plane",
    surface="`/v1/rolloutjobs/NAME/tasks`",
    stopped_by="the call is the admin's alone",
)
def test_tasks_are_read_by_their_ids(finished: StartedControlPlane) -> None:
    with Client(finished.url, finished.tokens["admin"]) as client:
        found = client.tasks("kept", ["t2", "nosuch", "t0"])
        assert [(task.id, task.answer) for task in found] == [("t2", "4"), ("t0", "4")]
    for token in (finished.tokens["worker"], finished.tokens["driver"]):
        headers = {"Authorization": f"Bearer {token}"}
        refused = httpx.get(
            f"{finished.url}/v1/rolloutjobs/kept/tasks", params={"id": "t0"}, headers=headers, trust_env=False
        )
        assert refused.status_code == 403, "answers and hidden tests are for the author alone"
