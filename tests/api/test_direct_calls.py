"""The calls that workers make for each rollout pass by FastAPI's layers, and are answered like all others."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import Request
from rollyard_api import app
from rollyard_api.rollouts import leasing
from rollyard_testing.api.plane import serving

CALLS = ("", "/heartbeat", "/complete", "/fail", "/route", "/reward")


def test_exactly_these_calls_are_answered_directly() -> None:
    assert app._DIRECT.keys() == {("POST", f"/v1/leases{call}") for call in CALLS}


@pytest.mark.parametrize("call", CALLS)
async def test_they_are_refused_and_counted_as_before(
    settings: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    seen: list[Any] = []
    original = Request.__init__

    def noted(self: Request, scope: Any, *more: Any) -> None:
        seen.append(scope.get("route"))
        original(self, scope, *more)

    monkeypatch.setattr(Request, "__init__", noted)
    path = f"/v1/leases{call}"
    async with serving(settings) as served:
        refused = await served.worker.post(path, json=[])
        assert refused.status_code in (400, 422)
        assert refused.headers["content-type"] == "application/problem+json"
        assert seen, "a request was made of it"
        assert seen[-1] is app._DIRECT["POST", path]
        assert (await served.worker.post(path, content=b"{")).status_code == 400
        wrong = await served.admin.get(path)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        assert (await served.anonymous.post(path, json={})).status_code == 401
        metrics = (await served.admin.get("/metrics")).text
    assert f'route="{path}",status="{refused.status_code}"' in metrics


async def test_an_unexpected_error_is_a_problem(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(leasing, "grant", broken)
    ask = {"worker": "w", "node": "n", "capacity": {"init": 1}}
    async with serving(settings) as served:
        answer = await served.worker.post("/v1/leases", json=ask)
    assert answer.status_code == 500
    assert "unexpected ZeroDivisionError" in answer.json()["detail"]
