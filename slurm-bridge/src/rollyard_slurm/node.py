"""`python -m rollyard_slurm.node` starts a backend on a node and announces where it answers.

The address is the one from which this node reaches the control plane, because workers and the bridge's
health checks reach the node by the same address. The port is one that is free when the backend starts. If
another process takes the port first, the backend ends and is started again with another port.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from rollyard_slurm.scripts.shell import HOST, PORT


def source_address(host: str, port: int) -> str:
    """Return the address of this machine from which packets to `host` would leave.

    No packet is sent.

    Raises:
        OSError: The host does not exist, or there is no route to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        name: str = probe.getsockname()[0]
    return name


def free_port(host: str) -> int:
    """Return a TCP port of `host` on which no process listens at the moment."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        port: int = probe.getsockname()[1]
    return port


def command_for(command: list[str], host: str, port: int) -> tuple[list[str], int]:
    """Return a command with the host and the port filled in, and the port on which it will listen.

    That port differs from `port` if the command has a `--port` option with another number.
    """
    filled = [word.replace(HOST, host).replace(PORT, str(port)) for word in command]
    chosen = port
    for index, word in enumerate(filled):
        value = word.partition("=")[2] if word.startswith("--port=") else ""
        if word == "--port" and index + 1 < len(filled):
            value = filled[index + 1]
        chosen = int(value) if value.isdigit() else chosen
    return filled, chosen


def base_url(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL of a server. An IPv6 address gets brackets."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def main(argv: list[str] | None = None) -> int:
    """Write the endpoint file, and replace this process by the command.

    Returns:
        An exit status, if one of the two failed: 2 for the endpoint file, and 127 for the command.
    """
    parser = argparse.ArgumentParser(prog="python -m rollyard_slurm.node", description=__doc__)
    parser.add_argument(
        "--endpoint", type=Path, required=True, help="file that says where the backend answers"
    )
    parser.add_argument("--toward", required=True, help="the control plane's URL")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    toward = urlsplit(options.toward)
    try:
        # A control plane that listens on a Unix socket runs on the same node as everything else.
        local = toward.scheme == "http+unix"
        host = "127.0.0.1" if local else source_address(toward.hostname or "", toward.port or 80)
        command, port = command_for(options.command, host, free_port(host))
        document = {
            "url": base_url(host, port),
            "node": os.environ.get("SLURMD_NODENAME", socket.gethostname()),
            "job": os.environ.get("SLURM_JOB_ID", ""),
            "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        }
        scratch = options.endpoint.with_name(f".{options.endpoint.name}.{os.getpid()}")
        scratch.write_text(json.dumps(document))
        scratch.replace(options.endpoint)
    except OSError as error:
        print(f"error: the backend cannot be announced: {error}", file=sys.stderr)
        return 2
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]}: {error.strerror}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())
