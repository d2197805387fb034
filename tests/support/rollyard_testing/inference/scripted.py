"""Scripted stand-ins for servers that misbehave at one call; real ones are tested beside them.

The SGLang-shaped one has the calls and the answers of SGLang's documentation and request types (0.5).
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from rollyard_testing.pace import patience

LOGPROB = {"old": -1.0, "new": -2.0}
REFERENCE = {"promptIds": [1, 2, 3, 4], "logprobs": [LOGPROB["new"]] * 3}

Step = Literal["measure", "pause", "load", "label", "flush", "resume", "compare"]
Answer = tuple[int, Any]


class Scripted(ABC):
    """One server. `failing[path]` is how often it answers 500; `gates[path]` holds the call up."""

    paths: ClassVar[Mapping[Step, str]]
    """The path of each step of a weight update."""

    def __init__(self, model: str = "tiny") -> None:
        self.model = self.served = model
        self.label = "default"
        self.weights = "old"
        self.paused = False
        self.failing: defaultdict[str, int] = defaultdict(int)
        self.gates: dict[str, threading.Event] = {}
        self.seen: list[str] = []
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.documents: dict[str, dict[str, Any]] = {}
        """Further answers by path."""
        self.stale = False
        """If true, it answers that it has loaded, and keeps its weights."""
        self.adapters: list[str] = []
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                return

            def do_GET(self) -> None:
                self._do(None)

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                self._do(json.loads(self.rfile.read(length) or b"{}"))

            def _do(self, body: dict[str, Any] | None) -> None:
                status, document = scripted.answer(urlsplit(self.path).path, body)
                data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
                try:
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    for name, value in scripted.headers(status).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self._server.shutdown()
        self._server.server_close()

    def headers(self, status: int) -> dict[str, str]:
        """Return further headers of an answer."""
        return {}

    def restart(self) -> None:
        """Become what a new process of it would be."""
        self.served, self.label, self.weights, self.paused = self.model, "default", "old", False
        self.adapters.clear()

    def answer(self, path: str, body: dict[str, Any] | None) -> Answer:
        """Return status and JSON (or text) of one request; `body` is None for GET."""
        compares = body is not None and ("prompt_logprobs" in body or body.get("logprob_start_len") == 0)
        # Log-probabilities of a prompt are requested before the weights are loaded, and after it.
        step = path if not compares else self.paths["measure" if self.weights == "old" else "compare"]
        self.seen.append(step)
        if body:
            self.bodies.append((path, body))
        if self.failing[step] > 0:
            self.failing[step] -= 1
            return 500, {"error": {"message": "scripted failure"}}
        if step in self.gates:
            self.gates[step].wait(patience(60))
        if path == "/health":
            return 200, {}
        if path in self.documents:
            return 200, self.documents[path]
        if path == "/v1/models":
            adapters = [{"id": name, "parent": self.served} for name in self.adapters]
            return 200, {"data": [{"id": self.served, "root": f"/models/{self.served}"}, *adapters]}
        if path == "/update_weight_version" and body:
            self.label = body["new_version"]
            return 200, {}
        return self.call(path, body)

    @abstractmethod
    def call(self, path: str, body: dict[str, Any] | None) -> Answer:
        """Answer a call that only servers of this shape have."""

    def load(self) -> None:
        """Take new weights, as far as the script allows it."""
        if not self.stale:
            self.weights = "new"


class VllmShaped(Scripted):
    """A server that speaks vLLM's calls, with `--enable-scale-out` and VLLM_SERVER_DEV_MODE=1."""

    paths: ClassVar[Mapping[Step, str]] = {
        "measure": "measure",
        "pause": "/pause",
        "load": "/collective_rpc",
        "label": "/update_weight_version",
        "flush": "/reset_prefix_cache",
        "resume": "/resume",
        "compare": "compare",
    }

    def call(self, path: str, body: dict[str, Any] | None) -> Answer:
        """Answer a call that only vLLM has."""
        if path == "/is_paused":
            return 200, {"is_paused": self.paused}
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        if path == "/metrics":
            names = (
                *("num_requests_running", "num_requests_waiting"),
                *("prefix_cache_queries_total", "prefix_cache_hits_total"),
            )
            lines = (f'vllm:{name}{{engine="0"}} {n}' for name, n in zip(names, (3, 1, 90, 45), strict=True))
            return 200, "\n".join(lines)
        if body is None:
            return 404, {}
        if path in ("/pause", "/resume"):
            self.paused = path == "/pause"
        elif path == "/collective_rpc":
            self.load()
        elif path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.adapters and not body["load_inplace"]:
                return 400, {"error": {"message": "already loaded"}}
            self.adapters = [body["lora_name"]]
        elif path in ("/inference/v1/generate", "/v1/completions"):
            return self._sampled(path, body) if body else (400, {"error": {"message": "Field required"}})
        elif path not in ("/reset_prefix_cache", "/inference/v1/abort_requests"):
            return 404, {}
        return 200, {}

    def _sampled(self, path: str, body: dict[str, Any]) -> Answer:
        spans = [{"version": self.label, "start": 0, "end": 1}]
        choice: dict[str, Any] = {"token_ids": [1], "finish_reason": "length", "weight_versions": spans}
        if path == "/v1/completions":
            prompt = body["prompt"]
            entries = [None, *({str(i): {"logprob": LOGPROB[self.weights]}} for i in prompt[1:])]
            choice |= {"prompt_token_ids": prompt, "prompt_logprobs": entries}
            choice["logprobs"] = {"token_logprobs": [-1.0]}
        else:
            prompt = body["token_ids"]
            choice["logprobs"] = {"content": [{"token_id": 1, "logprob": -1.0}]}
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(prompt)}}


class SglangShaped(Scripted):
    """A server that speaks SGLang's calls and, like SGLang, names its model by the folder that was loaded
    last.
    """

    paths: ClassVar[Mapping[Step, str]] = {
        "measure": "measure",
        "pause": "/pause_generation",
        "load": "/update_weights_from_disk",
        "label": "/update_weight_version",
        "flush": "/flush_cache",
        "resume": "/continue_generation",
        "compare": "compare",
    }

    def call(self, path: str, body: dict[str, Any] | None) -> Answer:
        """Answer a call that only SGLang has."""
        if path == "/model_info":
            folder = self.served if self.served != self.model else f"/models/{self.model}"
            return 200, {"model_path": folder, "weight_version": self.label, "is_generation": True}
        if path == "/metrics":
            names = ("num_running_reqs", "num_queue_reqs", "prompt_tokens_total", "cached_tokens_total")
            lines = (
                f'sglang:{name}{{tp_rank="0"}} {n}' for name, n in zip(names, (3, 1, 90, 45), strict=True)
            )
            return 200, "\n".join(lines)
        if body is None:
            return 404, {}
        if path == "/pause_generation":
            if body["mode"] not in ("abort", "retract", "in_place"):
                return 400, {"error": {"message": f"Invalid mode: {body['mode']!r}"}}
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weights_from_disk":
            self.load()
            self.served = body["model_path"]
            return 200, {"success": True, "message": "Succeeded to update model weights."}
        elif path in ("/load_lora_adapter", "/unload_lora_adapter"):
            known = body["lora_name"] in self.adapters
            if known == (path == "/load_lora_adapter"):
                return 400, {"success": False, "error_message": "already loaded, or not loaded"}
            self.adapters = [body["lora_name"]] if path == "/load_lora_adapter" else []
            return 200, {"success": True}
        elif path == "/generate":
            return self._sampled(body) if body else (400, {"error": {"message": "no input"}})
        elif path == "/v1/completions":
            # It has the same name as vLLM's call, and gives no token ids.
            return 200, {"choices": [{"text": "x", "logprobs": None}]}
        elif path != "/flush_cache":
            return 404, {}
        return 200, "Cache flushed.\n" if path == "/flush_cache" else {"status": "ok"}

    def _sampled(self, body: dict[str, Any]) -> Answer:
        ids = body["input_ids"]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": 1},
            "prompt_tokens": len(ids),
            "completion_tokens": 1,
            "weight_version": self.label,
            "weight_versions": [{"version": self.label, "start": 0, "end": 1}],
            "output_token_logprobs": [[-1.0, 1, None]],
        }
        if body.get("logprob_start_len") == 0:
            values = (None, *(LOGPROB[self.weights] for _ in ids[1:]))
            meta["input_token_logprobs"] = [[v, i, None] for v, i in zip(values, ids, strict=True)]
        return 200, {"text": "x", "output_ids": [1], "meta_info": meta}


class ProrlShaped(Scripted):
    """A server that has ProRL's `/generate` and nothing else.

    Args:
        allows: Whether a GET of that call is answered with 405 and what it allows; otherwise with 404.
    """

    paths: ClassVar[Mapping[Step, str]] = {"measure": "measure", "compare": "compare"}

    def __init__(self, *, allows: bool = True) -> None:
        super().__init__()
        self._allows = allows

    def answer(self, path: str, body: dict[str, Any] | None) -> Answer:
        """Answer `/generate` alone."""
        if path != "/generate":
            return 404, {"detail": "Not Found"}
        return super().answer(path, body)

    def headers(self, status: int) -> dict[str, str]:
        """Return what a 405 allows."""
        return {"allow": "POST"} if status == 405 else {}

    def call(self, path: str, body: dict[str, Any] | None) -> Answer:
        """Answer `/generate`."""
        if body is None:
            return (405, {"detail": "Method Not Allowed"}) if self._allows else (404, {"detail": "Not Found"})
        if "prompt_ids" not in body:
            return 422, {"detail": "prompt_ids: Field required"}
        return 200, {"response_ids": [1] * body["max_tokens"], "logprobs": [-1.0] * body["max_tokens"]}


SHAPES: dict[str, type[Scripted]] = {"vllm": VllmShaped, "sglang": SglangShaped}
