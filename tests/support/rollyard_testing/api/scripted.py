"""A scripted stand-in for a server that misbehaves at one call; the real engine is tested beside it."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

LOGPROB = {"old": -1.0, "new": -2.0}


class Scripted:
    """Speaks vLLM's control calls. `failing[path]`: how often it answers 500; `gates[path]`: holds it up."""

    def __init__(self, model: str = "tiny") -> None:
        self.model = model
        self.label = "default"
        self.weights = "old"
        self.paused = False
        self.failing: defaultdict[str, int] = defaultdict(int)
        self.gates: dict[str, threading.Event] = {}
        self.seen: list[str] = []
        self.stale = False
        """True: it answers that it has loaded, and keeps its weights."""
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                self._do()

            def do_POST(self) -> None:
                self._do()

            def _do(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                status, document = scripted.answer(urlsplit(self.path).path, body)
                data = json.dumps(document).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self._server.shutdown()
        self._server.server_close()

    def restart(self) -> None:
        """As if its process had been started anew."""
        self.label, self.weights, self.paused = "default", "old", False

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.seen.append(path)
        if self.failing[path] > 0:
            self.failing[path] -= 1
            return 500, {"error": {"message": "scripted failure"}}
        if path in self.gates:
            self.gates[path].wait(60)
        if path == "/v1/models":
            return 200, {"data": [{"id": self.model}]}
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/collective_rpc":
            if not self.stale:
                self.weights = "new"
        elif path == "/inference/v1/generate":
            return 200, {
                "choices": [
                    {
                        "token_ids": [1],
                        "logprobs": {"content": [{"token_id": 1, "logprob": -1.0}]},
                        "weight_versions": [{"version": self.label, "start": 0, "end": 1}],
                    }
                ]
            }
        elif path == "/v1/completions":
            entries = [None, *({str(i): {"logprob": LOGPROB[self.weights]}} for i in body["prompt"][1:])]
            return 200, {"choices": [{"prompt_logprobs": entries}]}
        elif path not in ("/health", "/reset_prefix_cache"):
            return 404, {}
        return 200, {}


REFERENCE = {"promptIds": [1, 2, 3, 4], "logprobs": [LOGPROB["new"]] * 3}
