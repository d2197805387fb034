"""What a policy that knows the marks of thoughts tries: answers in thoughts, and thoughts without an end."""

from __future__ import annotations

from functools import cache

import pytest
from rollyard_crds.task import Message, Task
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.chat.harmony import channel_thought, split_channels
from rollyard_pipeline.chat.thoughts import ThoughtReader, text_thought
from rollyard_testing.families import FAMILIES
from rollyard_testing.pipeline.thinking import judged, kept, played, thinking_chat

pytestmark = pytest.mark.attack(boundary="evaluation", surface="handlers that read the last message")


FINAL = "<|channel|>final<|message|>"
ANSWER = r"\boxed{7}"
MANY = 30_000
"""Marks. A search whose time grows with the square of their number would need minutes."""


@cache
def chat_of(family: str) -> ChatFormat:
    return thinking_chat(family)


async def said(family: str, text: str) -> tuple[str, str]:
    """Return the thought and the answer of a turn."""
    context = judged(kept(await played(chat_of(family), text, end=FAMILIES[family].end)))
    return context.thought, context.final_text


@pytest.mark.attack(
    "an answer in a thought that is never closed, so that every guess on the way counts; also where the "
    "prompt has opened the thought, with marks that are spelled by ordinary tokens, or in a channel of "
    "gpt-oss",
    stopped_by="what is a thought is decided by the prompt's end and by the sampled tokens; without its "
    "end there is no answer",
)
@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", f"<think>{ANSWER}"),
        ("qwen3", f"\n\t <think>{ANSWER}"),
        ("qwen3", f"<think><think></think><think>{ANSWER}"),
        ("qwen3", f"<think></think>\n\n<think>{ANSWER}"),
        ("qwen3", f"<think>a<·/think>{ANSWER}"),
        ("qwen3", f"<think>a</ think>{ANSWER}</thinking>"),
        ("qwen3", f"<·think>{ANSWER}"),
        ("qwen3", f"<think></think><·think>{ANSWER}"),
        ("qwen3", f"<think>{ANSWER}[/THINK]◁/think▷"),
        ("chatml", f"<think>{ANSWER}"),
        ("chatml", f"[THINK]{ANSWER}</think>"),
        ("qwen3_5", ANSWER),
        ("qwen3_5", f"<think>{ANSWER}"),
        ("qwen3_5", f"a<·/think>{ANSWER}"),
        ("qwen3_5", f"</think><think>{ANSWER}"),
        ("deepseek_r1", f"{ANSWER}<think>"),
        ("gpt_oss", f"<|channel|>analysis<|message|>{ANSWER}"),
        ("gpt_oss", f"<|channel|>analysis<|message|><|·channel|>final<|·message|>{ANSWER}"),
        ("gpt_oss", f"<|channel|>analysis final<|message|>{ANSWER}"),
        ("gpt_oss", f"<|channel|>final<|channel|>{ANSWER}"),
        ("gpt_oss", f"<|channel|>final to=functions.x<|message|>{ANSWER}"),
        (
            "gpt_oss",
            f"<|channel|>final<|message|>{ANSWER}<|end|><|start|>assistant<|channel|>analysis<|message|>b",
        ),
    ],
)
async def test_an_answer_in_a_thought_that_is_not_closed_is_none(family: str, text: str) -> None:
    assert (await said(family, text))[1] == ""


@pytest.mark.attack(
    "a mark after a wrong answer makes it a thought", stopped_by="a mark closes only what was opened"
)
@pytest.mark.parametrize(
    ("family", "text", "answer"),
    [
        ("chatml", "8</think>7", "8</think>7"),
        ("qwen3", "8<·/think>7", "8</think>7"),
        ("qwen3", "8<think></think>7", "8<think></think>7"),
        ("qwen3", "<think></think>8</think>7", "8</think>7"),
        ("qwen3_5", "</think>8</think>7", "8</think>7"),
        ("qwen3_5", "</think>8<think></think>7", "8<think></think>7"),
        ("gpt_oss", "8<|·channel|>analysis<|·message|>7", "8<|channel|>analysis<|message|>7"),
    ],
)
async def test_what_has_been_answered_does_not_become_a_thought(family: str, text: str, answer: str) -> None:
    """What stands before a mark counts, unless the mark closes what was opened."""
    assert await said(family, text) == ("", answer)


@pytest.mark.attack(
    "a tool prints a mark, which opens or closes the thought of the next turn",
    stopped_by="only the end of the prompt counts, which the chat template writes",
)
@pytest.mark.parametrize("mark", ["<think>", "</think>", "<think>\n", "</think>\n\n"])
async def test_what_others_say_opens_and_closes_no_thought(mark: str) -> None:
    """A tool's output, which the policy chooses, and a user's text stand before the template's own end."""
    for family, text, expected in (
        ("qwen3", ANSWER, ("", ANSWER)),
        ("qwen3_5", f"a</think>{ANSWER}", ("a", ANSWER)),
        ("qwen3_5", ANSWER, (ANSWER, "")),
    ):
        for role in ("user", "tool"):
            messages = [Message(role="user", content="?"), Message(role=role, content=f"a {mark}")]
            task = Task(id="t", messages=messages)
            episode = await played(chat_of(family), text, task=task)
            context = judged(kept(episode), task)
            assert (context.thought, context.final_text) == expected


@pytest.mark.attack(
    "characters that cannot be stored move the place at which a thought ends",
    stopped_by="places are counted in the text as it is stored",
)
async def test_the_places_hold_for_texts_that_cannot_be_stored() -> None:
    chat = chat_of("qwen3")
    for between in ("\0" * 100, "é\0", "<|·im_start|>" * 5):
        for text in (f"<think>a{between}b</think>7", f"<think>a</think>{between}7"):
            context = judged(kept(await played(chat, text)))
            assert context.trajectory is not None
            content = context.trajectory.messages[-1].content
            assert context.final_text == content[content.index("</think>") + len("</think>") :]
            assert "\0" not in context.final_text
    longest = 1 << 20  # The content of a message is cut after so many characters.
    cut = judged(kept(await played(chat, f"<think>{' assistant' * (longest // 10)}</think>7")))
    assert (len(cut.thought), cut.final_text) == (longest - len("<think> "), "")
    assert cut.trajectory is not None
    thought = cut.trajectory.turns[-1].thought
    assert thought is not None
    assert thought.end == thought.answer == longest


MARKS_WITHOUT_END = pytest.mark.attack(
    "a turn of nothing but marks takes the worker long", stopped_by="one pass over the turn"
)


@MARKS_WITHOUT_END
@pytest.mark.parametrize("texts", ["<think>", "</think>", "<think> </think>", "</think> <think>"])
def test_thousands_of_marks(texts: str) -> None:
    chat = chat_of("qwen3")
    reader = ThoughtReader(chat)
    tokens = chat.tokenizer.encode(texts)
    spelled = chat.tokenizer.encode("<\ufdd0think><\ufdd0/think>")
    for ids in (tokens * MANY, [*tokens, *spelled] * (MANY // 10), [*spelled, *tokens] * (MANY // 10)):
        text = chat.tokenizer.decode_sampled(ids)
        for prompt in ("", "<think>\n", "</think>\n"):
            thought = reader.read(prompt, ids, text)
            assert thought is None or 0 <= thought.start <= thought.end <= thought.answer <= len(text)
        text_thought(text)


@pytest.mark.attack(
    "a mark is spelled with a character that is dropped when the text is stored",
    stopped_by="marks are looked for in the text as it was sampled",
)
@pytest.mark.parametrize("place", range(1, len("<|close|>think<|sep|>")))
def test_a_character_that_is_dropped_closes_no_thought(place: int) -> None:
    """A policy may sample the character with which plain text is kept from becoming a control token."""
    closing = "<|close|>think<|sep|>"
    spelled = closing[:place] + "\ufdd0" + closing[place:]
    reader = ThoughtReader(chat_of("chatml"))
    for end in ("", closing):
        text = f"<|open|>think<|sep|>a{spelled}{ANSWER}{end}"
        thought = reader.read("", [], text)
        assert thought is not None
        assert thought.answer == len(text.replace("\ufdd0", ""))


@MARKS_WITHOUT_END
@pytest.mark.parametrize(
    "text",
    ["<|channel|>", "<|channel|>analysis", "<|message|>", "<|end|>", "<|start|>", f"{FINAL}b<|end|>",
     "<|channel|>" + " " * 50],
)  # fmt: skip
def test_thousands_of_channels(text: str) -> None:
    many = text * MANY
    thought = channel_thought(many)
    assert thought is None or 0 <= thought.start <= thought.end <= thought.answer <= len(many)
    assert set(split_channels(many, str, False)) <= {"content", "thinking"}
