"""The command `rollyard validate`, which checks manifests and task lists without a server."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.option(
    "-f",
    "--file",
    "files",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="Manifest (YAML or JSON; several documents allowed) or task list (.jsonl, .jsonl.gz, .parquet).",
)
@click.option("--handler", help="For a bare task list: check the tasks as this handler would.")
@click.option("--format", "task_format", help="For a bare task list: its format, such as verl.")
def command(files: tuple[Path, ...], handler: str | None, task_format: str | None) -> None:
    """Check manifests and the tasks that they name. Every fault is named; exit status 1 if there is one."""
    from rollyard.errors import InvalidInput
    from rollyard.jobs.manifests import check_file

    faults: list[str] = []
    for file in files:
        report = check_file(file, handler, task_format)
        faults += [f"{file}: {problem}" for problem in report.problems]
        for line in report.good:
            click.echo(f"{file}: {line}")
    if faults:
        for fault in faults[:-1]:
            click.echo(f"rollyard: {fault}", err=True)
        raise InvalidInput(faults[-1])
