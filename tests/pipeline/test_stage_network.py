"""The stages of a rollout whose job has a network: Init and Run reach its hosts, and Eval reaches nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import Lease, StageResult, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.errors import SandboxImpossible
from rollyard_pipeline.stages.stages import Stages
from rollyard_pipeline.worker.worker import stage_failure
from rollyard_testing.sandboxes.outside import HOST, Outside


class Plane:
    spec: RolloutJobSpec

    async def job_spec(self, namespace: str, name: str, uid: str) -> RolloutJobSpec:
        return self.spec


class Rollouts:
    """Plays one rollout of the shell handler, stage by stage."""

    def __init__(self, stages: Stages, plane: Plane, world: Outside) -> None:
        self.stages, self.plane, self.world = stages, plane, world

    async def play(
        self, command: str, test: str, setup: str, hosts: list[str] | None = None, **stage: Any
    ) -> StageResult:
        """Play it; `hosts` are those of the job that its task may reach, all of them without a list."""
        self.plane.spec = RolloutJobSpec.model_validate(
            {
                "tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"},
                "stages": {"eval": {"timeoutSeconds": 20, **stage}},
                "sandbox": {
                    "warm": 0, "network": "allowlist", "allowedHosts": [f"{HOST}:{self.world.port}"],
                    "resources": {"memory": "192Mi", "disk": "16Mi", "processes": 64},
                },
            }
        )  # fmt: skip
        calls = [{"name": "bash", "arguments": {"command": command}}]
        task = Task.model_validate(
            {
                "id": "t", "prompt": "q", "test_script": test, "solution": calls,
                "sandbox": {"setup": setup, "allowedHosts": hosts},
            }
        )  # fmt: skip
        init = await self._work("init", task)
        ran = await self._work("run", task, sandbox=init.sandbox, carry=init.carry)
        return await self._work(
            "eval", task, sandbox=init.sandbox, carry=ran.carry, trajectory=ran.transcript
        )

    async def _work(self, stage: str, task: Task, **fields: Any) -> StageResult:
        lease = Lease(
            rollout="r", token=1, stage=stage, job="j", namespace="default", group_id="g", attempt=0,
            job_uid=str(id(self.plane.spec)), sample_index=0, queued_seconds=0.0, lease_seconds=30.0,
            task=task, **fields,
        )  # fmt: skip
        self.held = HeldLease(lease)
        return await self.stages.work(self.held, StageTimes())


@pytest.fixture(params=["bubblewrap"])
async def rollouts(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Rollouts]:
    if request.param == "bubblewrap":
        request.getfixturevalue("bubblewrap_works")
    provider = open_provider(request.param, run_dir=tmp_path_factory.mktemp("s"), node="n")
    await provider.start()
    plane = Plane()
    try:
        async with Outside().serving(tmp_path) as world, BackendClient() as backends:
            stages = Stages(plane, backends, provider, Registry(), egress=world.egress())
            yield Rollouts(stages, plane, world)
            await stages.close()
    finally:
        for sandbox in provider.in_use():
            await provider.release(sandbox)
        await provider.aclose()


def fetch(world: Outside, stage: str) -> str:
    return f"curl -s --max-time 10 http://{HOST}:{world.port}/{stage} > {stage}.txt"


@pytest.mark.attack(
    "a test, or what Run left, reaches a host during the evaluation",
    boundary="network",
    surface="Eval",
    stopped_by="the exec server closes port and connections before it begins, and takes no other ones",
)
@pytest.mark.parametrize("sandbox", ["shared", "fresh"])
async def test_init_and_run_have_it_and_eval_has_not(rollouts: Rollouts, sandbox: str) -> None:
    world = rollouts.world
    test = (
        f'[ "$(cat init.txt)" = reached ] && {{ [ ! -e run.txt ] || [ "$(cat run.txt)" = reached ]; }} '
        '&& [ -z "$http_proxy$HTTPS_PROXY$NO_PROXY" ] '
        f"&& ! curl -s --max-time 5 -x $(cat proxy.txt) http://{HOST}:{world.port}/eval"
    )
    result = await rollouts.play(
        fetch(world, "run"), test, f"{fetch(world, 'init')}; echo $http_proxy > proxy.txt", sandbox=sandbox
    )
    assert (result.reward, result.reward_reason) == (1.0, "")
    asked = [each.split(b" ")[1] for each in world.received]
    assert asked == [b"/init", b"/run", b"/init"][: 3 if sandbox == "fresh" else 2]


async def test_a_task_has_no_more_of_it_than_it_names(rollouts: Rollouts) -> None:
    """The job permits a host, and the task none: neither Init nor Run reaches it."""
    world = rollouts.world
    result = await rollouts.play(
        f"{fetch(world, 'run')}; true",
        "[ ! -s init.txt ] && [ ! -s run.txt ]",
        f"{fetch(world, 'init')}; true",
        hosts=[],
    )
    assert (result.reward, result.reward_reason, world.received) == (1.0, "", [])


@pytest.mark.parametrize("rollouts", ["process"], indirect=True)
async def test_bare_processes_are_refused_for_good(rollouts: Rollouts) -> None:
    with pytest.raises(SandboxImpossible) as refused:
        await rollouts.play("true", "true", "true")
    failure = stage_failure(rollouts.held.lease, refused.value, StageTimes())
    assert (failure.reason, failure.retryable) == ("NetworkImpossible", False)
    assert "bubblewrap" in failure.message
