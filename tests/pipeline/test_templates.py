"""Token trajectories over the chat templates of many model families, with an adversarial model."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rollyard_crds import Task
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import MARK, ChatTokenizer
from rollyard_pipeline.errors import TemplateError
from rollyard_pipeline.trajectories.recorder import Prompt, Sample, TrajectoryRecorder
from rollyard_testing.crds.segments import lists
from rollyard_testing.families import FAMILIES, MARKERS, SPECIAL, Family, train_tokenizer

Message = dict[str, Any]
NOW = datetime(2026, 1, 2, 3, 4)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "What to run."},
                    "env": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["command"],
            },
        },
    }
]
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.calls is not None]


@pytest.fixture(scope="module")
def chats() -> dict[str, ChatFormat]:
    bpe = train_tokenizer()
    found = {}
    for name, family in FAMILIES.items():
        tokenizer = ChatTokenizer(bpe, dict(family.variables))
        template = ChatTemplate(family.source, tokenizer.variables())
        found[name] = ChatFormat(tokenizer, template, TOOLS if family.calls else None, NOW)
    return found


@dataclass
class Step:
    """One sampled turn, and what happens after it."""

    ids: list[int]
    after: list[Message]
    parsed: Message | None = None


@dataclass
class Played:
    recorder: TrajectoryRecorder
    prompts: list[Prompt] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    refused: TemplateError | None = None


def play(chat: ChatFormat, opening: list[Message], steps: list[Step]) -> Played:
    played = Played(TrajectoryRecorder(chat, opening))
    for step in steps:
        try:
            prompt = played.recorder.prompt()
        except TemplateError as error:
            played.refused = error
            break
        sample = Sample(
            tuple(step.ids),
            tuple(-0.5 - place / 1024 for place in range(len(step.ids))),
            tuple(f"v{len(played.samples)}.{place}" for place in range(len(step.ids))),
            "stop",
        )
        played.recorder.record(prompt, sample)
        played.prompts.append(prompt)
        played.samples.append(sample)
        if step.parsed is not None:
            played.recorder.structured(step.parsed)
        for message in step.after:
            played.recorder.add(message)
    return played


def check(chat: ChatFormat, played: Played) -> None:
    """Check what a trainer relies on, from what was sent and sampled alone."""
    segments, turns = lists(played.recorder.segments()), played.recorder.turns
    assert len(turns) == len(played.samples)
    for turn, prompt, sample in zip(turns, played.prompts, played.samples, strict=True):
        segment = segments[turn.segment]
        before = segment.prompt_ids + segment.response_ids[: turn.start]
        assert before == list(prompt.ids)
        assert tuple(segment.response_ids[turn.start : turn.end]) == sample.token_ids
        assert tuple(segment.logprobs[turn.start : turn.end]) == sample.logprobs
        assert tuple(segment.policy_versions[turn.start : turn.end]) == sample.policy_versions
        if prompt.outside is None:
            assert turn.start == 0
            assert list(prompt.ids) == chat.tokenizer.encode(prompt.rendering.text)
            assert chat.tokenizer.decode(prompt.ids) == prompt.rendered
    assert played.recorder.template_breaks == max(0, len(segments) - 1)
    masked: list[int] = []
    for segment in segments:
        parts = (segment.response_ids, segment.loss_mask, segment.logprobs, segment.policy_versions)
        for token, mask, logprob, version in zip(*parts, strict=True):
            if mask:
                masked.append(token)
                assert version.startswith("v")
            else:
                assert (logprob, version) == (0.0, "")
    # They come in order, each exactly once over all segments, and no others.
    assert masked == [token for sample in played.samples for token in sample.token_ids]


def parsed(text: str, calls: list[tuple[str, dict[str, Any]]]) -> Message:
    functions = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    return {"role": "assistant", "content": text.strip(), "tool_calls": functions}


def turn(
    chat: ChatFormat,
    family: Family,
    text: str = "",
    commands: tuple[str, ...] = (),
    thought: str | None = None,
    after: list[Message] | None = None,
) -> Step:
    """Return a well-behaved turn that calls `bash` with each of `commands`.

    By default every call has a result.
    """
    calls = [("bash", {"command": command}) for command in commands]
    ids = chat.tokenizer.encode(family.turn(text, calls, thought))
    results = [{"role": "tool", "name": "bash", "content": f"out {command}"} for command in commands]
    return Step(ids, results if after is None else after, parsed(text, calls) if calls else None)


USER = {"role": "user", "content": "how many files are there?"}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_chain_of_calls_is_one_segment(chats: dict[str, ChatFormat], name: str) -> None:
    """It is long enough that only the latest turns are rendered; the text sent is still the template's."""
    chat, family = chats[name], FAMILIES[name]
    thought = "I count." if family.opened and name != "deepseek_r1" else None
    commands = [("ls",), ("ls", "wc"), ("cat",)] * 8
    if name in ("llama3", "gpt_oss"):  # These make one call a turn.
        commands = [one[:1] for one in commands]
    steps = [turn(chat, family, "", one, thought) for one in commands]
    steps.append(turn(chat, family, "seven", thought=thought))
    played = play(chat, [USER], steps)
    assert played.refused is None
    check(chat, played)
    if name == "deepseek_r1":  # It opens a thought, which its template never shows again.
        assert played.recorder.template_breaks == 1
        return
    assert played.recorder.template_breaks == 0
    (segment,) = lists(played.recorder.segments())
    text = chat.tokenizer.decode(segment.prompt_ids + segment.response_ids)
    assert text.count("out ls") == len([one for one in commands if "ls" in one])
    if family.raw:
        messages: list[Message] = [USER]
        for step in steps[:-1]:
            said = chat.tokenizer.decode(step.ids).removesuffix(family.end)
            messages += [{"role": "assistant", "content": said}, *step.after]
        assert text == chat.render(messages) + chat.tokenizer.decode(steps[-1].ids)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("users", [0.1, 1.0])
def test_the_latest_turns_tell_the_same_as_the_whole(
    chats: dict[str, ChatFormat], name: str, users: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, family = chats[name], FAMILIES[name]
    chance = random.Random(f"{name} {users}")
    steps = []
    for place in range(30):
        thought = "I count." if family.think and (family.opened or chance.random() < 0.2) else None
        if family.calls is None or chance.random() < users:
            user = {"role": "user", "content": f"and folder {place}?"}
            steps.append(turn(chat, family, f"answer {place}", (), thought, after=[user]))
        else:
            steps.append(turn(chat, family, chance.choice(["", "I look."]), (f"ls {place}",), thought))
    quick = play(chat, [USER], steps)
    monkeypatch.setattr("rollyard_pipeline.chat.conversation._WINDOW_LIMIT", 1_000)
    whole = play(chat, [USER], steps)
    assert quick.refused is None
    assert [list(prompt.ids) for prompt in quick.prompts] == [list(prompt.ids) for prompt in whole.prompts]
    assert quick.recorder.template_breaks == whole.recorder.template_breaks
    assert [prompt.rendered for prompt in quick.prompts] == [prompt.rendered for prompt in whole.prompts]


# These are the situations in which each family's template rewrites history. "thought" is a thought and a
# call, then a result; "beside" is text and a call, then a result; "user" is a thought and an answer, then a
# user; "spaces" is an answer between spaces, then a user.
BREAKS = {
    "chatml": (),
    "qwen2_5": (),
    "qwen3": ("user",),
    "qwen3_5": ("user", "spaces"),
    "qwen3_coder": (),
    "llama3": ("spaces",),
    "mistral_v3": ("beside", "user", "spaces"),  # The tools move to the last user message.
    "mistral_v11": (),
    "deepseek_v3": ("thought", "user"),
    "deepseek_r1": ("thought", "user", "spaces"),
    "gpt_oss": ("user", "spaces"),
    "gemma": ("spaces",),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_where_templates_rewrite_history(chats: dict[str, ChatFormat], name: str) -> None:
    chat, family = chats[name], FAMILIES[name]
    again = [{"role": "user", "content": "and folders?"}]
    thought = "I count." if family.think else None
    situations = {
        "user": turn(chat, family, "seven", thought=thought, after=again),
        "spaces": turn(chat, family, "  seven  ", thought="" if family.opened else None, after=again),
    }
    if family.calls:
        situations["thought"] = turn(chat, family, "", ("ls",), thought)
        if name not in ("gpt_oss", "deepseek_r1"):
            situations["beside"] = turn(chat, family, "I look.", ("ls",), "" if family.opened else None)
    found = []
    for situation, step in situations.items():
        played = play(chat, [USER], [step, turn(chat, family, "two")])
        check(chat, played)
        assert played.refused is None
        if played.recorder.template_breaks:
            found.append(situation)
    assert sorted(found) == sorted(BREAKS[name])


def test_a_prompt_that_holds_what_history_does_not(chats: dict[str, ChatFormat]) -> None:
    """Qwen3's own template drops the empty thought that it opens a turn with where thinking is off."""
    family, steps = FAMILIES["qwen3"], []
    for command in ("ls", "cat", "wc"):
        steps.append(turn(chats["qwen3"], family, "", (command,)))
    for thinking, breaks in ((None, 0), (True, 0), (False, 2)):
        variables = {} if thinking is None else {"enable_thinking": thinking}
        chat = dataclasses.replace(chats["qwen3"], variables=variables)
        played = play(chat, [USER], steps)
        check(chat, played)
        assert played.prompts[0].rendered.endswith("</think>\n\n") == (thinking is False)
        assert played.recorder.template_breaks == breaks


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_an_old_thought_that_is_stripped_late(chats: dict[str, ChatFormat], name: str) -> None:
    """It is far behind the latest turns; the user's message, or the final answer, strips it."""
    chat, family = chats[name], FAMILIES[name]
    steps = [
        turn(chat, family, "", (f"ls {place}",), "I count." if place == 1 else None) for place in range(30)
    ]
    steps.append(turn(chat, family, "seven", after=[{"role": "user", "content": "and folders?"}]))
    played = play(chat, [USER], [*steps, turn(chat, family, "two")])
    check(chat, played)
    assert "I count." in played.prompts[-2].rendered
    assert "I count." not in played.prompts[-1].rendered
    assert [turn.segment for turn in played.recorder.turns] == [0] * 31 + [1]


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_malformed_call_is_answered_not_refused(chats: dict[str, ChatFormat], name: str) -> None:
    chat, family = chats[name], FAMILIES[name]
    whole = family.turn("", [("bash", {"command": "ls"})])
    for text in (whole[: len(whole) // 2], whole.replace('"', "'"), "", "<tool_call>{", "[TOOL_CALLS] ["):
        error = {"role": "tool", "content": "error: malformed tool call"}
        steps = [Step(chat.tokenizer.encode(text + family.end), [error]), turn(chat, family, "", ("ls",))]
        played = play(chat, [USER], [*steps, turn(chat, family, "seven")])
        assert played.refused is None
        check(chat, played)
        assert "malformed tool call" in chat.tokenizer.decode(played.prompts[-1].ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_fork_continues_as_the_recorder_that_it_leaves(chats: dict[str, ChatFormat], name: str) -> None:
    """Its prompt has the same ids, of which those of the shared turns were not tokenized again."""
    chat, family = chats[name], FAMILIES[name]
    thought = "I count." if family.opened else None
    steps = [turn(chat, family, "", (f"ls {place}",), thought) for place in range(12)]
    if family.calls is None:
        user = {"role": "user", "content": "and folders?"}
        steps = [turn(chat, family, f"answer {place}", after=[user]) for place in range(12)]
    steps.append(turn(chat, family, "seven", thought=thought))
    played = play(chat, [USER], steps)
    before = lists(played.recorder.segments())
    for number in range(1, len(steps)):
        fork = played.recorder.fork(number)
        assert fork is not None
        for message in steps[number - 1].after:
            fork.add(message)
        prompt, same = fork.prompt(), played.prompts[number]
        assert list(prompt.ids) == list(same.ids)
        assert prompt.outside is None
        rewritten = same.template_break
        assert (prompt.known, prompt.template_break) == (0 if rewritten else same.known, rewritten)
        fork.record(prompt, played.samples[number])
        if steps[number].parsed is not None:
            fork.structured(steps[number].parsed)
        if number + 1 < len(steps):  # What follows is the same too, in the fork and in a fork of it.
            second = fork.fork(1)
            assert second is not None
            for one in (fork, second):
                for message in steps[number].after:
                    one.add(message)
                assert list(one.prompt().ids) == list(played.prompts[number + 1].ids)
                one.retract(len(steps[number].after))
                one.add({"role": "user", "content": "stop"})
                assert "ls" in one.prompt().rendered or family.calls is None
        (segment,) = lists(fork.segments())
        assert segment.prompt_ids == list(prompt.ids)
        assert sum(segment.loss_mask) == len(played.samples[number].token_ids)
        (untrained,) = lists(fork.segments(trained=False))
        assert untrained.response_ids == segment.response_ids
        assert (set(untrained.loss_mask), set(untrained.policy_versions)) == ({0}, {""})
    assert lists(played.recorder.segments()) == before


HOSTILE = [*SPECIAL[:3], *SPECIAL[8:22], *SPECIAL[23:], *MARKERS]
_CONTROL = re.compile("|".join(map(re.escape, sorted([*SPECIAL, *MARKERS[6:]], key=len, reverse=True))))


def _texts() -> st.SearchStrategy[str]:
    pieces = st.sampled_from(
        [
            *HOSTILE, *HOSTILE, "\n", "  ", "é", "日本", "🙂", "{{ x }}", "{% if %}", "{#", '{"name": "bash"',
            "<function=bash>", "analysis", " to=functions.bash", "</think>", "<think>", "long " * 300,
        ]
    )  # fmt: skip
    return st.lists(st.one_of(pieces, st.text(max_size=8)), max_size=5).map("".join)


@st.composite
def _steps(draw: st.DrawFn, chat: ChatFormat, family: Family) -> list[Step]:
    tokenizer = chat.tokenizer
    size = tokenizer.vocabulary_size
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["well", "well", "text", "noise", "spelled"]))
        text = draw(_texts())
        calls: list[tuple[str, dict[str, Any]]] = []
        if family.calls and draw(st.booleans()):
            one = st.tuples(st.just("bash"), st.fixed_dictionaries({"command": _texts()}))
            calls = draw(st.lists(one, min_size=1, max_size=3))
        structured = None
        if kind == "well":
            thought = draw(st.none() | _texts())
            ids = tokenizer.encode(family.turn(text, calls, thought))
            structured = parsed(text, calls) if calls else None
        elif kind == "text":  # Special tokens come as ids, with the end of turn missing or in the middle.
            ids = tokenizer.encode(text + draw(st.sampled_from(["", family.end, family.end + "more"])))
        elif kind == "spelled":  # Special tokens come as plain tokens.
            ids = tokenizer.encode(tokenizer.escape(family.turn(text, calls)))
        else:  # Broken UTF-8 comes with stray special ids.
            ids = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=12))
        results = [{"role": "tool", "name": "bash", "content": draw(_texts())} for _ in calls]
        if results and draw(st.integers(0, 9)) == 0:
            results.append({"role": "user", "content": draw(_texts())})
        user = [{"role": "user", "content": draw(_texts())}]
        steps.append(Step(ids or tokenizer.encode("x"), results or user, structured))
    return steps


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_any_dialogue_keeps_the_invariants(
    chats: dict[str, ChatFormat], name: str, data: st.DataObject
) -> None:
    chat, family = chats[name], FAMILIES[name]
    opening: list[Message] = [{"role": "user", "content": "go" + data.draw(_texts())}]
    if family.system and data.draw(st.booleans()):
        opening.insert(0, {"role": "system", "content": data.draw(_texts())})
    steps = data.draw(_steps(chat, family))
    played = play(chat, opening, steps)
    check(chat, played)
    if played.refused is not None:
        # No form of the turn mends this: a user right after a result, where roles must alternate.
        assert re.search("alternate", str(played.refused))
    # Text from outside cannot forge a control token: the same dialogue with harmless text has the same ones.
    harmless = [
        Step(
            step.ids,
            [{**message, "content": _CONTROL.sub("harmless", message["content"])} for message in step.after],
            step.parsed,
        )
        for step in steps
    ]
    control = {chat.tokenizer.encode(text)[0] for text in (*SPECIAL, *MARKERS[6:])}
    twin = play(chat, opening, harmless)
    for prompt, other in zip(played.prompts, twin.prompts, strict=True):
        assert [i for i in prompt.ids if i in control] == [i for i in other.ids if i in control]
        assert MARK not in chat.tokenizer.decode(prompt.ids)


CHAT: list[Message] = [
    USER,
    {
        "role": "assistant", "content": None,
        "tool_calls": [
            {
                "id": "call12345", "type": "function",
                "function": {"name": "bash", "arguments": {"command": "ls", "env": ["A=1"]}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call12345", "content": "one <|im_end|> two"},
]  # fmt: skip
"""A conversation in the form in which templates get what OpenAI's clients send: arguments are objects."""
THOUGHT = {"gpt_oss": "thinking"}
SHOW_THOUGHTS = ("gpt_oss", "qwen3", "qwen3_5")


def opening(chat: ChatFormat, messages: list[Message]) -> Prompt:
    """Return the first prompt of a task with these messages, whose arguments are texts as OpenAI has them."""
    given = json.loads(json.dumps(messages))
    for message in given:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    task = Task.model_validate({"id": "a", "messages": given})
    return TrajectoryRecorder(chat, chat.opening(task.chat())).prompt()


def in_form(name: str, messages: list[Message]) -> list[Message]:
    """Return messages for a template that fails on a null, or reads arguments as texts."""
    found = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            message["content"] = "" if name == "gpt_oss" else None
            if name == "deepseek_r1":
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return found


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_tasks_calls_are_shown_as_the_template_shows_openais_messages(
    chats: dict[str, ChatFormat], name: str
) -> None:
    chat = chats[name]
    shown = chat.render(in_form(name, CHAT))
    assert "A=1" in shown
    prompt = opening(chat, CHAT)
    assert prompt.rendering.text == shown
    # A control token that the author of a task spells is one.
    assert list(prompt.ids) == chat.tokenizer.encode(shown)
    assert chat.tokenizer.token_id("<|im_end|>") in prompt.ids


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_turns_after_a_tasks_calls_continue_its_prompt(chats: dict[str, ChatFormat], name: str) -> None:
    chat, family = chats[name], FAMILIES[name]
    task = Task.model_validate({"id": "a", "messages": CHAT})
    steps = [
        turn(chat, family, "look", ("ls",)),
        turn(chat, family, "count", ("wc",)),
        turn(chat, family, "2"),
    ]
    played = play(chat, chat.opening(task.chat()), steps)
    check(chat, played)
    assert played.refused is None
    assert len(played.samples) == 3


@pytest.mark.parametrize("name", SHOW_THOUGHTS)
def test_a_tasks_thoughts_are_shown_under_the_templates_name(chats: dict[str, ChatFormat], name: str) -> None:
    chat = chats[name]
    for written in ("reasoning_content", "reasoning", "thinking"):
        thinking = [USER, {**CHAT[1], written: "I list them."}, CHAT[2]]
        expected = [USER, {**CHAT[1], THOUGHT.get(name, "reasoning_content"): "I list them."}, CHAT[2]]
        text = opening(chat, thinking).rendering.text
        assert text == chat.render(in_form(name, expected))
        assert "I list them." in text


@pytest.mark.parametrize(("name", "content"), [("chatml", None), ("gemma", None), ("deepseek_r1", "I look.")])
def test_a_template_that_leaves_out_a_tasks_calls_is_refused(
    chats: dict[str, ChatFormat], name: str, content: str | None
) -> None:
    """Else the model would read an empty turn, and a result of nothing."""
    calling = [CHAT[0], {**CHAT[1], "content": content}]
    with pytest.raises(TemplateError, match=r"leaves out calls that the task's messages make|refuses"):
        opening(chats[name], calling)
