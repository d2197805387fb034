"""The health of the backends that a driver has started, on answers that the tests choose."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from rollyard_drivers import health
from rollyard_drivers.health import BackendHealth, PoolHealth, watch_backend
from rollyard_drivers.reconcile.plan import STARTING, ObservedWorkload
from rollyard_inference.errors import BackendUnavailable, NotListening

DOWN, DEAF = NotListening("connection refused"), BackendUnavailable("no answer within 5 s")


class Answers:
    """What each check of a URL gives, in turn: None, or an error. After the last one, a check never ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checks: dict[str, list[Exception | None]] = {}
        self.first: list[tuple[str, str]] = []
        self.first_fails: list[Exception] = []
        self.over = asyncio.Event()
        monkeypatch.setattr(health, "check_alive", self._check)
        monkeypatch.setattr(health, "first_request", self._first)
        monkeypatch.setattr(health, "CHECK_SECONDS", 0.0)
        monkeypatch.setattr(health, "FIRST_CHECK_SECONDS", 0.0)

    async def _check(self, _transport: Any, url: str, _seconds: float) -> None:
        left = self.checks.get(url, [])
        if not left:
            self.over.set()
            await asyncio.Event().wait()
        error = left.pop(0)
        if error is not None:
            raise error

    async def _first(self, _transport: Any, url: str, model: str, _seconds: float) -> str:
        self.first.append((url, model))
        if self.first_fails:
            raise self.first_fails.pop(0)
        return "v1"


@pytest.fixture
async def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(monkeypatch)


async def reports(
    answers: Answers, checks: Sequence[Exception | None], known: BackendHealth | None = None
) -> list[BackendHealth]:
    """Return what is reported at first and after each of these checks."""
    found: list[BackendHealth] = []
    answers.over.clear()
    answers.checks["http://a"] = list(checks)
    async with httpx.AsyncClient(trust_env=False) as http:
        task = asyncio.create_task(watch_backend("http://a", "m", http, found.append, known))
        await answers.over.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return found


async def test_a_backend_that_loads_its_model_is_ready_after_its_first_completion(answers: Answers) -> None:
    answers.first_fails.append(DEAF)
    found = await reports(answers, [DOWN, DEAF, None, None, None])
    assert [one.ready for one in found] == [False] * 4 + [True] * 2
    assert [one.warmed_up for one in found] == [one.ready for one in found]
    assert [one.message for one in found] == [STARTING, STARTING, *["no answer within 5 s"] * 2, "", ""]
    assert answers.first == [("http://a", "m")] * 2, "none is asked of one that has answered"
    assert [one.policy_version for one in found] == [""] * 4 + ["v1"] * 2
    assert found[4].ready_since == found[5].ready_since is not None


async def test_a_backend_is_given_up_after_several_failures_in_a_row(answers: Answers) -> None:
    found = await reports(answers, [None, DEAF, DEAF, None, DEAF, DEAF, DOWN, DOWN, None])
    ready = [one.ready for one in found]
    assert ready == [False, True, True, True, True, True, True, False, False, True]
    begun = {one.ready_since for one in found[1:]}
    assert len(begun) == 1, "the time at which it was ready first"
    assert all(one.warmed_up and one.policy_version == "v1" for one in found[1:])
    assert len(answers.first) == 1
    first, second = {one.unready_since for one in found[2:4]}, {one.unready_since for one in found[5:9]}
    assert (len(first), len(second)) == (1, 1), "the time of the first failure in a row"
    assert None not in first | second
    assert {one.unready_since for one in (found[1], found[4], found[9])} == {None}
    assert found[7].message == "connection refused", "it does not load its model any more"


async def test_what_an_earlier_watch_knew_is_kept(answers: Answers) -> None:
    since = datetime(2026, 1, 1, tzinfo=UTC)
    known = BackendHealth("http://a", ready=True, warmed_up=True, policy_version="v0", ready_since=since)
    found = await reports(answers, [None, DEAF], known)
    assert found[0] == known
    assert [(one.ready, one.policy_version, one.ready_since) for one in found] == [(True, "v0", since)] * 3
    assert answers.first == []


async def test_a_pool_knows_each_pod_by_its_uid(answers: Answers) -> None:
    """A pod that follows another one of its name and address has to answer a completion itself."""
    woken: list[None] = []
    now = datetime(2026, 1, 1, tzinfo=UTC)
    pod = ObservedWorkload("b-0", "hash", "running", now, url="http://a")
    async with httpx.AsyncClient(trust_env=False) as http:
        pool = PoolHealth(http, lambda: woken.append(None))

        async def kept(running: Sequence[tuple[str, str]], model: str = "m") -> None:
            answers.over.clear()
            pool.keep(running, model)
            await answers.over.wait()

        answers.checks["http://a"] = [None]
        await kept([("1", "http://a"), ("2", "http://b")])
        assert woken
        one, two = pool.seen("1", pod), pool.seen("2", pod)
        assert (one.state, one.ready, one.policy_version) == ("running", True, "v1")
        assert (two.state, two.ready, two.message) == ("starting", False, STARTING)
        pool.keep([("1", "http://a"), ("2", "http://b")], "m")
        assert pool.seen("1", pod).ready, "a further pass changes nothing"
        await kept([("3", "http://a"), ("2", "http://b")])
        assert pool.seen("3", pod).state == "starting"
        ended = ObservedWorkload("b-0", "hash", "exited", now)
        assert pool.seen("1", ended).ready_since == one.ready_since is not None
        assert pool.seen("2", ended).ready_since is None
        answers.checks["http://a"] = [None]
        await kept([("3", "http://a"), ("2", "http://b")], "other")
        await asyncio.sleep(0)
        assert answers.first[-1] == ("http://a", "other"), "another model has to be served"
        await pool.close()
