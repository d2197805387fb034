"""The command line of the exec server: `python -I -m rollyard_sandbox.server --listen ADDRESS …`."""

from __future__ import annotations

import os
import sys

from rollyard_sandbox import proof
from rollyard_sandbox.isolation import network
from rollyard_sandbox.server.exec_server import serve
from rollyard_sandbox.server.options import ServerOptions


class _Arguments(ServerOptions):
    """The options, which argparse fills in, and the arguments from which some of them are made."""

    token_file: str | None
    secret_fd: int | None
    isolation_check: list[str]


def _parse(arguments: list[str] | None) -> _Arguments:
    import argparse  # This takes 3 ms, which a sandbox that calls `serve` itself does not spend.

    parser = argparse.ArgumentParser(prog="rollyard_sandbox.server", description="Exec server of a sandbox.")
    add = parser.add_argument
    add(
        "--listen",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="unix:/path, tcp://host:port (host *: every address; port 0: any free one) or fd:N (a bound "
        "socket); may be repeated",
    )
    add("--workdir", help="where sessions start")
    add(
        "--lease", type=float, metavar="SECONDS", help="kill everything and exit when not renewed for so long"
    )
    add("--token-file", metavar="FILE", help="the token that clients must show; TCP needs it, or its hash")
    add("--token-sha256", metavar="HEX", help="SHA-256 of the token that clients must show, 64 hex digits")
    add(
        "--isolation-check",
        action="append",
        default=[],
        metavar="IP:PORT",
        help="listen only when this cannot be reached, else exit with "
        f"{network.NOT_ISOLATED}; may be repeated",
    )
    add(
        "--isolation-seconds",
        type=float,
        metavar="SECONDS",
        help="how long to wait for that",
    )
    add("--max-sessions", type=int)
    add(
        "--max-output",
        type=int,
        metavar="BYTES",
        help="upper bound of a request's max_output",
    )
    add(
        "--ready-fd",
        type=int,
        metavar="N",
        help="write one JSON line (pid, listen) to this descriptor when ready, then close it",
    )
    add(
        "--own-pid-namespace",
        action="store_true",
        help="only this server and pid 1 may survive kill_all: the pid namespace is its own",
    )
    add(
        "--secret-fd",
        type=int,
        metavar="N",
        help=f"read {proof.SECRET_BYTES} bytes from this descriptor, which the server proves to know",
    )
    add(
        "--allow-loopback",
        action="store_true",
        help="accept TCP connections that come from this machine itself, where the server does not listen on "
        "a loopback address only",
    )
    options = parser.parse_args(arguments, _Arguments(listen=[]))
    if not os.path.isdir(options.workdir):
        parser.error(f"--workdir: {options.workdir} is not a directory")
    if options.lease is not None and options.lease <= 0:
        parser.error("--lease: must be more than 0 seconds")
    with_token = options.token_file is not None or options.token_sha256 is not None
    if not with_token and any(address.startswith("tcp:") for address in options.listen):
        parser.error("--listen: TCP needs --token-file or --token-sha256")
    if options.token_sha256 is not None:
        options.token_sha256 = options.token_sha256.lower()
        if len(options.token_sha256) != 64 or set(options.token_sha256) - set("0123456789abcdef"):
            parser.error("--token-sha256: must be 64 hexadecimal digits")
    if not 0 <= options.isolation_seconds <= 3600:
        parser.error("--isolation-seconds: must be between 0 and 3600 seconds")
    try:
        options.isolation_checks = tuple(network.ForbiddenAddress(text) for text in options.isolation_check)
    except ValueError as error:
        parser.error(f"--isolation-check: {error}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, and return the exit status."""
    options = _parse(arguments)
    options.yielding = options.own_pid_namespace  # A container has control groups of its own.
    if options.token_file is not None:
        try:
            with open(options.token_file, encoding="utf-8") as file:
                options.token = file.read().strip()
        except OSError as error:
            print(f"--token-file: {error}", file=sys.stderr)
            return 2
        if not options.token:
            print(f"--token-file: {options.token_file} is empty", file=sys.stderr)
            return 2
    if options.secret_fd is not None:
        try:
            options.secret = proof.read_secret(options.secret_fd)
        except (OSError, ValueError) as error:
            print(f"--secret-fd: {error}", file=sys.stderr)
            return 2
    return serve(options)
