"""The command `rollyard get`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

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


def named(command: str, kind: str, name: str | None) -> tuple[Literal["rj", "bp"] | None, str]:
    """Return the kind and the name that `[KIND] NAME` of a command gives. The kind is None for a NAME alone.

    Raises:
        click.UsageError: There is a KIND alone, or a word that is none.
    """
    known: Literal["rj", "bp"] | None = "rj" if kind in JOB_WORDS else "bp" if kind in POOL_WORDS else None
    if name is None and known is not None:
        raise click.UsageError(
            f"give the NAME too: rollyard {command} {kind} NAME (`rollyard get {kind}` lists them)"
        )
    if name is None:
        return None, kind
    if known is None:
        raise click.UsageError(f"KIND must be rj or bp (got {kind!r})")
    return known, name


def find(
    client: Client, kind: Literal["rj", "bp"] | None, name: str, namespace: str
) -> RolloutJob | BackendPool:
    """Return the object of a kind and name. Without a kind it is the job of this name, or else the pool."""
    from rollyard_client.errors import NotFound

    if kind == "bp":
        return client.pool(name, namespace)
    try:
        return client.job(name, namespace)
    except NotFound:
        if kind == "rj":
            raise
        try:
            return client.pool(name, namespace)
        except NotFound:
            raise NotFound(f"no RolloutJob and no BackendPool {name!r} in namespace {namespace!r}") from None
