"""Plans carried out while another operator works on the same pods hold for what they were made from."""

from __future__ import annotations

import pytest
from rollyard_crds import RolloutJobStatus
from rollyard_drivers.reconcile.plan import Launch, Owner, Plan, Stop, Workload
from rollyard_operator.controllers.children import Children
from rollyard_operator.kube import labels
from rollyard_operator.kube.object_cache import PodCache, uid_of
from rollyard_testing.operator.fakecluster import FakeKube, Object, stamp

OWNER = Owner("RolloutJob", "team", "math", "uid-of-math")
NAME = "math-uid-of-m-run-0"
WORKLOAD = Workload(name=NAME, kind="stage-worker", owner=OWNER, stages=("run",))


def pod(workload: Workload = WORKLOAD) -> Object:
    told = {labels.INSTANCE: "test", labels.COMPONENT: workload.kind, labels.JOB_UID: workload.owner.uid}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": workload.name, "namespace": "team", "labels": told},
        "spec": {"containers": [{"name": "worker", "image": "w:1"}]},
    }


class Side:
    """One operator's pods of a job, in a cluster in which it is not alone; its watch reports at once."""

    def __init__(self) -> None:
        self.kube, self.cache = FakeKube(), PodCache()
        self.kube.watchers.append(self._watch)
        self.children = Children(self.kube, self.cache, "test", lambda: None)

    def _watch(self, verb: str, obj: Object) -> None:
        if verb == "DELETED":
            self.cache.remove(("team", obj["metadata"]["name"]), uid_of(obj))
        else:
            self.cache.put(obj)

    def seen(self) -> list[Object]:
        return self.children.pods(OWNER.uid, "stage-worker")

    def ends(self) -> None:
        over = {"name": "worker", "state": {"terminated": {"exitCode": 1, "finishedAt": stamp()}}}
        self.kube.pod_status("team", NAME, {"phase": "Failed", "containerStatuses": [over]})

    def replaced(self) -> str:
        """Let the other operator replace the pod, and return its uid."""
        self.kube.remove("Pod", "team", NAME)
        return uid_of(self.kube.put(pod()))

    async def carry_out(self, plan: Plan[RolloutJobStatus], seen: list[Object]) -> None:
        await self.children.carry_out("team", plan, pod, seen)

    def uid(self) -> str:
        return uid_of(self.kube.objects["Pod", "team", NAME])


@pytest.fixture
def side() -> Side:
    return Side()


@pytest.mark.parametrize("before", [False, True], ids=["the first", "after one that ended"])
async def test_one_that_came_since_the_plan_is_not_made_again(side: Side, before: bool) -> None:
    if before:
        side.kube.put(pod())
        side.ends()
    seen = side.seen()
    theirs = side.replaced() if before else uid_of(side.kube.put(pod()))
    await side.carry_out(Plan(RolloutJobStatus(), launch=(Launch(WORKLOAD),)), seen)
    assert side.uid() == theirs
    assert side.kube.calls == []


async def test_one_that_came_since_the_plan_is_neither_stopped_nor_marked(side: Side) -> None:
    side.kube.put(pod())
    seen = side.seen()
    theirs = side.replaced()
    stop = Plan(RolloutJobStatus(), stop=(Stop(NAME, 30.0),), drain=frozenset({NAME}))
    await side.carry_out(stop, seen)
    assert side.uid() == theirs
    assert side.kube.calls == []


async def test_one_that_ended_is_made_anew_under_its_name(side: Side) -> None:
    first = uid_of(side.kube.put(pod()))
    side.ends()
    launch = Launch(WORKLOAD, restarts=2, last_end="exited with 1")
    await side.carry_out(Plan(RolloutJobStatus(), launch=(launch,)), side.seen())
    assert side.uid() != first
    notes = side.kube.objects["Pod", "team", NAME]["metadata"]["annotations"]
    assert (notes[labels.RESTARTS], notes[labels.LAST_END]) == ("2", "exited with 1")


async def test_one_that_is_not_the_owners_any_more_is_replaced(side: Side) -> None:
    """A pod without its label would hold the name for ever, and no operator would see it."""
    lost = pod()
    del lost["metadata"]["labels"][labels.JOB_UID]
    first = uid_of(side.kube.put(lost))
    assert side.seen() == []
    await side.carry_out(Plan(RolloutJobStatus(), launch=(Launch(WORKLOAD),)), side.seen())
    assert side.uid() != first
    assert [one["metadata"]["name"] for one in side.seen()] == [NAME]
