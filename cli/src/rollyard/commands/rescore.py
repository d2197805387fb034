"""The command `rollyard rescore`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard import terminal
from rollyard.connection import connect, server_options


@click.command()
@click.argument("name")
@click.option(
    "--handler",
    required=True,
    help="The handler; one that judges answers: math, stem, code, mixed, swe (submission: answer), your own.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A .jsonl or .jsonl.gz file; without it, the changes are only counted.",
)
@click.option(
    "--reward",
    "reward_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML with a section `reward`, in place of the job's.",
)
@click.option(
    "--sandbox",
    type=click.Choice(["bubblewrap", "apptainer"]),
    default="bubblewrap",
    show_default=True,
    help="The kind of the sandboxes here, for handlers that need some.",
)
@server_options
def command(
    name: str,
    handler: str,
    output: Path | None,
    reward_file: Path | None,
    sandbox: str,
    url: str | None,
    home: Path | None,
    namespace: str,
) -> None:
    """Evaluate a job's kept trajectories again on this machine, and report how many rewards change.

    No rollout runs, and the control plane keeps the rewards that it has. Each trajectory in the file
    says what its reward was, and who evaluated it again, when and with which handler.
    """
    from rollyard.errors import CliError
    from rollyard.extras import require
    from rollyard.jobs.rescoring import rescore

    require("`rollyard rescore`", "worker")
    with connect(url, home, namespace) as client:
        report = rescore(client, name, namespace, handler, output, reward_file, sandbox)
    for line in report.lines():
        terminal.echo_line(line)
    if output is not None:
        click.echo(f"The trajectories are in {output}.")
    if report.failed:
        trajectories = "1 trajectory" if report.failed == 1 else f"{report.failed} trajectories"
        raise CliError(f"{trajectories} could not be evaluated, for the reasons above")
