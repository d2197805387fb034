"""Lets a shell act on what is left of a SIGINT before it gets a command.

One that came as the last command ended may still be pending in bash, which then drops the number, or
the line, that it reads next: the command would never begin. An empty line can be dropped and asked again.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from rollyard_sandbox.execution.shell import Shell

AT_INTERRUPT = b"\n"
"""What bash prints when it acts on a SIGINT at its prompt."""


class Settling:
    """Probes of an idle shell, until it has reported the last of them.

    Raises:
        OSError: from the start on, and of `is_over`: the shell is gone.
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
        """Whether a report with `number` says that the shell waits for a command, and for nothing else."""
        if number == self._asked[-1]:
            return True
        if number in self._asked:
            self._asked.remove(number)  # the shell reads the next one
        else:
            self._ask()  # it began its prompt again, perhaps without the number that it had read
        return False
