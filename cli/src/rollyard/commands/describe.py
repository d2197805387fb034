"""The command `rollyard describe`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rollyard import terminal
from rollyard.connection import connection, server_options

if TYPE_CHECKING:
    from rollyard_client import Client

MAX_RETRIED: Final = 10_000
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

    from rollyard.commands.get import find, named
    from rollyard.page import link_if_any
    from rollyard.render.describe import describe_job, describe_pool

    which, name = named("describe", kind, name)
    console = terminal.console()
    with connection(url, home, namespace) as opened:
        client = opened.client
        thing = find(client, which, name, namespace)
        if isinstance(thing, RolloutJob):
            meta = thing.metadata
            reasons: Counter[tuple[str, str]] = Counter(_failures(client, meta.name, meta.namespace))
            retried = client.rollouts(meta.name, retried=True, namespace=meta.namespace)
            attempts: Counter[tuple[str, str, bool]] = Counter(
                (attempt.stage, attempt.reason, attempt.counted)
                for item in islice(retried, MAX_RETRIED)
                for attempt in item.attempts
            )
            link = link_if_any(opened, meta.namespace, meta.name)
            describe_job(console, thing, reasons, attempts, link)
        else:
            describe_pool(console, thing)


def _failures(client: Client, name: str, namespace: str) -> dict[tuple[str, str], int]:
    """Return the number of failed rollouts for each reason, with the message of the newest one."""
    failures = client.statistics(name, namespace)["failures"]
    return {(row["reason"], row.get("message", "")): row["n"] for row in failures}
