"""The command `rollyard describe`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard import terminal
from rollyard.connection import connect, server_options

MAX_RETRIED = 10_000
"""The number of retried rollouts whose attempts are counted."""


@click.command()
@click.argument("kind", metavar="[KIND]")
@click.argument("name", required=False)
@server_options
def command(kind: str, name: str | None, url: str | None, home: Path | None, namespace: str) -> None:
    """Show everything about one job or pool: `describe NAME`, or `describe rj|bp NAME`."""
    from collections import Counter
    from itertools import islice

    from rollyard_crds import RolloutJob

    from rollyard.commands.get import JOB_WORDS, POOL_WORDS, find
    from rollyard.render.describe import describe_job, describe_pool

    if name is None and kind in (*JOB_WORDS, *POOL_WORDS):
        raise click.UsageError(
            f"give the NAME too: rollyard describe {kind} NAME (`rollyard get {kind}` lists them)"
        )
    console = terminal.console()
    with connect(url, home, namespace) as client:
        thing = find(client, kind, name, namespace)
        if isinstance(thing, RolloutJob):
            meta = thing.metadata
            failed = client.rollouts(meta.name, status="failed", namespace=meta.namespace)
            reasons = Counter((item.reason, item.message) for item in failed)
            retried = client.rollouts(meta.name, retried=True, namespace=meta.namespace)
            attempts: Counter[tuple[str, str, bool]] = Counter(
                (one.stage, one.reason, one.counted)
                for item in islice(retried, MAX_RETRIED)
                for one in item.attempts
            )
            describe_job(console, thing, reasons, attempts)
        else:
            describe_pool(console, thing)
