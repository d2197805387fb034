"""Single rollouts that are taken through Init, Run and Eval, without a control plane."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from rollyard_crds.lease import (
    BackendAssignment,
    Lease,
    RouteRequest,
    RouteResponse,
    StageResult,
    StageTimes,
)
from rollyard_crds.rolloutjob import RolloutJobSpec, StageName
from rollyard_crds.task import Task
from rollyard_crds.trajectory import Trajectory
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.sandboxes.egress.destinations import Infrastructure
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.stages.stages import Stages

from rollyard_testing.crds.segments import lists

END = "<|im_end|>"
Answer = Callable[[str], str]
UseModel = Callable[..., None]
"""Gives the rollout a model: see the fixture `model`."""


class Plane:
    """What stages ask of the control plane."""

    def __init__(self) -> None:
        self.spec: RolloutJobSpec | None = None
        self.routed: list[RouteRequest] = []
        self.next: BackendAssignment | None = None
        """The backend to which rollouts move."""

    async def job_spec(self, namespace: str, name: str, uid: str) -> RolloutJobSpec | None:
        """Return the job that the test has configured."""
        return self.spec

    async def route(self, request: RouteRequest) -> RouteResponse:
        """Note the request, and return the next backend."""
        self.routed.append(request)
        return RouteResponse(backend=self.next, retry_after=0.05)


class Rollout:
    """A rollout that is taken through its stages, as a worker would do it."""

    def __init__(
        self, provider: SandboxProvider, stages: Stages, plane: Plane, infrastructure: Infrastructure
    ) -> None:
        self.provider = provider
        self.stages = stages
        self.plane = plane
        self.infrastructure = infrastructure
        """What no sandbox reaches."""
        self.task = Task(id="t", prompt="q")
        self.backend: BackendAssignment | None = None
        self.model: Any = None
        self.init: StageResult | None = None
        self.ran: StageResult | None = None
        self.times = StageTimes()

    def configure(self, task: dict[str, Any] | None = None, **spec: Any) -> None:
        """Set the fields of the task and of the job."""
        base = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
        sandbox = {"warm": 0, "resources": {"memory": "256Mi", "disk": "32Mi"}}
        self.plane.spec = RolloutJobSpec.model_validate({**base, "sandbox": sandbox, **spec})
        self.task = Task.model_validate({"id": "t", "prompt": "q", "test_script": "true", **(task or {})})

    def lease(self, stage: StageName, **fields: Any) -> Lease:
        """Return a lease of a stage with these fields."""
        fields.setdefault("attempt", 0)
        return Lease(
            rollout="r", token=1, stage=stage, job="j", namespace="default", job_uid=str(id(self.plane.spec)),
            group_id="g", sample_index=5, queued_seconds=0.0, lease_seconds=30.0, task=self.task,
            backend=self.backend, **fields,
        )  # fmt: skip

    def change_backend(self, **fields: Any) -> None:
        """Change fields of the backend that the next stage is assigned."""
        assert self.backend is not None
        self.backend = self.backend.model_copy(update=fields)

    async def stage(self, stage: StageName, **fields: Any) -> StageResult:
        """Return the result of a stage."""
        self.times = StageTimes()
        return await self.stages.work(HeldLease(self.lease(stage, **fields)), self.times)

    async def play(self) -> Trajectory:
        """Play Init and Run."""
        self.init = await self.stage("init")
        self.ran = await self.stage("run", sandbox=self.init.sandbox, carry=self.init.carry)
        transcript = self.ran.transcript
        assert transcript is not None
        return transcript.with_segments(lists(self.ran.segments))

    async def score(self, attempt: int = 0) -> StageResult:
        """Return the result of Eval."""
        assert self.init is not None
        assert self.ran is not None
        return await self.stage(
            "eval", sandbox=self.init.sandbox, carry=self.ran.carry, trajectory=self.ran.transcript,
            attempt=attempt,
        )  # fmt: skip


def call(name: str, **arguments: Any) -> str:
    """Return a turn that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>{END}"


def oracle(*steps: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a task whose reference solution makes these calls."""
    return {"solution": [{"name": name, "arguments": arguments} for name, arguments in steps]}
