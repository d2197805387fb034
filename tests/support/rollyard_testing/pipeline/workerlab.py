"""A worker with a control plane in memory, and with stages that a test holds and breaks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Literal

from rollyard_crds.lease import (
    CompleteRequest,
    FailRequest,
    HeartbeatRequest,
    HeartbeatResponse,
    Lease,
    LeaseRef,
    LeaseRequest,
    LeaseResponse,
    OutcomeItem,
    OutcomeResponse,
    RewardRequest,
    RewardResponse,
    RouteRequest,
    RouteResponse,
    SandboxHandle,
    StageFailure,
    StageResult,
)
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline import registry
from rollyard_pipeline.agents import Agent, AgentContext
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable, WorkerCall, WorkerCalls
from rollyard_pipeline.errors import ControlPlaneRefused
from rollyard_pipeline.handlers import Evaluation, Handler, StageContext
from rollyard_pipeline.worker.worker import Worker, WorkerOptions

from rollyard_testing.pace import patience

Outcome = StageResult | StageFailure
Answer = Literal["accepted", "stale", "cancelled", "unknown"]


class Plane(WorkerCalls):
    """A control plane in memory, which hands out prepared leases and keeps what comes back."""

    def __init__(self, spec: RolloutJobSpec) -> None:
        self.spec = spec
        self.queues: dict[str, deque[Lease]] = {"init": deque(), "run": deque(), "eval": deque()}
        self.outcomes: list[Outcome] = []
        self.reports = 0
        """How often outcomes were reported, taken or not."""
        self.arrived = asyncio.Condition()
        self.cancelled: list[LeaseRef] = []
        self.lost: list[LeaseRef] = []
        self.orphans: list[str] = []
        self.watched: list[str] = []
        self.beats: list[HeartbeatRequest] = []
        self.away = False
        self.over = False
        self.places: int | None = None
        """The places of the job's pool, as answers of Run say it."""
        self.asked: list[LeaseRequest] = []
        self.refuse: Callable[[Outcome], bool] = lambda outcome: False
        self.refusal = "refused"
        self.answer: Answer = "accepted"
        self._changed = asyncio.Event()

    def offer(self, *leases: Lease) -> None:
        for lease in leases:
            self.queues[lease.stage].append(lease)
        self._changed.set()

    def end(self) -> None:
        self.over = True
        self._changed.set()

    async def wait_for(self, count: int) -> list[Outcome]:
        async with asyncio.timeout(patience(30)), self.arrived:
            await self.arrived.wait_for(lambda: len(self.outcomes) >= count)
        return self.outcomes

    def _check(self) -> None:
        if self.away:
            raise ControlPlaneUnavailable("away")

    async def send(self, call: WorkerCall[Any]) -> Any:
        raise ControlPlaneRefused(f"{call.method} {call.path} is not played here")

    async def lease(self, request: LeaseRequest) -> LeaseResponse:
        self._check()
        self.asked.append(request)
        ((stage, capacity),) = request.capacity.items()
        assert capacity > 0
        while True:
            self._changed.clear()
            queue = self.queues[stage]
            leases = [queue.popleft() for _ in range(min(capacity, len(queue)))]
            if leases or self.over:
                places = self.places if stage == "run" else None
                return LeaseResponse(leases=leases, draining=self.over, places=places)
            await self._changed.wait()
            self._changed.set()
            await asyncio.sleep(0)

    async def heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        self._check()
        self.beats.append(request)
        return HeartbeatResponse(
            lost=self.lost, cancelled=self.cancelled, orphans=self.orphans, watched=self.watched
        )

    async def complete(self, request: CompleteRequest) -> OutcomeResponse:
        return await self._take(list(request.results))

    async def fail(self, request: FailRequest) -> OutcomeResponse:
        return await self._take(list(request.failures))

    async def _take(self, outcomes: list[Any]) -> OutcomeResponse:
        self.reports += 1
        self._check()
        assert len(outcomes) <= 8
        if any(self.refuse(outcome) for outcome in outcomes):
            raise ControlPlaneRefused(self.refusal)
        async with self.arrived:
            self.outcomes += outcomes
            self.arrived.notify_all()
        return OutcomeResponse(
            outcomes=[OutcomeItem(rollout=o.rollout, outcome=self.answer) for o in outcomes]
        )

    async def route(self, request: RouteRequest) -> RouteResponse:
        return RouteResponse(backend=None)

    async def reward(self, request: RewardRequest, seconds: float) -> RewardResponse:
        return RewardResponse(error="there is no service")

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        self._check()
        return self.spec

    async def waiting_images(self, namespace: str, name: str, uid: str) -> list[str]:
        self._check()
        return []


class Provider:
    """A provider that knows which sandboxes were released; nothing here needs a real one."""

    name = "fake"
    fetches = False

    def __init__(self) -> None:
        self.released: list[str] = []
        self.claims: list[str] = []
        self.renewed: list[str] = []
        self.full = ""
        self.drained = False

    def trouble(self) -> str:
        return self.full

    def drain(self) -> None:
        self.drained = True

    def claimed(self) -> list[str]:
        return list(self.claims)

    def in_use(self) -> list[str]:
        return list(self.claims)

    async def release(self, handle: SandboxHandle | str) -> None:
        self.released.append(handle if isinstance(handle, str) else handle.id)

    async def renew(self, ids: Collection[str], seconds: float) -> None:
        self.renewed += ids

    async def attach(self, handle: SandboxHandle) -> Any:
        @asynccontextmanager
        async def sandbox() -> AsyncIterator[None]:
            yield

        context = sandbox()
        context.client, context.workdir, context.handle = None, "/work", handle  # type: ignore[attr-defined]
        return context

    async def own_end(self, handle: SandboxHandle | str) -> str:
        return ""

    async def oom_killed(self, handle: SandboxHandle | str) -> bool:
        return False


class Steered(Handler):
    """A handler whose stages the test holds and breaks."""

    needs_sandbox: ClassVar[bool] = False
    gate: ClassVar[asyncio.Event]
    entered: ClassVar[list[str]]
    error: ClassVar[Exception | None] = None
    reward: ClassVar[Any] = 1.0
    reason: ClassVar[str] = ""
    shown: ClassVar[str] = ""

    async def _pass(self, ctx: StageContext) -> None:
        self.entered.append(ctx.rollout)
        await self.gate.wait()
        if self.error is not None:
            raise self.error

    async def init(self, ctx: StageContext) -> None:
        await self._pass(ctx)
        ctx.carry["seen"] = 1

    async def run(self, ctx: StageContext) -> None:
        await self._pass(ctx)

    async def eval(self, ctx: StageContext) -> Evaluation:
        await self._pass(ctx)
        ctx.show(self.shown)
        return Evaluation(self.reward, {"part": 0.5}, self.reason)


class Silent(Agent):
    uses_model = False
    uses_tools = False

    async def run(self, ctx: AgentContext) -> None:
        return


def spec(**stages: Any) -> RolloutJobSpec:
    return RolloutJobSpec.model_validate(
        {
            "tasks": {"inline": [{"id": "t", "prompt": "q"}]},
            "handler": "steered",
            "agent": {"type": "oracle", "tools": []},
            "stages": stages,
        }
    )


def lease(number: int, stage: str = "init", sandbox: str | None = None, **fields: Any) -> Lease:
    handle = SandboxHandle(provider="fake", id=sandbox, node="n", address="unix:/x") if sandbox else None
    return Lease(
        rollout=f"r{number}", token=1, stage=stage, job="j", namespace="default", job_uid="u", group_id="g",
        sample_index=0, attempt=0, queued_seconds=0.0, lease_seconds=30.0,
        task=Task(id="t", prompt="q"), sandbox=handle, **fields,
    )  # fmt: skip


@asynccontextmanager
async def working(
    plane: Plane, handler: type[Handler] | None, provider: Any = None, **options: Any
) -> AsyncIterator[tuple[Worker, asyncio.Task[None]]]:
    """Yield a worker at work. It is drained at the end if the test has not ended it.

    Without a handler, "steered" is that of an installed package.
    """
    classes: dict[str, dict[str, Any]] = {registry.AGENTS: {"oracle": Silent}}
    if handler is not None:
        classes[registry.HANDLERS] = {"steered": handler}
    extensions = registry.Registry(classes)
    places = options.pop("concurrency", {"init": 2, "run": 2, "eval": 2})
    async with BackendClient() as backends:
        worker = Worker(
            plane, backends, provider,
            WorkerOptions(worker="w", node="n", concurrency=places, extensions=extensions, **options),
        )  # fmt: skip
        task = asyncio.create_task(worker.run())
        try:
            yield worker, task
        finally:
            worker.drain()
            await task
