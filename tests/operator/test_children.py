"""Plans carried out while another operator works on the same pods hold for what they were made from."""

from __future__ import annotations

from contextlib import suppress

import pytest
from rollyard_crds import RolloutJobStatus
from rollyard_drivers.reconcile.plan import Launch, Owner, Plan, Stop, Workload
from rollyard_operator.controllers.object_loop import Children
from rollyard_operator.kube import labels
from rollyard_operator.kube.errors import KubeError
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


def stood_ready(name: str, workload: str = NAME) -> Object:
    """Return a pod that stood ready under a name of its own and became the pod of a workload."""
    made = pod()
    made["metadata"] |= {"name": name, "annotations": {labels.WORKLOAD: workload}}
    return made


class Side:
    """One operator's pods of a job, in a cluster in which it is not alone; its watch reports at once."""

    def __init__(self) -> None:
        self.kube, self.cache = FakeKube(), PodCache()
        self.kube.watchers.append(self._watch)
        self.wakes: list[None] = []
        self.children = Children(self.kube, self.cache, "test", lambda: self.wakes.append(None))

    def _watch(self, verb: str, obj: Object) -> None:
        if verb == "DELETED":
            self.cache.remove(("team", obj["metadata"]["name"]), uid_of(obj))
        else:
            self.cache.put(obj)

    def seen(self) -> list[Object]:
        return self.children.pods(OWNER.uid, "stage-worker")

    def ends(self, name: str = NAME) -> None:
        over = {"name": "worker", "state": {"terminated": {"exitCode": 1, "finishedAt": stamp()}}}
        self.kube.pod_status("team", name, {"phase": "Failed", "containerStatuses": [over]})

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


LAUNCH = Plan(RolloutJobStatus(), launch=(Launch(WORKLOAD, restarts=3, last_end="was lost"),))
NOTHING = Plan(RolloutJobStatus())


@pytest.mark.parametrize("late", [False, True], ids=["before", "since"])
async def test_a_ready_pod_that_became_the_workload_since_the_plan_is_left_alone(
    side: Side, late: bool
) -> None:
    """A pod of another workload is not touched, whether it stood ready or not."""
    side.kube.put(stood_ready("ready-0", workload="another"))
    if not late:
        side.kube.put(stood_ready("ready-1"))
        side.ends("ready-1")
    seen = side.seen()
    if late:
        side.kube.put(stood_ready("ready-1"))
    await side.carry_out(LAUNCH, seen)
    expected = [] if late else [("delete", "Pod", "ready-1"), ("create", "Pod", NAME)]
    assert side.kube.calls == expected
    assert "ready-0" in side.kube.names("Pod")


@pytest.mark.parametrize(
    ("ended", "leaving", "kept"),
    [
        ((), (), "ready-0"),
        (("ready-0",), (), "ready-1"),
        (("ready-0", "ready-1"), (), "ready-2"),
        ((), ("ready-0",), "ready-1"),
        (("ready-1",), ("ready-0", "ready-2"), "ready-1"),
    ],
)
async def test_of_several_pods_of_a_workload_one_that_works_is_kept(
    side: Side, ended: tuple[str, ...], leaving: tuple[str, ...], kept: str
) -> None:
    names = ("ready-0", "ready-1", "ready-2")
    for name in (*names, "ready-3"):
        made = stood_ready(name, workload="another" if name == "ready-3" else NAME)
        if name in leaving:
            made["metadata"]["deletionTimestamp"] = stamp()
        side.kube.put(made)
    for name in ended:
        side.ends(name)
    seen = side.seen()
    observed = {one.name: one for one in side.children.observed(seen)}
    assert sorted(observed) == ["another", NAME]
    uid = uid_of(side.kube.objects["Pod", "team", kept])
    assert observed[NAME].worker == f"{NAME}.{uid}"
    await side.carry_out(NOTHING, seen)
    surplus = [("delete", "Pod", name) for name in names if name != kept and name not in leaving]
    assert sorted(side.kube.calls) == surplus
    side.kube.calls.clear()
    # The watch may be late: what was deleted once is neither kept nor deleted a second time.
    await side.carry_out(NOTHING, seen)
    assert side.kube.calls == []


async def test_a_pod_that_was_deleted_is_stopping_before_the_watch_says_so(side: Side) -> None:
    side.kube.put(pod())
    other = pod()
    other["metadata"]["name"] = "another"
    side.kube.put(other)
    side.kube.watchers.clear()
    seen = side.seen()
    assert [one.state for one in side.children.observed(seen)] == ["starting"] * 2
    await side.carry_out(Plan(RolloutJobStatus(), stop=(Stop(NAME, 30.0),)), seen)
    states = {one.name: one.state for one in side.children.observed(seen)}
    assert states == {NAME: "stopping", "another": "starting"}


async def test_a_stop_says_how_the_next_launch_counts(side: Side) -> None:
    """Nothing of the pod is left when its successor is made, which may be refused at first."""
    side.kube.put(pod())
    again = Launch(WORKLOAD, restarts=5, last_end="did not answer")
    await side.carry_out(Plan(RolloutJobStatus(), stop=(Stop(NAME, 0.0, again),)), side.seen())
    assert side.seen() == []
    launch = Plan(RolloutJobStatus(), launch=(Launch(WORKLOAD),))
    for refusal in (KubeError(503, "Unavailable", "later"), KubeError(403, "Forbidden", "quota"), None):
        side.kube.refuse = lambda verb, obj, refusal=refusal: refusal
        with suppress(KubeError):
            await side.carry_out(launch, side.seen())
    notes = side.kube.objects["Pod", "team", NAME]["metadata"]["annotations"]
    assert (notes[labels.RESTARTS], notes[labels.LAST_END]) == ("5", "did not answer")
    side.kube.remove("Pod", "team", NAME)
    await side.carry_out(launch, side.seen())
    notes = side.kube.objects["Pod", "team", NAME]["metadata"]["annotations"]
    assert (notes[labels.RESTARTS], notes.get(labels.LAST_END)) == ("0", None)


@pytest.mark.parametrize(
    ("status", "refused"),
    [(0, False), (500, False), (503, False), (429, False), (400, True), (403, True), (422, True)],
)
async def test_a_refusal_is_observed_and_a_lack_of_an_answer_is_an_error(
    side: Side, status: int, refused: bool
) -> None:
    side.kube.refuse = lambda verb, obj: KubeError(status, "Reason", "in its words")
    if refused:
        await side.carry_out(LAUNCH, [])
        (one,) = side.children.observed([])
        assert (one.name, one.state, one.blocked, one.message) == (NAME, "exited", True, "in its words")
        assert (one.restarts, one.last_end) == (3, "was lost")
        assert len(side.wakes) == 1
    else:
        with pytest.raises(KubeError):
            await side.carry_out(LAUNCH, [])
        assert side.children.observed([]) == []
        assert side.wakes == []
    side.kube.refuse = lambda verb, obj: None
    await side.carry_out(LAUNCH, [])
    assert [one.blocked for one in side.children.observed(side.seen())] == [False]
    side.kube.remove("Pod", "team", NAME)
    assert side.children.observed(side.seen()) == []


async def test_one_that_is_refused_does_not_keep_the_others_from_being_made(side: Side) -> None:
    second = Workload(name=f"{NAME}1", kind="stage-worker", owner=OWNER, stages=("run",))
    side.kube.refuse = lambda verb, obj: (
        KubeError(503, "Unavailable", "later") if obj["metadata"]["name"] == NAME else None
    )
    plan = Plan(RolloutJobStatus(), launch=(Launch(WORKLOAD), Launch(second)))
    with pytest.raises(KubeError, match="later"):
        await side.carry_out(plan, [])
    assert side.kube.names("Pod") == [second.name]


@pytest.mark.parametrize("instance", ["test", "another", ""])
async def test_a_pod_that_holds_the_name_is_used_only_if_it_is_the_installations(
    side: Side, instance: str
) -> None:
    """The cache does not know the pod yet."""
    side.kube.watchers.clear()
    theirs = pod()
    theirs["metadata"]["labels"][labels.INSTANCE] = instance
    side.kube.put(theirs)
    await side.carry_out(LAUNCH, [])
    assert len(side.seen()) == (instance == "test")
    (one,) = side.children.observed(side.seen())
    assert one.blocked == (instance != "test")
