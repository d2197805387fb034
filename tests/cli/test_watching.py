"""`rollyard watch` while its job is deleted, or another one gets its name."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import cast

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
from rollyard_crds.lease import LiveTurn
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
    """A client that returns the states of a rollout in turn, and then that it has ended."""

    def __init__(self, *states: list[LiveTurn]) -> None:
        self._states = list(states)

    def running_rollout(self, _name: str, _rollout: str, _namespace: str) -> RunningRollout:
        if not self._states:
            raise Conflict("rollout 'r' has ended; its record is there", reason="RolloutEnded")
        return RunningRollout("run", "running", self._states.pop(0), 0)


def says(no: int, text: str, tokens: int = 0, *, running: bool = False) -> LiveTurn:
    role = "assistant" if tokens else "user"
    return LiveTurn(
        no=no, role=role, text=text, characters=len(text), tokens=tokens, seconds=2.0, running=running
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_rollout_is_followed_with_its_running_turn(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "ROLLOUT_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    states = (
        [],
        [says(0, "2 + 2?"), says(1, "I th", 3, running=True)],
        [says(0, "2 + 2?"), says(1, "I think \x1b[2J", 1812, running=True)],
        [says(0, "2 + 2?"), says(1, "It is 4", 1900)],
    )
    out = io.StringIO()
    console = terminal.console(file=out, width=100, force_terminal=is_terminal, color_system=None)
    running.follow_rollout(cast(Client, Rollouts(*states)), "job", "r", "default", console)
    text = out.getvalue()
    assert text.count("2 + 2?") == text.count("It is 4") == 1
    assert "assistant, 1,812 tokens in 2 s, being sampled" in text
    assert "assistant, 1,900 tokens in 2 s\n" in text
    assert "\x1b[2J" not in text
    assert "`rollyard view job r`" in capsys.readouterr().out
    with pytest.raises(CliError, match="has ended; its record is there: `rollyard view job r`"):
        running.follow_rollout(cast(Client, Rollouts()), "job", "r", "default", console)
