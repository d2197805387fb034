"""The command `rollyard weights`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from rollyard import terminal
from rollyard.arguments import pool_name
from rollyard.connection import Server, connect, server_options
from rollyard.errors import CliError, UsageProblem

if TYPE_CHECKING:
    from pydantic import ValidationError
    from rich.table import Table
    from rollyard_crds.weights import WeightUpdate

MODES: Final = click.Choice(["abort", "wait", "keep"])


@click.command()
@click.argument("pool", type=pool_name)
@click.option("--version", "version", metavar="V", help="Policy version of the new weights.")
@click.option("--checkpoint", metavar="DIR", help="Load this model folder.")
@click.option("--lora", metavar="NAME=DIR", help="Load this adapter.")
@click.option("--pushed", is_flag=True, help="The trainer has pushed them into the servers itself.")
@click.option(
    "--mode", type=MODES, default="abort", show_default=True, help="What happens to requests in flight."
)
@click.option(
    "--in-flight",
    type=click.Choice(["continue", "restart"]),
    default="continue",
    show_default=True,
    help="Rollouts in Run continue from their tokens, or start again.",
)
@click.option(
    "--reference",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.json",
    help='{"promptIds": […], "logprobs": […], "tolerance": 0.5 (optional)} under the new weights.',
)
@click.option("--require-verified", is_flag=True, help="Fail if the weights cannot be verified.")
@click.option("--wait", is_flag=True, help="Wait for the end; the exit status is 1 unless it succeeded.")
@click.option("--timeout", type=float, metavar="SECONDS", help="With --wait: for at most this long.")
@click.option("--pause", "pause", type=MODES, metavar="MODE", help="Pause the pool: abort, wait or keep.")
@click.option("--resume", is_flag=True, help="Undo --pause.")
@server_options
def weights(
    pool: str,
    version: str | None,
    checkpoint: str | None,
    lora: str | None,
    pushed: bool,
    mode: Any,
    in_flight: Any,
    reference: Path | None,
    require_verified: bool,
    wait: bool,
    timeout: float | None,
    pause: Any,
    resume: bool,
    server: Server,
) -> None:
    """Update POOL to new weights (--version and a source); without --version, list its updates."""
    if (version is not None) + (pause is not None) + resume > 1:
        raise UsageProblem("give one of --version, --pause and --resume")
    if version is not None and (checkpoint is not None) + (lora is not None) + pushed != 1:
        raise UsageProblem("give exactly one of --checkpoint DIR, --lora NAME=DIR and --pushed")
    if version is None and (checkpoint or lora or pushed or reference or require_verified or wait):
        raise UsageProblem("give --version V: the label of the new weights")
    if timeout is not None and not wait:
        raise UsageProblem("--timeout goes with --wait")
    from pydantic import ValidationError

    if version is not None:
        _check_version(version)
    adapter = _lora(lora)
    compared = None if reference is None else _reference(reference)
    with connect(*server) as client:
        if pause is not None or resume:
            changed = client.resume_pool(pool) if resume else client.pause_pool(pool, pause)
            click.echo(f"pool {pool} is {'paused' if changed.status.paused else 'not paused'}")
            return
        if version is None:
            from rollyard.render.tables import print_table

            print_table(terminal.console(), _table(client.weight_updates(pool)))
            return
        try:
            update = client.update_weights(
                pool,
                version,
                checkpoint=None if checkpoint is None else str(Path(checkpoint).absolute()),
                lora=adapter,
                pushed=pushed,
                mode=mode,
                in_flight=in_flight,
                reference=compared,
                require_verified=require_verified,
            )
        except ValidationError as error:
            raise UsageProblem(_first(error)) from error
        if wait:
            with _leaving(pool, update.id):
                update = client.wait_weights(pool, update.id, timeout)
    click.echo(_line(pool, update))
    if update.state == "Failed":
        raise CliError(f"weight update {update.id} failed: {update.message}")
    if wait and update.state != "Succeeded":
        raise CliError(f"weight update {update.id} was superseded by a later one")


@contextlib.contextmanager
def _leaving(pool: str, number: int) -> Iterator[None]:
    """Print a message if Ctrl-C ends the block, because the update continues."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(
            f"No longer waiting; weight update {number} continues (`rollyard weights {pool}` shows it)",
            err=True,
        )
        raise


def _check_version(text: str) -> None:
    from pydantic import TypeAdapter, ValidationError
    from rollyard_crds.weights import PolicyVersion

    try:
        TypeAdapter(PolicyVersion).validate_python(text)
    except ValidationError as error:
        raise UsageProblem(
            f"--version must be 1 to 100 characters without spaces and colons, got {text!r}"
        ) from error


def _lora(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    name, equals, folder = text.partition("=")
    if not name or not equals or not folder:
        raise UsageProblem(f"--lora must be NAME=DIR, got {text!r}")
    return name, str(Path(folder).absolute())


def _reference(path: Path) -> Any:
    from pydantic import ValidationError
    from rollyard_crds.weights import LogprobReference

    try:
        return LogprobReference.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        raise UsageProblem(f"{path}: {_first(error)}") from error
    except ValueError as error:
        raise UsageProblem(f"{path} is not JSON: {error}") from error


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def _line(pool: str, update: WeightUpdate) -> str:
    done = sum(part.step == "Done" for part in update.backends)
    verified = f"verified by {update.verified_by}" if update.verified else "not verified"
    detail = f", {verified}"
    if update.state == "Running":
        detail = f"; {update.message}" if update.message else ""
    return (
        f"weight update {update.id} of pool {pool}: {update.policy_version} {update.state}, "
        f"{done} of {len(update.backends)} backends{detail}"
    )


def _table(updates: list[WeightUpdate]) -> Table:
    """Return a table with one row for each weight update, the newest first."""
    from datetime import UTC, datetime

    from rollyard.render.tables import age, plain_table

    columns = ["id", "version", "state", "verified", "backends", "max diff", "paused", "age"]
    message_column = ["message"] if any(update.message for update in updates) else []
    listing, now = plain_table([*columns, *message_column]), datetime.now(UTC)
    for update in updates:
        parts = update.backends
        differences = [part.max_difference for part in parts if part.max_difference is not None]
        pauses = [part.paused_seconds for part in parts if part.paused_seconds is not None]
        listing.add_row(
            str(update.id),
            update.policy_version,
            update.state,
            update.verified_by if update.verified else "no",
            f"{sum(part.step == 'Done' for part in parts)}/{len(parts)}",
            f"{max(differences):.3g}" if differences else "-",
            f"{max(pauses):.2f}s" if pauses else "-",
            age(update.created_at, now),
            *([update.message] if message_column else []),
        )
    return listing
