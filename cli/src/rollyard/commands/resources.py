"""The commands that submit, show, change and end jobs and backend pools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import click

from rollyard import terminal
from rollyard.connection import Server, connect, connection, server_options
from rollyard.errors import InvalidInput, UsageProblem

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds import BackendPool, RolloutJob


@click.command()
@click.option(
    "-f", "--file", "path", required=True, type=click.Path(path_type=Path), help="Manifest (YAML or JSON)."
)
@click.option("--name", help="Submit the job under this name.")
@click.option("--wait", is_flag=True, help="Show progress until the job has ended.")
@server_options
def submit(path: Path, name: str | None, wait: bool, server: Server) -> None:
    """Submit a job or a backend pool from a manifest. Submitting the same manifest again changes nothing."""
    from rollyard_crds import BackendPool, RolloutJob
    from rollyard_crds.fields.signals import warnings_of

    from rollyard.jobs.manifests import entry_point_problems, folder_warnings, local_path, read_manifests
    from rollyard.jobs.running import follow, leaving, phase_of, require_success, submit_job

    manifests = read_manifests(path)
    jobs = [manifest for manifest in manifests if isinstance(manifest, RolloutJob)]
    if name is not None:
        if len(jobs) != 1:
            raise UsageProblem(f"--name needs a file with one RolloutJob; {path} holds {len(jobs)}")
        jobs[0].metadata.name = name
    with connect(*server) as client:
        for manifest in manifests:
            if "namespace" not in manifest.metadata.model_fields_set:
                manifest.metadata.namespace = client.namespace
            if isinstance(manifest, BackendPool):
                client.create_pool(manifest)
                click.echo(f"backendpool/{manifest.metadata.name} submitted")
            else:
                before = phase_of(client, manifest)
                job = submit_job(client, manifest)
                rollouts = f"{job.status.counts.total} rollouts"
                if before is None:
                    click.echo(f"rolloutjob/{job.metadata.name} submitted ({rollouts})")
                else:
                    click.echo(f"rolloutjob/{job.metadata.name} unchanged ({before}, {rollouts})")
                if job.status.skipped_rows is not None:
                    for line in job.status.skipped_rows.lines():
                        click.echo(f"rollyard: {line}", err=True)
                source = manifest.spec.tasks
                folder = local_path(source.url or "")
                further = folder_warnings(folder, source) if folder is not None and folder.is_dir() else []
                for warning in warnings_of(manifest.spec) + [f"spec.tasks.url: {line}" for line in further]:
                    click.echo(f"rollyard: warning: {warning}", err=True)
                # The control plane, perhaps on another machine, has them, so this is only a note.
                for problem in entry_point_problems(manifest):
                    click.echo(f"rollyard: not installed on this machine: {problem}", err=True)
        if not jobs:
            if wait:
                raise InvalidInput(f"{path}: holds no RolloutJob to wait for")
            return
        if wait:
            for job in jobs:
                with leaving(job.metadata.name):
                    ended = follow(client, job.metadata.name, job.metadata.namespace)
                require_success(ended, hint=True)
        elif not jobs[0].spec.tasks.stream:
            click.echo(f"Follow it with `rollyard watch {jobs[0].metadata.name}`")


JOB_WORDS: Final = ("rj", "rolloutjob", "rolloutjobs", "job", "jobs")
POOL_WORDS: Final = ("bp", "backendpool", "backendpools", "pool", "pools")


@click.command()
@click.argument("kind", default="rj")
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Choice(["json", "yaml", "wide"]), help="Instead of the table.")
@click.option("-A", "--all-namespaces", is_flag=True, help="List those of all namespaces.")
@server_options
def get(
    kind: str,
    name: str | None,
    output: str | None,
    all_namespaces: bool,
    server: Server,
) -> None:
    """List jobs (KIND rj, the default) or backend pools (KIND bp), or show one.

    `get bp -o wide` has a line for each backend: its health, circuit, weights, load and speed.
    """

    from rollyard.render import tables

    if kind not in (*JOB_WORDS, *POOL_WORDS):
        kind, name = "rj", kind
    of_jobs = kind in JOB_WORDS
    with connect(*server) as client:
        scope = "*" if all_namespaces else client.namespace
        if of_jobs:
            jobs = [client.job(name, client.namespace)] if name else client.jobs(scope)
            if output not in ("json", "yaml"):
                tables.print_table(terminal.console(), tables.jobs_table(jobs, output == "wide"))
                return
            documents = [job.to_json() for job in jobs]
        else:
            pools = [client.pool(name, client.namespace)] if name else client.pools(scope)
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
        click.UsageError: There is a KIND alone, or a word that is not a KIND.
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


MAX_RETRIED: Final = 10_000
"""The largest number of retried rollouts whose attempts are counted."""


def _pool_of(client: Client, job: RolloutJob) -> BackendPool | None:
    """Return the pool of a job, or None if it has none or the pool does not exist."""
    from rollyard_client.errors import NotFound

    if job.spec.backend_ref is None:
        return None
    try:
        return client.pool(job.spec.backend_ref.name, job.metadata.namespace)
    except NotFound:
        return None


@click.command()
@click.argument("kind", metavar="[KIND]")
@click.argument("name", required=False)
@server_options
def describe(kind: str, name: str | None, server: Server) -> None:
    """Show everything about one job or pool: `describe NAME`, or `describe rj|bp NAME`."""
    from collections import Counter
    from itertools import islice

    from rollyard_crds import RolloutJob

    from rollyard.page import link_if_any
    from rollyard.render.describe import describe_job, describe_pool

    which, name = named("describe", kind, name)
    console = terminal.console()
    with connection(*server) as opened:
        client = opened.client
        thing = find(client, which, name, client.namespace)
        if isinstance(thing, RolloutJob):
            meta = thing.metadata
            failures = client.statistics(meta.name, meta.namespace).failures
            # Each reason comes with the message of its newest rollout.
            reasons = Counter({(row.reason, row.message): row.n for row in failures})
            retried = client.rollouts(meta.name, retried=True, namespace=meta.namespace)
            attempts: Counter[tuple[str, str, bool]] = Counter(
                (attempt.stage, attempt.reason, attempt.counted)
                for item in islice(retried, MAX_RETRIED)
                for attempt in item.attempts
            )
            link = link_if_any(opened, meta.namespace, meta.name)
            describe_job(console, thing, reasons, attempts, link, _pool_of(client, thing))
        else:
            describe_pool(console, thing)


@click.command()
@click.argument("kind", metavar="[bp]")
@click.argument("name", required=False)
@click.option("--replicas", type=click.IntRange(0, 1024), required=True, help="Backends that should run.")
@server_options
def scale(kind: str, name: str | None, replicas: int, server: Server) -> None:
    """Change the number of a pool's backends: `scale bp NAME --replicas N`.

    Backends that go take no new rollouts, and end when they have none left or after half a minute; rollouts
    that they still have then continue elsewhere.
    """
    if name is None:
        kind, name = "bp", kind
    if kind not in POOL_WORDS:
        raise click.UsageError(f"only backend pools (bp) are scaled (got {kind!r})")
    with connect(*server) as client:
        pool = client.patch_pool(name, {"replicas": replicas}, client.namespace)
    click.echo(f"backendpool/{pool.metadata.name} scaled to {pool.spec.replicas}")


@click.command()
@click.argument("name")
@click.option(
    "--rollout",
    metavar="ID",
    help="Follow this rollout instead, with the turn that is being sampled. `rollyard view NAME --list "
    "--status leased` lists those that run.",
)
@server_options
def watch(name: str, rollout: str | None, server: Server) -> None:
    """Follow a job's progress until it ends: bars on a terminal, lines elsewhere."""
    from rollyard.jobs.running import follow, follow_rollout, leaving, require_success

    with connect(*server) as client, leaving(name):
        if rollout is not None:
            follow_rollout(client, name, rollout, client.namespace)
            return
        job = follow(client, name, client.namespace)
    terminal.echo_line(f"{job.status.phase}: {job.status.message}")
    require_success(job, hint=True)


@click.command()
@click.argument("name")
@click.option("--group", help="Only the rollouts of this task.")
@click.option("--rollout", help="Only this rollout.")
@server_options
def cancel(name: str, group: str | None, rollout: str | None, server: Server) -> None:
    """Cancel a job, a group or a rollout, wherever it is: queued, running or being evaluated."""
    from rollyard_client.finish import finished

    if group and rollout:
        raise UsageProblem("give --group or --rollout, not both")
    with connect(*server) as client:
        before = client.job(name)
        job = client.cancel(name, group=group, rollout=rollout)
    counts = job.status.counts
    target = f"rollout {rollout}" if rollout else f"group {group}" if group else f"job {name}"
    if finished(before):
        click.echo(f"job {name} had ended already ({before.status.phase}); nothing was changed")
        return
    click.echo(f"{target} cancelled ({counts.succeeded} of {counts.total} rollouts have a reward)")


@click.command()
@click.argument("kind", metavar="[KIND]")
@click.argument("name", required=False)
@server_options
def delete(kind: str, name: str | None, server: Server) -> None:
    """Delete a job or a pool: `delete NAME` for a job, or `delete rj|bp NAME`.

    A job that has not ended is cancelled. Its trajectories stay in the trajectory store.
    """
    which, name = named("delete", kind, name)
    with connect(*server) as client:
        if which == "bp":
            client.delete_pool(name, client.namespace)
            click.echo(f"backendpool/{name} deleted")
        else:
            client.delete(name, client.namespace)
            click.echo(f"rolloutjob/{name} deleted")
