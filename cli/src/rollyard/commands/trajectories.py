"""The command `rollyard trajectories`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard.connection import connect, server_options


@click.command()
@click.argument("name")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="A .parquet, .jsonl or .jsonl.gz.",
)
@click.option("--follow", is_flag=True, help="Continue until the job has ended (.jsonl only).")
@server_options
def command(
    name: str, output: Path, follow: bool, url: str | None, home: Path | None, namespace: str
) -> None:
    """Write a job's ended rollouts to a file. A file is there whole or not at all."""
    from rollyard.errors import UsageProblem
    from rollyard.extras import require
    from rollyard.trajectories.export import write

    if output.suffix == ".parquet":
        require("a .parquet file", "parquet")
    if follow and output.suffix == ".parquet":
        raise UsageProblem("--follow writes .jsonl; export Parquet once the job has ended")
    with connect(url, home, namespace) as client:
        count = write(client, name, namespace, output, follow=follow)
    click.echo(f"{count} trajectories in {output}")
