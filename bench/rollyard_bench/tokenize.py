"""A turn's tokenization on our side, at growing histories, beside rendering and tokenizing everything."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field

from rollyard_pipeline.chat.format import ChatFormat, ChatMessage
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import load_folder
from rollyard_pipeline.trajectories.recorder import Sample, TrajectoryRecorder

from rollyard_bench.results import Baseline, Measurement, Settings
from rollyard_bench.stats import Sample as Times
from rollyard_bench.vllm import POLICY

HISTORIES = (2048, 8192, 32_768)  # tokens
WORDS = ("wagon", "maple", "meadow", "bagel", "lantern", "cherry", "copper", "walrus", "hammer", "kettle")
LINES = 40  # lines of one tool result, which are about 200 tokens
VERSION = "1"


@dataclass(slots=True)
class Conversation:
    """A dialogue of tool calls that grows turn by turn. The model's part is invented, the rest is real."""

    chat: ChatFormat
    draw: random.Random
    messages: list[ChatMessage] = field(default_factory=list)
    """The messages as a trainer would keep them that renders everything for each turn."""
    recorder: TrajectoryRecorder = field(init=False)
    size: int = 0
    """The number of tokens of the last prompt."""

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": "Look through the files and submit the answer."})
        self.recorder = TrajectoryRecorder(self.chat, self.messages)

    def turn(self) -> float:
        """Play one turn. Return the seconds that the recorder took for the prompt and the sampled tokens."""
        begin = time.perf_counter()
        prompt = self.recorder.prompt()
        took = time.perf_counter() - begin
        self.size = len(prompt.ids)
        command = {"command": f"cat {self._name()}"}
        text = f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': command})}\n</tool_call>"
        call = {"type": "function", "function": {"name": "bash", "arguments": command}}
        ids = tuple(self.chat.tokenizer.encode(f"{text}<|im_end|>"))
        sample = Sample(ids, (-0.5,) * len(ids), (VERSION,) * len(ids), "stop")
        result = "\n".join(f"{self._name()} {self.draw.randrange(10_000)}" for _ in range(LINES))
        begin = time.perf_counter()
        self.recorder.record(prompt, sample)
        self.recorder.structured({"role": "assistant", "content": "", "tool_calls": [call]})
        self.recorder.add({"role": "tool", "content": result})
        took += time.perf_counter() - begin
        self.messages.append({"role": "assistant", "content": text})
        self.messages.append({"role": "tool", "content": result})
        return took

    def render_all(self) -> float:
        """Return the seconds that rendering and tokenizing the whole conversation takes."""
        begin = time.perf_counter()
        self.chat.tokenizer.encode(self.chat.render(self.messages))
        return time.perf_counter() - begin

    def _name(self) -> str:
        return f"{self.draw.choice(WORDS)}/{self.draw.choice(WORDS)}.txt"


def _times(chat: ChatFormat, conversations: int, turns: int) -> dict[int, tuple[Times, Times]]:
    """Return the times of the recorder's turn and of the whole rendering, by history."""
    ours: dict[int, list[float]] = {history: [] for history in HISTORIES}
    whole: dict[int, list[float]] = {history: [] for history in HISTORIES}
    for number in range(conversations):
        conversation = Conversation(chat, random.Random(number))
        for history in HISTORIES:
            while conversation.size < history:
                conversation.turn()
            for _ in range(turns):
                ours[history].append(conversation.turn() * 1e3)
            for _ in range(3):
                whole[history].append(conversation.render_all() * 1e3)
        if conversation.recorder.template_breaks or len(conversation.recorder.segments()) != 1:
            raise RuntimeError("the template broke the conversation into segments: nothing was measured")
    return {each: (Times(tuple(ours[each])), Times(tuple(whole[each]))) for each in HISTORIES}


async def measure(settings: Settings) -> list[Measurement]:
    """Measure the recorder with the tiny policy's tokenizer and template."""
    tokenizer, source = load_folder(POLICY)
    chat = ChatFormat(tokenizer, ChatTemplate(source, tokenizer.variables()))
    times = _times(chat, 2 if settings.quick else 5, 10 if settings.quick else 20)
    shape = (
        f"TrajectoryRecorder.prompt() and record() of a turn, with {LINES} lines of tool output; a trainer "
        "without token-in/token-out renders the template over all messages and tokenizes the text"
    )
    each = "; ".join(
        f"{history:,} tokens: ours {ours.text()}, rendering everything {whole.text()}"
        for history, (ours, whole) in times.items()
    )
    ours, whole = times[HISTORIES[-1]]
    baseline = Baseline("rendering everything", whole.p50)
    return [Measurement("delta_tokenize_32k", ours.p50, baseline, f"{each}; {shape}")]
