"""The agent `harness`: a program in the sandbox, whose calls to the model go through the gateway."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress
from typing import Final

import orjson
from rollyard_crds.trajectory import MAX_HARNESS_TEXT, HarnessRecord, turns_said
from rollyard_sandbox.client import ExecClient, ExecResult
from rollyard_sandbox.errors import SandboxError as ExecError

from rollyard_pipeline.agents.base import Agent, AgentContext, HarnessAccess
from rollyard_pipeline.errors import PermanentFailure, PipelineError
from rollyard_pipeline.gateway.errors import CallError
from rollyard_pipeline.harnesses.base import HarnessPlace, HarnessProgram, provider_variables
from rollyard_pipeline.sandboxes.starters.runtime import TOOLS
from rollyard_pipeline.tools.base import without_controls
from rollyard_pipeline.tools.shipped import SubmitTool, answer_problem
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.sanitize import clean_text

log = logging.getLogger(__name__)

_LONGEST: Final = 7 * 24 * 3600.0  # Run's own limit ends the harness long before; this is the exec server's.
_GRACE: Final = 2.0
"""The time in which a harness can end by itself once its calls are refused, in seconds."""
_KILL_SECONDS: Final = 10.0
_SHOWN: Final = 400  # characters of output in an error; an attempt's message is cut at 512
_MAX_SCRIPT: Final = 120_000
"""The most bytes of the command with its arguments. Linux permits 128 KiB for one argument."""
_NOT_STARTED: Final = (126, 127)
"""The exit codes of a shell that cannot run a program, and that does not find it."""


class HarnessAgent(Agent):
    """Runs the job's harness until it ends. What it asks the model is recorded by the gateway."""

    uses_tools = False
    uses_gateway = True

    async def run(self, ctx: AgentContext) -> None:
        """Run the harness in the sandbox.

        Raises:
            PermanentFailure: The harness is not in the sandbox, or cannot play this task.
            PipelineError: The harness ended before the model had sampled anything.
        """
        from rollyard_pipeline.gateway.server import GatewayServer  # Other workers need no HTTP server.

        use = ctx.harness
        if use is None:
            raise RuntimeError("the agent needs the rollout's gateway")
        client = ctx.tool_context.sandbox
        folder = f"/tmp/rollyard-{secrets.token_hex(8)}"
        try:
            async with GatewayServer(use.gateway).lent(client) as base_url:
                place = HarnessPlace(
                    base_url=base_url,
                    key=use.gateway.key,
                    model=use.gateway.model,
                    context=use.gateway.context,
                    messages=use.messages,
                    folder=folder,
                    workdir=use.workdir,
                    command=ctx.spec.command,
                )
                program = use.harness.program(place)
                try:
                    await _write(client, place, {**program.files, **(ctx.spec.files or {})})
                    result = await _played(ctx, use, place, program)
                finally:
                    await use.gateway.close(CallError("ended", "the harness of this rollout has ended"))
                    with suppress(ExecError):
                        await client.remove(folder)
        except ExecError as error:
            if not use.gateway.turns or not await ctx.has_caused(error):
                raise
            return  # The policy has filled or broken the sandbox, perhaps in an earlier step.
        await _judge(ctx, use, result)


async def _write(client: ExecClient, place: HarnessPlace, files: dict[str, str]) -> None:
    """Put the files of a harness into its folder."""
    messages = [message.model_dump(mode="json", exclude_none=True) for message in place.messages]
    for message in messages:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = orjson.dumps(call["function"]["arguments"]).decode()
    texts = {"messages.json": orjson.dumps(messages).decode(), **files}
    if all(message.role in ("system", "user") for message in place.messages):
        texts.setdefault("prompt.txt", place.prompt)
    for name, text in texts.items():
        await client.write_file(f"{place.folder}/{name}", text.encode(errors="replace"))


async def _played(
    ctx: AgentContext, use: HarnessAccess, place: HarnessPlace, program: HarnessProgram
) -> ExecResult:
    """Run the program to its end, and add it to the record.

    If Run's limit ends it, its calls get errors from then on. It has a little time to end by itself, and is
    then killed with all that it has started.
    """
    tools = f"{TOOLS}/{ctx.spec.harness}/bin"
    script = f'PATH="$PATH:{tools}"; export PATH\n{program.script}'
    if len(script.encode(errors="replace")) > _MAX_SCRIPT:
        raise PermanentFailure(
            f"the command of harness '{ctx.spec.harness}' has more than {_MAX_SCRIPT} bytes with the task's "
            "prompt; give it the prompt as a file: $ROLLYARD_HARNESS/prompt.txt",
            "HarnessImpossible",
        )
    client, log_file = ctx.tool_context.sandbox, f"{place.folder}/{program.log}"
    own = {"ROLLYARD_HARNESS": place.folder, "ROLLYARD_LOG": log_file}
    terminal = program.terminal if ctx.spec.terminal is None else ctx.spec.terminal
    running = asyncio.ensure_future(
        client.run(
            ["/bin/sh", "-c", script],
            env={**provider_variables(place), **own, **program.env},
            stdin=b"" if terminal else program.stdin.encode(errors="replace"),
            timeout=_LONGEST,
            max_output=MAX_HARNESS_TEXT - 256,
            terminal=terminal,
        )
    )
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await use.gateway.close(CallError("limit", "the time of this rollout is used up"))
        await _end(client, running)
        raise
    finally:
        running.cancel()
        ended = (await asyncio.gather(running, return_exceptions=True))[0]
        result = ended if isinstance(ended, ExecResult) else None
        text = await _end_of(client, log_file)
        ctx.episode.harness = _joined(ctx.episode.harness, _record(str(ctx.spec.harness), result, text))
        ctx.episode.answer = _answer(ctx.episode)


async def _end(client: ExecClient, running: asyncio.Future[ExecResult]) -> None:
    """Let a program end by itself for a moment, then kill all that runs in the sandbox."""
    await asyncio.wait({running}, timeout=_GRACE)
    if not running.done():
        with suppress(ExecError):
            await client.kill_all()
        await asyncio.wait({running}, timeout=_KILL_SECONDS)


async def _end_of(client: ExecClient, path: str) -> str:
    """Return the end of a file that the policy may have made into anything, or ""."""
    try:
        size = (await client.read_file(path, max_bytes=0)).size
        data = (
            await client.read_file(path, max_bytes=MAX_HARNESS_TEXT, offset=max(0, size - MAX_HARNESS_TEXT))
        ).data
    except ExecError:
        return ""
    return _clean(data.decode("utf-8", "replace"))


def _clean(text: str) -> str:
    return clean_text(without_controls(text), MAX_HARNESS_TEXT)


def _record(name: str, result: ExecResult | None, text: str) -> HarnessRecord:
    if result is None:
        return HarnessRecord(name=name, exit_code=None, log=text)
    killed = result.killed or result.timed_out
    return HarnessRecord(
        name=name,
        exit_code=None if killed else result.exit_code,
        seconds=result.seconds,
        output=_clean(result.text()),
        log=text,
    )


def _joined(before: HarnessRecord | None, record: HarnessRecord) -> HarnessRecord:
    """Return the record of all runs of a harness, of which a task with several steps has several."""
    if before is None:
        return record
    output = (before.output + record.output)[-MAX_HARNESS_TEXT:]
    return record.model_copy(update={"seconds": before.seconds + record.seconds, "output": output})


def _answer(episode: Episode) -> str | None:
    """Return the argument of the last call of `submit` in the rollout's own conversation, or None."""
    said = turns_said([message.role for message in episode.messages], len(episode.turns))
    for number in sorted(said, reverse=True):
        for call in reversed(episode.messages[number].tool_calls or ()):
            arguments = call.function.arguments
            answer = arguments.get("answer") if isinstance(arguments, dict) else None
            if (
                call.function.name == SubmitTool.name
                and isinstance(answer, str)
                and not answer_problem(answer)
            ):
                return answer
    return None


async def _judge(ctx: AgentContext, use: HarnessAccess, result: ExecResult) -> None:
    """Decide what the end of a harness means: the end of the episode, or a failure of the infrastructure.

    As long as the model has sampled nothing, the policy has no part in what happened.

    Raises:
        PipelineError: The harness ended without a turn of the model, or no backend answered its last call.
    """
    observed = await ctx.tool_context.ran(result)
    if observed.truncates:
        ctx.truncate(observed.truncates)
    if use.gateway.failure is not None:
        raise use.gateway.failure
    if use.gateway.turns:
        return
    refused = use.gateway.refused
    if refused is not None and refused.problem == "context":
        raise PermanentFailure(f"task '{ctx.task.id}': {refused.message}", "PromptTooLong")
    text = _clean(result.text()).strip()[-_SHOWN:] or "(no output)"
    name, code = ctx.spec.harness, result.exit_code
    if code in _NOT_STARTED:
        raise PermanentFailure(
            f"the harness '{name}' cannot be started in the sandbox (exit code {code}): {text}",
            "HarnessMissing",
        )
    raise PipelineError(
        f"the harness '{name}' ended with exit code {code} before the model had sampled anything: {text}",
        "HarnessFailed",
    )
