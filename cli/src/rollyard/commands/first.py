"""The commands with which tasks and rewards of one's own begin: `init` and `try`."""

from __future__ import annotations

import re
import shlex
import tempfile
from pathlib import Path
from typing import Final

import click

from rollyard import terminal
from rollyard.commands import plugin_option
from rollyard.connection import Server, server_options
from rollyard.errors import LookupFailed, UsageProblem
from rollyard.extras import require

TINY_POLICY: Final = "the tiny policy"


@click.command("try")
@click.argument("path", metavar="TASK", type=click.Path(path_type=Path))
@click.option("--task", "task_id", metavar="ID", help="Which task of the manifest or list [the first].")
@click.option("--handler", help="For a bare task list: the handler that scores its tasks.")
@click.option("--format", "task_format", help="For a bare task list: its format, such as verl.")
@plugin_option
@click.option("--backend", metavar="URL", help="A running vLLM-compatible server instead of the tiny policy.")
@click.option("--tokenizer", metavar="DIR", help="With --backend: the tokenizer, as for `rollyard up`.")
@click.option("--pool", metavar="NAME", help="Play in this pool of the running control plane instead.")
@click.option(
    "--sandbox",
    type=click.Choice(["bubblewrap", "apptainer", "docker", "podman", "process"]),
    help="The kind of the sandbox here [bubblewrap].",
)
@click.option(
    "--timeout",
    type=click.IntRange(1, 604_800),
    default=900,
    show_default=True,
    help="The longest time, in seconds.",
)
@server_options
def try_task(
    path: Path,
    task_id: str | None,
    handler: str | None,
    task_format: str | None,
    plugins: tuple[Path, ...],
    backend: str | None,
    tokenizer: str | None,
    pool: str | None,
    sandbox: str | None,
    timeout: int,
    server: Server,
) -> None:
    """Play one task once, and show it turn by turn with its reward.

    TASK is a job's manifest, or a task list with --handler. The shipped tiny policy plays on this machine,
    and nothing stays afterwards. With --pool, a job of one rollout runs on your control plane, and is
    deleted at the end. The exit status is 0 if the rollout has a reward, whatever the reward is.
    """
    from rollyard.jobs.trial import play_here, play_in_pool, trial_of

    here = {"--plugin": plugins or None, "--backend": backend, "--tokenizer": tokenizer, "--sandbox": sandbox}
    if pool is not None:
        for option, value in here.items():
            if value is not None:
                raise UsageProblem(f"{option} is for a trial on this machine; leave it or --pool out")
    elif any(value is not None for value in server):
        raise UsageProblem("--url, --kubernetes, --home and --namespace go with --pool")
    if tokenizer is not None and backend is None:
        raise UsageProblem("--tokenizer goes with --backend")
    if pool is not None:
        require("`rollyard try`", "worker")
    else:
        require("`rollyard try`", "local", "api", "worker", "sandbox", *(() if backend else ("engine",)))
    in_pool = pool is not None
    trial = trial_of(path, task_id, handler, task_format, plugins, timeout, in_pool=in_pool)
    console = terminal.console()
    if pool is not None:
        play_in_pool(trial, pool, server, console)
        return
    arguments = ["--sandbox", sandbox or "bubblewrap", *(f"--plugin={plugin}" for plugin in plugins)]
    if backend is not None:
        arguments += ["--backend", backend]
    if tokenizer is not None:
        arguments += ["--tokenizer", tokenizer]
    play_here(trial, arguments, backend or TINY_POLICY, console)


TEMPLATE_NAME: Final = "my-tasks"
"""The name that the files of the template have for the job."""
NAME: Final = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


def template() -> Path:
    """Return the folder whose files `rollyard init` copies.

    A wheel has it in this distribution, and a checkout in examples/first-task.

    Raises:
        LookupFailed: This installation lacks the folder.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "first_task", package.parents[2] / "examples" / "first-task"):
        if folder.is_dir():
            return folder
    raise LookupFailed("this installation lacks the files of `rollyard init`")


@click.command()
@click.argument("folder", metavar="NAME", type=click.Path(path_type=Path))
def init(folder: Path) -> None:
    """Make a folder with tasks, a reward function, a job and the commands that use them.

    NAME is the folder, and its last part the name of the job.
    """
    name = folder.name
    if not NAME.fullmatch(name):
        raise UsageProblem(
            f"NAME: {name!r} cannot be the name of a job: a small letter, then small letters, digits and "
            "'-', at most 40"
        )
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UsageProblem(f"NAME: {folder} is there already; choose another name")
    if not folder.parent.is_dir():
        raise UsageProblem(f"NAME: there is no folder {folder.parent}")
    files = {file.name: file.read_text() for file in template().iterdir() if file.is_file()}
    # It gets its name when it is whole. An empty folder of this name is replaced.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as whole:
        made = Path(whole) / name
        made.mkdir()
        for file, text in files.items():
            (made / file).write_text(text.replace(TEMPLATE_NAME, name))
        made.replace(folder)
    click.echo(f"{folder} has {', '.join(sorted(files))}. Try it:")
    click.echo(f"  cd {shlex.quote(str(folder))} && rollyard try job.yaml --plugin rewards.py")
