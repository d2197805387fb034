"""One run of the quickstart: a whole Rollyard in its own home, one job, its trajectories and a summary."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard_drivers.host.home import Home

from rollyard.errors import CliError, InvalidInput, LookupFailed
from rollyard.local.running_up import interruptible, running_up

if TYPE_CHECKING:
    from rich.console import Console
    from rollyard_client import Client
    from rollyard_crds import RolloutJob
    from rollyard_crds.trajectory import Trajectory

    from rollyard.quickstart.vllm_servers import VllmOptions, VllmServers
    from rollyard.trajectories.summary import PolicySummary


@dataclass(frozen=True, slots=True)
class QuickstartOptions:
    """The options of a quickstart: what it runs, and in which folders."""

    job: Path
    home: Path
    out: Path
    tasks: int
    samples: int
    sandbox: str = "bubblewrap"
    backend: tuple[str, ...] = ()
    """Further arguments for `rollyard up`, such as --model or --backend."""
    vllm: VllmOptions | None = None
    """The options of vLLM servers, which take the place of the embedded engine."""


def default_job() -> Path:
    """Return the path of the quickstart's job, which has its tasks beside it.

    A wheel has both files in this package, and a checkout has them in examples/quickstart.

    Raises:
        LookupFailed: This installation lacks the job.
    """
    here = Path(__file__).resolve().parent
    for path in (here / "job.yaml", here.parents[3] / "examples" / "quickstart" / "job.yaml"):
        if path.is_file():
            return path
    raise LookupFailed("this installation lacks the quickstart's job; give --job FILE")


def prepare(options: QuickstartOptions) -> RolloutJob:
    """Return the job with its first tasks only, which are written to a file in the output folder.

    Raises:
        InvalidInput: The manifest is not a single RolloutJob with a task file, or it has too few tasks.
        CliError: The output folder cannot be written.
    """
    from rollyard_crds import RolloutJob
    from rollyard_tasks.task_file import task_json
    from rollyard_tasks.task_list import TaskListError

    from rollyard.jobs.manifests import local_path, read_manifests, read_tasks

    manifests = read_manifests(options.job)
    job = manifests[0]
    if len(manifests) != 1 or not isinstance(job, RolloutJob):
        raise InvalidInput(f"{options.job}: must hold one RolloutJob")
    source = local_path(job.spec.tasks.url or "")
    if source is None:
        raise InvalidInput(f"{options.job}: spec.tasks.url must name a file")
    try:
        tasks = read_tasks(source)
    except TaskListError as error:
        raise InvalidInput(f"{source}: {error}") from error
    if len(tasks) < options.tasks:
        raise InvalidInput(f"--tasks {options.tasks}: {source} holds {len(tasks)}")
    lines = [f"{task_json(task).decode()}\n" for task in tasks[: options.tasks]]
    chosen = options.out / "tasks.jsonl"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        chosen.write_text("".join(lines))
    except OSError as error:
        raise CliError(
            f"--out {options.out} cannot be written: {error.strerror or error}", reason="HomeUnusable"
        ) from error
    job.spec.tasks.url = chosen.resolve().as_uri()
    job.spec.samples_per_task = options.samples
    return job


def fresh_home(path: Path) -> Home:
    """Return the home, from which the files of an earlier quickstart were removed.

    Raises:
        HostError: A quickstart runs there now.
    """
    home = Home(path.resolve())
    with home.locked():
        home.remove_context()
        for folder in (home.state, home.logs):
            shutil.rmtree(folder, ignore_errors=True)
    return home


@interruptible()
def run(options: QuickstartOptions, console: Console) -> RolloutJob:
    """Run the quickstart from an empty folder to trajectories and summary.json, and return the ended job.

    Raises:
        InvalidInput: The manifest, its tasks or the model cannot be used.
        HostError: A quickstart runs in this home already.
        StartFailed: `rollyard up` or a server did not start in time, or the weight update failed.
        CliError: Something else failed. As with the others, the message says what to do.
    """
    from rollyard.connection import connect
    from rollyard.jobs.running import follow

    if options.vllm is not None:
        options.vllm.check()
    job = prepare(options)
    home = fresh_home(options.home)
    name = job.metadata.name
    servers = _vllm_servers(options, job, console)
    policies: PolicySummary | None = None
    try:
        with contextlib.ExitStack() as stack:
            if servers is not None:
                stack.enter_context(servers.new_weights())
            backend = "backend" if servers is None else "vLLM servers"
            console.print(
                f"Starting control plane, workers and {backend} (home {_short(home.root)})", soft_wrap=True
            )
            further = servers.up_arguments() if servers else ()
            stack.enter_context(running_up(home, ["--sandbox", options.sandbox, *options.backend, *further]))
            client = stack.enter_context(connect(None, home.root, "default"))
            if servers is not None:
                servers.start(client)
            began = time.monotonic()
            submitted = client.submit(job)
            total = submitted.status.counts.total
            console.print(f"Job {name}: {options.tasks} tasks × {options.samples} samples = {total} rollouts")
            ended = follow(client, name, "default", console, servers.update if servers is not None else None)
            wall = time.monotonic() - began
            files = _export(client, ended, options)
            if servers is not None:
                policies = servers.summarize(client, files)
    except KeyboardInterrupt:
        console.print(
            "Interrupted; everything was stopped. No trajectories are kept; the next run starts over."
        )
        raise
    conclude(console, options.out, files, wall, policies)
    return ended


def _vllm_servers(options: QuickstartOptions, job: RolloutJob, console: Console) -> VllmServers | None:
    if options.vllm is None:
        return None
    from rollyard.quickstart.vllm_servers import VllmServers, run_places

    if options.vllm.update_weights:
        places = run_places(job.spec.places("run"), options.tasks * options.samples)
        job.spec.stages.run.concurrency = places
    return VllmServers(options.vllm, options.out, console)


def _export(client: Client, job: RolloutJob, options: QuickstartOptions) -> Path:
    from rollyard.trajectories.export import write

    name = job.metadata.name
    lines = options.out / "trajectories.jsonl"
    write(client, name, "default", options.out / "trajectories.parquet")
    write(client, name, "default", lines)
    reference = job.spec.backend_ref
    if reference is not None:
        pool = client.pool(reference.name).spec
        (options.out / "tokenizer.txt").write_text(f"{pool.tokenizer or pool.model}\n")
    return lines


def conclude(
    console: Console, out: Path, lines: Path, wall: float, policies: PolicySummary | None = None
) -> None:
    """Print the summary of a run and write OUT/summary.json.

    Args:
        console: The console to print on.
        out: The output folder.
        lines: The file with the trajectories as JSON lines.
        wall: The wall time of the job in seconds.
        policies: The backends and policy versions of the job, if vLLM served it.
    """
    from rollyard.render.tables import print_policies, print_summary
    from rollyard.trajectories.reading import most_telling, read_file
    from rollyard.trajectories.summary import summarize

    summary = summarize(read_file(lines), wall)
    document = summary.to_json() | (policies.to_json() if policies is not None else {})
    (out / "summary.json").write_text(json.dumps(document, indent=2) + "\n")
    console.print()
    print_summary(console, summary)
    if policies is not None:
        print_policies(console, policies)
    console.print(f"Trajectories: {_short(lines)} and {lines.with_suffix('.parquet').name}", soft_wrap=True)
    example: Trajectory | None = most_telling(read_file(lines))
    command = f"{_program()} view --from {shlex.quote(_short(lines))}"
    if example is not None:
        console.print(f"Read one:     {command} {example.id}", soft_wrap=True)
    console.print(f"What failed:  {command} --failed", soft_wrap=True)


def _short(path: Path) -> str:
    """Return the path, relative to the working folder if it is inside it."""
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def _program() -> str:
    """Return the command with which this user can call `rollyard` from the working folder."""
    program = shutil.which("rollyard")
    beside = Path(sys.executable).with_name("rollyard")
    if program is not None and Path(program).resolve() == beside.resolve():
        return "rollyard"
    with contextlib.suppress(ValueError):
        return str(beside.relative_to(Path.cwd()))
    return str(beside) if beside.is_file() else "rollyard"
