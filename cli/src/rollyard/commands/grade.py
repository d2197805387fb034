"""The command `rollyard grade`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

WITHOUT_CHOICES: Final = ("math", "code", "swe")
"""The handlers that look at no choices and at no number of a task."""


# An answer may begin with a minus sign.
@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, metavar="[ANSWER]")
@click.option(
    "--handler",
    required=True,
    help="The handler; one that judges answers: math, stem, code, mixed, swe (submission: answer), your own.",
)
@click.option("--key", help="The right answer.")
@click.option(
    "--choice", "choices", multiple=True, help="For stem and mixed, in order: a choice. The key is a letter."
)
@click.option("--unit", help="For stem and mixed: the key is a number in this unit ('' for none).")
@click.option(
    "--tolerance", type=float, help="For stem and mixed: the key is a number; the permitted share of it."
)
@click.option(
    "--tasks",
    type=click.Path(path_type=Path),
    help="A task list instead of --key, whose tasks may hold tests.",
)
@click.option("--format", "task_format", help="The format of --tasks, such as mbpp.")
@click.option("--task", "task_id", help="Which of --tasks; not needed if there is only one.")
@click.option(
    "--file",
    "pairs_file",
    type=click.Path(path_type=Path, allow_dash=True),
    help="JSON lines instead of ANSWER: answer, key or task, and optional choices, numeric, expect, id.",
)
@click.option(
    "--sandbox",
    type=click.Choice(["bubblewrap", "apptainer"]),
    default="bubblewrap",
    show_default=True,
    help="The kind of the sandboxes, for handlers that need some.",
)
@click.option("-o", "--output", type=click.Choice(["json"]), help="A JSON object for each answer.")
def command(
    words: tuple[str, ...],
    handler: str,
    key: str | None,
    choices: tuple[str, ...],
    unit: str | None,
    tolerance: float | None,
    tasks: Path | None,
    task_format: str | None,
    task_id: str | None,
    pairs_file: Path | None,
    sandbox: str,
    output: str | None,
) -> None:
    """Grade an answer as a job would, and show the reward, what was compared, and why.

    \b
    rollyard grade --handler math --key 1/2 'The answer is 0.5.'
    rollyard grade --handler stem --key 450 --unit K 'T = 4.5e2 K'
    rollyard grade --handler code --tasks mbpp.jsonl --format mbpp --task mbpp/2 - < answer.md
    rollyard grade --handler math --file pairs.jsonl

    ANSWER is the policy's last message; `-` reads it from standard input. The exit status is 0 if each answer
    was graded, and got the reward that its line of --file expects; 2 for wrong usage, else 1.
    """
    from rollyard.extras import require
    from rollyard.jobs.grading import grade, pairs_of, single

    require("`rollyard grade`", "worker")
    unknown = next((word for word in words if word.startswith("--")), None)
    if unknown is not None:
        raise click.NoSuchOption(unknown)
    if len(words) != (1 if pairs_file is None else 0):
        raise click.UsageError("give one ANSWER, in quotes, or --file")
    numeric = None if unit is None and tolerance is None else {"unit": unit, "relative": tolerance}
    if (key is not None or choices or numeric is not None) and (tasks is not None or pairs_file is not None):
        raise click.UsageError("--key, --choice, --unit and --tolerance are for an ANSWER without --tasks")
    options = {"--choice": choices, "--unit": unit is not None, "--tolerance": tolerance is not None}
    unused = next((option for option, value in options.items() if value), None)
    if unused is not None and handler in WITHOUT_CHOICES:
        raise click.UsageError(f"{unused}: the handler {handler!r} does not use it")
    if task_id is not None and (tasks is None or pairs_file is not None):
        raise click.UsageError(
            "--task is for an ANSWER with --tasks; the lines of --file have a field 'task'"
        )
    if task_format is not None and tasks is None:
        raise click.UsageError("--format is for --tasks")
    if pairs_file is None:
        (answer,) = words
        pairs = single(answer, key, choices, numeric, task_id)
    else:
        pairs = pairs_of(pairs_file)
    grade(
        pairs, handler, tasks, task_format, sandbox, summed=pairs_file is not None, as_json=output == "json"
    )
