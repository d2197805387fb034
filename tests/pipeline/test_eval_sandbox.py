"""Eval in a fresh sandbox: what comes over from Run's, what does not, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import pytest
from rollyard_crds.lease import Lease, SandboxHandle, StageResult, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task, TaskSandbox
from rollyard_pipeline import registry
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.leases import HeldLease, LeaseTable
from rollyard_pipeline.errors import PermanentFailure, PipelineError
from rollyard_pipeline.handlers import Evaluation, StageContext
from rollyard_pipeline.handlers.base import FolderChanges
from rollyard_pipeline.handlers.shell import ShellHandler
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.errors import SandboxLost
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.stages import eval_sandboxes, sandbox_places
from rollyard_pipeline.stages.eval_sandboxes import carries, eval_sandbox, place_within, reaches
from rollyard_pipeline.stages.sandbox_places import SandboxPlaces
from rollyard_pipeline.stages.stages import Stages
from rollyard_pipeline.worker.worker import stage_failure
from rollyard_sandbox.errors import FileError
from rollyard_testing.pace import patience


class Plain(ShellHandler):
    """A handler of files that Run left."""


class Fresh(Plain):
    eval_sandbox: ClassVar[Any] = "fresh"


class Outside(Fresh):
    needs_sandbox = False


class Answers(Plain):
    judges_answers = True


class Apart(Plain):
    def eval_apart(self, task: Task) -> TaskSandbox | None:
        return TaskSandbox()


class Changing(Plain):
    def changes(self, task: Task, workdir: str) -> FolderChanges | None:
        return FolderChanges(workdir, 1, lambda _path: False)


class Leaving(Plain):
    def artifacts(self, task: Task) -> Sequence[str]:
        return ["/work/a"]


class Networked(Plain):
    hosts: ClassVar[Sequence[str] | None] = None

    def eval_hosts(self, task: Task) -> Sequence[str] | None:
        return self.hosts


class Offline(Networked):
    hosts: ClassVar[Sequence[str] | None] = ()


CARRY = {"files": ["a"]}
NETWORK = {"network": "allowlist", "allowedHosts": ["a.org", "b.org"]}


@pytest.mark.parametrize(
    ("handler", "stage", "where", "carried", "reached"),
    [
        (Plain, {}, "shared", False, False),
        (Plain, {"sandbox": "fresh"}, "fresh", False, False),
        (Plain, {"carry": CARRY}, "fresh", True, True),
        (Fresh, {}, "fresh", False, False),
        (Fresh, {"sandbox": "shared"}, "shared", False, False),
        (Outside, {"sandbox": "fresh"}, "shared", False, False),
        (Answers, {"sandbox": "fresh"}, "fresh", False, True),
        (Apart, {}, "fresh", True, True),
        (Apart, {"sandbox": "shared"}, "fresh", True, True),
        (Changing, {"sandbox": "fresh"}, "fresh", True, True),
        (Leaving, {"sandbox": "fresh"}, "fresh", True, True),
        (Plain, NETWORK, "fresh", False, False),
        (Networked, NETWORK, "fresh", False, False),
        (Offline, NETWORK, "shared", False, False),
    ],
)
def test_where_eval_works_and_what_reaches_it(
    handler: type[ShellHandler], stage: dict[str, Any], where: str, carried: bool, reached: bool
) -> None:
    given = {"tasks": {"stream": True}, "handler": "x", "agent": {"type": "oracle"}}
    spec = RolloutJobSpec.model_validate({**given, "stages": {"eval": stage}})
    task = Task(id="t", prompt="q")
    assert eval_sandbox(spec, handler(), task) == where
    assert (carries(spec, handler(), task), reaches(spec, handler(), task)) == (carried, reached)


SMALL = {"warm": 0, "resources": {"memory": "192Mi", "disk": "16Mi", "processes": 64}}


class Plane:
    spec: RolloutJobSpec

    async def job_spec(self, namespace: str, name: str, uid: str) -> RolloutJobSpec:
        return self.spec


class Rollout:
    """A rollout that is taken through its stages; the policy plays one bash command."""

    def __init__(self, provider: NodeProvider, stages: Stages, plane: Plane) -> None:
        self.provider, self.stages, self.plane = provider, stages, plane
        self.held: HeldLease
        self.init: StageResult
        self.ran: StageResult

    def job(self, stage: dict[str, Any], **fields: Any) -> None:
        self.plane.spec = RolloutJobSpec.model_validate(
            {
                "tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}, "sandbox": SMALL,
                "stages": {"eval": {"timeoutSeconds": 20, **stage}}, **fields,
            }
        )  # fmt: skip

    def lease(self, stage: str, **fields: Any) -> HeldLease:
        self.held = HeldLease(
            Lease(
                rollout="r", token=1, stage=stage, job="j", namespace="default", group_id="g",
                job_uid=str(id(self.plane.spec)), sample_index=0, queued_seconds=0.0, lease_seconds=30.0,
                task=self.task, **{"attempt": 0, **fields},
            )
        )  # fmt: skip
        return self.held

    async def play(self, command: str, test: str, setup: str = "", **sandbox: Any) -> None:
        """Play Init and Run."""
        call = {"name": "bash", "arguments": {"command": command}}
        submit = {"name": "submit", "arguments": {"answer": "42"}}
        self.task = Task.model_validate(
            {
                "id": "t", "prompt": "q", "test_script": test, "solution": [call, submit],
                "sandbox": {"setup": setup or None, **sandbox},
            }
        )  # fmt: skip
        self.init = await self.stages.work(self.lease("init"), StageTimes())
        self.ran = await self.stages.work(
            self.lease("run", sandbox=self.init.sandbox, carry=self.init.carry), StageTimes()
        )

    async def score(self, attempt: int = 0) -> StageResult:
        held = self.lease(
            "eval",
            attempt=attempt,
            sandbox=self.init.sandbox,
            carry=copy.deepcopy(self.ran.carry),
            trajectory=self.ran.transcript,
        )
        return await self.stages.work(held, StageTimes())

    def only_runs_sandbox_is_left(self) -> bool:
        return self.provider.in_use() == self.provider.claimed() == [self.init.sandbox.id]


class Held(ShellHandler):
    """A handler that asks for `fresh` by itself.

    The test decides when Eval continues, and whether it breaks.
    """

    eval_sandbox: ClassVar[Any] = "fresh"
    entered: ClassVar[asyncio.Event]
    gate: ClassVar[asyncio.Event]
    error: ClassVar[Exception | None] = None

    async def init(self, ctx: StageContext) -> None:
        await super().init(ctx)
        ctx.carry["inits"] = ctx.carry.get("inits", 0) + 1

    async def eval(self, ctx: StageContext) -> Evaluation:
        self.entered.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return await super().eval(ctx)


@pytest.fixture
def handler() -> type[Held]:
    return type("One", (Held,), {"entered": asyncio.Event(), "gate": asyncio.Event()})


@pytest.fixture(params=["process", "bubblewrap"])
async def rollout(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, handler: type[Held]
) -> AsyncIterator[Rollout]:
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap_works")
    provider = open_provider(request.param, run_dir=tmp_path_factory.mktemp("s"), node="n")
    assert isinstance(provider, NodeProvider)
    await provider.start()
    plane = Plane()
    extensions = registry.Registry({registry.HANDLERS: {"shell": ShellHandler, "held": handler}})
    try:
        async with BackendClient() as backends:
            stages = Stages(plane, backends, provider, extensions)
            yield Rollout(provider, stages, plane)
            await stages.close()
        for sandbox in provider.in_use():
            await provider.release(sandbox)
    finally:
        await provider.aclose()


async def test_nothing_but_the_answer_comes_into_a_fresh_sandbox(rollout: Rollout) -> None:
    rollout.job({"sandbox": "fresh"})
    await rollout.play(
        "echo 1 > made; echo 2 > given; rm prepared; export X=1; (sleep 300 &)",
        '[ ! -e made ] && [ "$(cat given prepared)" = "as givenready" ] && [ "$ROLLYARD_ANSWER$KEY" = 42v ]',
        "echo ready > prepared",
        files={"given": "as given"},
        env={"KEY": "v"},
    )
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (1.0, "")
    assert result.sandbox == rollout.init.sandbox
    assert rollout.only_runs_sandbox_is_left()


async def test_shared_is_what_shell_says(rollout: Rollout) -> None:
    rollout.job({})
    await rollout.play("echo 1 > made", "[ -e made ]")
    assert (await rollout.score()).reward == 1.0


FILES = [
    ("echo new > a.py", 1.0),
    ("mkdir -p src/deep; echo new > a.py; echo 1 > src/deep/b; chmod +x src/deep/b; rm tool", 1.0),
    ("rm -r a.py other; ln -s /etc/passwd a.py", 0.0),
    ("rm a.py; mkfifo a.py; ln -s /etc src", 0.0),
    ("ln -sf hidden a.py", 0.0),
    ("rm -r a.py; mkdir a.py; echo new > a.py/a.py", 0.0),
    ("echo new > a.py; echo cheat > other; echo cheat > more; chmod 4777 a.py", 1.0),
]
NAMED = """
echo new > hidden; set -e
[ -f a.py ]; [ ! -L a.py ]; [ "$(cat a.py)" = new ]; [ "$(cat other)" = other ]; [ ! -e more ]
[ ! -u a.py ]; [ ! -L src ]; [ -e src/deep/b ] || [ -e tool ]; [ ! -e src ] || [ -x src/deep/b ]
[ ! -e src ] || [ ! -e tool ]
"""


@pytest.mark.parametrize(("command", "reward"), FILES)
async def test_named_files_are_as_run_left_them(rollout: Rollout, command: str, reward: float) -> None:
    rollout.job({"carry": {"files": ["a.py", "/work/src/", "tool", "never/there"]}})
    await rollout.play(command, NAMED, files={"a.py": "old\n", "other": "other\n", "tool": "x"})
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (reward, "")
    assert rollout.only_runs_sandbox_is_left()


SETUP = """
mkdir -p lib/inner gone empty; echo old > lib/same; echo old > lib/changed; echo a > lib/size; echo x > gone/x
echo '#!/bin/sh' > lib/program; mkdir swap; echo 1 > swap/1; echo 2 > other
for name in kept retargeted replaced unlinked; do ln -s lib/same $name; done
"""
CHANGES = """
echo new > lib/changed; echo ab > lib/size; rm -r gone empty; chmod +x lib/program; mkdir -p made/empty
echo made > made/file; rm -r swap other; echo file > swap; mkdir other; echo in > other/in
ln -sf lib/changed retargeted; rm replaced unlinked; echo file > replaced
ln -s lib linked; ln -s lib/changed made/link; ln -s /etc/passwd outside; mkfifo pipe
"""
DIFFERENCE = """
set -e
[ "$(cat lib/same)$(cat lib/changed)$(cat lib/size)" = oldnewab ]; [ -x lib/program ]
[ ! -e gone ]; [ ! -e empty ]; [ -d made/empty ]; [ "$(cat made/file)" = made ]; [ "$(cat swap)" = file ]
[ "$(cat other/in)" = in ]; [ "$(readlink kept)" = lib/same ]; [ -f replaced ]; [ ! -L replaced ]
for name in retargeted unlinked linked made/link outside pipe; do [ ! -L $name ]; [ ! -e $name ]; done
"""


async def test_a_diff_is_all_that_run_changed(rollout: Rollout) -> None:
    rollout.job({"carry": {"diff": True}})
    await rollout.play(CHANGES, DIFFERENCE, SETUP)
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (1.0, "")


async def test_a_diff_compares_contents(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither size nor time says that a file is the same, and one is compared in parts."""
    monkeypatch.setattr(eval_sandboxes, "MAX_DIGESTED", 1000)
    rollout.job({"carry": {"diff": True}})
    make = "head -c 2999 /dev/zero > zeros; cp zeros same; touch -d @1 zeros same"
    change = "printf x | dd of=zeros bs=1 seek=2500 conv=notrunc status=none; touch -d @1 zeros"
    await rollout.play(change, "[ $(tr -d '\\0' < zeros) = x ] && [ -z \"$(tr -d '\\0' < same)\" ]", make)
    assert (await rollout.score()).reward == 1.0


@pytest.mark.parametrize("kind", [{"files": ["a", "b"]}, {"diff": True}])
@pytest.mark.parametrize(
    ("command", "reward"),
    [
        ("head -c 600 /dev/zero > a; head -c 400 /dev/zero > b", 1.0),
        ("head -c 600 /dev/zero > a; head -c 401 /dev/zero > b", 0.0),
        ("truncate -s 15M a", 0.0),
        ("mkdir a; head -c 600 /dev/zero > a/1; ln a/1 a/2", 0.0),
    ],
)
async def test_more_than_may_be_carried_is_scored(
    rollout: Rollout, kind: dict[str, Any], command: str, reward: float
) -> None:
    rollout.job({"carry": {**kind, "maxBytes": 1000}})
    await rollout.play(command, "true")
    result = await rollout.score()
    assert (result.reward, result.reward_reason) == (reward, "" if reward else "SandboxSabotaged")
    assert rollout.only_runs_sandbox_is_left()


async def test_an_init_that_cannot_be_compared_says_so(rollout: Rollout) -> None:
    rollout.job({"carry": {"diff": True}})
    await rollout.play("true", "true", "mkdir -p $(printf 'd/%.0s' {1..70})")
    with pytest.raises(PermanentFailure, match=r"stages\.eval\.carry\.diff"):
        await rollout.score()
    assert rollout.only_runs_sandbox_is_left()


async def test_a_handler_names_its_default_and_prepares_the_fresh_one(
    rollout: Rollout, handler: type[Held]
) -> None:
    handler.gate.set()
    rollout.job({}, handler="held")
    await rollout.play("echo 1 > made", "[ ! -e made ]")
    result = await rollout.score()
    assert (result.reward, result.carry["inits"]) == (1.0, 1), "what Init and Run left is what Eval reads"
    rollout.job({"sandbox": "shared"}, handler="held")
    assert (await rollout.score()).reward == 0.0, "the job's word is the last"


async def test_a_failed_evaluation_leaves_nothing_and_can_be_repeated(
    rollout: Rollout, handler: type[Held]
) -> None:
    handler.gate.set()
    handler.error = RuntimeError("broken")
    rollout.job({"carry": {"files": ["made"]}}, handler="held")
    await rollout.play("echo 1 > made", "[ -e made ]")
    with pytest.raises(RuntimeError, match="broken"):
        await rollout.score()
    assert rollout.only_runs_sandbox_is_left()
    handler.error = None
    assert (await rollout.score()).reward == 1.0


async def test_runs_sandbox_is_missed_only_where_something_is_to_be_carried(rollout: Rollout) -> None:
    rollout.job({"carry": {"files": ["made"]}})
    await rollout.play("echo 1 > made", "[ ! -e made ]")
    await rollout.provider.release(rollout.init.sandbox)
    with pytest.raises(SandboxLost) as caught:
        await rollout.score()
    failure = stage_failure(rollout.held.lease, caught.value, StageTimes())
    assert (failure.reason, failure.return_to) == ("SandboxLost", "init")
    rollout.job({"sandbox": "fresh"})
    assert (await rollout.score()).reward == 1.0
    assert rollout.provider.in_use() == []


async def test_a_fresh_sandbox_that_is_lost_costs_no_new_run(rollout: Rollout, handler: type[Held]) -> None:
    rollout.job({"carry": {"diff": True}}, handler="held")
    await rollout.play("echo 1 > made", "[ -e made ]")
    task = asyncio.create_task(rollout.score())
    await asyncio.wait_for(handler.entered.wait(), patience(30))
    (own,) = set(rollout.provider.in_use()) - set(rollout.provider.claimed())
    await rollout.provider.release(own)
    handler.gate.set()
    with pytest.raises(PipelineError) as caught:
        await task
    failure = stage_failure(rollout.held.lease, caught.value, StageTimes())
    assert (failure.reason, failure.retryable, failure.return_to) == ("EvalSandboxFailed", True, None)
    assert (await rollout.score()).reward == 1.0


@pytest.mark.attack(
    "a bug of the exec server is used to end it, each time that a rollout goes badly",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="the first crash of a rollout is an infrastructure failure, which is logged as a bug "
    "(`SandboxCrashed`); from the second one on the rollout scores 0. Where no control group binds the "
    "memory of a sandbox, a server that the kernel ends because the whole node is out of memory counts as "
    "crashed, too",
)
async def test_a_fresh_sandbox_whose_server_crashes_costs_one_evaluation(
    rollout: Rollout, handler: type[Held]
) -> None:
    rollout.job({"carry": {"diff": True}}, handler="held")
    await rollout.play("echo 1 > made", "[ -e made ]")
    for attempt in (0, 1):
        handler.entered.clear()
        handler.gate.clear()
        task = asyncio.create_task(rollout.score(attempt))
        await asyncio.wait_for(handler.entered.wait(), patience(30))
        (own,) = set(rollout.provider.in_use()) - set(rollout.provider.claimed())
        record = rollout.provider._folder.load(own)
        os.kill(record.root.pid, signal.SIGKILL)
        handler.gate.set()
        if attempt == 0:
            with pytest.raises(PipelineError) as caught:
                await task
            assert caught.value.reason == "EvalSandboxFailed"
    result = await task
    assert (result.reward, result.reward_reason) == (0.0, "SandboxCrashed")
    assert rollout.only_runs_sandbox_is_left()


async def test_a_place_that_a_cancelled_wait_or_a_failed_stage_held_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sandbox_places, "_LOOK_SECONDS", 600.0)
    places = SandboxPlaces(Node(), usual=9, limit=3, evals=1)

    async def entered(number: int) -> None:
        async with places.for_eval(held(number)), places.for_init(held(number, "init")):
            raise RuntimeError("broken")

    async with places.for_eval(held(1)):
        waiting = [asyncio.create_task(entered(number)) for number in (2, 3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait(waiting[:1])
    async with asyncio.timeout(patience(10)):
        with pytest.raises(RuntimeError, match="broken"):
            await waiting[1]
        # Two of three places are for Init, and both can be had at once.
        async with places.for_init(held(4, "init")), places.for_init(held(5, "init")):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05), places.for_init(held(6, "init")):
                    pass
        async with places.for_init(held(7, "init")), places.for_init(held(8, "init")):
            pass


@pytest.mark.parametrize("carry", [None, {"files": ["x"]}])
async def test_the_policy_is_not_blamed_for_a_sandbox_that_it_never_touched(
    rollout: Rollout, handler: type[Held], carry: dict[str, Any] | None
) -> None:
    handler.gate.set()
    handler.error = FileError("x: no such file", reason="FileNotFound")
    rollout.job({"sandbox": "fresh", **({"carry": carry} if carry else {})}, handler="held")
    await rollout.play("true", "true")
    if carry is None:
        with pytest.raises(PipelineError, match="FileNotFound") as caught:
            await rollout.score()
        assert caught.value.reason == "EvalSandboxFailed"
    else:
        result = await rollout.score()
        assert (result.reward, result.reward_reason) == (0.0, "SandboxSabotaged")


async def test_a_cancelled_evaluation_leaves_nothing(rollout: Rollout, handler: type[Held]) -> None:
    rollout.job({}, handler="held")
    await rollout.play("true", "true")
    task = asyncio.create_task(rollout.score())
    await asyncio.wait_for(handler.entered.wait(), patience(30))
    table = LeaseTable()
    table.add(rollout.held)
    (own,) = set(rollout.provider.in_use()) - set(rollout.provider.claimed())
    assert table.unreported_sandboxes() == {own}, "heartbeats renew it, and name it to nobody"
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rollout.only_runs_sandbox_is_left()


async def test_a_sandbox_that_cannot_be_made_ready_is_infrastructure(rollout: Rollout) -> None:
    rollout.job({"sandbox": "fresh"})
    await rollout.play("true", "true")
    rollout.task = rollout.task.model_copy(
        update={"sandbox": rollout.task.sandbox.model_copy(update={"setup": "sleep 60"})}
    )
    rollout.plane.spec.stages.init.timeout_seconds = 1
    with pytest.raises(PipelineError, match=r"stages\.init\.timeoutSeconds") as caught:
        await rollout.score()
    failure = stage_failure(rollout.held.lease, caught.value, StageTimes())
    assert (failure.reason, failure.retryable, failure.return_to) == ("EvalSandboxFailed", True, None)
    assert rollout.only_runs_sandbox_is_left()


async def test_the_sandbox_of_a_dead_workers_eval_is_swept(rollout: Rollout, handler: type[Held]) -> None:
    """It belongs to no rollout: like one that was never claimed it ends with the worker that started it."""
    rollout.job({}, handler="held")
    await rollout.play("true", "true")
    task = asyncio.create_task(rollout.score())
    await asyncio.wait_for(handler.entered.wait(), patience(30))
    (own,) = set(rollout.provider.in_use()) - set(rollout.provider.claimed())
    record = rollout.provider._folder.load(own)
    assert await rollout.provider.sweep() == [], "its worker lives"
    dead = record.worker.__class__(pid=record.worker.pid, started=record.worker.started - 1)
    rollout.provider._folder.save(record.__class__(**{**_fields(record), "worker": dead}))
    assert await rollout.provider.sweep() == [own]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


class Node:
    """A node that counts its sandboxes."""

    def __init__(self) -> None:
        self.used: set[str] = set()

    def in_use(self) -> list[str]:
        return sorted(self.used)


def held(number: int, stage: str = "eval", *, alone: bool = False) -> HeldLease:
    """Return a lease, in Eval beside the sandbox of Run unless the rollout has none."""
    box = SandboxHandle(provider="p", id=f"run{number}", node="n", address="unix:/x")
    return HeldLease(
        Lease(
            rollout=f"r{number}", token=1, stage=stage, job="j", namespace="d", job_uid="u", group_id="g",
            sample_index=0, attempt=0, queued_seconds=0.0, lease_seconds=30.0, task=Task(id="t", prompt="q"),
            sandbox=box if stage == "eval" and not alone else None,
        )
    )  # fmt: skip


async def test_the_only_sandbox_of_a_rollout_needs_no_reserved_place() -> None:
    node = Node()
    places = SandboxPlaces(node, usual=99, limit=4, evals=4)
    one, two = held(1, alone=True), held(2, alone=True)
    async with places.for_eval(one), places.for_eval(two):
        for number, holding in enumerate((one, two)):
            handle = SandboxHandle(provider="p", id=f"e{number}", node="n", address="unix:/x")
            holding.eval_sandbox = handle
            node.used.add(handle.id)
        assert places.room(0) == 2, "they take places as other sandboxes do, and none is reserved for them"
        async with places.for_eval(held(3)):
            assert places.room(0) == 1, "now one is, for those that hold two"
        node.used |= {"run1", "run2"}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), places.for_eval(held(4, alone=True)):
                pass


@pytest.mark.attack(
    "rollouts that wait for Eval hold every place of a node",
    boundary="evaluation",
    surface="fresh Eval sandboxes",
    stopped_by="places are kept for Eval; claims, too",
)
@pytest.mark.parametrize(("limit", "evals"), [(2, 4), (4, 4), (12, 8), (16, 1)])
async def test_full_of_rollouts_that_wait_for_eval_a_node_goes_on(
    limit: int, evals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Init, Run and Eval of many rollouts reach the limit, never exceed it, and all of them end."""
    monkeypatch.setattr(sandbox_places, "_LOOK_SECONDS", 0.01)
    node = Node()
    places = SandboxPlaces(node, usual=99, limit=limit, evals=evals)
    most, done = 0, 0

    def look() -> None:
        nonlocal most
        most = max(most, len(node.used))

    async def play(number: int) -> None:
        nonlocal done
        begun = held(number, "init")
        async with places.for_init(begun):
            await asyncio.sleep(0)
            begun.sandbox = SandboxHandle(provider="p", id=f"run{number}", node="n", address="unix:/x")
            node.used.add(f"run{number}")
            look()
        await asyncio.sleep(0.01)
        evaluated = held(number)
        async with places.for_eval(evaluated):
            await asyncio.sleep(0)
            evaluated.eval_sandbox = SandboxHandle(provider="p", id=f"e{number}", node="n", address="unix:/x")
            node.used.add(f"e{number}")
            look()
            await asyncio.sleep(0.01)
            node.used.discard(f"e{number}")
        node.used.discard(f"run{number}")
        done += 1

    async with asyncio.timeout(patience(60)):
        await asyncio.gather(*(play(number) for number in range(2 * limit)))
    assert (done, most <= limit) == (2 * limit, True)


async def test_places_are_kept_only_where_they_are_needed() -> None:
    node = Node()
    places = SandboxPlaces(node, usual=99, limit=8, evals=4)
    assert places.room(1) == 7
    async with places.for_eval(held(1)):
        assert places.room(1) == 5
    free = SandboxPlaces(node, usual=9, evals=2)
    async with free.for_eval(one := held(1)), free.for_eval(held(2)):
        one.eval_sandbox = SandboxHandle(provider="p", id="e1", node="n", address="unix:/x")
        node.used |= {"e1", "run"}
        assert free.room(0) == 8, "without a limit, Eval's come on top"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), free.for_eval(held(3)):
                pass
    for limit, evals, left in ((2, 4, 1), (7, 4, 6), (16, 3, 13), (16, 9, 12), (40, 0, 39)):
        kept = SandboxPlaces(Node(), usual=99, limit=limit, evals=evals)
        assert (kept.room(0), kept.room(2)) == (limit, limit - 2)
        async with kept.for_init(held(1, "init")):
            assert kept.room(0) == left
        assert kept.room(0) == left, "once it is known that Evals need places, they are kept"
    assert SandboxPlaces(None, usual=7).room(3) == 7
    lonely = SandboxPlaces(node, usual=1, limit=1)
    with pytest.raises(PermanentFailure, match="--max-sandboxes is 1"):
        async with lonely.for_init(held(1, "init")):
            pass


@pytest.mark.attack(
    "many files of some rollouts use up the time of others' evaluations",
    boundary="network",
    surface="files of other rollouts",
    stopped_by="waiting for them counts against no limit",
)
async def test_waiting_for_the_files_of_other_rollouts_counts_against_no_limit() -> None:
    """Otherwise a few rollouts with many files would end the evaluations of others."""
    places = asyncio.Semaphore(0)
    asyncio.get_running_loop().call_later(0.5, places.release)
    async with asyncio.timeout(0.2) as limit:
        begun = limit.when()
        async with place_within(places, limit):
            end = limit.when()
    assert end - begun > 0.3
