"""The connection of commands to a control plane: the choice of the server, and errors of one line."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import click

from rollyard.errors import CliError, InvalidInput, LookupFailed, UsageProblem

if TYPE_CHECKING:
    from rollyard_client import Client
    from rollyard_client.context import Context

F = TypeVar("F", bound=Callable[..., Any])


KUBERNETES: Final = "kubernetes://"


class Server(NamedTuple):
    """What a command's options say about the server and the namespace: the arguments of `connect`."""

    url: str | None
    home: Path | None
    namespace: str | None
    """The namespace of the call, or None for the one that the client of the connection has."""


def server_options(command: F) -> F:
    """Add `--url`, `--kubernetes`, `--home` and `--namespace` to a command, which gets them as `server`."""

    @functools.wraps(command)
    def folded(
        *args: Any,
        url: str | None,
        kubernetes: str | None,
        home: Path | None,
        namespace: str | None,
        **kwargs: Any,
    ) -> Any:
        if url is not None and kubernetes is not None:
            raise UsageProblem("--url and --kubernetes name two servers; give one of them")
        if kubernetes is not None:
            url = KUBERNETES + kubernetes
        return command(*args, server=Server(url, home, namespace), **kwargs)

    wrapped: Any = folded
    for option in (
        click.option(
            "-n",
            "--namespace",
            metavar="NAME",
            help="Namespace [default; in a cluster: that of your kubeconfig's context].",
        ),
        click.option("--home", type=click.Path(path_type=Path), help="Home of the `rollyard up` to talk to."),
        click.option(
            "--kubernetes",
            metavar="[=NAMESPACE[/RELEASE]]",
            help="The installation in the cluster of your kubeconfig, over kubectl [ROLLYARD_KUBERNETES].",
        ),
        click.option("--url", help="Control plane [ROLLYARD_URL, else the running `rollyard up`]."),
    ):
        wrapped = option(wrapped)
    return cast(F, wrapped)


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """The connection of a command to a control plane."""

    client: Client
    is_tunnel: bool
    """Whether the client's address leads into a cluster, and ends with the command."""


@contextlib.contextmanager
def connect(url: str | None, home: Path | None, namespace: str | None) -> Iterator[Client]:
    """Yield a client whose errors end the command with one line; see `connection`."""
    with connection(url, home, namespace) as opened:
        yield opened.client


@contextlib.contextmanager
def connection(url: str | None, home: Path | None, namespace: str | None) -> Iterator[OpenConnection]:
    """Yield a connection whose client's errors end the command with one line.

    If neither the arguments nor the environment name a server and no `rollyard up` runs, the client uses
    the one installation in the cluster of the kubeconfig. There, a client without a namespace has that of
    the kubeconfig's context, as kubectl does; elsewhere it has `default`.

    Raises:
        LookupFailed: The server has no such object, or the cluster has no such installation.
        InvalidInput: The server refuses the request.
        UsageProblem: The URL is not valid, or several installations match.
        CliError: No server answers, none is found, or the call failed for another reason.
    """
    from rollyard_client import Client
    from rollyard_client import errors as wire

    from rollyard import cluster

    env = dict(os.environ)
    if home is not None:
        env["ROLLYARD_HOME"] = str(home.expanduser().resolve())
    if url is None and home is None and not env.get("ROLLYARD_URL") and env.get("ROLLYARD_KUBERNETES"):
        url = KUBERNETES + env["ROLLYARD_KUBERNETES"]
    address = url or env.get("ROLLYARD_URL") or ""
    if url is not None and not url.startswith(("http://", "https://", "http+unix://", KUBERNETES)):
        raise UsageProblem(f"--url must be a URL such as http://127.0.0.1:8765 (got {url!r})")
    try:
        with contextlib.ExitStack() as stack:
            if address.startswith(KUBERNETES):
                context, is_tunnel = stack.enter_context(_in_cluster(address, env)), True
            else:
                context, is_tunnel = stack.enter_context(_elsewhere(url, home, env))
            if namespace is None:
                namespace = cluster.current_namespace() if is_tunnel else "default"
            client = Client(context.url, context.token, namespace=namespace, tls=context.tls)
            yield OpenConnection(stack.enter_context(client), is_tunnel)
    except wire.ServerUnavailable as error:
        raise CliError(one_line_of(error), reason="NoServer") from error
    except wire.NotFound as error:
        raise LookupFailed(one_line_of(error)) from error
    except (wire.Invalid, wire.Conflict) as error:
        raise InvalidInput(one_line_of(error)) from error
    except wire.RollyardError as error:
        raise CliError(one_line_of(error)) from error


@contextlib.contextmanager
def _elsewhere(url: str | None, home: Path | None, env: dict[str, str]) -> Iterator[tuple[Context, bool]]:
    """Yield the context of a URL or of the file that `rollyard up` writes, and whether it uses a tunnel.

    If nothing names a server, the kubeconfig is used.
    """
    from rollyard_client import errors as wire
    from rollyard_client.context import context_path, resolve

    from rollyard import cluster

    try:
        context = resolve(url, None, env)
    except wire.ContextError as error:
        named = url is not None or home is not None or env.get("ROLLYARD_URL") or env.get("ROLLYARD_HOME")
        if named or context_path(env).exists() or not cluster.configured(env):
            raise _no_context(error, url, env) from error
        try:
            only = cluster.find(KUBERNETES)
        except UsageProblem:
            raise
        except CliError as problem:
            missing = str(_no_context(error, url, env))
            raise CliError(
                f"{missing}; in the cluster of your kubeconfig: {problem}", reason="NoServer"
            ) from error
        click.echo(f"rollyard: using {only} of the cluster of your kubeconfig", err=True)
        with _in_cluster(f"{KUBERNETES}{only}", env) as context:
            yield context, True
        return
    yield context, False


@contextlib.contextmanager
def _in_cluster(address: str, env: dict[str, str]) -> Iterator[Context]:
    """Yield the context of the installation that a `kubernetes://` address names, over a kubectl tunnel."""
    import ssl

    from rollyard_client.context import Context

    from rollyard import cluster

    installation = cluster.find(address)
    token = env.get("ROLLYARD_TOKEN") or cluster.token(installation)
    tls: ssl.SSLContext | None = None
    if installation.scheme == "https":
        # The API server has authenticated the other end of the tunnel. The certificate is for the Service's
        # name, and its authority may be the cluster's own.
        tls = ssl.create_default_context()
        tls.check_hostname = False
        tls.verify_mode = ssl.CERT_NONE
    with cluster.forwarded(installation) as url:
        yield Context(url, token, tls)


def _no_context(error: Exception, url: str | None, env: dict[str, str]) -> CliError:
    """Return the error for a missing token.

    The usual reason is that no server runs. In that case, the error says so.
    """
    from rollyard_client import Client
    from rollyard_client.call import Retry
    from rollyard_client.context import DEFAULT_URL, context_path
    from rollyard_client.errors import RollyardError, ServerUnavailable
    from rollyard_drivers.host.home import read_json

    document = read_json(context_path(env)) or {}
    if url is None and not env.get("ROLLYARD_URL") and env.get("ROLLYARD_HOME") and not document.get("url"):
        home = env["ROLLYARD_HOME"]
        return CliError(
            f"nothing runs on {home}; start it with `rollyard up --home {home}`, or give --url",
            reason="NoServer",
        )
    address = url or env.get("ROLLYARD_URL") or str(document.get("url") or DEFAULT_URL)
    try:
        with Client(address, "none", timeout=3.0, retry=Retry(attempts=1)) as client:
            client.ready()
    except ServerUnavailable:
        return CliError(f"no server at {address}; start one with `rollyard up`", reason="NoServer")
    except RollyardError:
        pass
    return CliError(str(error))


def one_line_of(error: Exception) -> str:
    """Return what an error of the client says in one line, with all fields that it names."""
    problems = list(getattr(error, "errors", ()))
    text = "; ".join(problems) if problems else str(error)
    return " ".join(text.split())
