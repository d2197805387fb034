"""A worker, or what speaks through it, misuses the list of attempts that is delivered to trainers."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard import terminal
from rollyard.render.trajectory import TrajectoryView
from rollyard_crds.trajectory import MAX_ATTEMPT_MESSAGE, MAX_ATTEMPTS, Trajectory
from rollyard_testing.adversary.restplane import Yard, control_plane, result

pytestmark = pytest.mark.attack(boundary="control plane", surface="attempts of a trajectory")


HOSTILE = "x\n2030-01-01 all is well\r\n\x1b[2K\x1b]0;title\x07\x9b31m\u202e"
CONTROLS = set("\n\r\x1b\x07\x9b\u202e")


@pytest.fixture
async def yard(tmp_path: Path) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path) as made:
        yield made


async def _fail(http: httpx.AsyncClient, lease: dict[str, Any], **fields: Any) -> None:
    item = {k: lease[k] for k in ("rollout", "token", "stage")} | {"reason": "Broken", **fields}
    answer = await http.post("/v1/leases/fail", json={"worker": "w", "failures": [item]})
    assert answer.status_code == 200, answer.text
    assert answer.json()["outcomes"][0]["outcome"] == "accepted"


@pytest.mark.attack(
    "messages and reasons of failures flood the record, or move the cursor of whoever reads it",
    stopped_by="at most 16 of 512 characters, with controls escaped before they are stored; those that "
    "counted stay longest",
)
async def test_hostile_messages_without_end_are_bounded_and_escaped(yard: Yard) -> None:
    """A worker hands one rollout over again and again, each time with the longest message there may be."""
    await yard.submit("mine")
    http = yard.client(yard.job_token("mine"))
    for _ in range(3 * MAX_ATTEMPTS):
        (lease,) = await yard.lease(http, "mine", init=1)
        await _fail(http, lease, message=(HOSTILE * 400)[:4096], reason=HOSTILE, counts=False)
    (lease,) = await yard.lease(http, "mine", init=1)
    await _fail(http, lease, message=HOSTILE, retryable=False)
    answer = await yard.admin.get("/v1/rolloutjobs/mine/trajectories")
    assert len(answer.content) < 4 * MAX_ATTEMPTS * MAX_ATTEMPT_MESSAGE
    record = Trajectory.model_validate_json(answer.content)
    assert len(record.attempts) == MAX_ATTEMPTS
    assert record.attempts_dropped == 2 * MAX_ATTEMPTS + 1
    for one in record.attempts:
        assert not CONTROLS & set(f"{one.reason}{one.message}{one.worker}{one.node}")
        assert len(one.message) <= MAX_ATTEMPT_MESSAGE
    assert record.attempts[-1].counted, "what ended the rollout is never pushed out"

    out = io.StringIO()
    TrajectoryView(terminal.console(file=out, width=200, color_system=None)).show(record)
    assert "x\\n2030-01-01" in out.getvalue()
    assert not (CONTROLS - {"\n"}) & set(out.getvalue())
    assert "\n2030" not in out.getvalue()


@pytest.mark.attack(
    "a worker says without end that there was no backend, so that nothing counts",
    stopped_by="outages excuse 20 attempts of a rollout; after that they count",
)
async def test_no_claim_of_an_outage_keeps_a_rollout_for_ever(yard: Yard) -> None:
    """A worker says each time that there was no backend, so that a failure would never count."""
    await yard.submit("mine", agent={"type": "oracle"})
    http = yard.client(yard.job_token("mine"))
    reports = 0
    for _ in range(100):
        inits = await yard.lease(http, "mine", init=1)
        for lease in inits:
            answer = await http.post("/v1/leases/complete", json={"worker": "w", "results": [_init(lease)]})
            assert answer.status_code == 200, answer.text
        for lease in await yard.lease(http, "mine", run=1):
            await _fail(http, lease, reason="NoBackend", counts=False)
            reports += 1
    record = Trajectory.model_validate_json(
        (await yard.admin.get("/v1/rolloutjobs/mine/trajectories")).content
    )
    assert (record.status, record.reason, record.reward) == ("failed", "NoBackend", None)
    assert 20 < reports < 30


def _init(lease: dict[str, Any]) -> dict[str, Any]:
    done = result(lease)
    done["sandbox"]["node"] = "n-mine"
    return done
