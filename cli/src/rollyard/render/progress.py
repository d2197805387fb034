"""The progress of a job or a rollout, which moves on a terminal and comes as plain lines elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text
from rollyard_client import RunningRollout
from rollyard_crds import STAGES, RolloutCounts, RolloutJob, StageName
from rollyard_crds.fields.reward import rounded
from rollyard_crds.lease import MAX_LIVE_TEXT, LiveTurn
from rollyard_crds.trajectory import Trajectory
from rollyard_process.log_text import one_line

LINE_SECONDS: Final = 2.0
WAITING_SECONDS: Final = 3.0
MIN_BAR: Final = 4
MAX_BAR: Final = 36
RUNNING_LINES: Final = 12
"""The lines of a running turn that a terminal shows."""
TEXT_WIDTH: Final = 72
"""The width of a bar's line without the bar itself, in characters."""


@dataclass(frozen=True, slots=True)
class StageProgress:
    """The progress of one stage: the numbers of rollouts that are past it, in it, and waiting for it."""

    stage: StageName
    done: int
    active: int
    queued: int


def stage_progress(counts: RolloutCounts) -> tuple[StageProgress, ...]:
    """Return the progress of each stage.

    A rollout that succeeded is past every stage. One that failed or was cancelled counts as past none,
    because the counts do not say in which stage it ended.
    """
    done = counts.succeeded
    out = []
    for stage in reversed(STAGES):
        here = getattr(counts, stage)
        out.append(StageProgress(stage, done, here.active, here.queued))
        done += here.active + here.queued
    return tuple(reversed(out))


def reward_text(job: RolloutJob) -> str:
    """Return a text such as `reward 0.412, 3 failed`, without the parts that are unknown or zero."""
    status = job.status
    parts = [] if status.reward_mean is None else [f"reward {rounded(status.reward_mean)}"]
    sampling = status.dynamic_sampling
    parts += (
        [f"{sampling.informative_groups} of {sampling.target_groups} groups"] if sampling is not None else []
    )
    parts += [f"{status.counts.failed} failed"] if status.counts.failed else []
    parts += [f"{status.counts.cancelled} cancelled"] if status.counts.cancelled else []
    return ", ".join(parts)


class NewAdvice:
    """Prints each advice on a job once, when it first applies. Its numbers may still change afterwards."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: set[str] = set()

    def update(self, job: RolloutJob) -> None:
        """Print the advice of this state that has not been printed."""
        for advice in job.status.advice:
            if advice.reason not in self._printed:
                self._printed.add(advice.reason)
                self._console.print(Text(one_line(f"Advice: {advice.message}")), soft_wrap=True)


class Bars:
    """Shows the states of one job, one after the other, as a bar for each stage.

    Args:
        progress: The bars, which have no task yet.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks = {stage: progress.add_task(stage.capitalize(), total=None, note="") for stage in STAGES}
        self._advice = NewAdvice(progress.console)
        self._message = ""
        self._since = 0.0
        self._shown = ""

    def update(self, job: RolloutJob) -> None:
        """Move the bars to this state. New advice and a message that persists are printed above them."""
        self._say_what_it_waits_for(job)
        self._advice.update(job)
        for item in stage_progress(job.status.counts):
            note = f"{item.active} active, {item.queued} queued"
            if item.stage == "eval":
                note = ", ".join(part for part in (note, reward_text(job)) if part)
            self._progress.update(
                self._tasks[item.stage],
                completed=item.done,
                total=job.status.counts.total or None,
                note=note,
            )

    def _say_what_it_waits_for(self, job: RolloutJob) -> None:
        message = "" if job.status.completion_time is not None else job.status.message
        if message != self._message:
            self._message, self._since = message, time.monotonic()
        # Every start takes a moment, so only a longer wait is worth a line.
        if message and message != self._shown and time.monotonic() - self._since >= WAITING_SECONDS:
            self._shown = message
            self._progress.console.print(Text(f"{job.status.phase}: {message}"), soft_wrap=True)


class ProgressLines:
    """Prints a line about a job from time to time and one at the end, and new advice at once."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._advice = NewAdvice(console)
        self._last = ""
        self._at = float("-inf")

    def update(self, job: RolloutJob) -> None:
        """Print new advice, and a line about the state.

        The line is printed if the state has changed, and if the last line is old enough or the job has ended.
        """
        self._advice.update(job)
        line = progress_line(job)
        ended = job.status.completion_time is not None
        now = time.monotonic()
        if line == self._last or (now - self._at < LINE_SECONDS and not ended):
            return
        self._last, self._at = line, now
        self._console.print(line, soft_wrap=True)


def progress_line(job: RolloutJob) -> str:
    """Return a line such as `Run: init 64/64, run 12/64 (16 active), eval 3/64, reward 0.500`."""
    counts = job.status.counts
    parts = []
    for item in stage_progress(counts):
        busy = f" ({item.active} active)" if item.active else ""
        parts.append(f"{item.stage} {item.done}/{counts.total}{busy}")
    tail = [reward_text(job)] if reward_text(job) else []
    waiting = [job.status.message] if job.status.message and job.status.completion_time is None else []
    return f"{job.status.phase}: " + ", ".join([*parts, *tail, *waiting])


@contextmanager
def progress_view(console: Console) -> Iterator[Callable[[RolloutJob], None]]:
    """Provide a function that shows each state of a job: as bars on a terminal, and as lines elsewhere."""
    if not console.is_terminal:
        yield ProgressLines(console).update
        return
    # On a narrow terminal, the bars become shorter, because counts must not be cut.
    width = max(MIN_BAR, min(MAX_BAR, console.width - TEXT_WIDTH))
    elapsed = [TimeElapsedColumn()] if width > MIN_BAR else []
    with Progress(
        TextColumn("{task.description:<5}"),
        BarColumn(bar_width=width),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
        TextColumn("{task.fields[note]}"),
        *elapsed,
        console=console,
    ) as progress:
        yield Bars(progress).update


class ConversationView:
    """Prints the messages of a rollout, each of them once, and shows the turn that is being sampled.

    Args:
        console: Where they are printed.
        live: The part of a terminal that shows the running turn, or None if there is none.
    """

    def __init__(self, console: Console, live: Live | None) -> None:
        self._console = console
        self._live = live
        self._printed: dict[int, str] = {}
        """The texts of the printed messages by their numbers, shortened as those of running rollouts are."""
        self._running: LiveTurn | None = None
        """The turn whose text a terminal shows, until its message is printed."""
        self._waits = ""
        self._at = float("-inf")

    def update(self, rollout: RunningRollout) -> None:
        """Print what is new in the rollout."""
        for turn in rollout.turns:
            if not turn.running and self._is_new(turn.no, turn.text):
                self._running = None
                calls = [f"{one_line(call.name)}({one_line(call.arguments)})" for call in turn.tool_calls]
                self._print(_turn_header(turn.role, turn.tokens, turn.seconds), turn.text, calls)
                if len(turn.text) < turn.characters:
                    self._console.print(Text(f"({turn.characters - len(turn.text)} more characters)"))
        last = rollout.turns[-1] if rollout.turns else None
        if last is not None and last.running:
            self._running = last
            self._show(last)
            return
        # The last turn's message comes with the record, so its text stays on the terminal during Eval.
        if rollout.stage != "eval":
            self._running = None
        doing = "in" if rollout.status == "leased" else "waiting for"
        self._say_where(f"{doing} {(rollout.stage or 'its next stage').capitalize()}")

    def finish(self, record: Trajectory) -> None:
        """Print those messages of a rollout that has ended which were not printed before."""
        first = min(self._printed, default=0)
        for number, message in enumerate(record.messages[first:], start=first):
            if not self._is_new(number, message.content):
                continue
            turn = record.turns[record.said[number]] if number in record.said else None
            tokens, seconds = (0, 0.0) if turn is None else (turn.end - turn.start, turn.model_seconds)
            calls = [
                one_line(f"{call.function.name}({json.dumps(call.function.arguments, ensure_ascii=False)})")
                for call in message.tool_calls or ()
            ]
            self._print(_turn_header(message.role, tokens, seconds), message.content, calls)

    def _is_new(self, number: int, text: str) -> bool:
        """Note a message that is there, and return whether it has to be printed."""
        text = text[:MAX_LIVE_TEXT]
        before = self._printed.get(number)
        if before == text:
            return False
        if before is not None:
            self._console.print("Another attempt began, which differs from here on:")
            self._printed = {no: said for no, said in self._printed.items() if no < number}
        self._printed[number] = text
        return True

    def _print(self, header: str, text: str, calls: list[str]) -> None:
        self._console.print(Text(header, "bold"), soft_wrap=True)
        self._console.print(Text(text), soft_wrap=True)
        for call in calls:
            self._console.print(Text(call), soft_wrap=True)

    def _show(self, turn: LiveTurn) -> None:
        header = f"{_turn_header(turn.role, turn.tokens, turn.seconds)}, being sampled"
        if self._live is not None:
            self._live.update(_end_of(turn, header), refresh=True)
        elif time.monotonic() - self._at >= LINE_SECONDS:
            self._at = time.monotonic()
            self._console.print(header, soft_wrap=True)

    def _say_where(self, words: str) -> None:
        if self._live is not None:
            shown = Text(words) if self._running is None else _end_of(self._running, words)
            self._live.update(shown, refresh=True)
        elif words != self._waits:
            self._console.print(words, soft_wrap=True)
        self._waits = words


def _end_of(turn: LiveTurn, words: str) -> Group:
    """Return the end of a turn's text, with some words below it."""
    end = turn.text.splitlines()[-RUNNING_LINES:]
    return Group(Text("\n".join(end), no_wrap=True, overflow="ellipsis"), Text(words, "bold"))


def _turn_header(role: str, tokens: int, seconds: float) -> str:
    """Return a line such as `assistant, 812 tokens in 16 s`."""
    noun = "token" if tokens == 1 else "tokens"
    return f"{one_line(role)}, {tokens:,} {noun} in {seconds:.0f} s" if tokens else one_line(role)


@contextmanager
def conversation_view(console: Console) -> Iterator[ConversationView]:
    """Provide a view of a rollout, whose running turn moves on a terminal."""
    if not console.is_terminal:
        yield ConversationView(console, None)
        return
    with Live(console=console, transient=True, refresh_per_second=4) as live:
        yield ConversationView(console, live)
