"""Scripted answers: texts that the engine gives instead of what the model would choose.

They let a test play a whole rollout with answers that it knows. Everything else is as always: the model
computes the logits of each position, and the sampler reports how likely they make the scripted token.

A script is a file of JSON lines, such as

    {"contains": "count the files", "answers": ["I count them.", "There are 3."]}

A line fits a request if the decoded prompt contains its text, and any request if it has none. Which of the
answers is given follows from the prompt alone, so that rollouts may run at once, in any order and on several
engines: it is the one after those that the prompt already has as turns, in order. A line whose answers the
prompt all has fits no longer. The first line that fits is used. If none does, the model samples.

A prompt that ends within an answer continues it, as requests do that were cut by an update of the weights. An
answer must therefore not begin with the token with which the template's prompts end.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard_engine.errors import EngineError
from rollyard_engine.tokens import EngineTokenizer

MAX_BYTES: Final = 16 << 20
"""The largest script, in bytes."""
_FIELDS: Final = frozenset({"contains", "answers"})


@dataclass(frozen=True, slots=True)
class _Answer:
    text: str
    ids: tuple[int, ...]
    """Its token ids and the token that ends the turn."""


@dataclass(frozen=True, slots=True)
class _Line:
    contains: str
    answers: tuple[_Answer, ...]


class Script:
    """The scripted answers of an engine.

    Args:
        lines: The lines, each a text that prompts contain and the answers.
        tokenizer: The model's tokenizer.
        end: The id of the token that ends a turn.
    """

    def __init__(
        self, lines: Sequence[tuple[str, Sequence[str]]], tokenizer: EngineTokenizer, end: int
    ) -> None:
        self._tokenizer = tokenizer
        self._end = tokenizer.piece(end)

        def answer(text: str) -> _Answer:
            return _Answer(text.strip(), (*tokenizer.encode(text, add_special_tokens=False), end))

        self._lines = [_Line(contains, tuple(map(answer, answers))) for contains, answers in lines]

    @property
    def highest_id(self) -> int:
        """The highest token id of all answers."""
        return max(max(answer.ids) for line in self._lines for answer in line.answers)

    def answer(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Return the ids with which a prompt is answered, or () if the model is to choose them."""
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        for line in self._lines:
            given = self._given(line, text) if line.contains in text else len(line.answers)
            if given < len(line.answers):
                ids = line.answers[given].ids
                return ids[_begun(ids, prompt) :]
        return ()

    def _given(self, line: _Line, text: str) -> int:
        """Return how many of the answers are turns in the text of a prompt, in their order."""
        at = 0
        for number, answer in enumerate(line.answers):
            while (at := text.find(answer.text, at)) >= 0:
                at += len(answer.text)
                if text[at : at + len(self._end) + 64].lstrip().startswith(self._end):
                    break
            else:
                return number
        return len(line.answers)


def _begun(ids: Sequence[int], prompt: Sequence[int]) -> int:
    """Return the number of an answer's ids with which a prompt ends."""
    longest = min(len(ids) - 1, len(prompt))
    return next((size for size in range(longest, 0, -1) if tuple(prompt[-size:]) == tuple(ids[:size])), 0)


def read_script(path: Path, tokenizer: EngineTokenizer, vocabulary: int, end: int | None) -> Script:
    """Read a script.

    Args:
        path: The file.
        tokenizer: The model's tokenizer.
        vocabulary: The number of the model's token ids.
        end: The id of the token that ends a turn, or None if the model has none.

    Raises:
        EngineError: The file cannot be read or is no script, or the model has no token that ends a turn. The
            message names the line and the field.
    """
    if end is None:
        raise EngineError(
            "--script: the model has no token that ends a turn (eos_token)", reason="StartupFailed"
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise EngineError(f"--script: {path} has more than {MAX_BYTES >> 20} MiB", reason="StartupFailed")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise EngineError(f"--script: {path} cannot be read: {why}", reason="StartupFailed") from error
    lines: list[tuple[str, list[str]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                lines.append(_line(line, tokenizer.piece(end)))
            except ValueError as error:
                raise EngineError(
                    f"--script: {path}, line {number}: {error}", reason="StartupFailed"
                ) from error
    if not lines:
        raise EngineError(f"--script: {path} has no line", reason="StartupFailed")
    script = Script(lines, tokenizer, end)
    if script.highest_id >= vocabulary:
        raise EngineError(
            f"--script: {path}: an answer has the token {script.highest_id}, and the model's vocabulary ends "
            f"at {vocabulary - 1}",
            reason="StartupFailed",
        )
    return script


def _line(line: str, end: str) -> tuple[str, list[str]]:
    """Return the text that prompts contain, and the answers.

    Raises:
        ValueError: The line is not one of a script. The message names the field.
    """
    try:
        value = json.loads(line)
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError('it must be an object such as {"contains": "TEXT", "answers": ["TEXT"]}')
    if unknown := sorted(value.keys() - _FIELDS):
        raise ValueError(f"'{unknown[0]:.64}' is unknown; the fields are 'contains' and 'answers'")
    contains, answers = value.get("contains", ""), value.get("answers")
    if not isinstance(contains, str):
        raise ValueError("'contains' must be a text")
    if not isinstance(answers, list) or not answers:
        raise ValueError("'answers' must be a list of texts with at least one")
    for index, answer in enumerate(answers):
        if not isinstance(answer, str) or not answer.strip():
            raise ValueError(f"'answers[{index}]' must be a text that is not empty")
        if end in answer:
            raise ValueError(f"'answers[{index}]' has {end}, which ends a turn; it is added at the end")
    return contains, answers
