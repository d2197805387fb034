"""The command `rollyard scale`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard.connection import connect, server_options


@click.command()
@click.argument("kind", metavar="[bp]")
@click.argument("name", required=False)
@click.option("--replicas", type=click.IntRange(0, 1024), required=True, help="Backends that should run.")
@server_options
def command(
    kind: str, name: str | None, replicas: int, url: str | None, home: Path | None, namespace: str
) -> None:
    """Change the number of a pool's backends: `scale bp NAME --replicas N`.

    Those that go take no new rollouts and end when they have none, or after half a minute;
    rollouts that they still have then continue elsewhere.
    """
    from rollyard.commands.get import POOL_WORDS

    if name is None:
        kind, name = "bp", kind
    if kind not in POOL_WORDS:
        raise click.UsageError(f"only backend pools (bp) are scaled (got {kind!r})")
    with connect(url, home, namespace) as client:
        pool = client.patch_pool(name, {"replicas": replicas}, namespace)
    click.echo(f"backendpool/{pool.metadata.name} scaled to {pool.spec.replicas}")
