"""Rollouts without a control plane: one task goes through Init, Run and Eval in this process."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from rollyard_crds.lease import Lease, StageResult, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec, StageName
from rollyard_crds.task import Task

from rollyard_pipeline import registry
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.calls import WorkerCall, WorkerCalls
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import ControlPlaneRefused
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.stages.rescoring import started
from rollyard_pipeline.stages.stages import Stages

_LEASE_SECONDS: Final = 60.0


A = TypeVar("A")


class _OneJob(WorkerCalls):
    """Answers for the control plane with the spec of the one job. Without a model, there is no other call."""

    def __init__(self, spec: RolloutJobSpec) -> None:
        self._spec = spec

    async def send(self, call: WorkerCall[A]) -> A:
        raise ControlPlaneRefused(f"there is no control plane here for {call.method} {call.path}")

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        return self._spec


class StagesAlone:
    """The stages of a worker that asks no control plane, for agents that ask no model.

    Args:
        spec: The spec of the job to which the tasks belong.
        provider: Starts sandboxes. The caller starts and closes it.
        backends: The process's backend client, which is not used by such agents.
        extensions: Loads handlers, agents, tools and parsers.
        egress: The network of sandboxes, if the job asks for one.
    """

    def __init__(
        self,
        spec: RolloutJobSpec,
        provider: SandboxProvider,
        backends: BackendClient,
        extensions: registry.Registry | None = None,
        egress: Egress | None = None,
    ) -> None:
        self._provider = provider
        self._stages = Stages(
            _OneJob(spec), backends, provider, extensions or registry.Registry(), egress=egress
        )
        self._numbers = itertools.count()

    async def play(self, task: Task) -> tuple[StageResult, StageResult]:
        """Play a task once, and return the results of Run and of Eval. No sandbox is left afterwards.

        Raises:
            Exception: The infrastructure failed, or the task is broken. Nothing is tried again.
        """
        number = next(self._numbers)

        def lease(stage: StageName, before: StageResult | None = None) -> HeldLease:
            return HeldLease(
                Lease(
                    rollout=f"{task.id}/{number}",
                    token=1,
                    stage=stage,
                    job="alone",
                    namespace="default",
                    job_uid="alone",
                    group_id=task.id,
                    sample_index=0,
                    attempt=0,
                    queued_seconds=0.0,
                    lease_seconds=_LEASE_SECONDS,
                    task=task,
                    sandbox=before.sandbox if before is not None else None,
                    carry=copy.deepcopy(before.carry) if before is not None else {},
                    trajectory=None if before is None else before.transcript,
                    segments=[] if before is None else before.segments,
                )
            )

        init_lease = lease("init")
        try:
            init = await self._stages.work(init_lease, StageTimes())
            ran = await self._stages.work(lease("run", init), StageTimes())
            return ran, await self._stages.work(lease("eval", ran), StageTimes())
        finally:
            if init_lease.sandbox is not None:
                await asyncio.shield(self._provider.release(init_lease.sandbox))

    async def close(self) -> None:
        """Close every handler."""
        await self._stages.close()


@asynccontextmanager
async def stages_alone(
    spec: RolloutJobSpec, provider: SandboxProvider, extensions: registry.Registry | None = None
) -> AsyncIterator[StagesAlone]:
    """Provide the stages over a provider, which is started first and closed afterwards.

    Raises:
        SandboxProviderError: Sandboxes cannot be started here.
    """
    async with started(provider), BackendClient() as backends:
        alone = StagesAlone(spec, provider, backends, extensions)
        try:
            yield alone
        finally:
            await alone.close()
