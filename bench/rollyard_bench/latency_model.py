"""The instrument of the pipeline figures: a server of vLLM's shape that answers after a fixed time.

`python -m rollyard_bench.latency_model --latency 0.5 --turns 4 --folder DIR --port-file FILE`. Every call
sleeps `latency` seconds, however many run at once, and gives the token ids of one tool call: `bash` in the
turns before the last, and `submit` in the last. It knows no rollouts: the turn is counted in the prompt.
Requests that only check whether the server works are answered at once: an empty request, and one for a single
token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MODEL = "fixed-latency"
MAX_MODEL_LEN = 32_768
START, END = "<|im_start|>", "<|im_end|>"

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def make_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, and the two special tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
    return tokenizer


def write_folder(folder: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template, as stage workers read them."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class LatencyModel:
    """The ASGI application."""

    def __init__(self, latency: float, turns: int) -> None:
        self._latency = latency
        self._turns = turns
        tokenizer = make_tokenizer()
        self._assistant_start = tuple(tokenizer.encode(START + "a").ids)
        step = self._call("bash", {"command": "echo step"})
        submit = self._call("submit", {"answer": "done"})
        self._step = self._encoded(tokenizer, step)
        self._last = self._encoded(tokenizer, submit)

    @staticmethod
    def _call(tool: str, arguments: dict[str, str]) -> str:
        return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"

    @staticmethod
    def _encoded(tokenizer: Tokenizer, text: str) -> tuple[list[int], str]:
        return list(tokenizer.encode(text + END).ids), text

    def turn(self, prompt: list[int]) -> int:
        """Return how many assistant messages have begun.

        Of the template's roles only that one begins with `a`.
        """
        start, role = self._assistant_start
        found, at = 0, -1
        while True:
            try:
                at = prompt.index(start, at + 1)
            except ValueError:
                return found
            found += prompt[at + 1 : at + 2] == [role]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope {scope['type']!r}")
        arrived = time.perf_counter()
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, answer = await self.respond(scope["path"], body, arrived)
        payload = orjson.dumps(answer)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(payload)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": payload})

    async def respond(self, path: str, body: bytes, arrived: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer of a request, which came at `arrived`."""
        answer = self.static(path)
        if answer is not None:
            return 200, answer
        if path == "/v1/completions":
            return await self._completed(orjson.loads(body), arrived)
        return 404, _error(404, "Not Found")

    async def _completed(self, request: dict[str, Any], arrived: float) -> tuple[int, dict[str, Any]]:
        if "prompt" not in request:
            return 400, _error(400, "prompt: Field required")
        if request.get("max_tokens") != 1:
            await self.wait(request, arrived)
        return 200, self.completion(request)

    async def wait(self, request: dict[str, Any], arrived: float) -> None:
        """Wait until the request, which came at `arrived`, is to be answered."""
        await asyncio.sleep(max(0.0, arrived + self._latency - time.perf_counter()))

    def static(self, path: str) -> dict[str, Any] | None:
        """Return the answer to a request whose body does not matter, or None if there is no such path."""
        model = {"id": MODEL, "object": "model", "owned_by": "bench", "max_model_len": MAX_MODEL_LEN}
        known: dict[str, dict[str, Any]] = {
            "/health": {},
            "/ping": {},
            "/version": {"version": "0.0.0"},
            "/v1/models": {"object": "list", "data": [model]},
        }
        return known.get(path)

    def answer(self, request: dict[str, Any]) -> tuple[list[int], str]:
        """Return the token ids of the answer, and their text."""
        return self._step if self.turn(request["prompt"]) < self._turns else self._last

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of `/v1/completions`."""
        prompt = request["prompt"]
        ids, text = self.answer(request)
        # This is the control plane's own probe of a new backend, which asks for one token.
        ids = ids[: request.get("max_tokens") or None]
        logprobs = {
            "text_offset": [0] * len(ids),
            "token_logprobs": [-0.5] * len(ids),
            "tokens": [str(token) for token in ids],
            "top_logprobs": [{} for _ in ids],
        }
        choice = {
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "prompt_logprobs": None,
        }
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
        }
        return {
            "id": "cmpl-bench",
            "object": "text_completion",
            "created": 0,
            "model": request.get("model", MODEL),
            "choices": [choice],
            "usage": usage,
        }


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "BadRequestError", "code": status}}


def serve(app: LatencyModel, port_file: Path) -> None:
    """Serve on a free port of the loopback interface until a signal; the port goes to `port_file`."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    partial = port_file.with_suffix(".partial")
    partial.write_text(str(listener.getsockname()[1]))
    os.replace(partial, port_file)
    config = uvicorn.Config(
        app, loop="uvloop", http="httptools", lifespan="off", log_level="warning", access_log=False
    )
    uvicorn.Server(config).run(sockets=[listener])


def main() -> None:
    """Serve on a free port of the loopback interface until a signal. The port is written to `--port-file`."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--latency", type=float, required=True, help="seconds of each call")
    parse.add_argument("--turns", type=int, required=True, help="model calls of one rollout")
    parse.add_argument("--folder", type=Path, required=True, help="where the tokenizer is written")
    parse.add_argument("--port-file", type=Path, required=True)
    options = parse.parse_args()
    write_folder(options.folder)
    serve(LatencyModel(options.latency, options.turns), options.port_file)


if __name__ == "__main__":
    main()
