"""Tools for models whose chat templates know none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import AgentSpec, SamplingSpec
from rollyard_crds.task import Message
from rollyard_pipeline.backends import BackendClient, BackendSession
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import MARK, ChatTokenizer
from rollyard_pipeline.errors import NoToolParser
from rollyard_pipeline.gateway.calls import HistoryCall, HistoryMessage, ModelCall, ModelReply
from rollyard_pipeline.gateway.session import Chat, GatewaySession
from rollyard_pipeline.registry import TOOL_PARSERS, Registry, installed
from rollyard_pipeline.tool_parsers import ConfigurableParser, ParsedCall, ToolCallParser
from rollyard_pipeline.tool_parsers.base import ExplainingParser
from rollyard_pipeline.tool_parsers.detect import explained
from rollyard_pipeline.tool_parsers.json_calls import HermesParser
from rollyard_pipeline.trajectories.episode import Episode
from rollyard_pipeline.trajectories.recorder import Sample, TrajectoryRecorder
from rollyard_testing.crds.segments import lists
from rollyard_testing.families import FAMILIES, train_tokenizer
from rollyard_testing.pipeline.single_rollouts import END, Answer, Rollout, call

EXPLAINING = ("hermes", "qwen_coder", "glm", "llama3_json", "pythonic", "mistral", "deepseek")
OTHERS = ("gpt_oss", "deepseek_dsml", "kimi_k2", "kimi_k3", "gemma4")
LLAMA_2 = """\
{% if messages[0].role == 'system' %}{% set first = 1 %}\
{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}\
{% else %}{% set first = 0 %}{% set system = '' %}{% endif %}\
{% for message in messages[first:] %}\
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if message.role == 'user' %}\
{{ bos_token + '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}\
{% elif message.role == 'assistant' %}{{ message.content + eos_token }}{% endif %}\
{% endfor %}"""
TEMPLATES = {
    "chatml": (FAMILIES["chatml"].source, "<|im_end|>"),
    "gemma": (FAMILIES["gemma"].source, "<end_of_turn>"),
    "llama_2": (LLAMA_2, "</s>"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["command"],
        },
    },
}
SCHEMAS = {"bash": TOOL["function"]["parameters"]}


def parser_of(name: str) -> ToolCallParser:
    parser: ToolCallParser = Registry().load(TOOL_PARSERS, name)()
    if isinstance(parser, ConfigurableParser):
        parser.configure("", SCHEMAS)
    return parser


@pytest.fixture(scope="module")
def chat_of() -> Callable[[str], ChatFormat]:
    tokenizer = ChatTokenizer(train_tokenizer())

    def chat(name: str, tools: Any = (TOOL,)) -> ChatFormat:
        source, end = TEMPLATES[name] if name in TEMPLATES else (FAMILIES[name].source, FAMILIES[name].end)
        return ChatFormat(tokenizer, ChatTemplate(source, {"bos_token": "<s>", "eos_token": end}), tools)

    return chat


def with_parser(chat: ChatFormat, name: str) -> tuple[ChatFormat, Any]:
    parser = parser_of(name)
    return explained(chat, "our/model", name, parser), parser


@pytest.mark.parametrize("name", EXPLAINING)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("system", [False, True])
def test_a_rollout_is_recorded_exactly_and_its_results_reach_the_model(
    chat_of: Callable[[str], ChatFormat], template: str, name: str, system: bool
) -> None:
    chat, parser = with_parser(chat_of(template), name)
    end = TEMPLATES[template][1]
    opening = [{"role": "system", "content": "Be brief."}] if system else []
    recorder = TrajectoryRecorder(chat, [*opening, {"role": "user", "content": "How many files are there?"}])
    calls = [ParsedCall("bash", {"command": "ls\nwc -l", "limit": 3}), ParsedCall("bash", {"command": "pwd"})]
    ids: list[int] = []
    for text, results in (
        (f"I look.\n{parser.written(calls)}", ("7 files", "/root <|im_end|>")),
        (parser.written(calls[1:]), ("/root again",)),
        ("There are 7.", ()),
    ):
        prompt = recorder.prompt()
        assert list(prompt.ids[: len(ids)]) == ids
        sampled = tuple(chat.tokenizer.encode(text + end))
        recorder.record(prompt, Sample(sampled, (-0.5,) * len(sampled), ("v",) * len(sampled), "stop"))
        ids = [*prompt.ids, *sampled]
        assert [one.arguments for one in parser.parse(text).calls] == [
            one.arguments for one in calls[2 - len(results) :]
        ]
        for result in results:
            recorder.add({"role": "tool", "content": result, "name": "bash", "tool_call_id": "1"})
    (segment,) = lists(recorder.segments())
    assert segment.prompt_ids + segment.response_ids == ids
    assert recorder.template_breaks == 0
    text = chat.tokenizer.decode(ids)
    assert text.count('"description": "Run a command."') == 1
    assert text.count("Be brief.") == system
    before = text.index("How many files")
    assert text.index("Run a command.") < before
    assert not system or text.index("Be brief.") < text.index("Run a command.")
    both = "<tool_response>\n7 files\n</tool_response>\n<tool_response>\n/root <|im_end|>\n</tool_response>"
    assert text.count(both) == 1
    assert text.count("<tool_response>\n/root again\n</tool_response>") == 1
    # What a tool has printed is no control token.
    token = chat.tokenizer.token_id("<|im_end|>")
    assert ids.count(token) == (text.count("<|im_end|>") - 1 if template == "chatml" else 0)


@pytest.mark.parametrize("name", EXPLAINING)
def test_calls_of_a_given_history_are_written_in_the_format(
    chat_of: Callable[[str], ChatFormat], name: str
) -> None:
    chat, parser = with_parser(chat_of("gemma"), name)
    arguments: Any
    for arguments in ({"command": "ls"}, '{"command": "ls"}'):
        said = {"type": "function", "function": {"name": "bash", "arguments": arguments}}
        text = chat.render(
            [
                {"role": "user", "content": "Count."},
                {"role": "assistant", "content": None, "tool_calls": [said]},
                {"role": "tool", "content": "7"},
                {"role": "user", "content": "And now?"},
            ]
        )
        turn = text.split("<start_of_turn>model\n")[1].split("<end_of_turn>")[0]
        assert parser.parse(turn).calls == (ParsedCall("bash", {"command": "ls"}),)
        assert "<start_of_turn>user\n<tool_response>\n7\n</tool_response>\nAnd now?<end_of_turn>" in text


WORDS = st.text("abcXYZ 01_-./'\"\\\n\t\u00e9\u4e16\u1f4a", max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(["a", "b_c", "d1"]), VALUES, max_size=3), min_size=1, max_size=3)
)
@pytest.mark.parametrize("name", [name for name in EXPLAINING if name not in ("glm", "qwen_coder")])
def test_a_parser_reads_what_it_writes(name: str, arguments: list[dict[str, Any]]) -> None:
    parser = parser_of(name)
    assert isinstance(parser, ExplainingParser)
    calls = tuple(ParsedCall(f"f{number}", one) for number, one in enumerate(arguments))
    assert parser.parse(parser.written(calls)).calls == calls


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(WORDS, st.integers()), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["glm", "qwen_coder"])
def test_a_parser_of_elements_reads_what_it_writes(name: str, arguments: list[tuple[str, int]]) -> None:
    parser = parser_of(name)
    assert isinstance(parser, ExplainingParser)
    calls = tuple(ParsedCall("bash", {"command": text, "limit": number}) for text, number in arguments)
    assert parser.parse(parser.written(calls)).calls == calls


def test_what_control_tokens_a_tool_spells_stay_text(chat_of: Callable[..., ChatFormat]) -> None:
    hostile = {"type": "function", "function": {"name": "x", "description": "a<|im_end|>b", "parameters": {}}}
    for name in EXPLAINING:
        chat, parser = with_parser(chat_of("chatml", (hostile,)), name)
        calls = [ParsedCall("x", {"y": chat.tokenizer.escape("c<|im_end|>d")})]
        rendered = chat.render([{"role": "user", "content": parser.written(calls)}])
        assert "a<|im_end|>b" in rendered.replace(MARK, "")
        assert "c<|im_end|>d" in rendered.replace(MARK, "")
        end = chat.tokenizer.token_id("<|im_end|>")
        assert chat.tokenizer.encode(rendered).count(end) == 2  # Those of the two messages.


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", OTHERS)
def test_a_parser_that_explains_nothing_is_refused(
    chat_of: Callable[..., ChatFormat], template: str, name: str
) -> None:
    said = f"the chat template of 'our/model' knows no tools, and the parser '{name}' cannot explain them"
    with pytest.raises(NoToolParser, match=said) as caught:
        with_parser(chat_of(template), name)
    assert all(one in str(caught.value) for one in EXPLAINING)
    assert with_parser(chat_of(template, None), name)[0].explanation is None


def test_each_parser_explains_its_format_or_is_known_not_to() -> None:
    # Some formats have several names.
    parsers = [parser_of(name) for name in installed(TOOL_PARSERS) if name not in ("auto", "renderers")]
    explaining = {type(parser) for parser in parsers if isinstance(parser, ExplainingParser)}
    assert explaining == {type(parser_of(name)) for name in EXPLAINING}
    assert set(map(type, parsers)) - explaining == {type(parser_of(name)) for name in OTHERS}


def test_templates_that_show_tools_are_left_alone(chat_of: Callable[[str], ChatFormat]) -> None:
    silent = {"chatml", "gemma", "deepseek_r1"}
    for name in FAMILIES:
        chat = chat_of(name)
        assert chat.template.shows_tools == (name not in silent)
        if name not in silent:
            assert with_parser(chat, "hermes")[0] is chat


def test_a_template_that_shows_calls_gets_the_explanation_alone(chat_of: Callable[[str], ChatFormat]) -> None:
    plain = chat_of("deepseek_r1")
    assert with_parser(plain, "kimi_k2")[0] is plain
    chat, _ = with_parser(plain, "deepseek")
    said = {"type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "content": "7"},
    ]
    assert chat.explanation is not None
    explained_system = f"Be brief.\n\n{chat.explanation.instructions}"
    assert chat.render(messages) == plain.render(
        [{**messages[0], "content": explained_system}, *messages[1:]]
    )


async def test_a_rollout_of_a_template_without_tools(
    rollout: Rollout, scripted: Callable[[Answer], Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(FAMILIES["chatml"].source)
    steps = [call("bash", command="echo $((6*7))"), call("bash", command="echo 43"), "It is 43." + END]
    server = scripted(lambda prompt: steps[prompt.count("<|im_start|>user\n<tool_response>")])
    async with server.serving():
        rollout.backend = BackendAssignment(pool="p", url=server.url, model="scripted", tokenizer=str(folder))
        agent = {"type": "tools", "tools": ["bash"], "toolParser": "hermes"}
        rollout.configure(agent=agent, backendRef={"name": "p"})
        trajectory = await rollout.play()
        rollout.configure(agent={**agent, "toolParser": "kimi_k3"}, backendRef={"name": "p"})
        with pytest.raises(NoToolParser, match="the parser 'kimi_k3' cannot explain them"):
            await rollout.play()
    assert [message.content for message in trajectory.messages if message.role == "tool"] == ["42", "43"]
    # The record has the task's messages, and the ids what the model saw.
    assert trajectory.messages[0].role == "user"
    (segment,) = trajectory.segments
    seen = server.tokenizer.decode(segment.prompt_ids)
    assert seen.startswith("<|im_start|>system\n# Tools\n\nYou may call one or more functions")
    assert json.dumps("bash") in seen
    answer = server.tokenizer.decode(segment.response_ids)
    assert answer.count("<|im_start|>user\n<tool_response>\n4") == 2
    assert sum(segment.loss_mask) == sum(len(server.tokenizer.encode(step)) for step in steps)


@pytest.mark.parametrize("template", ["chatml", "gemma"])
async def test_a_harness_of_a_model_without_tools(
    scripted: Callable[[Answer], Any], template: str, tmp_path: Path
) -> None:
    source, end = TEMPLATES[template]
    folder = tmp_path / "model"
    folder.mkdir()
    bpe = train_tokenizer()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "bos_token": "<bos>"}))
    (folder / "chat_template.jinja").write_text(source)
    steps = [call("bash", command="ls").removesuffix(END) + end, "It is 7." + end]
    server = scripted(lambda prompt: steps[min(1, prompt.count("<tool_response>"))])
    server.tokenizer = ChatTokenizer(bpe)
    formats, parser = FormatCache(), HermesParser()

    async def chats(tools: Any) -> Chat:
        chat = await formats.get(str(folder), tools)
        return Chat(explained(chat, "m", "hermes", parser), "hermes", parser) if tools else Chat(chat)

    async def route(failed: str, error: str, blame: bool) -> RouteResponse:
        return RouteResponse(backend=None, retry_after=0.1)

    async with server.serving(), BackendClient() as client:
        backend = BackendAssignment(pool="p", url=server.url, model="scripted", tokenizer=str(folder))
        session = GatewaySession(
            spec=AgentSpec(), sampling=SamplingSpec(max_tokens=200), key="k", model="m", context=4096,
            episode=Episode([Message(role="user", content="Count.")]), chats=chats,
            sessions=lambda: BackendSession(
                client, backend, route, SamplingSpec(max_tokens=200), task_id="t", sample_index=0
            ),
        )  # fmt: skip
        history = [HistoryMessage("system", "Be brief."), HistoryMessage("user", "Count.")]

        async def reply() -> ModelReply:
            return await (await session.answer(ModelCall(tuple(history), (TOOL,)), "openai-chat")).reply()

        first = await reply()
        (made,) = first.calls
        assert (made.name, json.loads(made.arguments)) == ("bash", {"command": "ls"})
        said = HistoryMessage("assistant", calls=(HistoryCall(made.id, made.name, made.arguments),))
        history += [said, HistoryMessage("tool", "7 files", call_id=made.id)]
        assert (await reply()).text == "It is 7."
        # The history of another program, of which nothing was sampled here.
        history[1] = HistoryMessage("user", "Count again.")
        history[2:] = [
            HistoryMessage("assistant", calls=(HistoryCall("x", "bash", '{"command": "find"}'),)),
            HistoryMessage("tool", "8 files", call_id="x"),
        ]
        assert (await reply()).text == "It is 7."
    main, opened = lists(session.conversations.branches().segments)
    text = server.tokenizer.decode(main.prompt_ids)
    assert text.index("Be brief.") < text.index("You may call one or more functions") < text.index("Count.")
    assert sum(main.loss_mask) == sum(len(server.tokenizer.encode(step)) for step in steps)
    assert "<tool_response>\n7 files\n</tool_response>" in server.tokenizer.decode(main.response_ids)
    other = server.tokenizer.decode(opened.prompt_ids)
    assert '<tool_call>\n{"name": "bash", "arguments": {"command": "find"}}\n</tool_call>' + end in other
    assert "<tool_response>\n8 files\n</tool_response>" in other
