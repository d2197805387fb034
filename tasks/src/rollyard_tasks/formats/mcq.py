"""The format `mcq`: multiple choice, as MMLU, MMLU-Pro, ARC, ScienceQA and GPQA write it."""

from __future__ import annotations

import hashlib
import string
from typing import Any, Final

from rollyard_tasks.formats.ids import row_id
from rollyard_tasks.formats.interface import Row, RowRefused, TaskFormat

_CHOICES: Final = ("choices", "options")
_GPQA: Final = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_REQUEST: Final = "End with the letter of the right choice, in the form: Answer: LETTER"
_BEFORE: Final = ("article", "passage", "context", "hint")
"""Columns that are shown before the question. ScienceQA's `lecture` explains the answer, and is left out."""
_REST: Final = ("category", "subject", "src", "Subdomain", "Record ID")
"""Columns that are kept in the metadata."""


class McqFormat(TaskFormat):
    """Reads rows with `question`, `choices` or `options`, and `answer`, or with the columns of ARC or GPQA.

    The answer is a letter, the index of a choice (from 0), or the text of one. If it may mean several, as "1"
    of the choices "1" and "2" does, `answer_index` or `answer_letter` must decide. In ARC, `choices` is an
    object with the lists `text` and `label`, and `answerKey` is a label. Whatever the labels are, the prompt
    shows letters, and the letter is the task's answer. GPQA's choices are put into an order that depends on
    their texts alone.
    """

    columns = (
        ("question", "choices", "answer"),
        ("question", "options", "answer"),
        ("question", "choices", "answerKey"),
        ("question_stem", "choices", "answerKey"),
        ("Question", "Correct Answer"),
    )

    def task(self, row: Row) -> dict[str, Any]:
        """Return the task of a row, whose prompt is the question with its choices."""
        if "Correct Answer" in row.values:
            question, choices = row.text("Question"), [row.text(name).strip() for name in _GPQA]
            answer = choices[0]
            choices.sort(key=lambda text: hashlib.sha256(f"{question}\0{text}".encode()).digest())
            index = choices.index(answer)
        else:
            question = row.text("question_stem" if "question_stem" in row.values else "question")
            name = next((name for name in _CHOICES if name in row.values), "choices")
            if isinstance(row.json(name), dict):
                choices, index = self._labelled(row, row.row(name))
            else:
                choices = self._texts(row, name)
                index = self._answer(row, choices)
        if not 2 <= len(choices) <= len(string.ascii_uppercase):
            raise RowRefused("choices", "must be 2 to 26 texts")
        passages = [text for name in _BEFORE if (text := row.text(name, "").strip())]
        lines = [f"{letter}. {text}" for letter, text in zip(string.ascii_uppercase, choices, strict=False)]
        return {
            "prompt": "\n".join(("\n\n".join((*passages, question)), "", *lines, "", _REQUEST)),
            "choices": choices,
            "answer": string.ascii_uppercase[index],
            "metadata": {name: row.values[name] for name in _REST if name in row.values},
            **row_id(row, "id", "question_id"),
        }

    def _texts(self, row: Row, name: str) -> list[str]:
        texts = row.items(name)
        for index, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise RowRefused(f"{row.name(name)}[{index}]", "must be a text that is not empty")
        return texts

    def _labelled(self, row: Row, choices: Row) -> tuple[list[str], int]:
        """Return the choices of ARC's columns, and the index of the right one."""
        texts, labels = self._texts(choices, "text"), [str(label) for label in choices.items("label")]
        if not len(texts) == len(labels) == len(set(labels)):
            raise RowRefused(choices.name("label"), "must be as many as the texts, and all different")
        key = str(row.values.get("answerKey", ""))
        if key not in labels:
            raise RowRefused("answerKey", "must be the label of one choice")
        return texts, labels.index(key)

    def _answer(self, row: Row, choices: list[str]) -> int:
        indices = sorted(_indices(row.values.get("answer"), choices))
        if not indices:
            raise RowRefused("answer", "must be the letter, the index or the text of one choice")
        index, letter = row.values.get("answer_index"), row.values.get("answer_letter")
        indices = [
            number
            for number in indices
            if index in (None, number, str(number)) and letter in (None, string.ascii_uppercase[number])
        ]
        if len(indices) != 1:
            raise RowRefused(
                "answer",
                "must mean one choice as a letter, an index and a text, or the one that 'answer_index' or "
                "'answer_letter' names",
            )
        return indices[0]


def _indices(answer: Any, choices: list[str]) -> set[int]:
    """Return the indices of the choices that an answer may mean: by a letter, by a text and by an index."""
    indices: set[int] = set()
    if isinstance(answer, str):
        letter = answer.strip().upper()
        if len(letter) == 1 and letter in string.ascii_uppercase[: len(choices)]:
            indices.add(string.ascii_uppercase.index(letter))
        if choices.count(answer) == 1:
            indices.add(choices.index(answer))
        if answer.strip().isascii() and answer.strip().isdigit() and len(answer) < 4:
            answer = int(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        indices.add(answer)
    return indices
