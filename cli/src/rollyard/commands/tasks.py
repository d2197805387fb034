"""The commands that work on tasks and answers without a control plane: checks, grades and images."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rollyard import terminal
from rollyard.commands import plugin_option, sandbox_option
from rollyard.errors import InvalidInput, UsageProblem
from rollyard.extras import require

if TYPE_CHECKING:
    from rollyard.jobs.manifests import TasksCheck


@click.command()
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="Manifest (YAML or JSON; several documents allowed), task list (JSON lines, a JSON list, CSV or "
    "Parquet, compressed or not) or folder of Harbor's task folders.",
)
@click.option("--handler", help="For a bare task list: check the tasks as this handler would.")
@click.option("--format", "task_format", help="For a bare task list: its format, such as verl.")
@plugin_option
@click.option("--oracle", is_flag=True, help="Also play each task's reference solution in a sandbox here.")
@click.option(
    "--sandbox",
    default="bubblewrap",
    show_default=True,
    type=click.Choice(["bubblewrap", "apptainer", "docker", "podman", "process"]),
    help="For --oracle: the kind of the sandboxes.",
)
def validate(
    files: tuple[Path, ...],
    handler: str | None,
    task_format: str | None,
    plugins: tuple[Path, ...],
    oracle: bool,
    sandbox: str,
) -> None:
    """Check manifests and the tasks that they name. Every fault is shown; exit status 1 if there is any."""
    from rollyard.jobs.manifests import check_file

    further: TasksCheck | None = None
    if oracle:
        from rollyard.jobs.evaluation import play

        further = partial(play, sandbox=sandbox, plugins=plugins)
    faults: list[str] = []
    for file in files:
        with terminal.cleaned_up():
            report = check_file(file, handler, task_format, further, plugins)
        faults += [f"{file}: {problem}" for problem in report.problems]
        for line in report.good:
            click.echo(f"{file}: {line}")
    if faults:
        for fault in faults[:-1]:
            click.echo(f"rollyard: {fault}", err=True)
        raise InvalidInput(faults[-1])


WITHOUT_CHOICES: Final = ("math", "code", "swe")
"""The handlers that use neither choices nor a number of a task."""


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
@sandbox_option
@plugin_option
@click.option("-o", "--output", type=click.Choice(["json"]), help="A JSON object for each answer.")
def grade(
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
    plugins: tuple[Path, ...],
    output: str | None,
) -> None:
    """Grade an answer as a job would, and show the reward, what was compared, and why.

    \b
    rollyard grade --handler math --key 1/2 'The answer is 0.5.'
    rollyard grade --handler stem --key 450 --unit K 'T = 4.5e2 K'
    rollyard grade --handler code --tasks mbpp.jsonl --format mbpp --task mbpp/2 - < answer.md
    rollyard grade --handler math --file pairs.jsonl

    ANSWER is the policy's last message; `-` reads it from standard input. The exit status is 0 if each answer
    was graded and got the reward that its line of --file expects, 2 for wrong usage, and 1 otherwise.
    """
    from rollyard.jobs import grading

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
        pairs = grading.single(answer, key, choices, numeric, task_id)
    else:
        pairs = grading.pairs_of(pairs_file)
    summed, as_json = pairs_file is not None, output == "json"
    grading.grade(pairs, handler, tasks, task_format, sandbox, plugins, summed=summed, as_json=as_json)


@click.group()
def images() -> None:
    """Build images of sandboxes ahead of time."""


@images.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Build into this folder: the `--image-cache` of the workers.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.sif", help="Build one image."
)
@click.option("--dry-run", is_flag=True, help="Print the definition files, and build nothing.")
@click.option(
    "--base",
    "bases",
    multiple=True,
    metavar="NAME=IMAGE",
    help="What to use for an image that Dockerfiles name: a SIF file, docker-archive:/PATH.tar, …; "
    "repeatable.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 86400),
    default=3600.0,
    show_default=True,
    help="For each image, in seconds.",
)
@click.option("--apptainer", metavar="PROGRAM", help="[apptainer, else singularity, from PATH]")
def build(
    folder: Path,
    cache: Path | None,
    out: Path | None,
    dry_run: bool,
    bases: tuple[str, ...],
    timeout: float,
    apptainer: str | None,
) -> None:
    """Build the images that the Dockerfiles of FOLDER need, without root.

    FOLDER has a Dockerfile, or is a folder of Harbor task folders. Each Dockerfile becomes a definition
    file of Apptainer. What cannot be translated faithfully is refused by line before anything is built. The
    commands of the Dockerfiles run on this machine, as you.
    """
    import asyncio

    if sum((cache is not None, out is not None, dry_run)) != 1:
        raise UsageProblem("give one of --cache DIR, --out FILE.sif and --dry-run")
    substitutes: dict[str, str] = {}
    for text in bases:
        name, equals, image = text.partition("=")
        if not name or not equals or not image:
            raise UsageProblem(f"--base {text!r}: expected NAME=IMAGE")
        substitutes[name] = str(Path(image).expanduser().absolute()) if ":" not in image else image
    require("`rollyard images`", "worker")
    from rollyard import images as image_builds

    needed = image_builds.needed_images(
        folder, substitutes, lambda line: terminal.echo(f"rollyard: {line}", err=True)
    )
    if out is not None and len(needed) > 1:
        raise UsageProblem(f"--out: {folder} needs {len(needed)} images; use --cache DIR")
    for each in needed:
        assert each.image.recipe is not None
        for note in each.image.recipe.notes:
            terminal.echo(f"{each.names[0]}: {note}", err=True)
    if dry_run:
        for each in needed:
            click.echo(f"# {', '.join(each.names)}\n{image_builds.definition_of(each.image)}")
    elif out is not None:
        asyncio.run(image_builds.build_one(needed[0], out.absolute(), apptainer, timeout, click.echo))
    else:
        assert cache is not None
        asyncio.run(image_builds.build_all(needed, cache, apptainer, timeout, click.echo))
