"""One rollout at a time through all stages of a worker, in real sandboxes and without a control plane."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollyard_crds.lease import StageResult
from rollyard_crds.rolloutjob import WorkerJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline import registry
from rollyard_pipeline.agents import Agent, AgentContext
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.stages.rescoring import StagesAlone
from rollyard_pipeline.tool_parsers.base import ParsedCall

SMALL = {"warm": 0, "resources": {"memory": "256Mi", "disk": "16Mi", "processes": 64}}


class Scripted(Agent):
    """A policy that plays one list of bash commands in each step of its task."""

    uses_model = False
    steps: Sequence[Sequence[str]] = ()
    said: list[str]
    """The user's messages, as the policy has read them."""

    async def run(self, ctx: AgentContext) -> None:
        told = [message.content for message in ctx.episode.messages if message.role == "user"]
        self.said[:] = told
        place = len(told) - 1
        for command in self.steps[place] if place < len(self.steps) else ():
            await ctx.replay(ParsedCall("bash", {"command": command}))


class StageLab:
    """A worker's stages over a provider of sandboxes."""

    def __init__(self, provider: NodeProvider, backends: BackendClient) -> None:
        self.provider = provider
        self.said: list[str] = []
        self.observed: list[str] = []
        """What the tools of the last rollout showed."""
        self.egress: Egress | None = None
        """The network of sandboxes, for one rollout. Its end closes it."""
        self._backends = backends

    async def play(
        self, task: Task | dict[str, Any], steps: Sequence[Sequence[str]] | None = None, **spec: Any
    ) -> StageResult:
        """Play Init, Run and Eval, and return what Eval reports. No sandbox is left afterwards.

        Args:
            task: The task.
            steps: The commands of the policy for each step of the task, or None for the agent `oracle`.
            spec: Fields of the job's spec, and of what the installer adds.
        """
        kind = "oracle" if steps is None else "scripted"
        agent = type("One", (Scripted,), {"steps": steps or (), "said": self.said})
        found = registry.Registry({registry.AGENTS: {"scripted": agent}})
        job = WorkerJobSpec.model_validate(
            {
                "tasks": {"stream": True}, "handler": "harbor", "sandbox": SMALL,
                "agent": {"type": kind, "tools": ["bash", "submit"]}, "backendRef": {"name": "unused"},
                "stages": {"eval": {"timeoutSeconds": 60}}, **spec,
            }
        )  # fmt: skip
        alone = StagesAlone(job, self.provider, self._backends, found, self.egress)
        try:
            ran, scored = await alone.play(task if isinstance(task, Task) else Task.model_validate(task))
        finally:
            await alone.close()
        assert self.provider.in_use() == []
        assert ran.trajectory is not None
        self.observed = [one.content for one in ran.trajectory.messages if one.role == "tool"]
        return scored


@asynccontextmanager
async def stage_lab(sandbox: str, folder: Path, **options: Any) -> AsyncIterator[StageLab]:
    """Provide stages over the sandboxes of one kind. A socket's path lies in `folder` and must be short."""
    provider = open_provider(sandbox, run_dir=folder, node="n", **options)
    assert isinstance(provider, NodeProvider)
    await provider.start()
    try:
        async with BackendClient() as backends:
            yield StageLab(provider, backends)
    finally:
        await provider.aclose()
