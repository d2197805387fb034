"""A vLLM-shaped and a SGLang-shaped server are probed, asked, updated and compared by the same calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from rollyard_crds.weights import WeightSource
from rollyard_inference import metrics
from rollyard_inference.capabilities import Capabilities, WeightInfo, cache_tokens, probe, renamed_model
from rollyard_inference.errors import (
    BackendError,
    BackendMismatch,
    BackendRefused,
    BackendUnavailable,
    ContextOverflow,
    ModelNotServed,
    NoSuchCall,
    ServerFailed,
)
from rollyard_inference.health import check_alive, check_model, first_request, weight_label
from rollyard_inference.replies import require_ok, sampled
from rollyard_inference.sampling.request import Sampling, ServedModel
from rollyard_inference.sampling.vllm import VllmCompletions, VllmGenerate
from rollyard_inference.transports.interface import Reply, Transport
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_inference.weights.connect import SglangWeights, VllmWeights, weight_control
from rollyard_inference.weights.control import WeightCallLimits, WeightControl
from rollyard_testing.inference.scripted import LOGPROB, SHAPES, Scripted, SglangShaped, VllmShaped
from rollyard_testing.pace import patience

LIMITS = WeightCallLimits()
ABORT = "/inference/v1/abort_requests"
LORA = {"lora": {"name": "tuned", "path": "/adapters/tuned"}}


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield HttpxTransport(client, connect_seconds=30.0)


@pytest.fixture(params=sorted(SHAPES))
def server(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    made = SHAPES[request.param]()
    yield made
    made.close()


@pytest.fixture
def sglang() -> Iterator[SglangShaped]:
    made = SglangShaped()
    yield made
    made.close()


@pytest.fixture
def vllm() -> Iterator[VllmShaped]:
    made = VllmShaped()
    yield made
    made.close()


async def controlled(transport: Transport, server: Scripted) -> WeightControl:
    return await weight_control(transport, server.url + "/v1/", LIMITS)


async def test_health(transport: Transport, server: Scripted) -> None:
    await check_alive(transport, server.url, 20.0)
    await check_model(transport, server.url, "tiny", 20.0)
    with pytest.raises(ModelNotServed, match="does not serve 'other'; it serves: tiny"):
        await check_model(transport, server.url, "other", 20.0)
    server.failing["/health"] = 1
    with pytest.raises(ServerFailed, match=r"/health answered 500: .*scripted failure"):
        await check_alive(transport, server.url, 20.0)


async def test_a_first_request_names_the_weights(transport: Transport, server: Scripted) -> None:
    server.label = "step-4"
    assert await first_request(transport, server.url, "tiny", 20.0) == "step-4"
    assert await weight_label(transport, server.url, 20.0) == "step-4"
    with pytest.raises(ModelNotServed, match="'other'"):
        await first_request(transport, server.url, "other", 20.0)
    path = (await probe(transport, server.url)).call.path
    server.failing[ABORT] = server.failing[path] = 1
    with pytest.raises(BackendUnavailable, match="answered 500 to a probe"):
        await first_request(transport, server.url, "tiny", 20.0)


async def test_which_calls_a_server_has(transport: Transport, sglang: SglangShaped, vllm: VllmShaped) -> None:
    assert (await probe(transport, vllm.url)).call.path == "/inference/v1/generate"
    assert (await probe(transport, sglang.url)).call.path == "/generate"
    assert isinstance(await controlled(transport, vllm), VllmWeights)
    assert isinstance(await controlled(transport, sglang), SglangWeights)
    for server in (sglang, vllm):
        server.failing["/weight_info"] = 1
    assert isinstance(await controlled(transport, sglang), SglangWeights)


@pytest.mark.parametrize(
    ("abort", "generate", "completions", "expected"),
    [
        (200, 400, 405, "/inference/v1/generate"),
        (403, 403, 405, "/v1/completions"),
        # A server that lacks the call to abort, or a gateway that answers in its own way, is asked directly.
        (404, 400, 405, "/inference/v1/generate"),
        (404, 404, 400, "/v1/completions"),
        (401, 400, 400, "/inference/v1/generate"),
        (404, 404, 404, ""),
    ],
)
async def test_vllm_is_probed_by_requests_that_it_does_not_log_as_errors(
    abort: int, generate: int, completions: int, expected: str
) -> None:
    """The parameters are the statuses of three calls; for `/v1/completions` it is that of a GET."""
    empty: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if request.method == "POST" and json.loads(request.content) == {}:
            empty.append(path)
        if path == ABORT:
            assert json.loads(request.content) == {"request_ids": []}
            return httpx.Response(abort)
        if path == "/inference/v1/generate":
            return httpx.Response(generate)
        if path == "/v1/completions":
            posted = request.method == "POST" and completions == 405
            return httpx.Response(400 if posted else completions, headers={"allow": "POST"})
        return httpx.Response(404)

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        asking = HttpxTransport(client, connect_seconds=30.0)
        if expected:
            assert (await probe(asking, "http://server")).call.path == expected
        else:
            with pytest.raises(BackendMismatch, match="no call with token ids"):
                await probe(asking, "http://server")
    if abort in (200, 403):
        assert empty == []


async def test_metrics(transport: Transport, server: Scripted) -> None:
    reply = await transport.request("GET", f"{server.url}/metrics", seconds=patience(20.0))
    assert metrics.parse(reply.content) == metrics.ServerMetrics(3.0, 1.0, 90.0, 45.0)


async def test_an_update_step_by_step(transport: Transport, server: Scripted) -> None:
    control = await controlled(transport, server)
    assert await control.label() == "default"
    assert await control.prompt_logprobs("tiny", [1, 2, 3]) == [LOGPROB["old"]] * 2
    await control.pause("abort")
    assert server.paused
    await control.load(WeightSource.model_validate({"checkpoint": {"path": "/checkpoints/7"}}))
    await control.set_label("step-7")
    await control.reset_prefix_cache()
    await control.resume()
    assert not server.paused
    assert await control.label() == "step-7"
    assert await control.prompt_logprobs("tiny", [1, 2, 3]) == [LOGPROB["new"]] * 2
    assert await control.reports_versions_of_tokens("tiny")
    before = len(server.bodies)
    await control.load(WeightSource.model_validate({"pushed": True}))
    assert len(server.bodies) == before, "what a trainer has pushed is there already"
    # However the server names it now, it still serves the pool's model.
    await check_model(transport, server.url, "tiny", 20.0)
    assert await first_request(transport, server.url, "tiny", 20.0) == "step-7"
    assert (await probe(transport, server.url)).serves("tiny")


async def test_an_adapter_is_replaced_in_place(transport: Transport, server: Scripted) -> None:
    control = await controlled(transport, server)
    for _ in range(2):
        await control.load(WeightSource.model_validate(LORA))
        assert server.adapters == ["tuned"]
    assert (await probe(transport, server.url)).model("tuned").parent == server.served
    await control.prompt_logprobs("tuned", [1, 2])
    assert server.bodies[-1][1].get("model", server.bodies[-1][1].get("lora_path")) == "tuned"


@pytest.mark.parametrize("step", ["pause", "load", "label", "flush", "resume"])
async def test_a_step_that_fails_may_be_tried_again(
    transport: Transport, server: Scripted, step: Any
) -> None:
    control = await controlled(transport, server)
    server.failing[server.paths[step]] = 1
    calls = {
        "pause": lambda: control.pause("abort"),
        "load": lambda: control.reload("/checkpoints/7"),
        "label": lambda: control.set_label("x"),
        "flush": control.reset_prefix_cache,
        "resume": control.resume,
    }
    with pytest.raises(ServerFailed, match="scripted failure"):
        await calls[step]()
    await calls[step]()


async def test_modes_of_a_pause(transport: Transport, sglang: SglangShaped, vllm: VllmShaped) -> None:
    ours = await controlled(transport, sglang)
    await ours.pause("keep")
    assert sglang.bodies[-1] == ("/pause_generation", {"mode": "retract"})
    with pytest.raises(NoSuchCall, match="use mode 'abort' or 'keep'"):
        await ours.pause("wait")
    assert ours.pause_modes == {"abort", "keep"}
    theirs = await controlled(transport, vllm)
    await theirs.pause("wait")
    assert await theirs.is_paused()
    assert await theirs.reports_versions_of_tokens("tiny"), "a paused server answers no request"


async def test_sglang_is_asked_to_keep_its_requests(transport: Transport, sglang: SglangShaped) -> None:
    control = await controlled(transport, sglang)
    await control.set_label("v1")
    assert sglang.bodies[-1][1] == {"new_version": "v1", "abort_all_requests": False}
    await control.reload("/checkpoints/7")
    assert sglang.bodies[-1][1] == {"model_path": "/checkpoints/7", "flush_cache": False}
    assert await control.folder() is None, "it names the last update's folder, not the first one"


async def test_the_folder_that_vllm_was_started_on(transport: Transport, vllm: VllmShaped) -> None:
    assert await (await controlled(transport, vllm)).folder() == "/models/tiny"


async def test_what_a_server_says_wrong(
    transport: Transport, server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = await controlled(transport, server)
    plain = server.answer
    for status, document, error in (
        (400, {"success": False, "message": "no such folder"}, BackendRefused),
        (404, {}, NoSuchCall),
        (200, {"success": False, "message": "no such folder"}, BackendRefused),
    ):
        if status == 200 and isinstance(server, VllmShaped):
            continue  # vLLM's answer to that call has no such field.
        monkeypatch.setattr(server, "answer", lambda _path, _body, s=status, d=document: (s, d))
        with pytest.raises(error):
            await control.reload("/nowhere")
    monkeypatch.setattr(server, "answer", lambda _path, _body: (200, {"choices": [], "meta_info": {}}))
    with pytest.raises(BackendMismatch, match="logprobs of the prompt"):
        await control.prompt_logprobs("tiny", [1, 2, 3])
    with pytest.raises(BackendError):
        await control.label()
    monkeypatch.setattr(
        server, "answer", lambda path, body: (400, "busy") if "cache" in path else plain(path, body)
    )
    with pytest.raises(BackendError, match="busy"):
        await control.reset_prefix_cache()


async def test_an_adapter_that_vllm_does_not_find_is_refused(
    transport: Transport, vllm: VllmShaped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM answers 404 then, as it does without the call. Neither can be mended by asking again."""
    control = await controlled(transport, vllm)
    plain = vllm.answer
    said = {"error": {"message": "No adapter found for /gone", "type": "NotFoundError"}}
    monkeypatch.setattr(
        vllm, "answer", lambda path, body: (404, said) if "lora" in path else plain(path, body)
    )
    source = WeightSource.model_validate({"lora": {"name": "tuned", "path": "/gone"}})
    with pytest.raises(BackendRefused, match=r"No adapter found for /gone .*--enable-lora"):
        await control.load(source)


@pytest.mark.parametrize(
    ("status", "headers", "error", "overloaded", "wait"),
    [
        (429, {}, ServerFailed, True, None),
        (429, {"retry-after": "7"}, ServerFailed, True, 7.0),
        (503, {"retry-after": "0"}, ServerFailed, True, 0.0),
        (503, {}, ServerFailed, False, None),
        (503, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, ServerFailed, False, None),
        (503, {"retry-after": "-1"}, ServerFailed, False, None),
        (503, {"retry-after": "inf"}, ServerFailed, False, None),
        (500, {"retry-after": "7"}, ServerFailed, False, 7.0),
        (599, {}, ServerFailed, False, None),
        (408, {}, ServerFailed, False, None),
        (409, {}, ServerFailed, False, None),
        (425, {}, ServerFailed, False, None),
        (201, {}, BackendMismatch, None, None),
        (299, {}, BackendMismatch, None, None),
        (300, {"location": "/there"}, BackendMismatch, None, None),
        (399, {"location": "/there"}, BackendMismatch, None, None),
        (400, {}, BackendRefused, None, None),
        (404, {}, BackendRefused, None, None),
        (499, {}, BackendRefused, None, None),
    ],
)
def test_what_a_status_means(
    status: int,
    headers: dict[str, str],
    error: type[BackendError],
    overloaded: bool | None,
    wait: float | None,
) -> None:
    reply = Reply(status, headers, b'{"error": {"message": "because"}}')
    with pytest.raises(error, match=f"GET /x answered {status}") as caught:
        require_ok("GET /x", reply)
    assert type(caught.value) is error
    assert ("to /there: " in str(caught.value)) == (300 <= status < 400)
    if isinstance(caught.value, ServerFailed):
        assert (caught.value.overloaded, caught.value.retry_after) == (overloaded, wait)


@pytest.mark.parametrize(
    ("status", "says", "error", "limit"),
    [
        (400, "This model's maximum context length is 4096 tokens.", ContextOverflow, 4096),
        (422, "the prompt is too long", ContextOverflow, None),
        (413, "too many input tokens", ContextOverflow, None),
        (400, "max_tokens must be at least 1, got -12.", ContextOverflow, None),
        (400, "max_tokens must be at least 1, got 1.5.", BackendRefused, None),
        (404, "this path has no context length", BackendRefused, None),
        (400, "The model `x` does not exist.", ModelNotServed, None),
        (404, "model x not found", ModelNotServed, None),
        (422, "The model `x` does not exist.", BackendRefused, None),
        (429, "the prompt is too long", ServerFailed, None),
    ],
)
def test_why_a_sampling_request_is_refused(
    status: int, says: str, error: type[BackendError], limit: int | None
) -> None:
    for body in ({"error": {"message": says}}, {"detail": says}, {"error": says}):
        with pytest.raises(BackendError) as caught:
            sampled("POST /x", Reply(status, {}, json.dumps(body).encode()))
        assert type(caught.value) is error, body
        if isinstance(caught.value, ContextOverflow):
            assert caught.value.limit == limit


class Recorded:
    """A transport that notes what it is asked, and answers as the test says."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Any, float | None]] = []

    async def request(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        seconds: float | None = None,
        limit: int = 0,
        traceparent: str | None = None,
    ) -> Reply:
        path = url.removeprefix("http://server")
        self.asked.append((method, path, body, seconds))
        name = path.partition("?")[0].rpartition("/")[2]
        return Reply(200, {}, json.dumps(self.answers.get(name, {})).encode())


LOW = WeightCallLimits(call=1.0, pause=2.0, load=3.0)
CARDS = {
    "data": [
        {"id": "other", "parent": "tiny", "root": "/adapters/other"},
        {"id": "tuned", "parent": "tiny", "root": "/adapters/tuned"},
        {"id": "tiny", "parent": None, "root": "/models/tiny"},
        {"id": "alias", "parent": None, "root": "/models/alias"},
    ]
}


async def test_what_vllm_is_asked_and_for_how_long() -> None:
    transport = Recorded(models=CARDS, is_paused={"is_paused": False})
    control = VllmWeights(transport, "http://server/v1", LOW)
    await control.pause("abort")
    await control.pause("wait")
    await control.pause("keep")
    await control.resume()
    await control.set_label("v2")
    await control.reset_prefix_cache()
    await control.reload("/checkpoints/7")
    await control.load(WeightSource.model_validate(LORA))
    await control.load(WeightSource.model_validate({"lora": {"name": "fresh", "path": "/adapters/fresh"}}))
    lora = {"lora_name": "tuned", "lora_path": "/adapters/tuned", "load_inplace": True}
    fresh = {"lora_name": "fresh", "lora_path": "/adapters/fresh", "load_inplace": False}
    assert transport.asked == [
        *(("POST", f"/pause?mode={mode}", None, 2.0) for mode in ("abort", "wait", "keep")),
        ("POST", "/resume", None, 1.0),
        ("POST", "/update_weight_version", {"new_version": "v2"}, 1.0),
        ("POST", "/reset_prefix_cache?reset_running_requests=true", None, 1.0),
        (
            "POST",
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": "/checkpoints/7"}},
            3.0,
        ),
        ("GET", "/v1/models", None, 1.0),
        ("POST", "/v1/load_lora_adapter", lora, 3.0),
        ("GET", "/v1/models", None, 1.0),
        ("POST", "/v1/load_lora_adapter", fresh, 3.0),
    ]
    assert await control.folder() == "/models/tiny", "that of the model, and not of an adapter before it"
    assert not await control.is_paused()
    transport.answers = {"reset_prefix_cache": {"success": False}}
    with pytest.raises(ServerFailed, match="success: false"):
        await control.reset_prefix_cache()


async def test_what_sglang_is_asked_and_for_how_long() -> None:
    transport = Recorded(models=CARDS)
    control = SglangWeights(transport, "http://server", LOW, "/get_model_info")
    await control.pause("abort")
    await control.pause("keep")
    await control.resume()
    await control.reset_prefix_cache()
    await control.reload("/checkpoints/7")
    await control.load(WeightSource.model_validate(LORA))
    await control.load(WeightSource.model_validate({"lora": {"name": "fresh", "path": "/adapters/fresh"}}))
    assert transport.asked == [
        ("POST", "/pause_generation", {"mode": "abort"}, 2.0),
        ("POST", "/pause_generation", {"mode": "retract"}, 2.0),
        ("POST", "/continue_generation", {}, 1.0),
        ("POST", "/flush_cache?timeout=10", None, 1.0),
        ("POST", "/update_weights_from_disk", {"model_path": "/checkpoints/7", "flush_cache": False}, 3.0),
        ("GET", "/v1/models", None, 1.0),
        ("POST", "/unload_lora_adapter", {"lora_name": "tuned"}, 3.0),
        ("POST", "/load_lora_adapter", {"lora_name": "tuned", "lora_path": "/adapters/tuned"}, 3.0),
        ("GET", "/v1/models", None, 1.0),
        ("POST", "/load_lora_adapter", {"lora_name": "fresh", "lora_path": "/adapters/fresh"}, 3.0),
    ]
    transport.asked.clear()
    transport.answers = {"get_model_info": {"weight_version": "v3"}}
    assert await control.label() == "v3"
    assert transport.asked == [("GET", "/get_model_info", None, 1.0)]
    for changed, right in (([7, 8, 9], True), ([7, 9, 8], False), ([7, 8], False)):
        entries = [[None if place == 0 else -0.5 * place, one, None] for place, one in enumerate(changed)]
        transport.answers = {"generate": {"meta_info": {"input_token_logprobs": entries}}}
        if right:
            assert await control.prompt_logprobs("tiny", [7, 8, 9]) == [-0.5, -1.0]
        else:
            with pytest.raises(BackendMismatch, match="logprobs of the prompt"):
                await control.prompt_logprobs("tiny", [7, 8, 9])


@pytest.mark.parametrize(
    ("path", "label", "folder", "found"),
    [
        ("/model_info", "step-1", "/new", "/new"),
        ("/get_model_info", "step-1", "/new", "/new"),
        ("/model_info", "default", "/new", None),
        ("/model_info", None, "/new", None),
        ("/model_info", "step-1", None, None),
        ("/model_info", "step-1", "/elsewhere", None),
        ("/weight_info", "step-1", "/new", None),
    ],
)
def test_only_an_updated_sglang_serves_the_pools_model_under_another_name(
    path: str, label: str | None, folder: str | None, found: str | None
) -> None:
    models = {name: ServedModel(name, 64) for name in ("/old", "/new")}
    weights = WeightInfo(path, label, folder)
    renamed = renamed_model(models, weights)
    assert (None if renamed is None else renamed.name) == found
    can = Capabilities(VllmGenerate(), models, weights, reports_pause=False)
    assert can.serves("tiny") is (found is not None)
    assert can.model("tiny") == ServedModel("tiny", None if found is None else 64)
    assert can.serves("/old")


def test_a_request_to_vllm_leaves_nothing_to_the_servers_own_defaults() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=3, seed=11)
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 3, "seed": 11, "logprobs": 0,
    }  # fmt: skip
    model = ServedModel("tuned", parent="tiny")
    assert VllmGenerate().body(model, (5, 6), sampling) == {
        "model": "tuned", "token_ids": [5, 6], "sampling_params": fields, "stream": False,
    }  # fmt: skip
    assert VllmCompletions().body(model, (5, 6), sampling) == {
        "model": "tuned", "prompt": [5, 6], "return_token_ids": True, "stream": False, **fields,
    }  # fmt: skip
    only = replace(sampling, allowed=(4, 9))
    assert VllmCompletions().body(model, (5,), only)["allowed_token_ids"] == [4, 9]
    assert VllmGenerate().body(model, (5,), only)["sampling_params"]["allowed_token_ids"] == [4, 9]


@pytest.mark.parametrize(
    ("info", "tokens"),
    [
        ({"max_total_num_tokens": 750_000, "max_total_tokens": None, "dp_size": 1}, 750_000),
        ({"max_total_num_tokens": 1000, "dp_size": 4}, 4000),
        ({"max_total_num_tokens": 1000}, 1000),
        ({"max_total_num_tokens": "many"}, None),
        ({"max_total_num_tokens": 0}, None),
        ({"max_total_num_tokens": True}, None),
        (None, None),
    ],
)
@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
async def test_sglang_says_the_size_of_its_kv_cache(
    sglang: SglangShaped, transport: Transport, path: str, info: dict[str, Any] | None, tokens: int | None
) -> None:
    if info is not None:
        sglang.documents[path] = info
    assert await cache_tokens(transport, sglang.url) == tokens
