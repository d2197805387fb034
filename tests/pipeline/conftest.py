"""A small byte-level BPE tokenizer and chat templates like those of well-known models."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_pipeline.backends import BackendClient, BackendSession
from rollyard_pipeline.backends.session import Route
from rollyard_pipeline.chat import ChatFormat
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import ChatTokenizer
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.egress.egress import Egress
from rollyard_pipeline.stages.stages import Stages
from rollyard_testing.families import FAMILIES, train_tokenizer
from rollyard_testing.pipeline.installed import install_handler
from rollyard_testing.pipeline.single_rollouts import Answer, Plane, Rollout, UseModel
from tokenizers import Tokenizer

# This is the shipped tiny policy's own.
TINY_FOLDER = Path(__file__).parents[2] / "engine/src/rollyard_engine/models/tiny-policy"
TINY = (TINY_FOLDER / "chat_template.jinja").read_text()

CHATML = FAMILIES["chatml"].source
TEMPLATES = {
    "chatml": CHATML,
    "llama": FAMILIES["llama3"].source,
    "qwen": FAMILIES["qwen3"].source,
    "tiny": TINY,
    # The template puts a newline before the end of turn, which no policy samples.
    "newline": CHATML.replace("+ '<|im_end|>\\n'", "+ '\\n<|im_end|>\\n'"),
}


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    return train_tokenizer()


@pytest.fixture(scope="session")
def tokenizer(bpe: Tokenizer) -> ChatTokenizer:
    return ChatTokenizer(bpe, {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|im_end|>"}})


@pytest.fixture(scope="session")
def formats(tokenizer: ChatTokenizer) -> dict[str, ChatFormat]:
    return {
        name: ChatFormat(tokenizer, ChatTemplate(source, tokenizer.variables()))
        for name, source in TEMPLATES.items()
    }


@pytest.fixture(scope="session")
def model_folder(bpe: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATES["qwen"])
    return folder


MODE = {"logprobs_mode": "processed_logprobs"}


class ScriptedModel:
    """A backend with real token ids, whose answers a function of the prompt's text decides."""

    def __init__(self, tokenizer: ChatTokenizer, answer: Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.answer = answer
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []
        self.card: dict[str, Any] = {"id": "scripted", "max_model_len": 100_000, **MODE}
        self.context = 100_000
        """The tokens of prompt and answer together; `card` may give another number."""
        self.pause = 0.0
        """The seconds before each token of an answer, which then comes as a stream."""
        self.running = asyncio.Event()
        """The event is cleared while the backend is paused."""
        self.running.set()
        self.url = ""

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response()
        if request.path == "/v1/models":
            return web.json_response({"data": [self.card]})
        if request.path == "/is_paused":
            return web.json_response({"is_paused": not self.running.is_set()})
        if request.path != "/inference/v1/generate":
            return web.json_response({"error": "not here"}, status=404)
        body = await request.json()
        if "token_ids" not in body:  # The request only asks whether the call exists.
            return web.json_response({"error": {"message": "token_ids: Field required"}}, status=400)
        await self.running.wait()
        if len(body["token_ids"]) >= self.context:
            said = f"This model's maximum context length is {self.context} tokens. However, your prompt ..."
            return web.json_response({"error": {"message": said}}, status=400)
        self.prompts.append(body["token_ids"])
        self.seeds.append(body["sampling_params"]["seed"])
        ids = self.tokenizer.encode(self.answer(self.tokenizer.decode(body["token_ids"])))
        cut = ids[: body["sampling_params"]["max_tokens"]]
        whole = {
            "finish_reason": "stop" if len(cut) == len(ids) else "length",
            "weight_versions": [{"version": "step-1", "start": 0, "end": len(cut)}],
        }
        if not self.pause:
            return web.json_response(self._event(body, cut, **whole))
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number, token in enumerate(cut, start=1):
            await asyncio.sleep(self.pause)
            event = self._event(body, [token], **(whole if number == len(cut) else {}))
            await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        return answer

    @staticmethod
    def _event(body: dict[str, Any], ids: list[int], **fields: Any) -> dict[str, Any]:
        content = [{"token_id": token, "logprob": -0.125} for token in ids]
        choice = {"token_ids": ids, "logprobs": {"content": content}, **fields}
        return {"choices": [choice], "prompt_token_ids": body["token_ids"]}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedModel]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
def scripted(tokenizer: ChatTokenizer) -> Callable[[Callable[[str], str]], ScriptedModel]:
    return lambda answer: ScriptedModel(tokenizer, answer)


ModelReply = Callable[[dict[str, Any]], Any]
"""Turns a request's body into an answer: JSON, a response, or something to await that gives one of them."""


class ScriptedBackend:
    """A backend whose answers the test decides; it answers the client's probes as a vLLM server does.

    Args:
        generate, completions, sglang: The answers of the three calls; None means that the call does not
            exist.
        models: The entries of `/v1/models`.
        states: The answers of further GET calls.
    """

    def __init__(
        self,
        *,
        generate: ModelReply | None = None,
        completions: ModelReply | None = None,
        sglang: ModelReply | None = None,
        models: list[dict[str, Any]] | None = None,
        states: dict[str, Callable[[], Any]] | None = None,
    ) -> None:
        self.calls = {"/inference/v1/generate": generate, "/v1/completions": completions, "/generate": sglang}
        self.models = [{"id": "tiny", "max_model_len": 64, **MODE}] if models is None else models
        self.states = states or {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.probes: list[str] = []
        self.request: web.Request | None = None
        """The request that is being answered."""
        self.url = ""

    @property
    def assignment(self) -> BackendAssignment:
        return BackendAssignment(
            pool="p", url=self.url, model="tiny", tokenizer="t", policy_version="assigned"
        )

    async def __aenter__(self) -> ScriptedBackend:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(self._runner, listener).start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            self.probes.append(request.path)
            if request.path == "/v1/models":
                return web.json_response({"object": "list", "data": self.models})
            if self.calls.get(request.path) is not None:
                return web.Response(status=405, headers={"Allow": "POST"})
            state = self.states.get(request.path)
            answer = state() if state is not None else web.Response(status=404)
            return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)
        body = await request.json()
        reply = self.calls.get(request.path)
        if request.path == "/inference/v1/abort_requests":
            self.probes.append(request.path)
            return web.Response(status=404 if self.calls["/inference/v1/generate"] is None else 200)
        if not body:
            self.probes.append(request.path)
            return web.Response(status=404 if reply is None else 400)
        self.requests.append((request.path, body))
        if reply is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.request = request
        answer = reply(body)
        if isinstance(answer, Awaitable):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    @staticmethod
    def generated(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Return two tokens, under two weight versions, as `/inference/v1/generate` answers."""
        content = [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -0.25}]
        choice = {
            "token_ids": [5, 6],
            "finish_reason": "stop",
            "logprobs": {"content": content},
            "weight_versions": [
                {"version": "w1", "start": 0, "end": 1},
                {"version": "w2", "start": 1, "end": 2},
            ],
        }
        return {"choices": [choice | changes], "usage": {"prompt_tokens": len(body["token_ids"])}}

    @staticmethod
    def completed(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
        """Return two tokens, as `/v1/completions` answers."""
        choice = {
            "prompt_token_ids": body["prompt"],
            "token_ids": [5, 6],
            "finish_reason": "stop",
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
        }
        return {"choices": [choice | changes], "usage": {"prompt_tokens": len(body["prompt"])}}

    async def stream(self, *events: object, end: str = "done", pause: float = 0.0) -> web.StreamResponse:
        """Answer the request with server-sent events.

        Args:
            end: `done` ends the stream in order, `cut` breaks the connection, `freeze` sends nothing more.
            pause: The seconds before each event but the first.
        """
        assert self.request is not None
        request = self.request
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await answer.prepare(request)
        for number, event in enumerate(events):
            await asyncio.sleep(pause if number else 0.0)
            data = event if isinstance(event, bytes) else f"data: {json.dumps(event)}\n\n".encode()
            await answer.write(data)
        if end == "freeze":
            await asyncio.sleep(600)
        if end == "cut" and request.transport is not None:
            request.transport.close()
        if end == "done":
            await answer.write(b"data: [DONE]\n\n")
        return answer

    @staticmethod
    def event(body: dict[str, Any], *ids: int, **changes: Any) -> dict[str, Any]:
        """Return an event with these tokens, as a stream of `/inference/v1/generate` has them."""
        content = [{"token_id": token, "logprob": -token / 8} for token in ids]
        choice = {"token_ids": [*ids], "finish_reason": None, "logprobs": {"content": content}}
        return {"choices": [choice | changes], "usage": {"prompt_tokens": len(body["token_ids"])}}

    def session(self, client: BackendClient, route: Route | None = None, **options: Any) -> BackendSession:
        """Return a rollout's session on this backend. Without `route`, it must not ask for another one."""

        async def never(url: str, error: str, blame: bool) -> RouteResponse:
            raise AssertionError(f"asked for a route away from {url}: {error}")

        spec = SamplingSpec(seed=3, **options.pop("sampling", {}))
        options = {"task_id": "t", "sample_index": 1, "budget": 20.0, **options}
        return BackendSession(client, self.assignment, route or never, spec, **options)


@pytest.fixture
def backend() -> type[ScriptedBackend]:
    """Return a class of backends whose answers the test decides."""
    return ScriptedBackend


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that installs the class `Judge` of a source as the handler `steered`."""
    return lambda source: install_handler(tmp_path, source, monkeypatch)


@pytest.fixture
def extensions() -> Registry:
    """Return what stages know beside what is installed."""
    return Registry({})


@pytest.fixture
async def rollout(tmp_path_factory: pytest.TempPathFactory, extensions: Registry) -> AsyncIterator[Rollout]:
    """Yield a rollout whose sandboxes are bare processes."""
    provider = open_provider("process", run_dir=tmp_path_factory.mktemp("s"), node="n")
    await provider.start()
    plane: Any = Plane()
    try:
        async with BackendClient(stall_timeout=20.0) as backends:
            egress = Egress()
            stages = Stages(plane, backends, provider, extensions, backend_budget=1.0, egress=egress)
            yield Rollout(provider, stages, plane, egress.infrastructure)
            await stages.close()
    finally:
        for sandbox in provider.claimed():
            await provider.release(sandbox)
        await provider.aclose()


@pytest.fixture
async def model(
    rollout: Rollout, scripted: Callable[[Answer], ScriptedModel], model_folder: Path
) -> AsyncIterator[UseModel]:
    """Yield a function that gives the rollout a model whose answers depend on the prompt's text."""
    answer: list[Answer] = []

    def latest(prompt: str) -> str:
        return answer[-1](prompt)

    server = rollout.model = scripted(latest)
    async with server.serving():

        def use(
            answers: Answer,
            agent: dict[str, Any] | None = None,
            task: dict[str, Any] | None = None,
            **spec: Any,
        ) -> None:
            answer.append(answers)
            rollout.backend = BackendAssignment(
                pool="p", url=server.url, model="scripted", tokenizer=str(model_folder), policy_version="v0"
            )
            rollout.configure(
                task, agent={"type": "tools", **(agent or {})}, backendRef={"name": "p"}, **spec
            )

        yield use
