"""The command `rollyard get`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from rollyard import terminal
from rollyard.connection import connect, server_options

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds import BackendPool, RolloutJob

JOB_WORDS: Final = ("rj", "rolloutjob", "rolloutjobs", "job", "jobs")
POOL_WORDS: Final = ("bp", "backendpool", "backendpools", "pool", "pools")


@click.command()
@click.argument("kind", default="rj")
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Choice(["json", "yaml", "wide"]), help="Instead of the table.")
@click.option("-A", "--all-namespaces", is_flag=True, help="List those of all namespaces.")
@server_options
def command(
    kind: str,
    name: str | None,
    output: str | None,
    all_namespaces: bool,
    url: str | None,
    home: Path | None,
    namespace: str,
) -> None:
    """List jobs (KIND rj, the default) or backend pools (KIND bp), or show one.

    `get bp -o wide` has a line for each backend: its health, circuit, weights, load and speed.
    """

    from rollyard.render import tables

    if kind not in (*JOB_WORDS, *POOL_WORDS):
        kind, name = "rj", kind
    of_jobs = kind in JOB_WORDS
    scope = None if all_namespaces else namespace
    with connect(url, home, namespace) as client:
        if of_jobs:
            jobs = [client.job(name, namespace)] if name else client.jobs(scope)
            if output not in ("json", "yaml"):
                tables.print_table(terminal.console(), tables.jobs_table(jobs, output == "wide"))
                return
            documents = [job.to_json() for job in jobs]
        else:
            pools = [client.pool(name, namespace)] if name else client.pools(scope)
            if output not in ("json", "yaml"):
                table = tables.backends_table(pools) if output == "wide" else tables.pools_table(pools)
                tables.print_table(terminal.console(), table)
                return
            documents = [pool.to_json() for pool in pools]
    document = documents[0] if name else {"apiVersion": "v1", "kind": "List", "items": documents}
    click.echo(_text(document, output or "yaml"), nl=False)


def _text(document: object, output: str) -> str:
    if output == "json":
        import json

        return json.dumps(document, indent=2) + "\n"
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def find(client: Client, kind: str, name: str | None, namespace: str) -> RolloutJob | BackendPool:
    """Return the object that `KIND NAME` names. A `NAME` alone is that of a job, or else of a pool."""
    from rollyard_client.errors import NotFound

    if name is not None and kind in POOL_WORDS:
        return client.pool(name, namespace)
    if name is not None and kind in JOB_WORDS:
        return client.job(name, namespace)
    if name is not None:
        raise click.UsageError(f"KIND must be rj or bp (got {kind!r})")
    try:
        return client.job(kind, namespace)
    except NotFound:
        try:
            return client.pool(kind, namespace)
        except NotFound:
            raise NotFound(f"no RolloutJob and no BackendPool {kind!r} in namespace {namespace!r}") from None
