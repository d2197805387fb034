"""Output on a terminal. Text from servers and rollouts is printed with its control characters escaped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment


def echo(text: str, *, err: bool = False) -> None:
    """Print text of several lines, with control characters escaped."""
    from rollyard_process.log_text import lines

    click.echo(lines(text), err=err)


def echo_line(text: str, *, err: bool = False) -> None:
    """Print text as one line, with control characters and line breaks escaped."""
    from rollyard_process.log_text import one_line

    click.echo(one_line(text), err=err)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Print a line if Ctrl-C ends the block, which removes what it starts however it ends."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("Interrupted; everything that it started is removed", err=True)
        raise


def console(**options: Any) -> Console:
    """Return a console that escapes control characters in the text that it prints, but not its own styles.

    The class is defined in this function because commands that print no table need not import rich.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rollyard_process.log_text import lines

    class Terminal(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text, style, control = segment
                yield segment if control else Segment(lines(text), style)

    # What looks like markup is text from a policy, a task or a person.
    return Terminal(highlight=False, markup=False, emoji=False, **options)
