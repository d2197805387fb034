"""The command `rollyard view`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rollyard import terminal
from rollyard.connection import connect, server_options

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_crds.trajectory import Trajectory

    from rollyard.render.trajectory import Decode


SORTS: Final = ("id", "ended", "-ended", "reward", "-reward", "duration", "-duration", "-tokens", "since")


@dataclass(frozen=True, slots=True)
class Choice:
    """The rollouts to show if none is named, and how to show them."""

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
@click.option("--min-reward", type=float, help="With --list: only rewards from this one on.")
@click.option("--max-reward", type=float, help="With --list: only rewards up to this one.")
@click.option("--task", help="With --list: only the samples of the task with this id.")
@click.option("--search", help="With --list: only conversations with all of these words.")
@click.option("--step", is_flag=True, help="Show them one after another.")
@click.option("--web", is_flag=True, help="Print the link of the page instead; `rollyard open` signs in.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Model folder, to show the exact tokens.")
@server_options
def command(
    arguments: tuple[str, ...],
    path: Path | None,
    failed: bool,
    listing: bool,
    step: bool,
    web: bool,
    tokenizer: Path | None,
    url: str | None,
    home: Path | None,
    namespace: str,
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
        _print_link(arguments[0], arguments[1:], url, home, namespace)
        return
    if filters and (path is not None or not listing or failed or len(arguments) != 1):
        names = ", ".join(f"--{key.replace('_', '-')}" for key in filters)
        raise click.UsageError(f"{names}: give it with NAME and --list, without ROLLOUT, --from and --failed")
    if path is not None:
        from rollyard.extras import require
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
    name, rest = arguments[0], arguments[1:]
    with connect(url, home, namespace) as client:
        if filters:
            _list(client, name, filters)
            return
        trajectories = _of_job(client, name, rest, namespace)
        beside = partial(_tokenizer, client, name, namespace)
        _view(trajectories, rest, choice, lambda: _decode(tokenizer, None if tokenizer else beside()))


def _print_link(name: str, rest: tuple[str, ...], url: str | None, home: Path | None, namespace: str) -> None:
    from rollyard.connection import connection
    from rollyard.page import job_link, rollout_id

    with connection(url, home, namespace) as opened:
        client = opened.client
        client.job(name, namespace)
        rollout = rollout_id(client, name, rest[0], namespace) if rest else ""
        terminal.echo_line(job_link(opened, namespace, name, rollout))


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

    reference = client.job(name, namespace).spec.backend_ref
    if reference is None:
        return None
    try:
        spec = client.pool(reference.name, namespace).spec
    except NotFound:
        return None
    folder = Path(spec.tokenizer or spec.model)
    return folder if (folder / "tokenizer.json").is_file() else None


def _decode(named: Path | None, fallback: Path | None) -> Decode | None:
    """Return the decoder of the tokenizer that the user named, or else of the one that was found, if any."""
    from rollyard.errors import LookupFailed
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

    from rollyard.errors import LookupFailed
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
