"""The commands that read, export and re-evaluate trajectories."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rollyard import terminal
from rollyard.arguments import job_name
from rollyard.commands import sandbox_option
from rollyard.connection import Server, connect, connection, server_options
from rollyard.errors import CliError, LookupFailed, UsageProblem
from rollyard.extras import require

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds.trajectory import Trajectory

    from rollyard.render.trajectory import Decode


@click.command()
@click.argument("name", type=job_name)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="A .parquet, .jsonl or .jsonl.gz file.",
)
@click.option("--follow", is_flag=True, help="Continue until the job has ended (.jsonl only).")
@server_options
def trajectories(name: str, output: Path, follow: bool, server: Server) -> None:
    """Write a job's ended rollouts to a file, which is written as a whole or not at all."""
    from rollyard.trajectories.export import write

    if output.suffix == ".parquet":
        require("a .parquet file", "parquet")
    if follow and output.suffix == ".parquet":
        raise UsageProblem("--follow writes .jsonl; export Parquet once the job has ended")
    with connect(*server) as client:
        count = write(client, name, client.namespace, output, follow=follow)
    click.echo(f"{count} trajectories in {output}")


@click.command()
@click.argument("name", type=job_name)
@click.option(
    "--handler",
    required=True,
    help="The handler; one that judges answers: math, stem, code, mixed, swe (submission: answer), your own.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="A .jsonl or .jsonl.gz file; without it, the changes are only counted.",
)
@click.option(
    "--reward",
    "reward_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="YAML with a section `reward`, instead of the job's.",
)
@sandbox_option
@server_options
def rescore(
    name: str,
    handler: str,
    output: Path | None,
    reward_file: Path | None,
    sandbox: str,
    server: Server,
) -> None:
    """Evaluate a job's kept trajectories again on this machine, and report how many rewards change.

    No rollout runs, and the control plane's rewards do not change. Each trajectory in the file
    says what its reward was, and who evaluated it again, when and with which handler.
    """
    from rollyard.jobs import rescoring

    require("`rollyard rescore`", "worker")
    with connect(*server) as client:
        report = rescoring.rescore(client, name, client.namespace, handler, output, reward_file, sandbox)
    for line in report.lines():
        terminal.echo_line(line)
    if output is not None:
        click.echo(f"The trajectories are in {output}.")
    if report.failed:
        trajectories = "1 trajectory" if report.failed == 1 else f"{report.failed} trajectories"
        raise CliError(f"{trajectories} could not be evaluated, for the reasons above")


SORTS: Final = ("id", "ended", "-ended", "reward", "-reward", "duration", "-duration", "-tokens", "since")


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rollouts to show if none is named, and how to show them."""

    failed: bool
    listing: bool
    step: bool


@click.command()
@click.argument("arguments", nargs=-1, metavar="[NAME] [ROLLOUT]")
@click.option(
    "--from",
    "path",
    type=click.Path(path_type=Path),
    help="A .jsonl or .parquet file instead of NAME.",
)
@click.option("--failed", is_flag=True, help="Only rollouts that failed or have reward 0, and why.")
@click.option("--list", "listing", is_flag=True, help="List the rollouts instead of showing one.")
@click.option("--sort", type=click.Choice(SORTS), help="With --list: the order; `-` begins with the largest.")
@click.option("--status", help="With --list: queued, leased, succeeded, failed or cancelled.")
@click.option("--reason", help="With --list: only rollouts that ended for this reason.")
@click.option("--min-reward", type=float, help="With --list: only rewards of at least this.")
@click.option("--max-reward", type=float, help="With --list: only rewards of at most this.")
@click.option("--task", help="With --list: only the samples of the task with this id.")
@click.option("--search", help="With --list: only conversations that have all of these words.")
@click.option("--step", is_flag=True, help="Show them one after another.")
@click.option("--web", is_flag=True, help="Print the link of the page instead; `rollyard open` signs in.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Model folder, to show the exact tokens.")
@server_options
def view(
    arguments: tuple[str, ...],
    path: Path | None,
    failed: bool,
    listing: bool,
    step: bool,
    web: bool,
    tokenizer: Path | None,
    server: Server,
    **filters: Any,
) -> None:
    """Read a trajectory turn by turn, sampled tokens marked (coloured; «…» without a terminal).

    ROLLOUT is an id, the end of one, or a task's id; without it, a solved one is chosen.
    `--failed` lists what failed or has reward 0, and why. With `--list`, the control plane sorts, filters
    and searches, however many rollouts there are.
    """
    choice = Choice(failed, listing, step)
    filters = {key: value for key, value in filters.items() if value is not None}
    if web:
        if path is not None or failed or listing or step or filters or not 1 <= len(arguments) <= 2:
            raise click.UsageError("--web goes with the job's NAME (and a ROLLOUT) alone")
        _print_link(job_name(arguments[0]), arguments[1:], server)
        return
    if filters and (path is not None or not listing or failed or len(arguments) != 1):
        names = ", ".join(f"--{key.replace('_', '-')}" for key in filters)
        raise click.UsageError(f"{names}: give it with NAME and --list, without ROLLOUT, --from and --failed")
    if path is not None:
        from rollyard.trajectories.reading import read_file, tokenizer_of

        if path.suffix == ".parquet":
            require("a .parquet file", "parquet")
        if len(arguments) > 1:
            raise click.UsageError("with --from give at most the ROLLOUT")
        from_file = read_file(path)
        _view(from_file, arguments, choice, lambda: _decode(tokenizer, tokenizer_of(path)))
        return
    if not 1 <= len(arguments) <= 2:
        raise click.UsageError("give the job's NAME (and a ROLLOUT), or --from FILE")
    name, rest = job_name(arguments[0]), arguments[1:]
    with connect(*server) as client:
        if filters:
            _list(client, name, filters)
            return
        trajectories = _of_job(client, name, rest, client.namespace)
        beside = partial(_tokenizer, client, name, client.namespace)
        _view(trajectories, rest, choice, lambda: _decode(tokenizer, None if tokenizer else beside()))


def _print_link(name: str, rest: tuple[str, ...], server: Server) -> None:
    from rollyard.page import job_link, rollout_id

    with connection(*server) as opened:
        client = opened.client
        client.job(name, client.namespace)
        rollout = rollout_id(client, name, rest[0], client.namespace) if rest else ""
        terminal.echo_line(job_link(opened, client.namespace, name, rollout))


def _list(client: Client, name: str, filters: dict[str, Any]) -> None:
    """Print the rows of the rollouts that the options select."""
    from rollyard_client import RolloutQuery

    from rollyard.render.tables import print_table, rows_table

    print_table(terminal.console(), rows_table(client.rollout_rows(name, RolloutQuery(**filters))))


def _of_job(client: Client, name: str, rest: tuple[str, ...], namespace: str) -> Iterable[Trajectory]:
    from rollyard_client.errors import NotFound

    if rest:
        try:
            return [client.trajectory(name, rest[0], namespace)]
        except NotFound:
            # This raises NotFound if there is no such job. If there is, the rollout's id may be shortened.
            client.job(name, namespace)
    return client.trajectories(name, namespace=namespace)


def _tokenizer(client: Client, name: str, namespace: str) -> Path | None:
    """Return the folder with the tokenizer of the job's pool, if it is on this machine."""
    from rollyard_client.errors import NotFound
    from rollyard_process import hub

    reference = client.job(name, namespace).spec.backend_ref
    if reference is None:
        return None
    try:
        spec = client.pool(reference.name, namespace).spec
    except NotFound:
        return None
    file = hub.find(spec.tokenizer or spec.model)
    return None if file is None else file.parent


def _decode(named: Path | None, fallback: Path | None) -> Decode | None:
    """Return the decoder of the tokenizer that the user named, or else of the one that was found, if any."""
    from rollyard.render.trajectory import tokenizer_decode

    folder = named or fallback
    if folder is None:
        return None
    try:
        return tokenizer_decode(folder)
    except ModuleNotFoundError:
        if named is not None:
            raise
        return None
    except (OSError, ValueError) as error:
        raise LookupFailed(f"--tokenizer {folder}: {error}") from error


def _view(
    trajectories: Iterable[Trajectory],
    rest: tuple[str, ...],
    choice: Choice,
    decode: Callable[[], Decode | None],
) -> None:

    from rollyard.render.tables import print_table, trajectories_table
    from rollyard.render.trajectory import TrajectoryView, why
    from rollyard.trajectories.reading import find, most_telling

    console = terminal.console()
    chosen: Iterator[Trajectory] = (
        trajectory for trajectory in trajectories if not choice.failed or why(trajectory)
    )
    if not rest and not choice.step and (choice.listing or choice.failed):
        print_table(console, trajectories_table(chosen))
        return
    if rest:
        chosen = iter([find(iter(trajectories), rest[0])])
    elif not choice.step:
        telling = most_telling(chosen)
        if telling is None:
            raise LookupFailed("no rollout has ended yet; `rollyard watch NAME` follows the job")
        chosen = iter([telling])
    view = TrajectoryView(console, decode())
    for number, trajectory in enumerate(chosen):
        if number:
            if console.is_terminal and not click.confirm("Next?", default=True):
                return
            console.print()
        view.show(trajectory)


CODE_SECONDS: Final = 60
"""The seconds within which the link must be opened, as the control plane sets them."""


@click.command()
@click.argument("arguments", nargs=-1, metavar="[NAME] [ROLLOUT]")
@click.option(
    "--role",
    type=click.Choice(["viewer", "admin"]),
    default="viewer",
    show_default=True,
    help="What the browser may do: a viewer may read, an admin may also cancel.",
)
@click.option(
    "--browser/--no-browser",
    default=None,
    help="Open the link in a browser on this machine [if there is a desktop].",
)
@click.option("--revoke-all", is_flag=True, help="End all sessions and links instead.")
@server_options
def open_page(
    arguments: tuple[str, ...],
    role: str,
    browser: bool | None,
    revoke_all: bool,
    server: Server,
) -> None:
    """Print a link to the page, to a job or to a rollout, which signs a browser in.

    The link works once, within a minute. With `--kubernetes`, the command runs until Ctrl-C and keeps
    the way into the cluster open.
    """
    from rollyard.page import page_url, path_of, rollout_id

    if len(arguments) > 2:
        raise click.UsageError("give at most the job's NAME and a ROLLOUT")
    if revoke_all and (arguments or browser):
        raise click.UsageError("--revoke-all takes no NAME and no --browser")
    with connection(*server) as opened:
        client = opened.client
        if revoke_all:
            ended = client.end_sessions()
            click.echo(f"{ended} {'session or link' if ended == 1 else 'sessions and links'} ended")
            return
        name, rollout = (*arguments, "", "")[:2]
        name = job_name(name)
        page_url(client.url, "")  # This raises an error before a code is made that nobody could use.
        if name:
            client.job(name, client.namespace)
        if rollout:
            rollout = rollout_id(client, name, rollout, client.namespace)
        code = client.sign_in_code("admin" if role == "admin" else "viewer")
        path = path_of(client.namespace, name, rollout)
        link = f"{page_url(client.url, code.prefix)}{path}#code={code.code}"
        _show(link, browser)
        if opened.is_tunnel:
            click.echo("The way into the cluster stays open until Ctrl-C.", err=True)
            # Python handles the signal of Ctrl-C, which ends the command, only in the main thread.
            threading.Event().wait()


def _show(link: str, browser: bool | None) -> None:
    from rollyard_drivers.host.home import default_home

    from rollyard.page import has_desktop, open_in_browser

    use_browser = (sys.stdout.isatty() and has_desktop()) if browser is None else browser
    if use_browser and open_in_browser(link, default_home().expanduser().resolve() / "page"):
        terminal.echo_line("Your browser opens the page. If it does not, open this link:", err=True)
    elif browser:
        terminal.echo_line("No browser could be started here. Open this link:", err=True)
    terminal.echo_line(link)
    click.echo(f"The link works once, within {CODE_SECONDS} seconds.", err=True)
