"""The contexts in which handlers work, and the check of what they carry to the next stage."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Final, Literal

from rollyard_crds.fields.allowed_hosts import HostRule, installers_rule
from rollyard_crds.fields.eval_carry import WORKDIR
from rollyard_crds.lease import Lease
from rollyard_crds.rolloutjob import RolloutJobSpec, SandboxSpec, WorkerJobSpec
from rollyard_crds.task import Task, TaskSandbox
from rollyard_crds.trajectory import Trajectory, Transcript

from rollyard_pipeline import registry
from rollyard_pipeline.agents.base import Agent
from rollyard_pipeline.errors import PermanentFailure, TaskInvalid
from rollyard_pipeline.handlers.base import ANSWER, Handler, StageContext
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.stages.inert_files import of_the_system
from rollyard_pipeline.tools.base import Tool

_CARRY_LIMIT: Final = 1 << 20  # The limit that the wire format sets, in bytes.


def stage_context(lease: Lease, spec: RolloutJobSpec, timeout: float) -> StageContext:
    """Return the context of one attempt at a stage, whose limit is `timeout` seconds."""
    # Each attempt starts clean: what an earlier one left or submitted must not affect this one's score.
    carry = {} if lease.stage == "init" else dict(lease.carry)
    if lease.stage == "run":
        carry.pop(ANSWER, None)
    return StageContext(
        task=lease.task,
        spec=spec,
        rollout=lease.rollout,
        sample_index=lease.sample_index,
        timeout=float(timeout),
        env={**spec.sandbox.env, **lease.task.sandbox.env},
        carry=carry,
    )


def evaluated(lease: Lease, handler: Handler) -> Transcript | Trajectory | None:
    """Return what Run recorded, with the token lists if the handler needs them.

    Raises:
        TokensMissing: The handler needs them, and Run's worker did not know this.
    """
    if lease.trajectory is None or not handler.needs_tokens:
        return lease.trajectory
    return lease.trajectory.with_segments([segment.lists() for segment in lease.segments])


async def prepare(handler: Handler, context: StageContext) -> None:
    """Let a handler's `init` prepare the sandbox, and have the sandbox record what Eval must find again.

    Raises:
        rollyard_sandbox.errors.SandboxError: The sandbox failed, or has too many files.
        Exception: `init` failed.
    """
    await handler.init(context)
    if context.client is not None:
        folder = handler.folder(context.task, context.workdir)
        await context.client.end_init(folder, *handler.artifacts(context.task))


def agent_of(extensions: registry.Registry, spec: RolloutJobSpec) -> tuple[Agent, dict[str, Tool]]:
    """Return the agent of a job, and its tools by name."""
    agent: Agent = extensions.load(registry.AGENTS, spec.agent.type)()
    tools: dict[str, Tool] = {}
    if agent.uses_tools:
        for name in spec.agent.tools:
            tool: Tool = extensions.load(registry.TOOLS, name)()
            tools[tool.name] = tool
    return agent, tools


SandboxUse = Literal["run", "eval", "none"]


def sandbox_use(handler: Handler, agent: Agent, tools: Mapping[str, Tool]) -> SandboxUse:
    """Return where rollouts have a sandbox: from Init on (`run`), in Eval alone, or nowhere."""
    if agent.uses_gateway or any(tool.needs_sandbox for tool in tools.values()):
        return "run"
    if not handler.needs_sandbox:
        return "none"
    return "run" if handler.sandbox_before_eval else "eval"


def narrowed(spec: SandboxSpec, task: TaskSandbox) -> SandboxSpec:
    """Return the sandboxes of a job with the network of a task.

    Raises:
        TaskInvalid: The task names a host that the job does not.
    """
    try:
        return spec.narrowed(task.allowed_hosts)
    except ValueError as error:
        raise TaskInvalid(str(error)) from error


def eval_network(spec: RolloutJobSpec, handler: Handler, task: Task) -> SandboxSpec:
    """Return the sandboxes of a job with the network that the tests of a task have.

    Raises:
        TaskInvalid: The task's tests need a host that the job does not give them, or the job gives a network
            to a handler whose tests never have one, or to a task whose files are in folders of the system.
    """
    stage = spec.stages.eval
    if not handler.needs_sandbox:
        return spec.sandbox.narrowed(())
    if stage.allowed_hosts and not handler.fetches:
        raise TaskInvalid(
            f"task '{task.id}': stages.eval.network: its handler runs no tests that may fetch what they need"
        )
    network_fields = {"network": stage.network or "none", "allowed_hosts": stage.allowed_hosts}
    try:
        hosts = handler.eval_hosts(task)
        network = spec.sandbox.model_copy(update=network_fields).narrowed(hosts, "stages.eval.allowedHosts")
    except ValueError as error:
        raise TaskInvalid(f"task '{task.id}': {error}") from error
    changes = handler.changes(task, WORKDIR)
    folders = [*handler.artifacts(task), *([] if changes is None else [changes.folder])]
    for path in folders if network.host_rules else ():
        if of_the_system(path):
            raise TaskInvalid(
                f"task '{task.id}': {path} is in a folder of the system, from which nothing can come into a "
                "sandbox of Eval that has a network"
            )
    return network


def pins_of(spec: RolloutJobSpec) -> tuple[HostRule, ...]:
    """Return the installer's rules that let hosts have addresses which are not public."""
    if not isinstance(spec, WorkerJobSpec):
        return ()
    return tuple(installers_rule(entry) for entry in spec.pinned_hosts)


def checked_carry(context: StageContext) -> dict[str, object]:
    """Return what a handler carries to the next stage.

    Raises:
        PermanentFailure: It is not JSON, or has more bytes than the wire format allows.
    """
    try:
        size = len(json.dumps(context.carry))
    except (TypeError, ValueError) as error:
        raise PermanentFailure(f"ctx.carry is not JSON: {error}", "HandlerStateInvalid") from error
    if size > _CARRY_LIMIT:
        raise PermanentFailure(
            f"ctx.carry has {size} bytes, at most {_CARRY_LIMIT} are allowed", "HandlerStateInvalid"
        )
    return context.carry


def sandbox_request(
    spec: RolloutJobSpec, handler: Handler, task: Task, added: TaskSandbox | None = None
) -> SandboxRequest:
    """Return the request for a sandbox of a task.

    Args:
        added: What the task adds to the job's sandbox; its `sandbox` if it is None.

    Raises:
        ValueError: A quantity of the spec is malformed.
    """
    of_image = functools.partial(handler.dockerfile, task)
    return SandboxRequest.of(spec.sandbox, task.sandbox if added is None else added, of_image)
