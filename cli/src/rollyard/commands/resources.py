"""The commands that submit, show, change and end jobs and backend pools."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from rollyard import terminal
from rollyard.arguments import (
    GROUP,
    RESOURCES,
    Kind,
    NamedObject,
    Selection,
    job_name,
    label_selector,
    selection,
    targets,
)
from rollyard.connection import Server, connect, connection, one_line_of, server_options
from rollyard.errors import InvalidInput, UsageProblem

if TYPE_CHECKING:
    from rich.table import Table
    from rollyard_client import Client
    from rollyard_crds import BackendPool, RolloutJob

T = TypeVar("T")


@click.command()
@click.option(
    "-f", "--file", "path", required=True, type=click.Path(path_type=Path), help="Manifest (YAML or JSON)."
)
@click.option("--name", help="Submit the job under this name.")
@click.option("--wait", is_flag=True, help="Show progress until the job has ended.")
@server_options
def submit(path: Path, name: str | None, wait: bool, server: Server) -> None:
    """Submit a job or a backend pool from a manifest. Submitting the same manifest again changes nothing.

    `rollyard apply` also changes what exists.
    """
    from rollyard_client.errors import Conflict
    from rollyard_crds import BackendPool, RolloutJob

    from rollyard.jobs.manifests import read_manifests
    from rollyard.jobs.running import follow, leaving, phase_of, require_success, submit_job

    manifests = read_manifests(path)
    jobs = [manifest for manifest in manifests if isinstance(manifest, RolloutJob)]
    if name is not None:
        if len(jobs) != 1:
            raise UsageProblem(f"--name needs a file with one RolloutJob; {path} holds {len(jobs)}")
        jobs[0].metadata.name = name
    with connect(*server) as client:
        for manifest in _placed(manifests, client):
            if isinstance(manifest, BackendPool):
                client.create_pool(manifest)
                click.echo(f"backendpool/{manifest.metadata.name} submitted")
            else:
                before = phase_of(client, manifest)
                try:
                    job = submit_job(client, manifest)
                except Conflict as error:
                    raise InvalidInput(f"{one_line_of(error)} (--name NEW)") from error
                rollouts = f"{job.status.counts.total} rollouts"
                if before is None:
                    click.echo(f"rolloutjob/{job.metadata.name} submitted ({rollouts})")
                else:
                    click.echo(f"rolloutjob/{job.metadata.name} unchanged ({before}, {rollouts})")
                for plugin in job.status.plugins:
                    if plugin.edited:
                        click.echo(
                            f"rollyard: {plugin.file} has changed since; this job keeps the text that it was "
                            "submitted with: submit another job with --name NEW",
                            err=True,
                        )
                if job.status.skipped_rows is not None:
                    for line in job.status.skipped_rows.lines():
                        click.echo(f"rollyard: {line}", err=True)
                _warn(manifest)
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


def _placed(
    manifests: Iterable[RolloutJob | BackendPool], client: Client
) -> Iterator[RolloutJob | BackendPool]:
    """Yield manifests, each in the namespace that it names or else in that of the client."""
    for manifest in manifests:
        if "namespace" not in manifest.metadata.model_fields_set:
            manifest.metadata.namespace = client.namespace
        yield manifest


def _name(thing: RolloutJob | BackendPool) -> str:
    return f"{thing.kind.lower()}/{thing.metadata.name}"


def _warn(job: RolloutJob) -> None:
    """Print what is hardly meant in a job that was submitted."""
    from rollyard_crds.fields.signals import warnings_of

    from rollyard.jobs.manifests import folder_warnings, local_path

    source = job.spec.tasks
    folder = local_path(source.url or "")
    further = folder_warnings(folder, source) if folder is not None and folder.is_dir() else []
    for warning in warnings_of(job.spec) + [f"spec.tasks.url: {line}" for line in further]:
        click.echo(f"rollyard: warning: {warning}", err=True)


FILES: Final = click.option(
    "-f",
    "--file",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Manifest (YAML or JSON, several documents too), or - for standard input; repeatable.",
)


@click.command()
@FILES
@server_options
def apply(paths: tuple[Path, ...], server: Server) -> int:
    """Create the jobs and pools that manifests describe, or change them.

    What a manifest leaves out stays as it is. Of a job, what is to be rolled out cannot be changed; workers,
    limits, `priority` and `suspend` can. A refused change names the field.
    """
    from rollyard_crds import RolloutJob

    from rollyard.jobs.manifests import read_manifests
    from rollyard.jobs.running import apply_manifest

    if not paths:
        raise UsageProblem("give a manifest: rollyard apply -f FILE (or - for standard input)")
    manifests = [manifest for path in paths for manifest in read_manifests(path)]

    def one(client: Client, manifest: RolloutJob | BackendPool) -> None:
        change = apply_manifest(client, manifest)
        click.echo(f"{_name(manifest)} {change}")
        if change == "created" and isinstance(manifest, RolloutJob):
            _warn(manifest)

    with connect(*server) as client:
        return for_each(client, ((_name(each), each) for each in _placed(manifests, client)), one)


def for_each(client: Client, things: Iterable[tuple[str, T]], act: Callable[[Client, T], None]) -> int:
    """Do something with each of several named things, and return 1 if one was refused, and else 0.

    A refusal is printed, and the others follow, as with kubectl.
    """
    from rollyard_client.errors import Conflict, Invalid, NotFound

    status = 0
    for name, thing in things:
        try:
            act(client, thing)
        except NotFound as error:
            terminal.echo_line(f"rollyard: {one_line_of(error)}", err=True)
            status = 1
        except (Conflict, Invalid, InvalidInput) as error:
            terminal.echo_line(f"rollyard: {name}: {one_line_of(error)}", err=True)
            status = 1
    return status


WATCH_SECONDS: Final = 1.0
"""The seconds between two readings of what `get --watch` shows."""


@click.command()
@click.argument("words", nargs=-1, metavar="[KIND[,KIND]|all] [NAME]...")
@click.option(
    "-o", "--output", type=click.Choice(["json", "yaml", "wide", "name"]), help="Instead of the table."
)
@click.option("-A", "--all-namespaces", is_flag=True, help="List those of all namespaces.")
@click.option("-l", "--selector", metavar="LABELS", help="Only those with these labels, as team=a,stage!=b.")
@click.option("-w", "--watch", "watching", is_flag=True, help="Then print a line for each change.")
@server_options
def get(
    words: tuple[str, ...],
    output: str | None,
    all_namespaces: bool,
    selector: str | None,
    watching: bool,
    server: Server,
) -> None:
    """List jobs (KIND rj, the default) or backend pools (KIND bp), or show some.

    `get bp -o wide` has a line for each backend: its health, circuit, weights, load and speed.
    """
    from rollyard.jobs.running import answered

    selected = selection(words)
    chosen = label_selector(selector) if selector is not None else None
    if watching and output not in (None, "wide"):
        raise UsageProblem(f"--watch prints tables; leave -o {output} out")
    if selected.targets and (chosen is not None or all_namespaces):
        raise UsageProblem("--selector and --all-namespaces go without NAMEs")
    with connect(*server) as client:
        scope = "*" if all_namespaces else client.namespace

        def read() -> list[RolloutJob | BackendPool]:
            return [
                thing
                for thing in _selected(client, selected, scope)
                if chosen is None or chosen(thing.metadata.labels)
            ]

        things = read()
        if output in ("json", "yaml", "name"):
            click.echo(_text(things, output, is_one=len(selected.targets) == 1), nl=False)
            return
        if not things:
            names = " and ".join(f"{RESOURCES[kind]}s" for kind in selected.kinds or ("rj",))
            where = "any namespace" if all_namespaces else f"namespace {scope!r}"
            click.echo(f"No {names} in {where}", err=True)
        printed = _PrintedTables(wide=output == "wide", namespaces=all_namespaces)
        printed.update(things)
        while watching:
            time.sleep(WATCH_SECONDS)
            printed.update(answered(read))


def _selected(client: Client, selected: Selection, namespace: str) -> Iterator[RolloutJob | BackendPool]:
    for target in selected.targets:
        yield find(client, target, client.namespace)
    if not selected.targets:
        for kind in selected.kinds or ("rj",):
            yield from client.jobs(namespace) if kind == "rj" else client.pools(namespace)


class _PrintedTables:
    """Prints tables of objects, and then the rows that change below them, in columns of the same width."""

    def __init__(self, wide: bool, namespaces: bool) -> None:
        self._wide = wide
        self._namespaces = namespaces
        self._names: set[tuple[str, str]] = set()
        self._rows: set[tuple[str, ...]] = set()
        self._widths: dict[tuple[str, ...], list[int]] = {}

    def update(self, things: Sequence[RolloutJob | BackendPool]) -> None:
        """Print what has changed since the last call, which is everything in the first one."""
        from rollyard.render.tables import print_table

        names = {(_name(thing), thing.metadata.namespace) for thing in things}
        for name, _ in sorted(self._names - names):
            click.echo(f"{name} deleted")
        rows = {thing.metadata.uid: self._texts([thing]) for thing in things}
        changed = [thing for thing in things if not rows[thing.metadata.uid] <= self._rows]
        for number, table in enumerate(self._tables(changed)):
            columns = tuple(str(column.header) for column in table.columns)
            table.show_header = columns not in self._widths
            if number and table.show_header:
                click.echo()
            widths = self._widths.setdefault(columns, [0] * len(columns))
            for place, column in enumerate(table.columns):
                widths[place] = max(widths[place], *map(len, map(str, (column.header, *column.cells))))
                column.min_width = widths[place]
            print_table(terminal.console(), table)
        self._names = names
        self._rows = set().union(*rows.values())

    def _tables(self, things: Sequence[RolloutJob | BackendPool]) -> list[Table]:
        """Return a table of the jobs and one of the pools among some objects, without empty ones."""
        from rollyard_crds import BackendPool, RolloutJob

        from rollyard.render import tables

        jobs = [thing for thing in things if isinstance(thing, RolloutJob)]
        pools = [thing for thing in things if isinstance(thing, BackendPool)]
        made = [tables.jobs_table(jobs, self._wide, self._namespaces)] if jobs else []
        if pools:
            table = tables.backends_table if self._wide else tables.pools_table
            made.append(table(pools, self._namespaces))
        return made

    def _texts(self, things: Sequence[RolloutJob | BackendPool]) -> set[tuple[str, ...]]:
        """Return the rows of some objects without their ages, which change all the time."""
        texts: set[tuple[str, ...]] = set()
        for table in self._tables(things):
            kept = [column for column in table.columns if column.header != "AGE"]
            texts.update(zip(*(map(str, column.cells) for column in kept), strict=True))
        return texts


def _text(things: Sequence[RolloutJob | BackendPool], output: str, is_one: bool) -> str:
    """Return objects as text: one as it is, several as a List, or the name of each in a line."""
    if output == "name":
        return "".join(f"{thing.kind.lower()}.{GROUP}/{thing.metadata.name}\n" for thing in things)
    documents: list[Mapping[str, Any]] = [thing.to_json() for thing in things]
    document = documents[0] if is_one else {"apiVersion": "v1", "kind": "List", "items": documents}
    if output == "json":
        import json

        return json.dumps(document, indent=2) + "\n"
    import yaml

    text: str = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return text


def find(client: Client, target: NamedObject, namespace: str) -> RolloutJob | BackendPool:
    """Return an object. Without a kind it is the job of this name, or else the pool."""
    from rollyard_client.errors import NotFound

    name = target.name
    if target.kind == "bp":
        return client.pool(name, namespace)
    try:
        return client.job(name, namespace)
    except NotFound:
        if target.kind == "rj":
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
@click.argument("words", nargs=-1, metavar="[KIND] NAME")
@server_options
def describe(words: tuple[str, ...], server: Server) -> None:
    """Show everything about a job or pool: `describe NAME`, or `describe rj|bp NAME`."""
    from collections import Counter
    from itertools import islice

    from rollyard_crds import RolloutJob

    from rollyard.page import link_if_any
    from rollyard.render.describe import describe_job, describe_pool

    console = terminal.console()
    wanted = targets("describe", words)
    with connection(*server) as opened:
        client = opened.client
        for number, target in enumerate(wanted):
            if number:
                console.print()
            thing = find(client, target, client.namespace)
            if not isinstance(thing, RolloutJob):
                describe_pool(console, thing)
                continue
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


@click.command()
@click.argument("words", nargs=-1, metavar="[bp] NAME...")
@click.option("--replicas", type=click.IntRange(0, 1024), required=True, help="Backends that should run.")
@server_options
def scale(words: tuple[str, ...], replicas: int, server: Server) -> int:
    """Change the number of a pool's backends: `scale bp NAME --replicas N`.

    Backends that go take no new rollouts, and end when they have none left or after half a minute; rollouts
    that they still have then continue elsewhere.
    """
    wanted = targets("scale", words)
    for target in wanted:
        if target.kind == "rj":
            raise click.UsageError(
                f"only backend pools (bp) are scaled (got rj/{target.name}); the workers of a job are in "
                "spec.stages, which `rollyard apply` changes"
            )

    def one(client: Client, target: NamedObject) -> None:
        pool = client.patch_pool(target.name, {"replicas": replicas}, client.namespace)
        click.echo(f"backendpool/{pool.metadata.name} scaled to {pool.spec.replicas}")

    with connect(*server) as client:
        return for_each(client, ((f"backendpool/{each.name}", each) for each in wanted), one)


@click.command()
@click.argument("name", type=job_name)
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
@click.argument("name", type=job_name)
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
@click.argument("words", nargs=-1, metavar="[KIND] NAME...")
@FILES
@click.option("--ignore-not-found", is_flag=True, help="Count what is not there as deleted.")
@server_options
def delete(words: tuple[str, ...], paths: tuple[Path, ...], ignore_not_found: bool, server: Server) -> int:
    """Delete jobs or pools: `delete NAME` for a job, `delete rj|bp NAME…`, or all of `-f FILE`.

    A job that has not ended is cancelled. Its trajectories stay in the trajectory store.
    """
    from rollyard.jobs.manifests import read_manifests

    if bool(words) == bool(paths):
        raise UsageProblem("give the NAMEs of what to delete, or -f FILE" + " (not both)" * bool(words))
    manifests = [manifest for path in paths for manifest in read_manifests(path)]
    named = targets("delete", words) if words else ()

    def one(client: Client, item: tuple[Kind, str, str]) -> None:
        from rollyard_client.errors import NotFound

        kind, namespace, name = item
        try:
            if kind == "bp":
                client.delete_pool(name, namespace)
            else:
                client.delete(name, namespace)
        except NotFound:
            if not ignore_not_found:
                raise
            return
        click.echo(f"{RESOURCES[kind]}/{name} deleted")

    with connect(*server) as client:
        # A name alone is that of a job: nobody loses a pool to a short form.
        items: list[tuple[Kind, str, str]] = [
            (target.kind or "rj", client.namespace, target.name) for target in named
        ]
        for manifest in _placed(manifests, client):
            kind: Kind = "rj" if manifest.kind == "RolloutJob" else "bp"
            items.append((kind, manifest.metadata.namespace, manifest.metadata.name))
        return for_each(client, ((f"{RESOURCES[item[0]]}/{item[2]}", item) for item in items), one)
