"""A kubectl for tests, which answers from a JSON file, and forwards ports for real on this machine.

`python scripted_kubectl.py STATE ARGUMENT…`. STATE: {"services": […], "secrets": {…}, "target": PORT,
"forbidden": ["services --all-namespaces", "secrets", "portforward"], "unreachable": bool, "lives": seconds}.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn


def refuse(what: str) -> NoReturn:
    print(f'Error from server (Forbidden): {what} is forbidden: User "jane" cannot do that', file=sys.stderr)
    sys.exit(1)


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1] if name in words else ""


def relay(source: socket.socket, sink: socket.socket) -> None:
    try:
        while chunk := source.recv(65536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        sink.close()


def forward(port: int, target: int, lives: float) -> None:
    listener = socket.create_server(("127.0.0.1", port))
    print(f"Forwarding from 127.0.0.1:{listener.getsockname()[1]} -> 8765", flush=True)
    ends = time.monotonic() + lives
    while (left := ends - time.monotonic()) > 0:
        listener.settimeout(left)
        try:
            near, _ = listener.accept()
        except TimeoutError:
            break
        far = socket.create_connection(("127.0.0.1", target))
        for pair in ((near, far), (far, near)):
            threading.Thread(target=relay, args=pair, daemon=True).start()
    print("error: lost connection to pod", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    state: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    words = sys.argv[2:]
    if state.get("unreachable"):
        print("Unable to connect to the server: dial tcp 192.0.2.1:6443: i/o timeout", file=sys.stderr)
        sys.exit(1)
    forbidden: list[str] = state.get("forbidden", [])
    if words[:2] == ["config", "view"]:
        print(state.get("current", ""))
    elif words[:2] == ["get", "services"]:
        everywhere = "--all-namespaces" in words
        if "services" in forbidden or (everywhere and "services --all-namespaces" in forbidden):
            refuse("services")
        namespace = option(words, "--namespace")
        found = [
            item for item in state["services"] if everywhere or item["metadata"]["namespace"] == namespace
        ]
        print(json.dumps({"items": found}))
    elif words[:2] == ["get", "secret"]:
        if "secrets" in forbidden:
            refuse("secrets")
        if words[2] not in state["secrets"]:
            print(f'Error from server (NotFound): secrets "{words[2]}" not found', file=sys.stderr)
            sys.exit(1)
        print(json.dumps({"data": state["secrets"][words[2]]}))
    elif words[0] == "port-forward":
        if "portforward" in forbidden:
            refuse("pods/portforward")
        local, _, _ = words[-1].partition(":")
        forward(int(local or 0), state["target"], state.get("lives", 3600))
    else:
        sys.exit(f"unknown: {words}")


if __name__ == "__main__":
    main()
