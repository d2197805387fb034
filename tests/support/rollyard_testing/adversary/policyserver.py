"""A model whose turns a test dictates one by one, while the rollout runs.

The server speaks vLLM's calls. A rollout's prompt holds its word (`rya-…`), which identifies its turns.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rollyard_testing.families import FAMILIES, train_tokenizer, write_folder
from rollyard_testing.pace import patience

FAMILY = FAMILIES["qwen2_5"]
WORD = re.compile(r"rya-[0-9a-f]{16}")
WAIT_SECONDS = patience(60.0)
MODEL = "dictated"


class Turns:
    """The turns of one rollout: prompts come in, texts go out."""

    def __init__(self) -> None:
        self.prompts: queue.Queue[str] = queue.Queue()
        self.texts: queue.Queue[str] = queue.Queue()
        self.ids: list[list[int]] = []
        """The token ids of each prompt."""


class PolicyServer:
    """A server of dictated turns on a free port of loopback."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = train_tokenizer()
        self.folder = write_folder(FAMILY, self.tokenizer, folder)
        self._turns: dict[str, Turns] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def turns(self, word: str) -> Turns:
        """Return the turns of the rollout with this word."""
        with self._lock:
            return self._turns.setdefault(word, Turns())

    def sample(self, ids: list[int]) -> list[int]:
        """Return the token ids of the turn that follows the prompt `ids`."""
        prompt = self.tokenizer.decode(ids, skip_special_tokens=False)
        word = WORD.search(prompt)
        if word is None:  # The control plane tests whether the model answers at all.
            return self._encoded(FAMILY.turn("yes"))
        turns = self.turns(word[0])
        turns.ids.append(ids)
        turns.prompts.put(prompt)
        text = turns.texts.get(timeout=WAIT_SECONDS)
        return self._encoded(text)

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @contextlib.contextmanager
    def serving(self) -> Iterator[PolicyServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="policy-server")
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        policy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

            def do_GET(self) -> None:
                card = {"id": MODEL, "max_model_len": 100_000, "logprobs_mode": "processed_logprobs"}
                answers: dict[str, Any] = {
                    "/health": {},
                    "/v1/models": {"data": [card]},
                    "/is_paused": {"is_paused": False},
                }
                self._answer(answers.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                if self.path != "/inference/v1/generate":
                    self._answer(None)
                elif "token_ids" not in body:  # The client asks whether the call exists.
                    self._answer({"error": {"message": "token_ids: Field required"}}, 400)
                else:
                    ids = policy.sample(body["token_ids"])[: body["sampling_params"]["max_tokens"]]
                    self._answer(_completion(ids, body["token_ids"]))

            def _answer(self, document: Any, status: int = 200) -> None:
                data = json.dumps(document or {}).encode()
                self.send_response(404 if document is None else status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # A rollout that is cut off reads no answer.
                    self.wfile.write(data)

        return Handler


def _completion(ids: list[int], prompt: list[int]) -> dict[str, Any]:
    content = [{"token_id": token, "logprob": -0.125} for token in ids]
    choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
    return {"choices": [choice], "prompt_token_ids": prompt}


def calling(name: str, arguments: dict[str, Any]) -> str:
    """Return the text of a turn that makes one call."""
    assert FAMILY.calls is not None
    return FAMILY.turn(calls=[(name, arguments)])
