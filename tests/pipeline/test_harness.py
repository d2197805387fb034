"""Rollouts that a program in the sandbox plays, through the gateway of the Run worker."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.task import Message
from rollyard_crds.trajectory import Trajectory
from rollyard_inference.errors import BackendUnavailable
from rollyard_pipeline.errors import PermanentFailure, PipelineError
from rollyard_pipeline.harnesses import Harness, HarnessPlace, HarnessProgram
from rollyard_pipeline.harnesses.shipped import MiniSweAgentHarness
from rollyard_pipeline.registry import HARNESSES, TOOL_PARSERS, Registry
from rollyard_pipeline.tool_parsers.base import ParsedTurn
from rollyard_pipeline.tool_parsers.json_calls import HermesParser
from rollyard_pipeline.worker.worker import hand_over
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import FileError, LaunchError, SandboxError
from rollyard_testing.pipeline.single_rollouts import END, Rollout, UseModel, call
from rollyard_testing.waiting import eventually

pytestmark = pytest.mark.slow

CLIENT = '''
import json, os, sys, urllib.error, urllib.request

FOLDER = os.environ["ROLLYARD_HARNESS"]
messages = json.load(open(f"{FOLDER}/messages.json"))


def ask(key=os.environ["OPENAI_API_KEY"], **fields):
    """Return the status and the body of a call."""
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **fields}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def said(answer):
    """Keep a reply in the history and return it."""
    message = answer["choices"][0]["message"]
    messages.append({name: value for name, value in message.items() if value is not None})
    return message
'''
SUBMIT = {
    "type": "function",
    "function": {
        "name": "submit",
        "parameters": {"type": "object", "properties": {"answer": {"type": "string"}}},
    },
}


def harness(program: str, **agent: Any) -> dict[str, Any]:
    """Return the fields of an agent whose harness is this program in Python."""
    command = f'{shlex.quote(sys.executable)} -u "$ROLLYARD_HARNESS/agent.py"'
    files = {"agent.py": CLIENT + program, **agent.pop("files", {})}
    return {"type": "harness", "harness": "command", "command": command, "files": files, **agent}


def printed(trajectory: Trajectory) -> Any:
    """Return the JSON that the harness has printed last."""
    assert trajectory.harness is not None
    return json.loads(trajectory.harness.output.strip().splitlines()[-1])


async def test_a_program_plays_a_rollout_and_what_it_did_is_recorded(
    rollout: Rollout, model: UseModel
) -> None:
    steps = [f"I look.{END}", call("submit", answer="42")]
    program = f"""
said(ask(tools=[{SUBMIT!r}])[1])
messages.append({{"role": "user", "content": "And now?"}})
status, answer = ask(tools=[{SUBMIT!r}], temperature=0.3)
print(json.dumps([status, said(answer)]))
open(os.environ["ROLLYARD_LOG"], "w").write("all went well")
sys.exit(3)
"""
    agent = harness(program, files={"notes.txt": "of the job"})
    model(lambda prompt: steps[prompt.count("And now?")], agent, {"prompt": "What is it?"})
    trajectory = await rollout.play()
    assert [message.content for message in trajectory.messages if message.role == "user"] == [
        "What is it?", "And now?",
    ]  # fmt: skip
    assert [turn.finish_reason for turn in trajectory.turns] == ["stop", "tool_calls"]
    assert [turn.asked for turn in trajectory.turns] == [None, {"temperature": 0.3}]
    record = trajectory.harness
    assert record is not None
    assert (record.name, record.exit_code, record.log) == ("command", 3, "all went well")
    status, message = printed(trajectory)
    assert status == 200
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"answer": "42"}
    # Each token that was sampled is trained on, once, with its log-probability.
    sampled = [
        token
        for segment in trajectory.segments
        for token, mask in zip(segment.response_ids, segment.loss_mask, strict=True)
        if mask
    ]
    expected = [token for step in steps for token in rollout.model.tokenizer.encode(step)]
    assert sampled == expected
    assert rollout.model.prompts[0] == trajectory.segments[0].prompt_ids
    # The answer of `submit` is that of the rollout, as for the agents that have the tool.
    assert rollout.ran is not None
    assert rollout.ran.carry["answer"] == "42"
    assert (trajectory.answer, trajectory.final_text) == ("42", "42")
    stats = rollout.ran.stats.gateway
    assert stats is not None
    assert (stats.calls, stats.refused, stats.conversations) == ({"openai-chat": 2}, 0, {"main": 1})
    assert not trajectory.truncated
    assert rollout.times.model_seconds > 0


async def test_it_finds_the_task_and_the_gateway_and_nothing_else_of_the_task(
    rollout: Rollout, model: UseModel
) -> None:
    program = """
ask()
folder = sorted(os.listdir(FOLDER))
names = [name for name in os.environ if "BASE" in name or "KEY" in name or "MODEL" in name]
urls = {os.environ[name] for name in names if "BASE" in name}
prompt = open(f"{FOLDER}/prompt.txt").read()
print(json.dumps([folder, names, sorted(urls), prompt, messages, os.getcwd(), FOLDER]))
"""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add."}]
    task = {"messages": messages, "prompt": None, "answer": "secret", "test_script": "secret"}
    model(lambda prompt: f"7{END}", harness(program, files={"more.txt": "x"}), task)
    trajectory = await rollout.play()
    folder, names, urls, prompt, read, work, place = printed(trajectory)
    assert folder == ["agent.py", "messages.json", "more.txt", "prompt.txt"]
    assert {"OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL"} <= {*names}
    assert {"OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY"} <= {*names}
    assert {"OPENAI_MODEL", "ANTHROPIC_MODEL", "ROLLYARD_MODEL"} <= {*names}
    assert [url.removeprefix(urls[0]) for url in urls] == ["", "/v1"]
    assert prompt == "Be brief.\n\nAdd."
    assert read == messages
    assert not place.startswith(work)


async def test_a_terminal_is_there_if_the_job_says_so(rollout: Rollout, model: UseModel) -> None:
    program = "ask()\nprint(json.dumps([os.isatty(number) for number in range(3)]))"
    for terminal in (False, True):
        model(lambda prompt: f"7{END}", harness(program, terminal=terminal))
        assert printed(await rollout.play()) == [terminal] * 3


@pytest.mark.parametrize(
    ("program", "reason", "words"),
    [
        ("no-such-program --now", "HarnessMissing", "exit code 127"),
        ("/dev/null", "HarnessMissing", "exit code 126"),
        ("echo it broke; exit 4", "HarnessFailed", r"exit code 4 before .* sampled anything: it broke"),
        ("true", "HarnessFailed", r"exit code 0 before .* \(no output\)"),
    ],
)
async def test_a_harness_without_a_turn_is_a_failure_and_no_reward(
    rollout: Rollout, model: UseModel, program: str, reason: str, words: str
) -> None:
    model(lambda prompt: f"7{END}", {"type": "harness", "harness": "command", "command": program})
    with pytest.raises(PipelineError, match=words) as caught:
        await rollout.play()
    assert caught.value.reason == reason
    assert caught.value.retryable == (reason == "HarnessFailed")


async def test_one_that_hangs_without_a_turn_is_a_failure_and_no_reward(
    rollout: Rollout, model: UseModel
) -> None:
    agent = {"type": "harness", "harness": "command", "command": "echo waiting; sleep 1000"}
    model(lambda prompt: f"7{END}", agent, stages={"run": {"timeoutSeconds": 1}})
    with pytest.raises(PipelineError, match="until the end of Run: waiting") as caught:
        await rollout.play()
    assert caught.value.reason == "HarnessFailed"


async def test_a_prompt_without_room_is_the_authors_fault(rollout: Rollout, model: UseModel) -> None:
    model(lambda prompt: f"7{END}", harness("print(ask())", maxContextTokens=16), {"prompt": "x " * 200})
    with pytest.raises(PermanentFailure, match="task 't': the prompt has") as caught:
        await rollout.play()
    assert caught.value.reason == "PromptTooLong"


async def test_limits_are_errors_of_the_protocol(rollout: Rollout, model: UseModel) -> None:
    program = """
said(ask()[1])
messages.append({"role": "user", "content": "More."})
print(json.dumps(ask()))
"""
    model(lambda prompt: f"7{END}", harness(program, maxTurns=1))
    trajectory = await rollout.play()
    status, body = printed(trajectory)
    assert status == 400
    assert "agent.maxTurns" in body["error"]["message"]
    assert (len(trajectory.turns), trajectory.truncated_reason) == (1, "MaxTurns")


async def test_a_backend_that_is_gone_is_no_reward_though_the_harness_ends_in_order(
    rollout: Rollout, model: UseModel
) -> None:
    program = """
said(ask()[1])
messages.append({"role": "user", "content": "Stop the server."})
print(ask())
"""

    def answer(prompt: str) -> str:
        if "Stop the server." in prompt:
            raise RuntimeError("the backend breaks")
        return f"7{END}"

    model(answer, harness(program))
    with pytest.raises((BackendUnavailable, PipelineError)):
        await rollout.play()


async def test_a_backend_that_is_gone_at_the_end_of_run_is_no_reward_though_no_call_waits_for_it(
    rollout: Rollout, model: UseModel
) -> None:
    program = """
import time
said(ask()[1])
messages.append({"role": "user", "content": "Stop the server."})
print(ask()[0], flush=True)
time.sleep(1000)
"""

    def answer(prompt: str) -> str:
        if "Stop the server." in prompt:
            raise RuntimeError("the backend breaks")
        return f"7{END}"

    model(answer, harness(program), stages={"run": {"timeoutSeconds": 6}})
    with pytest.raises(BackendUnavailable):
        await rollout.play()


POLICYS_TOOLS = [
    {"properties": 5},
    {"properties": {"a": 5}},
    {"properties": {"a": {"anyOf": 5}}},
    {"properties": {"a": {"type": [["string"], {}]}}},
]


@pytest.mark.attack(
    "the policy offers tools of its own, whose schemas no parser can read, so that its rollout fails and is "
    "played again",
    boundary="evaluation",
    surface="calls of the gateway",
    stopped_by="parsers take any schema; a sampled turn that cannot be read fails the rollout only if its "
    "tools were offered before the policy had sampled anything",
)
async def test_schemas_of_the_policys_own_calls_do_not_fail_the_rollout(
    rollout: Rollout, model: UseModel
) -> None:
    program = f"""
said(ask(tools=[{SUBMIT!r}])[1])
own = []
for parameters in {POLICYS_TOOLS!r}:
    tool = {{"type": "function", "function": {{"name": "x", "parameters": parameters}}}}
    own.append(ask(tools=[tool], messages=[{{"role": "user", "content": "Call it."}}])[0])
print(json.dumps(own))
"""

    def answer(prompt: str) -> str:
        calls = "<tool_call>\n<function=x>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        return f"{calls if 'Call it.' in prompt else '7'}{END}"

    model(answer, harness(program, toolParser="qwen_coder"))
    assert printed(await rollout.play()) == [200] * len(POLICYS_TOOLS)


@pytest.mark.attack(
    "the policy fills the record of its rollout by calls of its own, so that the result is refused and has "
    "no score",
    boundary="evaluation",
    surface="calls of the gateway",
    stopped_by="a call that would add more than the record can hold is refused",
)
async def test_calls_of_the_policy_do_not_make_the_record_too_large(
    rollout: Rollout, model: UseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_pipeline.gateway.conversations.MAX_RECORD_BYTES", 40_000)
    program = """
said(ask()[1])
own = [ask(messages=[{"role": "user", "content": f"{number}" + " " * 6000}]) for number in range(9)]
messages.append({"role": "user", "content": "And now?"})
print(json.dumps([[status for status, _ in own], own[-1][1]["error"]["message"], ask()[0]]))
"""
    model(lambda prompt: f"7{END}", harness(program))
    trajectory = await rollout.play()
    statuses, message, last = printed(trajectory)
    assert statuses[:2] == [200, 200]
    assert statuses[-2:] == [400, 400]
    assert "the record of the rollout would have more than" in message
    assert last == 200
    assert rollout.ran is not None
    assert len(rollout.ran.model_dump_json()) < 120_000


class PickyParser(HermesParser):
    """A parser with a mistake: it fails where it reads a call of a tool `trap`."""

    def parse(self, text: str) -> ParsedTurn:
        if "trap" in self._schemas:
            raise RuntimeError("the parser breaks")
        return super().parse(text)


@pytest.mark.parametrize("from_the_start", [False, True])
async def test_a_parser_that_breaks_on_tools_counts_if_the_harness_has_offered_them_from_the_start(
    rollout: Rollout, model: UseModel, from_the_start: bool
) -> None:
    trap = {"type": "function", "function": {"name": "trap"}}
    first = [trap if from_the_start else SUBMIT]
    program = f"""
print(ask(tools={first!r}))
print(json.dumps(ask(tools=[{trap!r}], messages=[{{"role": "user", "content": "My own."}}])[0]))
"""
    model(lambda prompt: f"7{END}", harness(program, toolParser="picky"))
    if from_the_start:
        with pytest.raises(RuntimeError, match="the parser breaks"):
            await rollout.play()
    else:
        assert printed(await rollout.play()) == 503


class GreeterHarness(Harness):
    """A preset of another package."""

    def program(self, place: HarnessPlace) -> HarnessProgram:
        script = f'{place.command or "cat"} greeting > "$ROLLYARD_HARNESS/seen"; '
        script += f'{shlex.quote(sys.executable)} "$ROLLYARD_HARNESS/sub/run.py"'
        files = {"sub/run.py": CLIENT + "ask()\nprint(sys.stdin.read(), open(f'{FOLDER}/seen').read())"}
        return HarnessProgram(script, files=files, stdin="read me", log="seen")


@pytest.fixture
def extensions() -> Registry:
    return Registry({HARNESSES: {"greeter": GreeterHarness}, TOOL_PARSERS: {"picky": PickyParser}})


async def test_a_preset_of_another_package_is_used(rollout: Rollout, model: UseModel) -> None:
    task = {"sandbox": {"files": {"greeting": "hello"}}}
    model(lambda prompt: f"7{END}", {"type": "harness", "harness": "greeter"}, task)
    record = (await rollout.play()).harness
    assert record is not None
    assert (record.name, record.output.strip(), record.log) == ("greeter", "read me hello", "hello")


async def test_an_unknown_harness_is_found_out_before_a_sandbox_starts(
    rollout: Rollout, model: UseModel
) -> None:
    model(lambda prompt: f"7{END}", {"type": "harness", "harness": "no-such"})
    with pytest.raises(PermanentFailure, match="no harness 'no-such' is installed") as caught:
        await rollout.stage("init")
    assert caught.value.reason == "UnknownHarness"
    assert rollout.provider.claimed() == []


async def test_it_has_a_sandbox_though_the_handler_needs_none(rollout: Rollout, model: UseModel) -> None:
    task = {"answer": "7", "test_script": None}
    model(lambda prompt: f"\\boxed{{7}}{END}", harness("ask()"), task, handler="math")
    record = (await rollout.play()).harness
    assert record is not None
    assert record.exit_code == 0


def place(**fields: Any) -> HarnessPlace:
    """Return a place with these fields."""
    known = {"base_url": "http://127.0.0.1:1", "key": "k", "model": "M/x", "context": 8, "folder": "/tmp/h",
             "workdir": "/work", "messages": [Message(role="user", content="Fix 'it'.")]}  # fmt: skip
    return HarnessPlace(**{**known, **fields})


def test_mini_swe_agent_is_called_as_its_manual_says() -> None:
    program = MiniSweAgentHarness().program(place())
    assert shlex.split(program.script) == [
        "mini", "-y", "--exit-immediately", "-m", "openai/M/x", "-t", "Fix 'it'.", "-o", "$ROLLYARD_LOG",
    ]  # fmt: skip
    own = MiniSweAgentHarness().program(place(command="nice mini -c own.yaml")).script
    assert own.startswith("nice mini -c own.yaml -y ")


async def test_a_rollout_that_is_cancelled_or_handed_over_leaves_no_process_of_its_harness(
    rollout: Rollout, model: UseModel, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    program = f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
said(ask()[1])
with open({str(seen)!r}, "w") as file:
    file.write(str(os.getpid()))
while True:
    time.sleep(0.1)
    ask()
"""
    model(lambda prompt: f"7{END}", harness(program))
    init = await rollout.stage("init")
    run = asyncio.create_task(rollout.stage("run", sandbox=init.sandbox, carry=init.carry))

    async def started() -> int:
        return int(seen.read_text() or 0) if seen.exists() else 0

    harness_id = await eventually(started)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not Path(f"/proc/{harness_id}").exists()
    # What has been played is in the sandbox, so that the next worker begins with a fresh one.
    lease = rollout.lease("run", sandbox=init.sandbox)
    assert hand_over(lease, rollout.times).return_to == "init"


STEPS = """
class Judge(Handler):
    async def run(self, ctx):
        further = await ctx.agent_steps.step(ctx.task, 60.0)
        ctx.agent_steps.say("Then subtract.")
        await ctx.run_agent()
        ctx.carry["further"] = further

    async def eval(self, ctx):
        return Evaluation(float(ctx.carry["further"] and ctx.final_text == "second"))
"""


async def test_each_step_of_a_task_is_a_run_of_the_harness(
    rollout: Rollout, model: UseModel, install: Callable[[str], None]
) -> None:
    install(STEPS)
    program = f"""
said(ask(tools=[{SUBMIT!r}])[1])
print(messages[0]["content"])
"""
    answers = {"Add.": f"first{END}", "Then subtract.": f"second{END}"}

    def answer(prompt: str) -> str:
        (said,) = [text for begin, text in answers.items() if begin in prompt]
        return said

    model(answer, harness(program), {"prompt": "Add."}, handler="steered")
    trajectory = await rollout.play()
    assert [message.content for message in trajectory.messages] == ["Then subtract.", "second"]
    (branch,) = trajectory.branches
    assert (branch.kind, branch.trained, branch.parent) == ("main", True, None)
    assert [message.content for message in branch.messages] == ["Add.", "first"]
    assert trajectory.harness is not None
    assert trajectory.harness.output.split("\n") == ["Add.", "Then subtract.", ""]
    assert sum(map(sum, (segment.loss_mask for segment in trajectory.segments))) == sum(
        len(rollout.model.tokenizer.encode(text)) for text in answers.values()
    )
    assert (await rollout.score()).reward == 1.0


@pytest.mark.attack(
    "the policy breaks its sandbox so that the harness of a further step cannot start, and its rollout is "
    "played again",
    boundary="evaluation",
    surface="steps of a harness",
    stopped_by="once the model has sampled, the policy answers for its sandbox: the rollout is evaluated",
)
async def test_a_sandbox_that_an_earlier_step_has_broken_is_evaluated(
    rollout: Rollout, model: UseModel, install: Callable[[str], None]
) -> None:
    install(STEPS)
    program = "import shutil\nsaid(ask()[1])\nshutil.rmtree(os.getcwd())"
    model(lambda prompt: f"7{END}", harness(program), handler="steered")
    trajectory = await rollout.play()
    assert [message.content for message in trajectory.messages] == ["q", "7"]


@pytest.mark.parametrize(
    ("error", "is_policys"),
    [
        (LaunchError("no", reason="ConfinementFailed"), False),
        (SandboxError("no", reason="ServerFault"), True),
        (SandboxError("no", reason="BadRequest"), False),
    ],
)
async def test_who_is_at_fault_for_a_step_that_cannot_start_is_decided_as_for_tools(
    rollout: Rollout,
    model: UseModel,
    install: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    error: SandboxError,
    is_policys: bool,
) -> None:
    install(STEPS)
    tunnel, opened = ExecClient.tunnel, []

    async def second_fails(client: ExecClient, purpose: Any = "network") -> Any:
        opened.append(await tunnel(client, purpose) if not rollout.model.prompts else None)
        if opened[-1] is None:
            raise error
        return opened[-1]

    monkeypatch.setattr(ExecClient, "tunnel", second_fails)
    model(lambda prompt: f"7{END}", harness("said(ask()[1])"), handler="steered")
    if is_policys:
        assert len((await rollout.play()).turns) == 1
    else:
        with pytest.raises(SandboxError) as caught:
            await rollout.play()
        assert caught.value.reason == error.reason


LATE = """
import subprocess, time
said(ask()[1])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while os.path.exists(FOLDER):
            time.sleep(0.01)
        messages.append({"role": "user", "content": "One more."})
        try:
            text = str(ask())
        except OSError as error:
            text = str(error)
        with open("late.part", "w") as file:
            file.write(text)
        os.rename("late.part", "late")
    os._exit(0)
"""


async def test_a_call_after_its_end_finds_nobody(rollout: Rollout, model: UseModel) -> None:
    model(lambda prompt: f"7{END}", harness(LATE))
    trajectory = await rollout.play()
    assert rollout.init is not None
    assert rollout.init.sandbox is not None
    sandbox = await rollout.provider.attach(rollout.init.sandbox)
    async with sandbox:

        async def said() -> str:
            try:
                return (await sandbox.client.read_file("late")).data.decode()
            except FileError:
                return ""

        text = await eventually(said)
        assert "refused" in text or "reset" in text or "closed" in text
    assert len(trajectory.turns) == 1
    assert len(rollout.model.prompts) == 1
