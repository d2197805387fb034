"""The command `rollyard submit`."""

from __future__ import annotations

from pathlib import Path

import click

from rollyard.connection import connect, server_options


@click.command()
@click.option(
    "-f", "--file", "path", required=True, type=click.Path(path_type=Path), help="Manifest (YAML or JSON)."
)
@click.option("--name", help="Submit the job under this name.")
@click.option("--wait", is_flag=True, help="Show progress until the job has ended.")
@server_options
def command(
    path: Path, name: str | None, wait: bool, url: str | None, home: Path | None, namespace: str
) -> None:
    """Submit a job or a backend pool from a manifest. The same manifest twice is the same as once."""
    from rollyard_crds import BackendPool, RolloutJob
    from rollyard_crds.fields.signals import warnings_of

    from rollyard.errors import InvalidInput, UsageProblem
    from rollyard.jobs.manifests import (
        entry_point_problems,
        folder_warnings,
        local_path,
        read_manifests,
    )
    from rollyard.jobs.submission import phase_of, submit
    from rollyard.jobs.watching import leaving, require_success, watch

    manifests = read_manifests(path)
    jobs = [manifest for manifest in manifests if isinstance(manifest, RolloutJob)]
    if name is not None:
        if len(jobs) != 1:
            raise UsageProblem(f"--name needs a file with one RolloutJob; {path} holds {len(jobs)}")
        jobs[0].metadata.name = name
    with connect(url, home, namespace) as client:
        for manifest in manifests:
            if "namespace" not in manifest.metadata.model_fields_set:
                manifest.metadata.namespace = namespace
            if isinstance(manifest, BackendPool):
                client.create_pool(manifest)
                click.echo(f"backendpool/{manifest.metadata.name} submitted")
            else:
                before = phase_of(client, manifest)
                job = submit(client, manifest)
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
                    ended = watch(client, job.metadata.name, job.metadata.namespace)
                require_success(ended, hint=True)
        elif not jobs[0].spec.tasks.stream:
            click.echo(f"Follow it with `rollyard watch {jobs[0].metadata.name}`")
