"""The command `rollyard cancel`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard.connection import connect, server_options


@click.command()
@click.argument("name")
@click.option("--group", help="Only the rollouts of this task.")
@click.option("--rollout", help="Only this rollout.")
@server_options
def command(
    name: str, group: str | None, rollout: str | None, url: str | None, home: Path | None, namespace: str
) -> None:
    """Cancel a job, a group or a rollout, wherever it is: queued, running or in evaluation."""
    from rollyard_client.finish import finished

    from rollyard.errors import UsageProblem

    if group and rollout:
        raise UsageProblem("give --group or --rollout, not both")
    with connect(url, home, namespace) as client:
        before = client.job(name)
        job = client.cancel(name, group=group, rollout=rollout)
    counts = job.status.counts
    target = f"rollout {rollout}" if rollout else f"group {group}" if group else f"job {name}"
    if finished(before):
        click.echo(f"job {name} had ended already ({before.status.phase}); nothing was changed")
        return
    click.echo(f"{target} cancelled ({counts.succeeded} of {counts.total} rollouts have a reward)")
