"""What the operator remembers of the control plane, and what it wakes."""

from __future__ import annotations

from datetime import UTC, datetime

from rollyard_crds import BackendPool, BackendStatus, Condition
from rollyard_operator.controllers.control_plane_view import ResourceViews, _others_of_pool
from rollyard_operator.kube.object_cache import Key

POOL = BackendPool.model_validate({"metadata": {"name": "p"}, "spec": {"model": "m"}})
KEY = ("default", "p")


def with_status(**changes: object) -> BackendPool:
    return POOL.model_copy(update={"status": POOL.status.model_copy(update=changes)})


async def test_what_an_answer_to_an_own_call_brings_of_others_is_told() -> None:
    told: list[Key] = []
    views = ResourceViews[BackendPool](told.append, _others_of_pool)
    views.learn(POOL)
    assert told == [], "whoever registers it continues with the answer"
    now = datetime(2026, 1, 1, tzinfo=UTC)
    ready = Condition(type="Ready", status="True", reason="Ready", last_transition_time=now)
    views.learn(with_status(conditions=[ready]))
    assert told == [], "its own words"
    found = with_status(conditions=[ready], backends=[BackendStatus(url="http://s:1", ready=True)])
    views.learn(found)
    assert told == [KEY]
    views.replace([found], begun=float("inf"))
    assert told == [KEY], "the next look finds nothing new: it would be missed for good"
