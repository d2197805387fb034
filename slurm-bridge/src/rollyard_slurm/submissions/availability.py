"""A record of whether Slurm answers.

While Slurm does not answer, everything counts as it was last seen.
"""

from __future__ import annotations

from collections.abc import Callable


class SlurmAvailability:
    """Records whether Slurm answers.

    Args:
        say: A function that is called with a line for the user of the bridge at each change.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._trouble = ""
        self._answered_once = False

    @property
    def trouble(self) -> str:
        """The reason why Slurm does not answer. It is empty while Slurm answers."""
        return self._trouble

    @property
    def answered_once(self) -> bool:
        """Whether Slurm has answered since the bridge started. Nothing is submitted before that."""
        return self._answered_once

    def lost(self, trouble: str) -> None:
        """Note that Slurm does not answer, and why."""
        if trouble != self._trouble:
            self._say(f"Slurm does not answer, everything counts as last seen: {trouble}")
        self._trouble = trouble

    def answered(self) -> None:
        """Note that Slurm answers."""
        if self._trouble:
            self._say(f"Slurm answers again (it did not: {self._trouble})")
        self._trouble = ""
        self._answered_once = True
