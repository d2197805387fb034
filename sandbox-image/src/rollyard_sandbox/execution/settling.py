"""Settling of a shell: it acts on what is left of a SIGINT before it receives a command.

A SIGINT that came as the last command ended may still be pending in bash. Bash then drops the number, or the
line, that it reads next, and a command would never begin. An empty line can be dropped and sent again.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.execution.shell import Shell

AT_INTERRUPT = b"\n"
"""The text that bash prints when it acts on a SIGINT at its prompt."""


class Settling:
    """The probes of an idle shell, which are repeated until it has reported the last of them.

    Raises:
        OSError: The shell is gone. `is_over` raises this, too.
    """

    def __init__(self, shell: Shell, next_number: Callable[[], str]) -> None:
        self._shell = shell
        self._next_number = next_number
        self._asked: list[str] = []
        shell.forget_input()
        self._ask()

    def _ask(self) -> None:
        self._asked.append(self._next_number())
        self._shell.probe(self._asked[-1])

    def is_over(self, number: str) -> bool:
        """Return whether a report with `number` means that the shell waits for a command and nothing else."""
        if number == self._asked[-1]:
            return True
        if number in self._asked:
            self._asked.remove(number)  # The shell reads the next number.
        else:
            self._ask()  # The shell began its prompt again, perhaps without the number that it had read.
        return False
