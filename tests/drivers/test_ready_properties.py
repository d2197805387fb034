"""Properties of the planning of ready workers: it is bounded, converges, and gives no worker away twice."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from rollyard_drivers.reconcile.ready_workers import START_SECONDS, ReadyPlan, ReadyWorker, choose, plan_ready

START = datetime(2026, 1, 1, tzinfo=UTC)
PLACES = ("a", "b")
SHAPES = ("new", "old")

ready_workers = st.builds(
    ReadyWorker,
    namespace=st.sampled_from([*PLACES, "elsewhere"]),
    name=st.just(""),
    uid=st.just(""),
    shape=st.sampled_from(SHAPES),
    state=st.sampled_from(["starting", "running", "ended", "leaving"]),
    created_at=st.integers(0, 2 * int(START_SECONDS)).map(lambda age: START - timedelta(seconds=age)),
    pending=st.booleans(),
)
worlds = st.lists(ready_workers, max_size=12).map(
    lambda found: [replace(one, name=f"r-{at}", uid=f"u-{at}") for at, one in enumerate(found)]
)
counts = st.integers(0, 4)


def carried_out(world: list[ReadyWorker], plan: ReadyPlan, shape: str = "new") -> list[ReadyWorker]:
    gone = {worker.uid for worker in plan.delete}
    left = [worker for worker in world if worker.uid not in gone and worker.state != "leaving"]
    for namespace, number in plan.create.items():
        for _ in range(number):
            name = f"n-{namespace}-{len(left)}"
            left.append(ReadyWorker(namespace, name, f"u-{name}", shape, "starting", START))
    return left


@given(
    world=worlds,
    count=counts,
    namespaces=st.sets(st.sampled_from(PLACES)),
    resting=st.sets(st.sampled_from(PLACES)),
)
@settings(max_examples=300, deadline=None)
def test_it_converges_to_the_number_and_stays_there(
    world: list[ReadyWorker], count: int, namespaces: set[str], resting: set[str]
) -> None:
    plan = plan_ready(world, namespaces, count, "new", START, resting)
    assert len({worker.uid for worker in plan.delete}) == len(plan.delete)
    # Where one has ended, the same would happen to the next, so none is made at once.
    ended = {one.namespace for one in world if one.shape == "new" and one.state == "ended"}
    assert plan.broken >= ended & namespaces
    assert set(plan.create) <= namespaces - resting - plan.broken
    left = carried_out(world, plan)
    for namespace in (*PLACES, "elsewhere"):
        here = [worker for worker in left if worker.namespace == namespace]
        assert len(here) <= (count if namespace in namespaces else 0)
        assert all(worker.shape == "new" and worker.state in ("starting", "running") for worker in here)
    # Once nothing rests, one more step reaches the number, and a further step changes nothing.
    left = carried_out(left, plan_ready(left, namespaces, count, "new", START))
    assert sorted(worker.namespace for worker in left) == sorted([*namespaces] * count)
    assert plan_ready(left, namespaces, count, "new", START) == ReadyPlan({}, (), frozenset())


@given(world=worlds, count=counts)
@settings(max_examples=200, deadline=None)
def test_a_good_worker_is_deleted_only_when_there_are_enough(world: list[ReadyWorker], count: int) -> None:
    plan = plan_ready(world, PLACES, count, "new", START)
    for worker in plan.delete:
        late = (START - worker.created_at).total_seconds() > START_SECONDS and not worker.pending
        good = worker.namespace in PLACES and worker.shape == "new"
        good = good and (worker.state == "running" or (worker.state == "starting" and not late))
        kept = [one for one in carried_out(world, plan) if one.namespace == worker.namespace]
        assert not good or len(kept) == count
        if good and worker.state == "running":
            assert all(one.state == "running" for one in kept), "those that run are kept first"


@given(
    world=worlds, wishes=st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(SHAPES)), max_size=12)
)
@settings(max_examples=200, deadline=None)
def test_no_worker_is_chosen_twice(world: list[ReadyWorker], wishes: list[tuple[str, str]]) -> None:
    taken: list[str] = []
    for namespace, shape in wishes:
        chosen = choose(world, namespace, shape, taken)
        fit = [
            one
            for one in world
            if (one.namespace, one.shape, one.state) == (namespace, shape, "running") and one.uid not in taken
        ]
        assert (chosen is None) == (not fit), "one that fits is found"
        if chosen is not None:
            assert chosen in fit
            assert chosen.created_at == min(one.created_at for one in fit), "the oldest comes first"
            taken.append(chosen.uid)
    assert len(taken) == len(set(taken))
