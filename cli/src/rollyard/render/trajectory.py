"""A trajectory for people to read, turn by turn.

Sampled tokens are marked, and each turn has the statistics of their log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text
from rollyard_crds.task import Message
from rollyard_crds.trajectory import Attempt, Branch, HarnessRecord, Segment, Trajectory, Turn
from rollyard_process.log_text import one_line, sentence
from rollyard_process.telemetry.identity import trace_id

Decode = Callable[[Sequence[int]], str]

SAMPLED: Final = "bold green"
OUTSIDE: Final = "default"
DIM: Final = "dim"
OPEN: Final = "«"
CLOSE: Final = "»"
PROMPT_LIMIT: Final = 2000


@dataclass(frozen=True, slots=True)
class LogprobStats:
    """The log-probabilities of one turn's sampled tokens, in nats."""

    count: int
    mean: float
    lowest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> LogprobStats:
        """Return the statistics of some log-probabilities. All are zero if there are none."""
        if not values:
            return cls(0, 0.0, 0.0)
        return cls(len(values), sum(values) / len(values), min(values))

    def __str__(self) -> str:
        if not self.count:
            return "no tokens"
        return f"{self.count} tokens, logprob mean {self.mean:.3f}, lowest {self.lowest:.2f}"


def tokenizer_decode(folder: Path) -> Decode:
    """Return a function that decodes tokens with the `tokenizer.json` of a model folder.

    Special tokens are shown.

    Raises:
        OSError: There is no such file.
        ValueError: The file cannot be read as a tokenizer.
    """
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json" if folder.is_dir() else folder
    text = file.read_text()
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"{file}: not a tokenizer: {error}") from error

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    return decode


def why(trajectory: Trajectory) -> str:
    """Return one line that says why a rollout has no reward or a reward of zero, or an empty text."""
    if trajectory.status != "succeeded":
        detail = f": {sentence(trajectory.message)}" if trajectory.message else ""
        return f"{trajectory.status}, {trajectory.reason or 'no reason given'}{detail}"
    if trajectory.reward is None or trajectory.reward > 0:
        return ""
    parts = [trajectory.reward_reason] if trajectory.reward_reason else []
    if trajectory.truncated:
        parts.append(f"truncated ({trajectory.truncated_reason})")
    errors = [call.error for turn in trajectory.every_turn for call in turn.tool_calls if call.error]
    if errors:
        parts.append(f"{len(errors)} tool calls failed, last: {one_line(errors[-1])}")
    if trajectory.harness is not None:
        # A harness may read calls from the text, so their absence in the record says nothing.
        code = trajectory.harness.exit_code
        if code is None:
            parts.append("the harness was killed")
        elif code != 0:
            parts.append(f"the harness ended with exit status {code}")
    elif trajectory.tool_parser and not any(turn.tool_calls for turn in trajectory.every_turn):
        parts.append("it never called a tool")
    turns = sum(1 for _ in trajectory.every_turn)
    return "reward 0: " + ("; ".join(parts) or f"not solved in {turns} turn{'' if turns == 1 else 's'}")


def attempts(listed: Sequence[Attempt], dropped: int) -> Iterator[Text]:
    """Yield one line for each attempt that did not end well, and one for those that were dropped."""
    for attempt in listed:
        node = f" on {attempt.node}" if attempt.node else ""
        where = f", {attempt.worker}{node}" if attempt.worker else node
        title = (
            f"{attempt.stage} attempt {attempt.attempt}"
            if attempt.attempt
            else f"in the queue of {attempt.stage}"
        )
        note = "" if attempt.counted else ", not counted"
        detail = f": {sentence(attempt.message)}" if attempt.message else ""
        yield Text(f"{title}, {attempt.seconds:.3f} s{where}{note}: {attempt.reason}{detail}", style="yellow")
    if dropped:
        yield Text(f"{dropped} more attempts are not listed", style="yellow")


def header(trajectory: Trajectory) -> Iterator[Text]:
    """Yield lines that identify the rollout and say how it ended."""
    yield Text(f"{trajectory.id}", style="bold")
    yield Text(f"trace {trace_id(trajectory.id)}", style=DIM)
    yield from outcome(trajectory)


def outcome(trajectory: Trajectory) -> Iterator[Text]:
    """Yield lines that say how the rollout ended: its reward with what it is made of, and its times."""
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    yield Text(
        f"task {trajectory.task_id}, sample {trajectory.sample_index}: {trajectory.status}, reward {reward}"
        + (f", truncated ({trajectory.truncated_reason})" if trajectory.truncated else "")
    )
    if trajectory.tool_parser:
        yield Text(f"tool calls read by {trajectory.tool_parser}", style=DIM)
    reasons = why(trajectory)
    if reasons:
        yield Text(reasons, style="yellow")
    rescored = getattr(trajectory, "rescored", None)
    if rescored is not None:
        before = "none" if rescored.reward is None else f"{rescored.reward:g}"
        yield Text(
            f"evaluated again with {rescored.handler} by {rescored.by}, {rescored.at:%Y-%m-%d %H:%M}; reward "
            f"before: {before}",
            style=DIM,
        )
    if trajectory.reward_components:
        parts = ", ".join(f"{name} {value:g}" for name, value in trajectory.reward_components.items())
        yield Text(f"reward components: {parts}", style=DIM)
    if trajectory.reward_output:
        yield Text("the evaluation printed:", style=DIM)
        # The policy's program may have written it, and none of its lines may look like the lines here.
        for text in trajectory.reward_output.splitlines():
            yield Text(f"  │ {text}", style=DIM)
    if trajectory.harness is not None:
        yield from harness_end(trajectory.harness)
    yield from attempts(trajectory.attempts, trajectory.attempts_dropped)
    timings = trajectory.timings
    for name in ("init", "run", "eval"):
        stage = getattr(timings, name)
        yield Text(
            f"{name:<5} worked {stage.active_seconds:.3f} s after {stage.queued_seconds:.3f} s in the queue"
            + (f", {stage.attempts} attempts" if stage.attempts > 1 else ""),
            style=DIM,
        )
    yield Text(
        f"Run consists of model {timings.model_seconds:.3f} s, tools {timings.tool_seconds:.3f} s, "
        f"own code {timings.own_seconds:.3f} s",
        style=DIM,
    )


def harness_end(harness: HarnessRecord) -> Iterator[Text]:
    """Yield lines that say how a harness ended, and what it printed."""
    code = harness.exit_code
    end = "killed, or not started" if code is None else f"exit status {code}"
    style = DIM if code == 0 else "yellow"
    yield Text(f"harness {one_line(harness.name)}: {end} after {harness.seconds:.3f} s", style=style)
    for title, text in (("it printed", harness.output), ("the end of its log", harness.log[-PROMPT_LIMIT:])):
        if text:
            yield Text(f"{title}:", style=DIM)
            # As for what an evaluation printed, none of its lines may look like the lines here.
            for line in _shortened(text).splitlines():
                yield Text(f"  │ {line}", style=DIM)


_KINDS: Final = {
    "main": "another version of the main conversation",
    "subagent": "sub-agent",
    "policy": "calls of the policy itself",
}
"""The words for kinds of branches whose name does not say enough."""


class TrajectoryView:
    """Prints trajectories on a console. Without a terminal, sampled text is enclosed in «…»."""

    def __init__(self, console: Console, decode: Decode | None = None) -> None:
        self._console = console
        self._decode = decode

    def show(self, trajectory: Trajectory) -> None:
        """Print the whole trajectory."""
        for line in header(trajectory):
            self._console.print(line, soft_wrap=True)
        self._console.print()
        self.turns(trajectory)

    def turns(self, trajectory: Trajectory) -> None:
        """Print what the rollout begins with, its turns, and its further conversations in the same way."""
        if trajectory.branches:
            rewrites = f", rewrites conversation {trajectory.continues}"
            self._conversation_title(
                f"{trajectory.conversation}: own conversation"
                f"{'' if trajectory.continues is None else rewrites}"
            )
        self._conversation(trajectory)
        for branch in trajectory.branches:
            self._console.print()
            self._conversation_title(f"{branch.number}: {_described(branch)}")
            parts = {"messages": branch.messages, "turns": branch.turns, "branches": []}
            self._conversation(trajectory.model_copy(update=parts))

    def _conversation_title(self, title: str) -> None:
        self._console.print(Text(f"━━ conversation {title}", style="bold"), soft_wrap=True)

    def _conversation(self, trajectory: Trajectory) -> None:
        self._start(trajectory)
        if self._decode is not None and trajectory.segments:
            self._tokens(trajectory, self._decode)
        else:
            self._messages(trajectory)

    def _sampled(self, text: str) -> Text:
        if self._console.is_terminal:
            return Text(text, style=SAMPLED)
        return Text(f"{OPEN}{text}{CLOSE}")

    def _start(self, trajectory: Trajectory) -> None:
        for message in trajectory.given:
            self._input(message)

    def _input(self, message: Message) -> None:
        """Print a message that was not sampled in this rollout, with the calls that it holds."""
        self._rule("assistant, given" if message.role == "assistant" else message.role)
        if message.reasoning_content:
            self._console.print(Text(_shortened(message.reasoning_content), style=DIM), soft_wrap=True)
        if message.content or not message.tool_calls:
            self._console.print(Text(_shortened(message.content)), soft_wrap=True)
        for call in message.tool_calls or ():
            line = f"   {call.function.name} {_arguments(call.function.arguments)}"
            self._console.print(Text(line, style="cyan"), soft_wrap=True)

    def _rule(self, title: str) -> None:
        self._console.print(Text(f"── {title}", style=DIM), soft_wrap=True)

    def _turn_title(self, trajectory: Trajectory, number: int, turn: Turn) -> None:
        segment = trajectory.segments[turn.segment] if trajectory.segments else None
        tokens = slice(turn.start, turn.end)
        values = segment.logprobs[tokens] if segment is not None else []
        # A conversation that is not trained on has the ids of its tokens, and no log-probabilities.
        known = segment is None or any(segment.loss_mask[tokens])
        stats = str(LogprobStats.of(values)) if known else f"{len(values)} tokens, not trained on"
        title = f"turn {number}: {stats}, ended by {turn.finish_reason}"
        # Most rollouts are sampled from one version, so the versions are shown only if there are several.
        if segment is not None and len(_versions(trajectory, trajectory.turns)) > 1:
            title += f", policy version {' then '.join(_versions(trajectory, [turn]))}"
        if turn.thought is not None:
            title += f", thought of {turn.thought.end - turn.thought.start} characters"
        self._rule(f"{title}, model {turn.model_seconds:.3f} s, tools {turn.tool_seconds:.3f} s")

    def _calls(self, turn: Turn) -> None:
        for call in turn.tool_calls:
            line = Text(f"   {call.name} {_arguments(call.arguments)}  {call.seconds:.3f} s", style="cyan")
            if call.error:
                line.append(f"  {one_line(call.error)}", style="red")
            self._console.print(line, soft_wrap=True)

    def _tokens(self, trajectory: Trajectory, decode: Decode) -> None:
        for number, turn in enumerate(trajectory.turns, start=1):
            segment = trajectory.segments[turn.segment]
            previous = trajectory.turns[number - 2] if number > 1 else None
            if previous is not None and previous.segment != turn.segment:
                self._new_segment(trajectory, number, turn)
            self._turn_title(trajectory, number, turn)
            self._console.print(
                self._sampled(decode(segment.response_ids[turn.start : turn.end])), soft_wrap=True
            )
            self._calls(turn)
            outside = _outside_after(trajectory, number - 1, segment)
            if outside:
                self._console.print(Text(decode(outside), style=OUTSIDE), soft_wrap=True)

    def _new_segment(self, trajectory: Trajectory, number: int, turn: Turn) -> None:
        """Print the messages that the turn answers.

        They are at the end of the new segment's prompt, and not after the previous turn.
        """
        tokens = len(trajectory.segments[turn.segment].prompt_ids)
        self._rule(
            f"segment {turn.segment + 1}: the chat template shows earlier turns differently, "
            f"a new prompt of {tokens} tokens"
        )
        for message in _messages_before(trajectory, number):
            self._input(message)

    def _messages(self, trajectory: Trajectory) -> None:
        turn_numbers, first = trajectory.said, len(trajectory.given)
        for index, message in enumerate(trajectory.messages[first:], start=first):
            if index not in turn_numbers:
                self._rule(message.role)
                self._console.print(Text(message.content), soft_wrap=True)
                continue
            turn = trajectory.turns[turn_numbers[index]]
            self._turn_title(trajectory, turn_numbers[index] + 1, turn)
            if message.content or not turn.tool_calls:
                self._console.print(self._sampled(message.content), soft_wrap=True)
            self._calls(turn)


def _described(branch: Branch) -> str:
    """Return what a branch is, whether it is trained on, and where it left its parent."""
    kind = _KINDS.get(branch.kind, branch.kind)
    trained = "trained on" if branch.trained else "not trained on"
    if branch.parent is None:
        return f"{kind}, {trained}"
    if not branch.shared:
        return f"{kind}, {trained}, began in conversation {branch.parent}"
    noun = "message" if branch.shared == 1 else "messages"
    return f"{kind}, {trained}, left conversation {branch.parent} after {branch.shared} {noun}"


def _versions(trajectory: Trajectory, turns: Iterable[Turn]) -> list[str]:
    """Return the policy versions of the turns' tokens, in the order of their first appearance."""
    versions: dict[str, None] = {}
    for turn in turns:
        versions |= dict.fromkeys(trajectory.segments[turn.segment].policy_versions[turn.start : turn.end])
    return list(versions)


def _messages_before(trajectory: Trajectory, number: int) -> list[Message]:
    """Return the messages between turn `number` and the turn before it. Turns are counted from 1."""
    indexes = {turn: index for index, turn in trajectory.said.items()}
    before, here = indexes.get(number - 2), indexes.get(number - 1)
    return [] if before is None or here is None else trajectory.messages[before + 1 : here]


def _outside_after(trajectory: Trajectory, index: int, segment: Segment) -> list[int]:
    """Return the tokens between a turn's end and the next turn or the segment's end.

    They are tool results and text of the chat template.
    """
    turn = trajectory.turns[index]
    following = trajectory.turns[index + 1] if index + 1 < len(trajectory.turns) else None
    end = following.start if following is not None and following.segment == turn.segment else None
    return segment.response_ids[turn.end : end]


def _shortened(text: str) -> str:
    return text if len(text) <= PROMPT_LIMIT else f"{text[:PROMPT_LIMIT]}… ({len(text)} characters)"


def _arguments(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return text if len(text) <= 400 else f"{text[:400]}…"
