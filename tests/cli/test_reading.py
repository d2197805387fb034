"""Trajectories, progress and summaries are read and printed."""

from __future__ import annotations

import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from rollyard import terminal
from rollyard.errors import CliError, InvalidInput, LookupFailed, UsageProblem
from rollyard.main import main
from rollyard.render import progress
from rollyard.render.describe import describe_job, describe_pool
from rollyard.render.progress import ProgressLines, progress_line, reward_text, stage_progress
from rollyard.render.tables import age, backends_table, jobs_table, plain_table, pools_table, print_table
from rollyard.render.trajectory import TrajectoryView, why
from rollyard.trajectories.export import write_lines
from rollyard.trajectories.reading import find, most_telling, read_file, tokenizer_of
from rollyard.trajectories.summary import summarize, summarize_policies
from rollyard_api.trajectories.parquet import encode
from rollyard_crds import BackendPool, BackendPoolStatus, BackendStatus, RolloutCounts, RolloutJob
from rollyard_crds.trajectory import Trajectory
from rollyard_crds.weights import WeightUpdate
from rollyard_testing.crds.conversations import harness_record
from rollyard_testing.manifests import job_manifest


def record(sample: int = 0, reward: float | None = 1.0, **changes: Any) -> Trajectory:
    """Return two turns: ids 10-12 are sampled, 20-21 the tool's answer, 13-14 sampled."""
    document: dict[str, Any] = {
        "id": f"job-aa-0-{sample}",
        "job": "job",
        "task_id": "t0",
        "group_id": "t0",
        "sample_index": sample,
        "reward": reward,
        "reward_components": {"tests": 1.0},
        "segments": [
            {
                "prompt_ids": [1, 2],
                "response_ids": [10, 11, 12, 20, 21, 13, 14],
                "loss_mask": [1, 1, 1, 0, 0, 1, 1],
                "logprobs": [-0.5, -1.0, -1.5, 0.0, 0.0, -0.25, -0.75],
                "policy_versions": ["0", "0", "0", "", "", "0", "0"],
            }
        ],
        "messages": [
            {"role": "user", "content": "count the lines"},
            {"role": "assistant", "content": "call wc"},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "it is 3"},
        ],
        "turns": [
            {
                "segment": 0,
                "start": 0,
                "end": 3,
                "finish_reason": "tool_calls",
                "tool_calls": [{"name": "bash", "arguments": {"command": "wc -l a"}, "seconds": 0.01}],
            },
            {"segment": 0, "start": 5, "end": 7, "finish_reason": "stop"},
        ],
        "timings": {"run": {"queued_seconds": 1.0, "active_seconds": 2.0, "attempts": 1}},
        **changes,
    }
    return Trajectory.model_validate(document)


def failed(sample: int, **changes: Any) -> Trajectory:
    base = {"status": "failed", "reason": "SandboxLost", "message": "gone", "segments": [], "turns": []}
    return record(sample, None, **{**base, **changes})


def shown(trajectory: Trajectory, decode: Any = None, terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200, highlight=False)
    TrajectoryView(console, decode).show(trajectory)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_sampled_tokens_are_marked_and_others_are_not() -> None:
    text = shown(record(), lambda ids: " ".join(f"<{number}>" for number in ids))
    assert "«<10> <11> <12>»\n" in text
    assert "\n<20> <21>\n" in text
    assert "«<13> <14>»" in text
    assert "3 tokens, logprob mean -1.000, lowest -1.50" in text
    assert 'bash {"command": "wc -l a"}' in text


def test_without_a_tokenizer_messages_are_shown() -> None:
    text = shown(record())
    assert "count the lines" in text
    assert "«call wc»" in text
    assert "«it is 3»" in text
    assert "2 tokens, logprob mean -0.500" in text


def test_the_length_of_a_thought_is_shown() -> None:
    turn = {"segment": 0, "start": 0, "end": 7, "finish_reason": "stop"}
    thinking = {**turn, "thought": {"start": 7, "end": 47, "answer": 55}}
    assert ", thought of 40 characters, model" in shown(record(turns=[thinking]))
    assert "thought" not in shown(record(turns=[turn]))


@pytest.mark.parametrize("decode", [None, lambda ids: " ".join(map(str, ids))])
def test_each_conversation_of_a_harness_is_shown_the_own_one_first(decode: Any) -> None:
    trajectory = Trajectory.model_validate(harness_record())
    text = shown(trajectory, decode=decode)
    titles = [line for line in text.splitlines() if line.startswith("━━")]
    assert titles == [
        "━━ conversation 4: own conversation, rewrites conversation 0",
        "━━ conversation 0: another version of the main conversation, trained on",
        "━━ conversation 1: sub-agent, trained on, began in conversation 0",
        "━━ conversation 2: calls of the policy itself, not trained on",
        "━━ conversation 3: title, not trained on, left conversation 0 after 2 messages",
    ]
    own, earlier, helper, policy, _title = text.split("━━ conversation ")[1:]
    assert "turn 1: 3 tokens, logprob mean -0.250" in own
    assert ("«50 51 52»" if decode else "«It is fixed.»") in own
    assert "turn 2: 2 tokens, logprob mean -0.250" in earlier
    assert ("«13 14»" if decode else "«I ask a helper.»") in earlier
    assert 'bash {"command": "ls"}  0.500 s' in earlier
    assert ("«20 21 22 23»" if decode else "«It subtracts.»") in helper
    assert "turn 1: 2 tokens, not trained on, ended by stop" in policy
    assert ("«30 31»" if decode else "«You passed.»") in policy
    assert "Say that I passed." in policy


def test_how_a_harness_ended_is_shown_and_its_output_looks_like_no_line_of_ours() -> None:
    harness = {"name": "command", "exit_code": None, "seconds": 2.5, "output": "a\n━━ conversation 9\n"}
    text = shown(Trajectory.model_validate(harness_record(harness=harness)))
    assert (
        "harness command: killed, or not started after 2.500 s\nit printed:\n  │ a\n  │ ━━ conversation 9"
        in text
    )
    assert "the end of its log" not in text
    ended = shown(Trajectory.model_validate(harness_record()))
    assert "harness mini-swe-agent: exit status 0 after 12.500 s" in ended
    assert "the end of its log:\n  │ started" in ended
    out = terminal.console(file=io.StringIO(), width=200)
    TrajectoryView(out).show(Trajectory.model_validate(harness_record()))
    assert "  │ \\x1b[31mstep 1\\x1b[0m\n" in out.file.getvalue()  # type: ignore[attr-defined]


def test_what_read_the_tool_calls_is_shown() -> None:
    assert "\ntool calls read by renderers/0.1.12:hy3\n" in shown(record(tool_parser="renderers/0.1.12:hy3"))
    assert "tool calls read by" not in shown(record())


def test_on_a_terminal_colour_marks() -> None:
    text = shown(record(), terminal=True)
    assert "«" not in text
    assert "\x1b[1;32mcall wc" in text


def test_why() -> None:
    assert why(record()) == ""
    assert why(failed(0)) == "failed, SandboxLost: gone"
    assert why(record(reward=0.0)) == "reward 0: not solved in 2 turns"
    assert why(record(reward=0.0, reward_reason="SandboxSabotaged")) == "reward 0: SandboxSabotaged"
    assert "MaxTurns" in why(record(reward=0.0, truncated=True, truncated_reason="MaxTurns"))


ATTEMPTS = [
    {"stage": "init", "attempt": 0, "reason": "NodeGone", "message": "", "worker": "", "node": "n7",
     "started": 1.0, "seconds": 61.0, "counted": False},
    {"stage": "run", "attempt": 2, "reason": "BackendUnavailable", "message": "nobody answers",
     "worker": "w-1", "node": "n7", "started": 2.0, "seconds": 60.5, "counted": True},
]  # fmt: skip


def test_attempts_that_did_not_end_well_are_shown() -> None:
    text = shown(record(attempts=ATTEMPTS, attempts_dropped=3))
    assert "in the queue of init, 61.000 s on n7, not counted: NodeGone\n" in text
    assert "run attempt 2, 60.500 s, w-1 on n7: BackendUnavailable: nobody answers\n" in text
    assert "3 more attempts are not listed" in text
    assert "attempt" not in shown(record()).lower()


def test_a_job_is_described_with_the_attempts_of_its_rollouts() -> None:
    job = RolloutJob.model_validate(
        job_manifest("job", {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}})
    )
    attempts = Counter({("run", "BackendUnavailable", False): 105, ("init", "ImageBroken", True): 2})
    text = printed(lambda out: describe_job(out, job, Counter({("Broken", "two\nlines"): 1}), attempts))
    assert "  105 × BackendUnavailable in run, not counted\n  2 × ImageBroken in init\n" in text
    assert "  1 × Broken: two lines\n" in text
    assert "did not end well" not in printed(lambda out: describe_job(out, job, Counter(), Counter()))


def test_a_job_is_described_with_what_it_was_warned_of() -> None:
    swe = {"script": "make test", "log_parser": "go", "pass_to_pass": ["TestA"]}
    task = {"id": "a", "prompt": "?", "swe": swe}
    spec = {"handler": "swe", "agent": {"type": "oracle"}, "tasks": {"inline": [task]}}
    job = RolloutJob.model_validate({"metadata": {"name": "job"}, "spec": spec})
    text = printed(lambda out: describe_job(out, job, Counter(), Counter()))
    assert (
        "Warning:      spec.tasks.inline: tasks whose swe.verdict is 'log': 1. It believes what tests" in text
    )


def test_the_description_of_a_spec_leaves_out_what_equals_the_default() -> None:
    tasks = [{"id": "a", "prompt": "?", "answer": "1"}]
    template = {"volumes": [{"name": "scratch", "emptyDir": {}}]}
    spec = {
        "handler": "math",
        "agent": {"type": "oracle", "maxTurns": 8},
        "tasks": {"inline": tasks},
        "stages": {"run": {"template": template}},
    }
    job = RolloutJob.model_validate({"metadata": {"name": "job"}, "spec": spec})
    _, _, text = printed(lambda out: describe_job(out, job, Counter(), Counter())).partition("defaults:\n")
    shown = {**spec, "tasks": {"inline": "1 task"}}
    assert yaml.safe_load(text) == shown


def test_the_description_of_a_spec_has_the_sizes_of_a_harness_files() -> None:
    agent = {
        "type": "harness",
        "harness": "command",
        "command": "sh run.sh",
        "files": {"run.sh": "date\n" * 300},
    }
    spec = {"tasks": {"stream": True}, "handler": "shell", "backendRef": {"name": "p"}, "agent": agent}
    job = RolloutJob.model_validate(job_manifest("job", spec))
    _, _, text = printed(lambda out: describe_job(out, job, Counter(), Counter())).partition("defaults:\n")
    assert yaml.safe_load(text)["agent"] == {**agent, "files": {"run.sh": "1,500 characters"}}


def test_a_job_is_described_with_the_rows_that_were_skipped() -> None:
    spec = {"handler": "math", "agent": {"type": "oracle"}, "tasks": {"url": "x", "onBadRow": "skip"}}
    rows = {"count": 3, "read": 12, "reasons": ["line 3: id: is missing", "line 7: \x1b[2Jnot valid JSON"]}
    document = {"metadata": {"name": "job"}, "spec": spec, "status": {"skippedRows": rows}}
    job = RolloutJob.model_validate(document)
    text = printed(lambda out: describe_job(out, job, Counter(), Counter()))
    assert (
        "Skipped:      3 of 12 rows of the task list are skipped:\n"
        "  line 3: id: is missing\n  line 7: \\x1b[2Jnot valid JSON\n  … (1 more)\n"
    ) in text
    job.status.skipped_rows = None
    assert "Skipped" not in printed(lambda out: describe_job(out, job, Counter(), Counter()))


def test_a_job_is_described_with_its_target_and_what_was_thrown_away() -> None:
    sampling = {"targetGroups": 32, "informativeGroups": 30, "inFlightGroups": 8, "waitingGroups": 5}
    wasted = {"uninformativeGroups": 20, "surplusRollouts": 3, "discardedTokens": 4096}
    job = RolloutJob.model_validate(
        {
            "metadata": {"name": "job"},
            "spec": {
                "tasks": {"stream": True},
                "handler": "shell",
                "agent": {"type": "oracle"},
                "samplesPerTask": 2,
                "dynamicSampling": {"targetGroups": 32},
            },
            "status": {"dynamicSampling": sampling | wasted},
        }
    )
    text = printed(lambda out: describe_job(out, job, Counter(), Counter()))
    assert "Target:       30 of 32 groups have a signal; 8 in flight, 5 waiting\n" in text
    thrown_away = "20 groups without a signal, 3 surplus rollouts, 4096 sampled tokens"
    assert f"Thrown away:  {thrown_away}\n" in text
    assert reward_text(job) == "30 of 32 groups"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    records = [record(0), record(1, 0.0), failed(2, attempts=ATTEMPTS, attempts_dropped=1)]
    lines = [one.model_dump_json().encode() for one in records]
    (tmp_path / "t.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "t.parquet").write_bytes(encode(lines))
    return {"jsonl": tmp_path / "t.jsonl", "parquet": tmp_path / "t.parquet"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_give_back_what_was_written(kind: str, files: dict[str, Path]) -> None:
    assert list(read_file(files[kind])) == [
        record(0),
        record(1, 0.0),
        failed(2, attempts=ATTEMPTS, attempts_dropped=1),
    ]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_give_back_the_record_of_a_harness(kind: str, tmp_path: Path) -> None:
    records = [Trajectory.model_validate(harness_record()), record(1)]
    file = tmp_path / f"t.{kind}"
    lines = [one.line() for one in records]
    file.write_bytes(b"\n".join(lines) + b"\n" if kind == "jsonl" else encode(lines))
    assert list(read_file(file)) == records
    assert summarize(records, 1.0).turns_mean == 4.0
    assert summarize(records, 1.0).tokens_sampled == 12 + 5


def test_finding_a_rollout(files: dict[str, Path]) -> None:
    path = files["jsonl"]
    assert find(read_file(path), "job-aa-0-1").sample_index == 1
    assert find(read_file(path), "0-2").sample_index == 2
    with pytest.raises(LookupFailed, match="fits 3 rollouts"):
        find(read_file(path), "t0")
    with pytest.raises(LookupFailed, match="no rollout 'zz'"):
        find(read_file(path), "zz")
    telling = most_telling(read_file(path))
    assert telling is not None
    assert telling.sample_index == 0


def test_broken_trajectory_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(record().model_dump_json() + "\n" + json.dumps({"id": 3}) + "\n")
    with pytest.raises(InvalidInput, match="line 2"):
        list(read_file(path))
    (tmp_path / "t.parquet").write_text("no")
    with pytest.raises(InvalidInput, match="not a Parquet file"):
        list(read_file(tmp_path / "t.parquet"))


def test_view_from_a_file_needs_no_server(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "--from", str(files["parquet"])]) == 0
    assert "«it is 3»" in capsys.readouterr().out
    assert main(["view", "--from", str(files["jsonl"]), "--failed"]) == 0
    listed = capsys.readouterr().out
    assert "job-aa-0-0" not in listed
    assert "reward 0: not solved" in listed
    assert "failed, SandboxLost: gone" in listed
    assert main(["view", "--from", str(files["jsonl"]), "0-1"]) == 0
    assert "sample 1: succeeded, reward 0" in capsys.readouterr().out


def test_summary() -> None:
    other = {"task_id": "t1", "group_id": "t1"}
    records = [record(0), record(1, 0.0), failed(2), record(3, 1.0, **other), record(4, 1.0, **other)]
    summary = summarize(records, wall_seconds=10.0)
    document = summary.to_json()
    assert (summary.rollouts, summary.succeeded, summary.failed) == (5, 4, 1)
    assert (summary.groups, summary.groups_informative) == (2, 1)
    rounded = [record(0, 0.3), record(1, 0.1 + 0.2)]
    assert summarize(rounded, wall_seconds=1.0).groups_informative == 0
    assert summary.reward_mean == 0.75
    assert document["tokens_sampled"] == 20
    assert document["tokens_per_second"] == 2.0
    assert summary.stages["run"].mean_worked == 2.0
    keys = {"rollouts", "succeeded", "failed", "reward_mean", "groups_informative", "tokens_sampled"}
    assert keys | {"wall_seconds"} <= document.keys()


def test_stage_progress_adds_up() -> None:
    """A rollout that failed or was cancelled counts as past no stage."""
    counts = RolloutCounts.model_validate(
        {
            "total": 24,
            "init": {"queued": 4, "active": 3},
            "run": {"queued": 2, "active": 5},
            "eval": {"active": 1},
            "succeeded": 3,
            "failed": 2,
            "cancelled": 4,
        }
    )
    done = {item.stage: item.done for item in stage_progress(counts)}
    assert done == {"init": 11, "run": 4, "eval": 3}


def test_lines_are_written_on_change_only() -> None:
    job = RolloutJob.model_validate(
        {
            "metadata": {"name": "j"},
            "spec": {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}},
            "status": {"phase": "Run", "counts": {"total": 2, "run": {"active": 2}}},
        }
    )
    console = Console(file=io.StringIO(), highlight=False)
    lines = ProgressLines(console)
    for _ in range(5):
        lines.update(job)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == progress_line(job) + "\n"
    assert progress_line(job) == "Run: init 2/2, run 0/2 (2 active), eval 0/2"


ADVICE = [
    {
        "reason": "TruncatedByMaxTokens",
        "message": "8 of 8 rollouts were truncated by maxTokens (1,024): raise it",
    },
    {"reason": "EqualRewards", "message": "the reward is 0 in all of 32 rollouts"},
]


def advised(*advice: dict[str, str], **counts: int) -> RolloutJob:
    return RolloutJob.model_validate(
        {
            "metadata": {"name": "j"},
            "spec": {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}},
            "status": {"phase": "Run", "counts": {"total": 64, **counts}, "advice": list(advice)},
        }
    )


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "log"])
def test_advice_is_printed_once_when_it_first_applies(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=40, highlight=False)
    later = {**ADVICE[0], "message": ADVICE[0]["message"].replace("8 of 8", "60 of 64")}
    with progress.progress_view(console) as show:
        show(advised())
        for succeeded in range(3):
            show(advised(ADVICE[0], succeeded=succeeded))
        show(advised(succeeded=9))
        for succeeded in range(10, 13):
            show(advised(later, ADVICE[1], succeeded=succeeded))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert printed.count("Advice: ") == 2
    for one in ADVICE:
        assert f"Advice: {one['message']}\n" in printed, "it is one line, however narrow the terminal is"


def test_a_job_is_described_with_all_of_its_advice() -> None:
    hostile = {"reason": "Other", "message": "[red]two\nlines \x1b[2J"}
    text = printed(lambda out: describe_job(out, advised(*ADVICE, hostile), Counter(), Counter()))
    for one in ADVICE:
        assert f"Advice:       {one['message']}\n" in text
    assert "Advice:       [red]two\\nlines \\x1b[2J\n" in text
    assert "Advice" not in printed(lambda out: describe_job(out, advised(), Counter(), Counter()))


@pytest.mark.parametrize("width", [30, 60, 200])
def test_a_narrow_terminal_cuts_no_id(width: int) -> None:
    out = io.StringIO()
    table = plain_table(["rollout", "status", "why"])
    table.add_row("quickstart-77fffddd-5-0", "succeeded", "reward 0: not solved in 3 turns")
    print_table(Console(file=out, width=width, force_terminal=True), table)
    shown = out.getvalue()
    assert "quickstart-77fffddd-5-0" in shown
    assert "succeeded" in shown
    assert "…" not in shown


def test_a_new_segment_shows_what_its_prompt_ends_with_and_versions_that_differ() -> None:
    second = {
        "prompt_ids": [1, 2, 10, 20, 21],
        "response_ids": [13, 14],
        "loss_mask": [1, 1],
        "logprobs": [-0.25, -0.75],
        "policy_versions": ["0", "step-1"],
    }
    whole = record()
    first = whole.segments[0].model_dump()
    first |= {name: values[:3] for name, values in first.items() if name != "prompt_ids"}
    turns = [turn.model_dump() for turn in whole.turns]
    turns[1] |= {"segment": 1, "start": 0, "end": 2}
    text = shown(record(segments=[first, second], turns=turns), lambda ids: f"{list(ids)}")
    lines = text.splitlines()
    begins = next(place for place, line in enumerate(lines) if line.startswith("── segment 2"))
    assert "5 tokens" in lines[begins]
    assert lines[begins + 1 : begins + 3] == ["── tool", "3"]
    assert "policy version 0 then step-1" in lines[begins + 3]
    assert "policy version" not in shown(record())


CALL = {"function": {"name": "grep", "arguments": {"pattern": "x"}}}
SHOTS = [
    {"role": "user", "content": "an example"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "x marks"},
    {"role": "assistant", "content": "it marks the spot"},
]


@pytest.mark.parametrize("by", ["messages", "tokens"])
def test_a_tasks_own_turns_are_shown_as_given(by: str) -> None:
    decode = None if by == "messages" else lambda ids: f"{list(ids)}"
    plain = shown(record(), decode)
    text = shown(record(messages=[*SHOTS, *record().model_dump()["messages"]]), decode)
    given = '── user\nan example\n── assistant, given\n   grep {"pattern": "x"}\n── tool\nx marks\n'
    given += "── assistant, given\nit marks the spot\n"
    assert text == plain.replace("── user\ncount", f"{given}── user\ncount")
    # Nothing was sampled by a rollout that ended before its first turn.
    assert "«" not in shown(failed(0, messages=SHOTS))


def test_messages_of_a_later_segment_are_found_behind_a_tasks_own_turns() -> None:
    whole = record()
    first, turns = whole.segments[0].model_dump(), [turn.model_dump() for turn in whole.turns]
    second = {name: values[5:] for name, values in first.items()} | {"prompt_ids": [1]}
    turns[1] |= {"segment": 1, "start": 0, "end": 2}
    messages = [*SHOTS, *whole.model_dump()["messages"]]
    text = shown(record(messages=messages, segments=[first, second], turns=turns), lambda ids: f"{list(ids)}")
    assert "a new prompt of 1 tokens\n── tool\n3\n── turn 2" in text


def test_bars_say_why_a_job_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    job = RolloutJob.model_validate(
        {
            "metadata": {"name": "j"},
            "spec": {"tasks": {"stream": True}, "handler": "shell", "backendRef": {"name": "gone"}},
        }
    )
    job.status.message = "BackendPool 'gone' has no ready backend"
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    with progress.progress_view(console) as show:
        show(job)
        now += progress.WAITING_SECONDS - 1
        show(job)
        assert isinstance(console.file, io.StringIO)
        assert "gone" not in console.file.getvalue()
        for _ in range(3):
            now += 1
            show(job)
    assert console.file.getvalue().count("Pending: BackendPool 'gone' has no ready backend") == 1


ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


@pytest.fixture
def half_updated() -> BackendPool:
    """Return two backends, one of them behind, whose metrics cannot be read."""
    numbers = {"runningRequests": 5, "waitingRequests": 3, "prefixCacheHitRate": 0.7125}
    numbers |= {"tokensPerSecond": 81.6}
    status = {
        "readyReplicas": 2,
        "backends": [
            {"url": ONE, "ready": True, "policyVersion": "v2", "activeRollouts": 6, **numbers},
            {
                "url": TWO,
                "ready": True,
                "policyVersion": "v1",
                "weights": "Stale",
                "message": "it is behind",
                "activeRollouts": 2,
            },
        ],
    }
    spec = {"model": "/models/policy", "replicas": 2, "engine": {"type": "vllm"}}
    return BackendPool.model_validate({"metadata": {"name": "p"}, "spec": spec, "status": status})


def printed(render: Callable[[Console], None], width: int = 0) -> str:
    """Return what a pipe gets, or a terminal of a width."""
    out = io.StringIO()
    render(Console(file=out, highlight=False, force_terminal=bool(width), width=width or 80))
    return out.getvalue()


def cells(text: str) -> list[list[str]]:
    """Return the cells of a table in a pipe, whose columns are three spaces apart."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


def test_a_pools_row_sums_up_its_backends(half_updated: BackendPool) -> None:
    heads, row = cells(printed(lambda out: print_table(out, pools_table([half_updated]))))
    told = dict(zip(heads, row, strict=False))
    told = {name: told[name] for name in ("NAME", "READY", "VERSION", "ACTIVE", "WAITING", "HIT RATE")}
    assert list(told.values()) == ["p", "2/2", "mixed", "8", "3", "71.2%"]


def test_a_pool_of_servers_of_ones_own_is_as_large_as_its_list(half_updated: BackendPool) -> None:
    engine = {"type": "external", "external": {"urls": [ONE, TWO, "http://x"]}}
    rates = [{"prefixCacheHitRate": rate, "waitingRequests": 2} for rate in (0.25, 0.75)]
    status = {
        "readyReplicas": 1,
        "paused": True,
        "backends": [{"url": url, **rate} for url, rate in zip((ONE, TWO), rates, strict=True)],
    }
    mine = BackendPool.model_validate(
        {"metadata": {"name": "mine"}, "spec": {"model": "m", "engine": engine}, "status": status}
    )
    heads, _, row = cells(printed(lambda out: print_table(out, pools_table([half_updated, mine]))))
    told = dict(zip(heads, row, strict=False))
    assert (told["NAME"], told["READY"], told["ENGINE"]) == ("mine", "1/3", "external")
    assert (told["WAITING"], told["HIT RATE"], told["STATE"]) == ("4", "50.0%", "Paused")
    text = printed(lambda out: describe_pool(out, mine))
    assert "1 of 3 backends; paused: the servers sample nothing" in text
    assert "2 of 2 backends\n" in printed(lambda out: describe_pool(out, half_updated))


RAW = "no: raw log-probabilities (--logprobs-mode processed_logprobs)"


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["", ""], "-"),
        (["yes", ""], "yes"),
        (["yes", "yes"], "yes"),
        (["yes", RAW], f"1 of 2: {RAW}"),
        ([RAW, RAW], RAW),
        (["unknown: x", RAW], f"1 of 2: {RAW}"),
    ],
)
def test_a_pool_says_whether_its_servers_have_what_training_needs(
    half_updated: BackendPool, lines: list[str], shown: str
) -> None:
    for backend, line in zip(half_updated.status.backends, lines, strict=True):
        backend.trains = line
    heads, row = cells(printed(lambda out: print_table(out, pools_table([half_updated]))))
    assert (heads[-1], row[-1]) == ("TRAINS", shown)
    assert f"\nTrains:       {shown}\n" in printed(lambda out: describe_pool(out, half_updated))


def test_each_backends_state_is_shown(half_updated: BackendPool) -> None:
    known = [ONE, "Ready", "Closed", "Current", "v2", "6", "5", "3", "71.2%", "82"]
    unknown = [TWO, "Ready", "Closed", "Stale", "v1", "2", "-", "-", "-", "-"]
    heads = ["BACKEND", "HEALTH", "CIRCUIT", "WEIGHTS", "VERSION", "ACTIVE", "RUNNING", "WAITING"]
    heads += ["HIT RATE", "TOKENS/S"]
    wide = cells(printed(lambda out: print_table(out, backends_table([half_updated]))))
    assert wide == [["POOL", *heads, "MESSAGE"], ["p", *known], ["p", *unknown, "it is behind"]]
    described = cells(printed(lambda out: describe_pool(out, half_updated)))
    place = described.index(heads)
    assert described[place + 1 : place + 3] == [known, unknown]
    assert [f"{TWO}: it is behind"] in described
    # On a narrow terminal nothing is cut: each backend takes a few lines.
    narrow = printed(lambda out: describe_pool(out, half_updated), width=60)
    assert "waiting 3" in narrow
    assert "hit rate 71.2%" in narrow


@pytest.mark.parametrize("message", ["spec.model: the hub cannot be reached", ""])
def test_a_pool_without_a_backend_has_a_row_that_says_why(half_updated: BackendPool, message: str) -> None:
    ready = {"type": "Ready", "status": "False", "reason": "NoBackendReady", "message": message}
    status = {"conditions": [ready | {"lastTransitionTime": "2026-01-02T03:04:05Z"}]}
    bare = half_updated.model_copy(update={"status": BackendPoolStatus.model_validate(status)})
    heads, *rows = cells(printed(lambda out: print_table(out, backends_table([bare, half_updated]))))
    assert rows[0] == ["p", *["-"] * (len(heads) - 2), message or "NoBackendReady"]
    assert [row[1] for row in rows] == ["-", ONE, TWO]


def test_jobs_have_a_row_each_with_their_own_conditions() -> None:
    def job(name: str, **status: Any) -> RolloutJob:
        spec = {"tasks": {"stream": True}, "handler": name, "backendRef": {"name": f"pool-{name}"}}
        return RolloutJob.model_validate({"metadata": {"name": name}, "spec": spec, "status": status})

    def conditions(*given: tuple[str, str, str]) -> list[dict[str, str]]:
        return [
            {"type": kind, "status": status, "reason": reason, "lastTransitionTime": "2026-01-02T03:04:05Z"}
            for kind, status, reason in given
        ]

    counts = {
        "total": 36, "succeeded": 2, "failed": 3, "cancelled": 4, "init": {"queued": 5, "active": 6},
        "run": {"queued": 7, "active": 8}, "eval": {"queued": 1, "active": 0},
    }  # fmt: skip
    jobs = [
        job(
            "math", phase="Run", counts=counts, rewardMean=0.12345, message="waits",
            conditions=conditions(
                ("Admitted", "True", "Fits"), ("Finished", "False", "Unfinished"), ("Running", "True", "Busy")
            ),
        ),
        job("code", phase="Failed", conditions=conditions(("Finished", "True", "Done"))),
        job("new"),
    ]  # fmt: skip
    heads, *rows = cells(printed(lambda out: print_table(out, jobs_table(jobs, wide=True))))
    assert heads == [
        "NAME", "FINISHED", "PHASE", "REASON", "SUCCEEDED", "FAILED", "TOTAL", "REWARD", "HANDLER", "POOL",
        "INIT", "RUN", "EVAL", "MESSAGE", "AGE",
    ]  # fmt: skip
    assert rows[0] == [
        "math", "False", "Run", "Busy", "2", "3", "36", "0.123", "math", "pool-math", "6+5", "8+7", "0+1",
        "waits",
    ]  # fmt: skip
    assert rows[1][:3] == ["code", "True", "Failed"]
    assert rows[2][:3] == ["new", "Unknown", "Pending"]


def test_an_age_is_told_in_the_largest_unit_of_which_there_are_two() -> None:
    now = datetime(2026, 1, 10, tzinfo=UTC)
    told = {0: "0s", 119: "119s", 120: "2m", 7199: "119m", 7200: "2h", 172_799: "47h", 172_800: "2d"}
    for seconds, text in told.items():
        assert age(now - timedelta(seconds=seconds), now) == text
    assert age(now + timedelta(seconds=5), now) == "0s", "clocks differ"
    assert age(None, now) == ""


def test_why_names_each_reason_that_there_is() -> None:
    assert why(record(status="cancelled", reward=None, reason="JobCancelled")) == "cancelled, JobCancelled"
    assert why(record(status="failed", reward=1.0)) == "failed, no reason given"
    assert why(failed(0, message="two\nlines")) == "failed, SandboxLost: two lines"
    assert why(record(reward=None)) == ""
    assert why(record(reward=0.5, truncated=True, truncated_reason="MaxTurns")) == ""
    calls = [{"name": "bash", "error": text} for text in ("first", "second")]
    turn = {"segment": 0, "start": 0, "end": 3, "finish_reason": "tool_calls"}
    turns = [{**turn, "tool_calls": calls}, {**turn, "tool_calls": [{"name": "bash"}]}]
    said = why(record(reward=0.0, reward_reason="TestTimeout", turns=turns))
    assert said == "reward 0: TestTimeout; 2 tool calls failed, last: second"
    silent = {"reward": 0.0, "turns": [turn]}
    assert why(record(**silent, tool_parser="hermes")) == "reward 0: it never called a tool"
    assert why(record(**silent)) == "reward 0: not solved in 1 turn", "it had no tools"


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        (0, "not solved in 1 turn"),
        (1, "the harness ended with exit status 1"),
        (None, "the harness was killed"),
    ],
)
def test_why_says_how_a_harness_ended_and_not_that_it_called_no_tool(
    exit_code: int | None, reason: str
) -> None:
    turns = [{"segment": 0, "start": 0, "end": 3, "finish_reason": "stop"}]
    harness = {"name": "command", "exit_code": exit_code}
    assert (
        why(record(reward=0.0, turns=turns, tool_parser="hermes", harness=harness)) == f"reward 0: {reason}"
    )


def test_the_most_telling_rollout_is_solved_and_then_has_turns() -> None:
    def of(sample: int, reward: float | None, turns: int) -> Trajectory:
        turn = {"segment": 0, "start": 0, "end": 3, "finish_reason": "stop"}
        return record(sample, reward, turns=[turn] * turns)

    def chosen(*records: Trajectory) -> int:
        found = most_telling(iter(records))
        assert found is not None
        return found.sample_index

    assert chosen(of(0, 0.0, 3), of(1, None, 9), of(2, 0.1, 1), of(3, 1.0, 1)) == 2
    assert chosen(of(0, 1.0, 1), of(1, 1.0, 3), of(2, 1.0, 9)) == 1
    assert chosen(of(0, None, 0), of(1, 0.0, 2)) == 1
    assert most_telling(iter(())) is None


def test_a_whole_id_is_found_though_others_end_so() -> None:
    records = [record(0, id="x-0-1"), record(1, id="0-1"), record(2, id="y-0-1")]
    assert find(iter(records), "0-1").sample_index == 1
    with pytest.raises(LookupFailed, match="fits 3 rollouts: x-0-1, 0-1, y-0-1"):
        find(iter(records), "-1")
    with pytest.raises(LookupFailed, match=r"fits 9 rollouts: .*job-aa-0-7, …$"):
        find((record(sample) for sample in range(9)), "t0")


def test_a_summary_counts_each_end_and_each_stage_apart() -> None:
    own = {"group_id": "alone", "timings": {}}
    timings = {
        "init": {"active_seconds": 1.0, "queued_seconds": 4.0, "attempts": 1},
        "run": {"active_seconds": 3.0, "queued_seconds": 0.5, "attempts": 2},
    }
    summary = summarize(
        [
            record(0, 1.0, timings=timings, truncated=True),
            record(1, 1.0),
            failed(2, timings={"init": {"active_seconds": 2.0}}),
            record(3, None, status="cancelled", **own),
            record(4, 0.0, **own),
        ],
        wall_seconds=0.0,
    )
    assert (summary.succeeded, summary.failed, summary.cancelled, summary.truncated) == (3, 1, 1, 1)
    assert (summary.groups, summary.groups_informative) == (2, 0)
    assert summary.reward_mean == pytest.approx(2 / 3)
    assert (summary.turns_mean, summary.tokens_per_second) == (8 / 5, 0.0)
    stages = {
        name: (one.rollouts, one.worked_seconds, one.queued_seconds) for name, one in summary.stages.items()
    }
    assert stages == {"init": (2, 3.0, 4.0), "run": (2, 5.0, 1.5), "eval": (0, 0.0, 0.0)}
    assert (summary.stages["init"].mean_worked, summary.stages["init"].mean_queued) == (1.5, 2.0)
    assert summary.stages["eval"].mean_worked == 0.0
    assert summarize([], 1.0).reward_mean is None


def test_policies_are_summed_up_over_backends_and_updates() -> None:
    def mixed(sample: int, backend: str, *versions: str) -> Trajectory:
        segment = {
            "prompt_ids": [1], "response_ids": [5] * 3, "loss_mask": [1, 1, 0], "logprobs": [0.0] * 3,
            "policy_versions": [*versions, ""],
        }  # fmt: skip
        return record(sample, backend=backend, segments=[segment], turns=[])

    backends = [BackendStatus(url=url, ready=True, policy_version="v2") for url in (ONE, TWO)]
    parts = [
        {"url": ONE, "maxDifference": 0.1, "pausedSeconds": 3.0},
        {"url": TWO, "maxDifference": 0.3, "pausedSeconds": 2.0},
        {"url": "http://x"},
    ]
    updates = [
        WeightUpdate.model_validate(
            {
                "id": number, "policyVersion": version, "source": {"pushed": True}, "mode": "abort",
                "inFlight": "continue", "state": "Succeeded", "backends": parts if number == 1 else [],
                "createdAt": "2026-01-01T00:00:00Z",
                "finishedAt": "2026-01-01T00:01:30Z" if number == 1 else None,
            }
        )
        for number, version in ((1, "v1"), (2, "v2"))
    ]  # fmt: skip
    told = summarize_policies(
        [mixed(0, ONE, "default", "v1"), mixed(1, TWO, "v2", "v2"), mixed(2, ONE, "v1", "v1")],
        backends,
        updates,
    )
    assert [(one.url, one.rollouts, one.tokens_sampled) for one in told.backends] == [
        (ONE, 2, 4),
        (TWO, 1, 2),
    ]
    versions = [(one.version, one.rollouts, one.tokens, one.lag) for one in told.policy_versions]
    assert versions == [("default", 1, 1, 2), ("v1", 2, 3, 1), ("v2", 1, 2, 0)]
    assert told.rollouts_of_several_versions == 1
    first, second = told.weight_updates
    assert (first.max_difference, first.paused_seconds, first.seconds) == (0.3, 3.0, 90.0)
    assert (second.max_difference, second.paused_seconds, second.seconds) == (None, None, None)


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_file_is_written_whole_or_stays_as_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / name
    assert write_lines(iter([b"1", b"2"]), path) == 2
    before = path.read_bytes()
    content = gzip.decompress(before) if name.endswith("gz") else before
    assert content == b"1\n2\n"

    def broken() -> Iterator[bytes]:
        yield b"3"
        raise LookupFailed("a task is gone")

    with pytest.raises(LookupFailed, match="a task is gone"):
        write_lines(broken(), path)
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == [name], "nothing is left beside it"
    with pytest.raises(UsageProblem, match="must end in"):
        write_lines(iter([]), tmp_path / "t.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match="cannot be written"):
        write_lines(iter([b"1"]), tmp_path / "file" / name)


def test_the_tokenizer_beside_a_file_is_used_while_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    assert tokenizer_of(path) is None
    model = tmp_path / "model"
    (tmp_path / "tokenizer.txt").write_text(f"{model}\n")
    assert tokenizer_of(path) is None
    model.mkdir()
    assert tokenizer_of(path) is None
    (model / "tokenizer.json").write_text("{}")
    assert tokenizer_of(path) == model


def test_what_a_pool_takes_is_shown_with_what_it_follows_from(half_updated: BackendPool) -> None:
    def shown(*sizes: dict[str, int], **spec: int) -> tuple[str, str]:
        document = half_updated.to_json()
        document["spec"] |= spec
        for backend, more in zip(document["status"]["backends"], sizes, strict=True):
            backend |= more
        pool = BackendPool.model_validate(document)
        heads, row = cells(printed(lambda out: print_table(out, pools_table([pool]))))
        limit = re.search(r"^Limit: +(.*)$", printed(lambda out: describe_pool(out, pool)), re.M)
        assert limit is not None
        return dict(zip(heads, row, strict=False))["ACTIVE"], limit[1]

    sizes = {"contextTokens": 40_960, "kvCacheTokens": 750_000}
    of_all = "active rollouts on all backends together"
    assert shown({}, {}) == (
        "8", "not known yet; as many rollouts as the KV cache of each backend has room for",
    )  # fmt: skip
    assert shown({"maxActiveRollouts": 73} | sizes, {"maxActiveRollouts": 12} | sizes) == (
        "8/85", f"85 {of_all}, by the size of the KV caches",
    )  # fmt: skip
    assert shown({"maxActiveRollouts": 73} | sizes, {"maxActiveRollouts": 256}) == (
        "8/329", f"329 {of_all}, some say nothing of their KV cache",
    )  # fmt: skip
    own = {"maxActiveRollouts": 5}
    assert shown(own | sizes, own, maxActiveRollouts=5) == ("8/10", "5 active rollouts for each backend")


def test_a_job_is_described_with_the_limits_that_it_leaves_to_its_servers(half_updated: BackendPool) -> None:
    def shown(pool: BackendPool | None, **spec: Any) -> dict[str, str]:
        whole = {"tasks": {"stream": True}, "handler": "math", "backendRef": {"name": "p"}, **spec}
        job = RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": whole})
        text = printed(lambda out: describe_job(out, job, Counter(), Counter(), pool=pool))
        fields = dict(re.findall(r"^([A-Z][a-z ]+): +(.*)$", text, re.M))
        return {
            name: fields[name]
            for name in ("Context", "Turn", "Tool output", "Run", "Sandboxes")
            if name in fields
        }

    document = half_updated.to_json()
    for backend, context in zip(document["status"]["backends"], (40_960, 32_768), strict=True):
        backend |= {"contextTokens": context, "maxActiveRollouts": 40}
    pool = BackendPool.model_validate(document)
    assert shown(pool) == {
        "Context": "32,768 to 40,960 tokens",
        "Turn": "what is left of the context",
        "Tool output": "32,768 bytes",
        "Run": "up to 80 rollouts of each worker at once, 1,800 s each",
    }
    own = {"maxContextTokens": 16_384, "maxToolOutputBytes": 500, "tools": ["submit"]}
    assert shown(pool, agent=own, sampling={"maxTokens": 1024}, stages={"run": {"concurrency": 8}}) == {
        "Context": "16,384 tokens",
        "Turn": "1,024 tokens",
        "Tool output": "500 bytes",
        "Run": "up to 8 rollouts of each worker at once, 1,800 s each",
        "Sandboxes": "none in Init and Run",
    }
    unknown = shown(None)
    assert unknown["Context"] == "that of the server, which is not known yet"
    assert unknown["Tool output"] == "16,384 bytes"
    oracle = shown(None, backendRef=None, agent={"type": "oracle"})
    assert oracle == {"Run": "up to 64 rollouts of each worker at once, 1,800 s each"}
