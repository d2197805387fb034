"""Commands' way to the control plane: which server, and its errors as one line."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rollyard.errors import CliError, InvalidInput, NoServer, NotFound, UsageProblem

if TYPE_CHECKING:
    from rollyard_client import Client

F = TypeVar("F", bound=Callable[..., Any])


def server_options(command: F) -> F:
    """`--url`, `--home` and `--namespace`, as every command that talks to a server has them."""
    for option in (
        click.option("-n", "--namespace", default="default", show_default=True, help="Namespace."),
        click.option("--home", type=click.Path(path_type=Path), help="Home of the `rollyard up` to talk to."),
        click.option("--url", help="Control plane [ROLLYARD_URL, else the running `rollyard up`]."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def connect(url: str | None, home: Path | None, namespace: str) -> Iterator[Client]:
    """A client; what the server or the network says wrong ends the command with one line.

    Raises:
        NoServer, NotFound, InvalidInput, CliError.
    """
    from rollyard_client import Client
    from rollyard_client import errors as wire
    from rollyard_client.context import resolve

    env = dict(os.environ)
    if home is not None:
        env["ROLLYARD_HOME"] = str(home.expanduser().resolve())
    if url is not None and not url.startswith(("http://", "https://")):
        raise UsageProblem(f"--url must be a URL such as http://127.0.0.1:8765 (got {url!r})")
    try:
        try:
            context = resolve(url, None, env)
        except wire.ContextError as error:
            raise _no_context(error, url, env) from error
        with Client(context.url, context.token, namespace=namespace) as client:
            yield client
    except wire.ServerUnavailable as error:
        raise NoServer(_one_line(error)) from error
    except wire.NotFound as error:
        raise NotFound(_one_line(error)) from error
    except (wire.Invalid, wire.Conflict) as error:
        raise InvalidInput(_one_line(error)) from error
    except wire.RollyardError as error:
        raise CliError(_one_line(error)) from error


def _no_context(error: Exception, url: str | None, env: dict[str, str]) -> CliError:
    """No token is known. Most often that is because no server runs: say that first."""
    from rollyard_client import Client
    from rollyard_client.context import DEFAULT_URL, context_path
    from rollyard_client.errors import RollyardError, ServerUnavailable
    from rollyard_client.transport import Retry

    from rollyard.local.home import read_json

    document = read_json(context_path(env)) or {}
    address = url or env.get("ROLLYARD_URL") or str(document.get("url") or DEFAULT_URL)
    try:
        with Client(address, "none", timeout=3.0, retry=Retry(attempts=1)) as client:
            client.ready()
    except ServerUnavailable:
        return NoServer(f"no server at {address}; start one with `rollyard up`")
    except RollyardError:
        return CliError(str(error))
    return CliError(str(error))


def _one_line(error: Exception) -> str:
    problems = list(getattr(error, "errors", ()))
    text = "; ".join(problems) if problems else str(error)
    return " ".join(text.split())
