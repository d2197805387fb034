"""The instruments of the pipeline figures: servers of vLLM's shape that answer in time, and compute nothing.

`python -m rollyard_bench.model_servers --port-file FILE KIND FOLDER NUMBER…` serves one of `MODELS` with
these numbers; `model_server` starts it. However many requests run at once, each takes its time, and next to
no time of a core: a real server beside the control plane and the worker would share two cores with them, and
would keep no pace. Requests that only check whether the server works are answered at once: an empty request,
and one for a single token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import uvicorn
from rollyard_api.core.sockets import write_port
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from rollyard_bench.processes import BENCH, ROOT, port_of, program

MODEL = "fixed-latency"
MAX_MODEL_LEN = 32_768
POLICY = ROOT / "examples" / "tiny-policy" / "hf"
"""The folder with the tokenizer and the chat template of the streaming model."""
LONG_MODEL_LEN = 65_536
"""The context of the streaming model."""
START, END = "<|im_start|>", "<|im_end|>"
MEAN_TOKENS = 23.0
SPREAD = 0.27
"""The standard deviation of the logarithm of a paced answer's tokens. Both are as in the tiny policy's
answers to the same questions, which have a mean of 22.8 tokens and a standard deviation of 6.2."""
MAX_TOKENS = 200
"""No paced answer is longer, whatever the request allows."""

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
    """An ASGI application whose calls take `latency` seconds each.

    A call gives the token ids of one tool call: `bash` in the turns before the last, and `submit` in the
    last. It knows no rollouts: the turn is counted in the prompt.
    """

    def __init__(self, latency: float, turns: int) -> None:
        self._latency = latency
        self._turns = turns
        tokenizer = make_tokenizer()
        self._assistant_start = tuple(tokenizer.encode(START + "a").ids)
        self._step, self._last = (
            (list(tokenizer.encode(text + END).ids), text)
            for text in (_call("bash", {"command": "echo step"}), _call("submit", {"answer": "done"}))
        )

    def turn(self, prompt: list[int]) -> int:
        """Return how many assistant messages have begun.

        Of the template's roles only that one begins with `a`.
        """
        start, role = self._assistant_start
        return list(pairwise(prompt)).count((start, role))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        arrived = time.perf_counter()
        request = Request(scope, receive)
        try:
            status, answer = await self.respond(scope["path"], await request.body(), arrived)
        except ClientDisconnect:
            return
        response = Response(orjson.dumps(answer), status, media_type="application/json")
        await response(scope, receive, send)

    async def respond(self, path: str, body: bytes, arrived: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer of a request, which came at `arrived`."""
        answer = self.static(path)
        if answer is not None:
            return 200, answer
        if path != "/v1/completions":
            return 404, _error(404, "Not Found")
        request = orjson.loads(body)
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
        logprobs = {"token_logprobs": [-0.5] * len(ids), "tokens": [str(token) for token in ids]}
        logprobs |= {"text_offset": [0] * len(ids), "top_logprobs": [{} for _ in ids]}
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
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        usage["total_tokens"] = sum(usage.values())
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


def _call(tool: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def tokens_of(seed: int) -> int:
    """Return how many tokens the request with this seed gets, log-normal around MEAN_TOKENS."""
    drawn = random.Random(seed).lognormvariate(-SPREAD * SPREAD / 2, SPREAD)
    return min(MAX_TOKENS, max(2, round(MEAN_TOKENS * drawn)))


class PacedModel(LatencyModel):
    """An ASGI application whose tokens take `pace` seconds each.

    The number of tokens of an answer is drawn from the request's seed, so two servers give the same request
    the same answer. `GET /late` returns by how many seconds the answers came later than the pace says.
    """

    def __init__(self, pace: float) -> None:
        super().__init__(latency=0.0, turns=1)
        self._pace = pace
        self._late: list[float] = []
        tokenizer = make_tokenizer()
        self._letters = list(tokenizer.encode("x" * (MAX_TOKENS - 1) + END).ids)

    def count(self, request: dict[str, Any]) -> int:
        """Return the number of tokens that the request gets."""
        return min(tokens_of(int(request.get("seed") or 0)), request.get("max_tokens") or MAX_TOKENS)

    def answer(self, request: dict[str, Any]) -> tuple[list[int], str]:
        """Return the token ids of the answer, whose last one ends the turn, and their text."""
        count = self.count(request)
        return self._letters[-count:], "x" * (count - 1)

    async def wait(self, request: dict[str, Any], arrived: float) -> None:
        """Wait until the last token is due."""
        due = arrived + self._pace * self.count(request)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        self._late.append(time.perf_counter() - due)

    def static(self, path: str) -> dict[str, Any] | None:
        """Return the answer to a request without a body that matters."""
        return {"seconds": self._late} if path == "/late" else super().static(path)


class WeightedModel(LatencyModel):
    """The same with vLLM's calls for new weights.

    It has no weights, only their label, which every token carries. A pause lets the requests in flight end,
    as vLLM's mode `wait` does; requests that come meanwhile begin when it resumes. Loading takes no time.
    """

    def __init__(self, latency: float, turns: int) -> None:
        super().__init__(latency, turns)
        self._label = "default"
        self._in_flight = 0
        self._none_in_flight = asyncio.Event()
        self._none_in_flight.set()
        self._sampling = asyncio.Event()
        self._sampling.set()

    async def respond(self, path: str, body: bytes, arrived: float) -> tuple[int, dict[str, Any]]:
        """Return the status and the answer of a request, which came at `arrived`."""
        match path:
            case "/weight_info":
                return 200, {"weight_version": self._label}
            case "/is_paused":
                return 200, {"is_paused": not self._sampling.is_set()}
            case "/update_weight_version":
                self._label = orjson.loads(body)["new_version"]
            case "/pause":
                self._sampling.clear()
                await self._none_in_flight.wait()
            case "/resume":
                self._sampling.set()
            case "/reset_prefix_cache":
                return 200, {"success": True}
            case _:
                return await super().respond(path, body, arrived)
        return 200, {}

    async def wait(self, request: dict[str, Any], arrived: float) -> None:
        """Wait until the request is to be answered. Its time begins when the server samples."""
        if not self._sampling.is_set():
            await self._sampling.wait()
            arrived = time.perf_counter()
        self._in_flight += 1
        self._none_in_flight.clear()
        try:
            await super().wait(request, arrived)
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._none_in_flight.set()

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of `/v1/completions`, whose tokens carry the label of the weights."""
        answer = super().completion(request)
        (choice,) = answer["choices"]
        end = len(choice["token_ids"])
        choice["weight_versions"] = [{"version": self._label, "start": 0, "end": end}]
        return answer


class StreamingModel(LatencyModel):
    """An ASGI application with vLLM's `/inference/v1/generate`, as a stream or not.

    Each answer is a sentence and a tool call that depends on the seed. Its first token comes after `first`
    seconds, and all others after `rest` more. `GET /firsts` returns when the first token of each seed was
    sent, by the monotonic clock, which all processes of a machine share.
    """

    def __init__(self, first: float, rest: float) -> None:
        super().__init__(latency=first + rest, turns=0)
        self._first = first
        self._rest = rest
        self._tokenizer = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
        self._firsts: dict[str, float] = {}

    def static(self, path: str) -> dict[str, Any] | None:
        """Return the answer to a request without a body that matters."""
        if path == "/inference/v1/abort_requests":
            return {}
        if path == "/v1/models":
            model = {"id": MODEL, "object": "model", "owned_by": "bench", "max_model_len": LONG_MODEL_LEN}
            return {"object": "list", "data": [model | {"logprobs_mode": "processed_logprobs"}]}
        return {"seconds": self._firsts} if path == "/firsts" else super().static(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["path"] != "/inference/v1/generate":
            await super().__call__(scope, receive, send)
            return
        arrived = time.perf_counter()
        body = orjson.loads(await Request(scope, receive).body() or b"{}")
        if not body.get("token_ids"):
            await Response(b"{}", 400, media_type="application/json")(scope, receive, send)
            return
        params = body["sampling_params"]
        ids = self._ids(params.get("seed") or 0)[: params.get("max_tokens")]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await asyncio.sleep(max(0.0, arrived + self._first - time.perf_counter()))
        self._firsts[str(params.get("seed"))] = time.monotonic()
        for start, end in ((0, 1), (1, len(ids))) if body.get("stream") else ((0, len(ids)),):
            if start:
                await asyncio.sleep(self._rest)
            event = orjson.dumps(self._event(len(body["token_ids"]), ids, start, end))
            data = b"data: %b\n\n" % event if body.get("stream") else event
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n" if body.get("stream") else b""})

    def _ids(self, seed: int) -> list[int]:
        said = f"I look at the next file, number {seed % 1000}, because the answer may be in it.\n"
        text = said + _call("bash", {"command": f"cat data/part-{seed % 1000}.txt | head -n 40"})
        return list(self._tokenizer.encode(text + END).ids)

    def _event(self, prompt: int, ids: list[int], start: int, end: int) -> dict[str, Any]:
        last = end == len(ids)
        content = [{"token_id": token, "logprob": -0.5, "rank": 1} for token in ids[start:end]]
        choice = {"index": 0, "token_ids": ids[start:end], "logprobs": {"content": content}}
        choice["finish_reason"] = "stop" if last else None
        choice["weight_versions"] = [{"version": "1", "start": 0, "end": end}] if last else None
        usage = {"prompt_tokens": prompt, "completion_tokens": end, "total_tokens": prompt + end}
        return {"request_id": "generate-tokens-bench", "choices": [choice], "usage": usage}


MODELS: dict[str, Callable[..., LatencyModel]] = {
    "latency": LatencyModel,
    "paced": PacedModel,
    "weighted": WeightedModel,
    "streaming": StreamingModel,
}


@asynccontextmanager
async def model_server(kind: str, folder: Path, name: str, *numbers: float) -> AsyncIterator[str]:
    """Start one of `MODELS`, and yield its URL. Its tokenizer lies in `folder/name`.

    Raises:
        ProgramFailed: It opens no port.
    """
    port_file = folder / f"{name}.port"
    command = [sys.executable, "-m", "rollyard_bench.model_servers", "--port-file", str(port_file)]
    command += [kind, str(folder / name), *map(str, numbers)]
    async with program(command, folder / f"{name}.log", {"PYTHONPATH": str(BENCH)}) as running:
        yield f"http://127.0.0.1:{await port_of(running, 'rollyard_bench.model_servers', port_file)}"


def main() -> None:
    """Serve on a free port of the loopback interface until a signal. The port is written to `port_file`."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("kind", choices=MODELS)
    parse.add_argument("folder", type=Path, help="where the tokenizer is written")
    parse.add_argument("--port-file", type=Path, required=True)
    parse.add_argument("numbers", type=float, nargs="+", help="the arguments of the model's class")
    options = parse.parse_args()
    write_folder(options.folder)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    write_port(options.port_file, listener)
    config = uvicorn.Config(
        MODELS[options.kind](*options.numbers),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
