"""`rollyard watch` of jobs, also if one is deleted or another one gets its name, and of rollouts."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from rich.console import Console
from rollyard import terminal
from rollyard.errors import CliError
from rollyard.jobs import running
from rollyard.render import progress
from rollyard_client import (
    AsyncClient,
    Client,
    Conflict,
    JobReplaced,
    NotFound,
    RunningRollout,
    ServerUnavailable,
    finish,
)
from rollyard_crds import RolloutJob
from rollyard_crds.base import Condition
from rollyard_crds.lease import MAX_LIVE_TEXT, LiveTurn
from rollyard_crds.trajectory import Trajectory
from rollyard_testing.pace import patience


def job(uid: str) -> RolloutJob:
    spec = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    return RolloutJob.model_validate({"metadata": {"name": "job", "uid": uid}, "spec": spec})


class Seen:
    """A client that returns the states of a job in turn."""

    def __init__(self, *states: RolloutJob | Exception) -> None:
        self._states = list(states)

    def job(self, _name: str, _namespace: str | None = None) -> RolloutJob:
        state = self._states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "POLL_SECONDS", 0.0)
    monkeypatch.setattr("rollyard_client._sync.client.POLL_SECONDS", 0.0)
    monkeypatch.setattr("rollyard_client._async.client.POLL_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (job("second"), "was deleted while it was watched, and another one was submitted"),
        (NotFound("no such job"), "was deleted while it was watched"),
    ],
)
def test_watch_says_what_became_of_its_job(then: RolloutJob | Exception, said: str) -> None:
    client = cast(Client, Seen(job("first"), job("first"), job("first"), then))
    with pytest.raises(CliError, match=said):
        running.follow(client, "job", "default", console=Console(file=io.StringIO()))


def test_waiting_for_a_job_does_not_end_with_another_one() -> None:
    uids = ["first", "first", "second"]

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=job(uids.pop(0)).model_dump_json(by_alias=True))

    with Client("http://x", "t") as client:
        client._transport.client.close()
        client._transport.client = httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))
        with pytest.raises(JobReplaced, match="another one was submitted"):
            client.wait("job", timeout=patience(60))


async def test_nor_does_the_async_client() -> None:
    uids = ["first", "second"]

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=job(uids.pop(0)).model_dump_json(by_alias=True))

    async with AsyncClient("http://x", "t") as client:
        await client._transport.client.aclose()
        client._transport.client = httpx.AsyncClient(
            base_url="http://x", transport=httpx.MockTransport(answer)
        )
        with pytest.raises(JobReplaced):
            await client.wait("job", timeout=patience(60))


def test_the_first_look_knows_no_job() -> None:
    finish.check_same(job("any"), None)
    finish.check_same(job("any"), "any")


def ended(uid: str, phase: str = "Succeeded", failed: int = 0) -> RolloutJob:
    last = job(uid)
    last.status.phase = phase  # type: ignore[assignment]
    last.status.message = "it is over"
    last.status.counts.failed = failed
    last.status.conditions = [
        Condition.model_validate(
            {"type": kind, "status": "True", "reason": "Done", "lastTransitionTime": "2026-01-02T03:04:05Z"}
        )
        for kind in ("Admitted", "Finished")
    ]
    return last


def test_outages_that_each_pass_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0

    def later(_seconds: float) -> None:
        nonlocal now
        now += running.UNREACHABLE_SECONDS * 0.6

    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=lambda: now, sleep=later))
    gone = ServerUnavailable("nobody answers")
    seen: list[RolloutJob] = []
    states: list[RolloutJob | Exception] = [job("a"), gone, gone, job("a"), gone, gone, job("a"), ended("a")]
    client = cast(Client, Seen(gone, *states))
    out = Console(file=io.StringIO())
    assert running.follow(client, "job", "default", out, seen.append) == states[-1]
    assert seen == [states[0], states[3], states[6], states[7]]
    client = cast(Client, Seen(job("a"), job("a"), gone, gone, gone, ended("a")))
    with pytest.raises(ServerUnavailable, match="nobody answers"):
        running.follow(client, "job", "default", out)


@pytest.mark.parametrize("phase", ["Failed", "Cancelled"])
def test_a_job_that_did_not_succeed_is_an_error_that_says_where_to_look(phase: str) -> None:
    running.require_success(ended("a", failed=3), hint=True)
    with pytest.raises(CliError, match=rf"^job 'job' is {phase}: it is over$"):
        running.require_success(ended("a", phase), hint=True)
    with pytest.raises(CliError, match=r"it is over$"):
        running.require_success(ended("a", phase, failed=3))
    with pytest.raises(CliError, match="rollyard view job --failed"):
        running.require_success(ended("a", phase, failed=3), hint=True)


class Rollouts:
    """A client that returns the states of a rollout in turn, and then its record."""

    def __init__(self, record: Trajectory, *states: RunningRollout | Exception) -> None:
        self._states = list(states)
        self._record: list[Trajectory | Exception] = [ServerUnavailable("it restarts"), record]

    def running_rollout(self, _name: str, _rollout: str, _namespace: str) -> RunningRollout:
        if not self._states:
            raise Conflict("rollout 'r' has ended; its record is there", reason="RolloutEnded")
        state = self._states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state

    def trajectory(self, _name: str, _rollout: str, _namespace: str) -> Trajectory:
        assert not self._states, "there is no record before the rollout has ended"
        record = self._record.pop(0)
        if isinstance(record, Exception):
            raise record
        return record


def says(no: int, text: str, tokens: int = 0, *, running: bool = False) -> LiveTurn:
    role = "assistant" if tokens else "user"
    return LiveTurn(
        no=no, role=role, text=text, characters=len(text), tokens=tokens, seconds=2.0, running=running
    )


def state(*turns: LiveTurn, stage: str = "run", status: str = "leased") -> RunningRollout:
    return RunningRollout(stage, status, list(turns), 0)


def record(answer: str = "It is 4", **more: Any) -> Trajectory:
    """Return the record of a rollout with a question and one turn of 1,900 tokens."""
    call = {"function": {"name": "submit", "arguments": {"answer": "viér"}}}
    return Trajectory.model_validate(
        {
            "id": "r",
            "job": "job",
            "task_id": "t",
            "group_id": "t",
            "sample_index": 0,
            "messages": [
                {"role": "user", "content": "2 + 2?"},
                {"role": "assistant", "content": answer, "tool_calls": [call]},
            ],
            "turns": [{"segment": 0, "start": 0, "end": 1900, "finish_reason": "stop", "model_seconds": 9}],
            "reward": 1.0,
            **more,
        }
    )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that follows a rollout through its states, and returns what it prints."""
    monkeypatch.setattr(running, "ROLLOUT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)

    def follow(last: Trajectory, *states: RunningRollout | Exception, is_terminal: bool = False) -> str:
        out = io.StringIO()
        console = terminal.console(file=out, width=100, force_terminal=is_terminal, color_system=None)
        running.follow_rollout(cast(Client, Rollouts(last, *states)), "job", "r", "default", console)
        return out.getvalue()

    return follow


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_rollout_is_followed_until_its_answer_stays_on_the_screen(
    is_terminal: bool, watched: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = watched(
        record(),
        state(status="queued"),
        state(),
        state(says(0, "2 + 2?"), says(1, "I", 1, running=True)),
        ServerUnavailable("it restarts"),
        state(says(0, "2 + 2?"), says(1, "I think \x1b[2J", 1812, running=True)),
        state(stage="eval", status="queued"),
        state(stage="eval"),
        is_terminal=is_terminal,
    )
    assert text.count("2 + 2?") == text.count("It is 4") == 1
    assert "waiting for Run" in text
    assert "in Run" in text
    assert "assistant, 1 token in 2 s, being sampled" in text
    assert "assistant, 1,812 tokens in 2 s, being sampled" in text
    assert "\x1b[2J" not in text
    assert text.index("in Eval") < text.index("assistant, 1,900 tokens in 9 s\n") < text.index("It is 4\n")
    assert 'submit({"answer": "viér"})' in text
    # The text of the turn stays while it is evaluated.
    assert ("I think \\x1b[2J\nin Eval" in text) == is_terminal
    assert capsys.readouterr().out == (
        "rollout r ended with the reward 1; `rollyard view job r` shows its record\n"
    )


def test_a_message_that_was_printed_while_the_rollout_ran_is_not_printed_again(
    watched: Callable[..., str],
) -> None:
    long = "It is " + "4" * MAX_LIVE_TEXT
    shortened = says(1, long[:MAX_LIVE_TEXT], 1900).model_copy(update={"characters": len(long)})
    text = watched(record(long), state(says(0, "2 + 2?"), shortened))
    assert text.count("It is 4") == text.count("2 + 2?") == 1
    assert "(6 more characters)" in text


def test_another_attempt_is_kept_apart_from_the_first(watched: Callable[..., str]) -> None:
    text = watched(record(), state(says(0, "2 + 2?"), says(1, "It is 5", 1900)), state(status="queued"))
    first, _, second = text.partition("Another attempt began")
    assert "It is 5" in first
    assert "It is 4" in second
    assert "2 + 2?" not in second


@pytest.mark.parametrize(
    ("more", "says_how"),
    [
        ({}, "ended with the reward 1;"),
        ({"reward": None}, "ended without a reward;"),
        (
            {"status": "failed", "reward": None, "reason": "NoSandbox", "message": "none\nis left"},
            "failed, NoSandbox: none is left;",
        ),
    ],
)
def test_a_rollout_that_has_ended_is_printed_from_its_record(
    more: dict[str, Any], says_how: str, watched: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = watched(record(**more))
    assert text.index("2 + 2?") < text.index("It is 4")
    assert capsys.readouterr().out.startswith(f"rollout r {says_how}")


def test_only_the_end_of_a_rollout_ends_the_watch(
    watched: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Conflict, match="something else"):
        watched(record(), state(), Conflict("something else"))
    now = [100.0]
    monkeypatch.setattr(
        running,
        "time",
        SimpleNamespace(
            monotonic=lambda: now[0], sleep=lambda _: now.append(now.pop() + running.UNREACHABLE_SECONDS)
        ),
    )
    with pytest.raises(ServerUnavailable):
        watched(record(), *[ServerUnavailable("nobody answers")] * 3)
