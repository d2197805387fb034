"""The rows of a task list that are not tasks and were left out."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from rollyard_crds.base import Model

MAX_REASONS: Final = 10
"""The largest number of reasons that are kept."""
MAX_REASON: Final = 256
_Reason = Annotated[str, Field(max_length=MAX_REASON)]


class SkippedRows(Model):
    """Rows of the task list that are not tasks and were left out, because `tasks.onBadRow` is `skip`."""

    count: Annotated[int, Field(ge=0)] = 0
    """Rows that were left out."""
    read: Annotated[int, Field(ge=0)] = 0
    """Rows that were read, including those that were left out."""
    reasons: Annotated[list[_Reason], Field(max_length=MAX_REASONS)] = Field(default_factory=list)
    """Why the first of them are not tasks: the number of the row, its field, and what is wrong with it."""

    @property
    def full(self) -> bool:
        """Whether no further reason is kept."""
        return len(self.reasons) >= MAX_REASONS

    @property
    def many(self) -> bool:
        """Whether at least half of the rows were left out, which is hardly intended."""
        return 0 < self.read <= 2 * self.count

    def add(self, reason: str) -> None:
        """Count a row that is left out, and keep the reason if it is one of the first."""
        self.count += 1
        if not self.full:
            self.reasons.append(_shown(reason))

    def summary(self) -> str:
        """Return a text such as `2 of 100 rows of the task list are skipped`, or "" if none is."""
        return f"{self.count} of {self.read} rows of the task list are skipped" if self.count else ""

    def lines(self) -> list[str]:
        """Return the summary and the reasons for people, a line each; nothing if no row was left out."""
        if not self.count:
            return []
        more = self.count - len(self.reasons)
        return [f"{self.summary()}:", *self.reasons, *([f"… ({more} more)"] if more > 0 else [])]


def _shown(reason: str) -> str:
    """Return a reason as one line that fits into a status, in which every character is visible."""
    text = "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in reason[: MAX_REASON + 1]
    )
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON - 1]}…"
