"""The command `rollyard images`, which builds images of sandboxes ahead of time."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard import terminal
from rollyard.errors import UsageProblem


@click.group()
def command() -> None:
    """Build images of sandboxes ahead of time."""


@command.command()
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
    help="What is taken for an image that Dockerfiles name: a SIF file, docker-archive:/PATH.tar, …; "
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

    FOLDER has a Dockerfile, or it is a folder of Harbor task folders. Each Dockerfile becomes a definition
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
    from rollyard import extras

    extras.require("`rollyard images`", "worker")
    from rollyard import images

    needed = images.needed_images(
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
            click.echo(f"# {', '.join(each.names)}\n{images.definition_of(each.image)}")
    elif out is not None:
        asyncio.run(images.build_one(needed[0], out.absolute(), apptainer, timeout, click.echo))
    else:
        assert cache is not None
        asyncio.run(images.build_all(needed, cache, apptainer, timeout, click.echo))
