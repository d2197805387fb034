"""Whole jobs: a control plane process, a worker process, real sandboxes, and a model over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from rich.console import Console
from rollyard.jobs.manifests import packed
from rollyard.render.trajectory import TrajectoryView
from rollyard_client import AsyncClient
from rollyard_crds.trajectory import Trajectory
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_testing.families import FAMILIES
from rollyard_testing.pace import patience

END = "<|im_end|>"


@pytest.fixture(scope="module")
def sandbox(bubblewrap_problem: str | None) -> str:
    """Return `bubblewrap` where it works; with ROLLYARD_REQUIRE_REAL=1 it must."""
    if bubblewrap_problem is None:
        return "bubblewrap"
    if os.environ.get("ROLLYARD_REQUIRE_REAL") == "1":
        pytest.fail(bubblewrap_problem)
    return "process"


class Yard:
    """A control plane, and workers to start beside it."""

    def __init__(self, folder: Path, url: str, client: AsyncClient, sandbox: str) -> None:
        self.folder = folder
        self.url = url
        self.client = client
        self.sandbox = sandbox

    @asynccontextmanager
    async def worker(self, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
        with (self.folder / "worker.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollyard_pipeline", "--url", self.url,
                "--token-file", str(self.folder / "state" / "tokens.json"),
                "--run-dir", str(self.folder / "run"), "--sandbox", self.sandbox, *options,
                stderr=log,
            )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(patience(60)):
                await process.wait()

    async def job(self, name: str, tasks: list[dict[str, Any]] | dict[str, Any], **spec: Any) -> None:
        source = tasks if isinstance(tasks, dict) else {"inline": tasks}
        spec = {"tasks": source, "handler": "shell", "sandbox": SMALL, **spec}
        manifest = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": name}}
        await self.client.submit({**manifest, "spec": spec})

    async def pool(self, name: str, url: str, tokenizer: Path) -> None:
        spec = {
            "model": "scripted", "tokenizer": str(tokenizer),
            "engine": {"type": "external", "external": {"urls": [url]}},
        }  # fmt: skip
        manifest = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "BackendPool", "metadata": {"name": name}}
        await self.client.create_pool({**manifest, "spec": spec})

    async def results(self, name: str, count: int) -> list[Trajectory]:
        found: list[Trajectory] = []
        async with asyncio.timeout(patience(120)):
            async for trajectory in self.client.trajectories(name, follow=True):
                found.append(trajectory)
                if len(found) == count:
                    return found
        raise AssertionError(f"{len(found)} of {count} trajectories; {self.log()}")

    def log(self) -> str:
        return (self.folder / "worker.log").read_text()[-4000:]

    def sandboxes(self) -> list[str]:
        folder = self.folder / "run" / "sandboxes"
        return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


SMALL = {"resources": {"memory": "192Mi", "disk": "16Mi", "processes": 64}, "warm": 1}


@pytest.fixture
async def yard(tmp_path_factory: pytest.TempPathFactory, sandbox: str) -> AsyncIterator[Yard]:
    # A socket's path must be short.
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("y", numbered=True)))
    port_file = folder / "port"
    with (folder / "api.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollyard_api", "--state-dir", str(folder / "state"), "--port", "0",
            "--port-file", str(port_file), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with asyncio.timeout(patience(60)):
            while not port_file.exists():
                assert process.returncode is None, (folder / "api.log").read_text()
                await asyncio.sleep(0.05)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        token = json.loads((folder / "state" / "tokens.json").read_text())["admin"]
        async with AsyncClient(url, token) as client:
            yield Yard(folder, url, client, sandbox)
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(patience(30)):
            await process.wait()


def count_task(number: int) -> dict[str, Any]:
    """Return a task: count files, write the number into a file, and submit it."""
    return {
        "id": f"count-{number}",
        "prompt": "How many files are in the folder data? Write the number into result.txt and submit it.",
        "sandbox": {
            "files": {f"data/{place}.txt": "x\n" for place in range(number)},
            "env": {"EXPECTED": str(number)},
            "setup": "mkdir -p data; touch ready",
        },
        "test_script": '[ -f ready ] && [ "$(cat result.txt)$ROLLYARD_ANSWER" = "$EXPECTED$EXPECTED" ]',
        "solution": [
            {"name": "bash", "arguments": {"command": "ls data | wc -l > result.txt"}},
            {"name": "submit", "arguments": {"answer": str(number)}},
        ],
    }


async def test_the_oracle_solves_every_task(yard: Yard) -> None:
    tasks = [count_task(number) for number in range(1, 9)]
    await yard.job("oracle", tasks, agent={"type": "oracle"})
    async with yard.worker("--job", "oracle") as worker:
        results = await yard.results("oracle", len(tasks))
        async with asyncio.timeout(patience(60)):
            code = await worker.wait()
    assert code == 0, yard.log()
    assert [(result.status, result.reward) for result in results] == [("succeeded", 1.0)] * len(tasks), (
        yard.log()
    )
    for result in results:
        assert result.segments == []
        assert [turn.finish_reason for turn in result.turns] == ["replayed", "replayed"]
        assert [message.role for message in result.messages] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
        ]
        assert result.timings.run.active_seconds > 0
    assert yard.sandboxes() == []


def call(name: str, **arguments: str) -> str:
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>{END}"


def counting_policy(prompt: str) -> str:
    """Read what the tools print, as a policy does."""
    said = prompt.split("<tool_response>\n")[1:]
    if not said:
        return call("bash", command="ls data | wc -l | tee result.txt")
    return call("submit", answer=said[-1].split("\n</tool_response>")[0])


async def test_a_policy_with_tools(
    yard: Yard, scripted: Callable[[Callable[[str], str]], Any], model_folder: Path
) -> None:
    async with scripted(counting_policy).serving() as model:
        await yard.pool("p", model.url, model_folder)
        tasks = [count_task(number) for number in (2, 3, 5)]
        await yard.job("policy", tasks, samplesPerTask=2, backendRef={"name": "p"})
        async with yard.worker("--job", "policy"):
            results = await yard.results("policy", 6)
    assert [result.reward for result in results] == [1.0] * 6, yard.log()
    for result in results:
        (segment,) = result.segments
        assert result.template_breaks == 0
        assert [turn.finish_reason for turn in result.turns] == ["tool_calls", "tool_calls"]
        assert set(segment.policy_versions) == {"step-1", ""}
        assert sum(segment.loss_mask) == sum(turn.end - turn.start for turn in result.turns)
        # The last prompt that the backend read is the record up to the last turn.
        ids = segment.prompt_ids + segment.response_ids[: result.turns[-1].start]
        assert ids in model.prompts
        assert result.backend == model.url
        assert result.sampling is not None
        assert 0 < result.timings.model_seconds <= result.timings.run.active_seconds
    assert yard.sandboxes() == []


CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "How many files are there?"},
    {
        "role": "assistant", "content": None, "reasoning_content": "I list them.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": {"path": "/data"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "a b c"},
]  # fmt: skip
"""A conversation with a call, a thought and a result, in OpenAI's form but for the arguments."""


async def test_a_chat_that_begins_with_calls(
    yard: Yard, scripted: Callable[[Callable[[str], str]], Any], model_folder: Path
) -> None:
    """The model reads what the template makes of the chat, and none of it passes for the policy's own."""
    messages = json.loads(json.dumps(CHAT))
    function = messages[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    file = yard.folder / "chats.jsonl"
    file.write_text(json.dumps({"messages": [*messages, {"role": "assistant", "content": "3"}]}))
    async with scripted(lambda _prompt: f"3{END}").serving() as model:
        await yard.pool("p", model.url, model_folder)
        await yard.job(
            "chats", {"url": await yard.client.upload(file), "format": "chat"}, handler="math",
            agent={"type": "single_turn"}, backendRef={"name": "p"},
        )  # fmt: skip
        async with yard.worker("--job", "chats"):
            (result,) = await yard.results("chats", 1)
    assert (result.reward, len(result.turns)) == (1.0, 1), yard.log()
    template = ChatTemplate((model_folder / "chat_template.jinja").read_text())
    (segment,) = result.segments
    assert segment.prompt_ids == model.tokenizer.encode(template.render(CHAT))
    assert segment.loss_mask == [1] * len(segment.response_ids)
    assert model.tokenizer.decode(segment.response_ids) == f"3{END}"
    shown = io.StringIO()
    TrajectoryView(Console(file=shown, width=200)).show(result)
    assert (
        '── assistant, given\nI list them.\n   ls {"path": "/data"}\n── tool\na b c\n── turn 1'
        in shown.getvalue()
    )
    assert re.findall("«(.*)»", shown.getvalue()) == ["3"]
    token = json.loads((yard.folder / "state" / "tokens.json").read_text())["admin"]
    path = f"{yard.url}/v1/rolloutjobs/chats/rollouts/{result.id}/messages"
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session,
        session.get(path) as answer,
    ):
        items = (await answer.json())["items"]
    assert [item["turn"] for item in items] == [None, None, None, 0]
    assert items[1]["reasoning_content"] == "I list them."
    (call,) = items[1]["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("ls", {"path": "/data"})


ROOT = Path(__file__).parents[2]
WORDS = ("echo apple > words.txt", "echo plum >> words.txt", "cat given.txt >> words.txt")


def stepping_policy(prompt: str) -> str:
    """Do what the last instruction of examples/harbor/tasks/steps says, then end the step."""
    step = prompt.count("words.txt") - sum(prompt.count(command) for command in WORDS) - 1
    done = prompt.count("<tool_response>")
    return f"Done.{END}" if done > step else call("bash", command=WORDS[step])


async def test_a_template_that_fits_no_parser_ends_the_job_at_its_first_run(
    yard: Yard, scripted: Callable[[Callable[[str], str]], Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(FAMILIES["chatml"].source)
    async with scripted(lambda prompt: END).serving() as model:
        await yard.pool("p", model.url, folder)
        tasks = [{"id": f"t{number}", "prompt": "7?", "answer": "7"} for number in range(300)]
        agent = {"type": "tools", "tools": ["submit"]}
        await yard.job("unread", tasks, handler="math", agent=agent, backendRef={"name": "p"})
        async with yard.worker("--job", "unread"):
            found = await yard.results("unread", 300)
    assert {one.reason for one in found} == {"NoToolParser"}
    failed = [one for one in found if one.status == "failed"]
    assert 0 < len(failed) < 150  # Those that were in Run already.
    assert "the chat template of 'scripted' offers no tools" in failed[0].message
    assert "set agent.toolParser" in failed[0].message
    assert {one.attempt for one in failed} == {1}


async def test_a_thinking_model_without_room_is_advised_of_it_while_the_job_runs(
    yard: Yard, scripted: Callable[[Callable[[str], str]], Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(FAMILIES["qwen3_5"].source)
    async with scripted(lambda _prompt: "Let me count again. " * 99).serving() as model:
        model.card["logprobs_mode"] = "raw_logprobs"
        await yard.pool("p", model.url, folder)
        await yard.job(
            "thinking", [{"id": f"t{number}", "prompt": "7?", "answer": "7"} for number in range(4)],
            handler="math", agent={"type": "single_turn"}, backendRef={"name": "p"}, samplesPerTask=8,
            sampling={"temperature": 0.7, "maxTokens": 32},
            stages={"init": {"concurrency": 8}, "run": {"concurrency": 8}},
        )  # fmt: skip
        async with yard.worker("--job", "thinking"):
            results = await yard.results("thinking", 32)
    assert {(one.reward, one.truncated_reason) for one in results} == {(0.0, "MaxTokens")}, yard.log()
    status = (await yard.client.job("thinking")).status
    advice = {one.reason: one.message for one in status.advice}
    assert advice["TruncatedByMaxTokens"] == (
        "32 of 32 rollouts were truncated by maxTokens (32): raise sampling.maxTokens"
    )
    assert "32 of 32 rollouts were cut in a thought that had not ended" in advice["ThoughtsDoNotEnd"]
    assert "start vLLM with --logprobs-mode processed_logprobs" in advice["OtherLogprobs"]
    assert "the reward is 0 in all of 32 rollouts" in advice["EqualRewards"]
    assert len(advice) == 4


async def test_task_folders(
    yard: Yard, sandbox: str, scripted: Callable[[Callable[[str], str]], Any], model_folder: Path
) -> None:
    """The reference solutions of all examples, then a policy that plays several steps in one record."""
    if sandbox == "process":
        pytest.skip("bare processes have no folders below /")
    kind = {"format": "harbor"}
    with packed(ROOT / "examples/harbor/tasks") as file:
        tasks = {"url": await yard.client.upload(file), **kind}
    with packed(ROOT / "examples/harbor/tasks/steps") as file:
        steps = {"url": await yard.client.upload(file), **kind}
    # The folders state how much memory their tasks need.
    fields = {"handler": "harbor", "sandbox": {"resources": {"memory": "256Mi", "disk": "16Mi"}, "warm": 0}}
    await yard.job("folders", tasks, agent={"type": "oracle"}, **fields)
    async with yard.worker("--job", "folders"):
        solved = await yard.results("folders", 4)
    assert [(one.status, one.reward) for one in solved] == [("succeeded", 1.0)] * 4, yard.log()
    async with scripted(stepping_policy).serving() as model:
        await yard.pool("p", model.url, model_folder)
        await yard.job("steps", steps, backendRef={"name": "p"}, **fields)
        async with yard.worker("--job", "steps"):
            (played,) = await yard.results("steps", 1)
    assert (played.reward, played.truncated) == (1.0, False), yard.log()
    assert [message.role for message in played.messages] == ["user", "assistant", "tool", "assistant"] * 3
    (segment,) = played.segments
    assert sum(segment.loss_mask) == sum(turn.end - turn.start for turn in played.turns)
    assert segment.prompt_ids + segment.response_ids[: played.turns[-1].start] in model.prompts
    assert yard.sandboxes() == []


POLICY = ROOT / "engine/src/rollyard_engine/models/tiny-policy"


@asynccontextmanager
async def engine(
    yard: Yard, port: int = 0, *options: str, model: Path = POLICY
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Start the embedded engine, and yield the process and its port."""
    port_file = yard.folder / "engine.port"
    port_file.unlink(missing_ok=True)
    with (yard.folder / "engine.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollyard_engine", "--model", str(model), "--port", str(port),
            "--port-file", str(port_file), "--served-model-name", "scripted", *options,
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        async with asyncio.timeout(patience(60)):
            while not port_file.exists():
                assert process.returncode is None, (yard.folder / "engine.log").read_text()
                await asyncio.sleep(0.05)
        yield process, int(port_file.read_text())
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(patience(30)):
            await process.wait()


async def quickstart(yard: Yard, name: str, tasks: int, **spec: Any) -> None:
    """Submit the first tasks of the quickstart, with two samples of each."""
    lines = (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()[:tasks]
    agent = {"type": "tools", "tools": ["bash", "edit", "submit"], "maxTurns": 8, "maxContextTokens": 1024}
    await yard.job(
        name, [json.loads(line) for line in lines], samplesPerTask=2, agent=agent,
        sampling={"maxTokens": 64}, backendRef={"name": "p"}, **spec,
    )  # fmt: skip


BUDGET = 1.0
"""How long the worker's rollouts try a backend that is ready and does not answer, in seconds."""
OUTAGE = 5.0
"""How long the only backend is away, in seconds."""


async def test_an_outage_of_the_only_backend_costs_no_attempt(yard: Yard) -> None:
    """kill -9 of the engine in the middle of Run. It is away for longer than a rollout's own retries last."""
    count = 16
    async with engine(yard) as (process, port):
        await yard.pool("p", f"http://127.0.0.1:{port}", POLICY)
        stages = {"run": {"maxAttempts": 1, "concurrency": 4}}
        await quickstart(yard, "outage", tasks=count // 2, stages=stages)
        async with yard.worker("--job", "outage", "--backend-budget", f"{BUDGET:g}"):
            await yard.results("outage", 2)
            process.kill()
            await process.wait()
            await asyncio.sleep(OUTAGE)
            before = [one async for one in yard.client.rollouts("outage")]
            assert [one for one in before if one.status == "failed"] == [], yard.log()
            waiting = [one for one in before if (one.stage, one.status) == ("run", "leased")]
            assert waiting, "no Run was under way in the outage"
            async with engine(yard, port):
                results = await yard.results("outage", count)
    assert [(result.status, result.attempt) for result in results] == [("succeeded", 0)] * count, yard.log()
    assert not any(one.counted for result in results for one in result.attempts)
    interrupted = {one.id for one in waiting}
    assert all(result.sampled_tokens > 0 for result in results if result.id in interrupted)
    assert yard.sandboxes() == []


async def test_a_template_without_tools_is_played_with_the_embedded_engine(yard: Yard) -> None:
    """Rollouts at once, whose answers a script gives; the record has what the engine says it sampled."""
    model = yard.folder / "model"
    model.mkdir()
    for file in POLICY.iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(
        FAMILIES["gemma"].source.replace("<end_of_turn>", "<|im_end|>")
    )
    script, log = yard.folder / "script.jsonl", yard.folder / "samples.jsonl"
    script.write_text(
        "".join(
            json.dumps({"contains": f"Number {number}?", "answers": [one.removesuffix(END) for one in turns]})
            + "\n"
            for number in range(2)
            for turns in [[call("bash", command=f"echo 4{number}"), call("submit", answer=f"4{number}")]]
        )
    )
    options = (f"--script={script}", f"--log-samples={log}", "--policy-version=v3")
    async with engine(yard, 0, *options, model=model) as (_, port):
        await yard.pool("p", f"http://127.0.0.1:{port}", model)
        tasks = [
            {"id": f"t{number}", "prompt": f"Number {number}?", "answer": f"4{number}"} for number in range(2)
        ]
        agent = {"type": "tools", "tools": ["bash", "submit"], "toolParser": "hermes"}
        await yard.job(
            "plain", tasks, handler="math", agent=agent, samplesPerTask=4, backendRef={"name": "p"}
        )
        async with yard.worker("--job", "plain"):
            results = await yard.results("plain", 8)
    assert [(result.status, result.reward) for result in results] == [("succeeded", 1.0)] * 8, yard.log()
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    delivered = []
    for one in results:
        assert [message.role for message in one.messages].count("tool") == 2
        (segment,) = one.segments
        ids = [*segment.prompt_ids, *segment.response_ids]
        for turn in one.turns:
            start, end = (len(segment.prompt_ids) + place for place in (turn.start, turn.end))
            delivered.append((ids[:start], ids[start:end], segment.logprobs[turn.start : turn.end]))
        assert segment.policy_versions[: one.turns[0].end] == ["v3"] * one.turns[0].end
    asked = [
        (entry["prompt_ids"], entry["ids"], entry["logprobs"])
        for entry in logged
        if entry["finish_reason"] == "stop"
    ]
    assert len(delivered) == 16
    assert sorted(delivered) == sorted(asked)
