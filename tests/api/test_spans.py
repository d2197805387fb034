"""The spans that the control plane sends: one tree a rollout, which adds up to its timings."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.rollouts import sweeps
from rollyard_api.storage.database import Transaction
from rollyard_api.storage.schema import rollouts
from rollyard_process.telemetry.identity import is_sampled, trace_id
from rollyard_process.telemetry.options import TraceOptions
from rollyard_testing.api.plane import Worker, serving
from rollyard_testing.traces.receiver import GotSpan, Receiver, problems_of_tree, receiving

PATH = "/v1/rolloutjobs/job"
ONE = {"inline": [{"id": "t0", "prompt": "p"}]}


@pytest.fixture
def receiver() -> Any:
    with receiving() as running:
        yield running


@pytest.fixture
async def traced(settings: Any, receiver: Receiver) -> AsyncIterator[Any]:
    """Yield a control plane that sends its spans to the receiver."""
    async with serving(settings, traces=TraceOptions(f"{receiver.url}/v1/traces")) as served:
        yield served


async def _expire(served: Any) -> None:
    def op(tx: Transaction) -> None:
        late = rollouts.c.lease_expires.is_not(None)
        tx.conn.execute(sa.update(rollouts).where(late).values(lease_expires=tx.now - 1.0))
        sweeps.expire(tx)

    await served.plane.database.write(op)


def _spans(served: Any, receiver: Receiver) -> dict[str, list[GotSpan]]:
    """Send what waits, and return the spans by trace."""
    served.plane.traces.close(20.0)
    assert served.plane.traces.dropped == {}
    assert len(receiver.spans) == served.plane.traces.exported
    return receiver.traces()


def _sums(spans: list[GotSpan], record: dict[str, Any]) -> None:
    """Check that the spans of each stage and of its queue add up to the record's timings."""
    for stage in ("init", "run", "eval"):
        timing = record["timings"][stage]
        queued = sum(span.seconds for span in spans if span.name == f"queue {stage}")
        active = sum(span.seconds for span in spans if span.name == stage)
        assert queued == pytest.approx(timing["queued_seconds"], abs=1e-4)
        assert active == pytest.approx(timing["active_seconds"], abs=1e-4)


async def test_every_way_of_a_rollout_is_one_tree(traced: Any, receiver: Receiver) -> None:
    """A failure, a hand-over, an expired lease, and then success: attempts are spans of their own."""
    await traced.submit(tasks=ONE)
    worker = Worker(traced.worker)
    (lease,) = await worker.lease(init=1)
    await worker.fail(lease, "ImageBroken", message="no such image")
    (lease,) = await worker.lease(init=1)
    await worker.fail(lease, "WorkerDrained", message="it stops", counts=False)
    (lease,) = await worker.lease(init=1)
    result = worker.result(lease)
    await worker.complete(result)
    await worker.complete(result)  # A repeated report adds no span.
    await worker.lease(run=1)
    await _expire(traced)
    assert await worker.finish_all() == 1
    record = (await traced.admin.get(f"{PATH}/trajectories")).json()
    ((trace, spans),) = _spans(traced, receiver).items()
    assert trace == trace_id(record["id"])
    assert problems_of_tree(spans) == []
    _sums(spans, record)
    (root,) = [span for span in spans if not span.parent]
    assert root.name == "invoke_agent job"
    assert root.attributes["gen_ai.conversation.id"] == record["id"]
    assert root.attributes["rollyard.status"] == "succeeded"
    assert root.attributes["rollyard.reward"] == record["reward"]
    errors = [span.attributes.get("error.type") for span in spans if span.failed]
    assert sorted(str(error) for error in errors) == ["ImageBroken", "LeaseExpired", "WorkerDrained"]
    timings = record["timings"]
    stages, parts = ("init", "run", "eval"), ("queued_seconds", "active_seconds")
    total = sum(timings[stage][part] for stage in stages for part in parts)
    assert root.seconds == pytest.approx(total, abs=1e-3)
    assert all(span.service == "rollyard-control-plane" for span in spans)
    assert all(root.start - 1e-3 <= span.start <= span.end <= root.end + 1e-3 for span in spans)


@pytest.mark.parametrize("stage", ["queued", "leased"])
async def test_a_cancelled_rollout_has_its_last_state(traced: Any, receiver: Receiver, stage: str) -> None:
    await traced.submit(tasks=ONE)
    if stage == "leased":
        await Worker(traced.worker).lease(init=1)
    await traced.admin.post(f"{PATH}/cancel")
    await traced.plane.cancel_rest(1)
    (spans,) = _spans(traced, receiver).values()
    assert problems_of_tree(spans) == []
    names = sorted(span.name for span in spans)
    assert names == sorted({"invoke_agent job", "queue init", *(["init"] if stage == "leased" else [])})
    (root,) = [span for span in spans if not span.parent]
    assert root.attributes["rollyard.status"] == "cancelled"
    assert root.seconds == pytest.approx(sum(span.seconds for span in spans if span.parent), abs=1e-3)


async def test_a_rollout_that_fails_for_good_is_an_error(traced: Any, receiver: Receiver) -> None:
    await traced.submit(tasks=ONE)
    worker = Worker(traced.worker)
    (lease,) = await worker.lease(init=1)
    await worker.fail(lease, "UnknownImage", retryable=False)
    (spans,) = _spans(traced, receiver).values()
    assert problems_of_tree(spans) == []
    (root,) = [span for span in spans if not span.parent]
    assert root.failed
    assert root.attributes["error.type"] == "UnknownImage"


async def test_what_is_dropped_is_counted_in_the_metrics(settings: Any) -> None:
    """Nothing listens at the receiver's port, and the job does not notice."""
    with receiving() as gone:
        url = gone.url
    async with serving(settings, traces=TraceOptions(f"{url}/v1/traces")) as served:
        await served.submit(tasks=ONE)
        assert await Worker(served.worker).finish_all() == 1
        served.plane.traces.close(20.0)
        text = (await served.admin.get("/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("rollyard_spans"))
    assert float(lines["rollyard_spans_exported_total"]) == 0
    assert float(lines['rollyard_spans_dropped_total{reason="not_taken"}']) == 7


async def test_without_traces_there_is_no_span(served: Any) -> None:
    seen: list[int] = []
    after = served.plane.after_commit
    served.plane.database._after = lambda committed: (
        seen.extend(len(tx.spans) for tx in committed), after(committed)
    )  # fmt: skip
    await served.submit(tasks=ONE)
    assert await Worker(served.worker).finish_all() == 1
    assert seen
    assert not any(seen)
    assert "rollyard_spans" not in (await served.admin.get("/metrics")).text


async def test_of_a_fraction_of_groups_all_samples_are_traced(settings: Any, receiver: Receiver) -> None:
    options = TraceOptions(f"{receiver.url}/v1/traces", 0.5)
    async with serving(settings, traces=options) as served:
        tasks = {"inline": [{"id": f"t{number}", "prompt": "p"} for number in range(24)]}
        await served.submit(tasks=tasks, samplesPerTask=2)
        assert await Worker(served.worker).finish_all() == 48
        traces = _spans(served, receiver)
        items = (await served.admin.get(f"{PATH}/rollouts")).json()["items"]
    chosen = [item["id"] for item in items if is_sampled(item["id"], 0.5)]
    assert 0 < len(chosen) < 48
    assert set(traces) == {trace_id(rollout) for rollout in chosen}
    groups = {rollout.rpartition("-")[0] for rollout in chosen}
    assert len(chosen) == 2 * len(groups)
