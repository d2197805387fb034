"""The backend client and its session on scripted servers that behave, move, or contradict themselves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import RouteResponse
from rollyard_inference.errors import (
    BackendError,
    BackendMismatch,
    BackendRefused,
    ContextOverflow,
    ModelNotServed,
)
from rollyard_pipeline.backends import BackendClient, Sampling
from rollyard_pipeline.backends import client as clients
from rollyard_pipeline.backends.session import request_seed

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)


async def test_generate_gives_versions_per_token(backend: Any) -> None:
    async with backend(generate=backend.generated) as server, BackendClient() as client:
        sample = await client.sample(server.assignment, [1, 2, 3], SAMPLING)
    assert sample.token_ids == (5, 6)
    assert sample.logprobs == (-0.5, -0.25)
    assert sample.policy_versions == ("w1", "w2")
    path, body = server.requests[0]
    assert path == "/inference/v1/generate"
    assert body["token_ids"] == [1, 2, 3]
    # All that changes the distribution is sent, because a server fills the rest from generation_config.json.
    assert body["sampling_params"] == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "max_tokens": 8, "seed": 7, "logprobs": 0, "stream_interval": 32,
    }  # fmt: skip


async def test_what_a_backend_can_do_is_asked_once(backend: Any) -> None:
    async with backend(completions=backend.completed) as server, BackendClient() as client:
        samples = await asyncio.gather(
            *(client.sample(server.assignment, [1, 2, 3], SAMPLING) for _ in range(8))
        )
        assert await client.max_model_len(server.assignment) == 64
    assert {sample.policy_versions for sample in samples} == {("assigned", "assigned")}
    assert [path for path, _ in server.requests] == ["/v1/completions"] * 8
    assert sorted(server.probes) == sorted(set(server.probes)), "a probe was repeated"
    body = server.requests[-1][1]
    assert body["prompt"] == [1, 2, 3]
    assert body["return_token_ids"] is True


async def test_another_server_at_the_same_address_is_asked_anew(backend: Any) -> None:
    server = backend(generate=backend.generated, completions=backend.completed)
    async with server, BackendClient() as client:
        await client.sample(server.assignment, [1], SAMPLING)
        server.calls["/inference/v1/generate"] = None
        server.models[0]["max_model_len"] = 32
        sample = await server.session(client).turn([1], 8, 0)
        assert await client.max_model_len(server.assignment) == 32
    assert sample.policy_versions == ("assigned", "assigned")
    assert server.requests[-1][0] == "/v1/completions"


@pytest.mark.parametrize(
    ("status", "headers", "text", "probes"),
    [
        (500, {}, "down", 2),
        (503, {}, "down", 2),
        (204, {}, "", 2),
        (404, {}, "gone", 2),
        (404, {}, "The model `tiny` does not exist.", 2),
        (400, {}, "This model's maximum context length is 64 tokens.", 2),
        # A server that is only busy, or dislikes a request, is still the same one.
        (429, {}, "busy", 1),
        (503, {"Retry-After": "1"}, "busy", 1),
        (400, {}, "no such id", 1),
    ],
)
async def test_a_server_is_asked_anew_what_it_can_do_after_a_failure(
    backend: Any, status: int, headers: dict[str, str], text: str, probes: int
) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if len(server.requests) == 2:
            return web.Response(status=status, headers=headers, text=text)
        return backend.generated(body)

    async with backend(generate=reply) as server, BackendClient() as client:
        await client.sample(server.assignment, [1], SAMPLING)
        with pytest.raises(BackendError):
            await client.sample(server.assignment, [1], SAMPLING)
        await client.sample(server.assignment, [1], SAMPLING)
    assert server.probes.count("/v1/models") == probes


async def test_what_is_known_of_a_server_ages(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with backend(generate=backend.generated) as server, BackendClient() as client:
        assert await client.max_model_len(server.assignment) == 64
        server.models[0]["max_model_len"] = 32
        assert await client.max_model_len(server.assignment) == 64
    monkeypatch.setattr(clients, "_FACTS_SECONDS", 0.0)
    async with backend(generate=backend.generated) as server, BackendClient() as client:
        for length in (64, 32, 16):
            server.models[0]["max_model_len"] = length
            assert await client.max_model_len(server.assignment) == length


async def test_each_server_and_each_model_is_known_by_itself(backend: Any) -> None:
    two = [
        {"id": "tiny", "max_model_len": 64, "logprobs_mode": "raw_logprobs"},
        {"id": "large", "max_model_len": 32, "logprobs_mode": "processed_logprobs"},
    ]
    first = backend(generate=backend.generated, models=two)
    second = backend(generate=backend.generated, models=[{**two[1], "id": "tiny", "max_model_len": 16}])
    async with first, second, BackendClient() as client:
        large = first.assignment.model_copy(update={"model": "large"})
        for _ in range(2):
            found = []
            for assignment in (first.assignment, large, second.assignment):
                await client.sample(assignment, [1], SAMPLING)
                mode = await client.logprobs_mode(assignment)
                found.append((await client.max_model_len(assignment), mode))
            assert found == [
                (64, "raw_logprobs"), (32, "processed_logprobs"), (16, "processed_logprobs"),
            ]  # fmt: skip
        assert [body["model"] for _, body in first.requests] == ["tiny", "large"] * 2
        assert await client.max_model_len(first.assignment.model_copy(update={"model": "gpt-x"})) is None


async def test_tokens_without_a_version_have_the_one_of_the_assignment(backend: Any) -> None:
    spans = [{"version": "w1", "start": 0, "end": 1}, {"version": None, "start": 1, "end": 2}]
    server = backend(generate=lambda body: backend.generated(body, weight_versions=spans))
    async with server, BackendClient() as client:
        sample = await client.sample(server.assignment, [1], SAMPLING)
        newer = server.assignment.model_copy(update={"policy_version": "newer"})
        assert (await client.sample(newer, [1], SAMPLING)).policy_versions == ("w1", "newer")
    assert sample.policy_versions == ("w1", "assigned")


async def test_a_server_without_token_ids_is_refused(backend: Any) -> None:
    async with backend() as server, BackendClient() as client:
        with pytest.raises(BackendMismatch, match="no call with token ids in and out"):
            await client.sample(server.assignment, [1], SAMPLING)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_token_ids": [1, 2]}, "read 2 prompt ids, 3 were sent"),
        ({"prompt_token_ids": [1, 9, 3]}, "prompt id 1 is 9"),
        ({"prompt_token_ids": [1, 2, 3.0]}, "prompt_token_ids[2] is 3.0"),
        ({"prompt_token_ids": None}, "return_token_ids"),
        ({"token_ids": [5, 6, 7]}, "3 token_ids but 2 logprobs"),
        ({"token_ids": [5, "6"]}, "token_ids[1] is '6'"),
        ({"token_ids": [5, True]}, "token_ids[1] is True"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "no token sampled"),
        ({"token_ids": list(range(9)), "logprobs": {"token_logprobs": [-1.0] * 9}}, "max_tokens was 8"),
        ({"logprobs": None}, "logprobs is missing"),
        ({"logprobs": {"token_logprobs": [-0.5, None]}}, "sampled token 6, is None"),
        ({"logprobs": {"token_logprobs": [-0.5, 0.5]}}, "above 0"),
        ({"finish_reason": "error"}, "finish_reason is 'error'"),
    ],
)
async def test_an_answer_that_contradicts_itself_is_refused(
    backend: Any, changes: dict[str, Any], says: str
) -> None:
    server = backend(completions=lambda body: backend.completed(body, **changes))
    async with server, BackendClient() as client:
        with pytest.raises(BackendMismatch) as caught:
            await client.sample(server.assignment, [1, 2, 3], SAMPLING)
    assert says in str(caught.value)
    assert server.url in str(caught.value)
    assert caught.value.reason == "BackendMismatch"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logprobs": {"content": [{"token_id": 5, "logprob": -0.5}]}}, "1 logprobs"),
        (
            {"logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 7, "logprob": -1.0}]}},
            "is of token 7",
        ),
        ({"weight_versions": [{"version": "w", "start": 0, "end": 3}]}, "0 to 3 of 2"),
        ({"weight_versions": [{"version": "w", "start": 0, "end": 1}]}, "ends at token 1 of 2"),
        ({"weight_versions": [{"version": "w", "start": 1, "end": 2}]}, "1 to 2 of 2"),
        ({"prompt_token_ids": [4]}, "prompt id 0 is 4"),
    ],
)
async def test_generate_answers_are_checked_too(backend: Any, changes: dict[str, Any], says: str) -> None:
    server = backend(generate=lambda body: backend.generated(body, **changes))
    async with server, BackendClient() as client:
        with pytest.raises(BackendMismatch, match=says):
            await client.sample(server.assignment, [1], SAMPLING)


@pytest.mark.parametrize("usage", [{"prompt_tokens": 2}, {}, None])
async def test_generate_must_have_read_as_many_ids_as_were_sent(backend: Any, usage: Any) -> None:
    server = backend(generate=lambda body: backend.generated(body) | {"usage": usage})
    async with server, BackendClient() as client:
        with pytest.raises(BackendMismatch, match="usage"):
            await client.sample(server.assignment, [1, 2, 3], SAMPLING)


async def test_an_id_outside_of_the_vocabulary_is_no_token(backend: Any) -> None:
    async with backend(generate=backend.generated) as server, BackendClient() as client:
        talk = server.session(client, _back_to(server))
        talk.vocabulary = 6
        with pytest.raises(BackendMismatch, match="sampled token 6, the vocabulary has 6 tokens"):
            await talk.turn([1], 8, 0)


def _back_to(server: Any) -> Any:
    async def route(url: str, error: str, blame: bool) -> RouteResponse:
        return RouteResponse(backend=server.assignment)

    return route


async def test_a_server_of_another_model_is_refused_by_name(backend: Any) -> None:
    other = backend(generate=backend.generated, models=[{"id": "gpt-x"}])
    async with other, backend(generate=backend.generated) as right, BackendClient() as client:
        with pytest.raises(ModelNotServed, match=r"does not serve the model 'tiny'; it serves gpt-x"):
            await client.sample(other.assignment, [1], SAMPLING)
        blamed: list[bool] = []

        async def route(url: str, error: str, blame: bool) -> RouteResponse:
            blamed.append(blame)
            return RouteResponse(backend=right.assignment)

        sample = await other.session(client, route).turn([1], 8, 0)
    assert sample.token_ids == (5, 6)
    assert blamed == [True]
    assert other.requests == []


async def test_a_model_that_went_away_is_named(backend: Any) -> None:
    said = {"error": {"message": "The model `tiny` does not exist.", "type": "NotFoundError", "code": 404}}
    server = backend(generate=lambda body: web.json_response(said, status=404))
    async with server, BackendClient() as client:
        with pytest.raises(ModelNotServed, match="`tiny` does not exist"):
            await client.sample(server.assignment, [1], SAMPLING)


async def test_an_adapters_context_is_its_base_models(backend: Any) -> None:
    models = [{"id": "base", "max_model_len": 48}, {"id": "tiny", "parent": "base", "max_model_len": None}]
    async with backend(generate=backend.generated, models=models) as server, BackendClient() as client:
        assert await client.max_model_len(server.assignment) == 48


async def test_a_refusal_is_not_retried(backend: Any) -> None:
    server = backend(generate=lambda body: web.json_response({"error": "no such id"}, status=400))
    async with server, BackendClient() as client:
        with pytest.raises(BackendRefused, match="no such id"):
            await server.session(client).turn([1], 8, 0)
    assert len(server.requests) == 1


OVERFLOWS = [  # These are the words of vLLM's versions and SGLang.
    "The decoder prompt (length 70) is longer than the maximum model length of 64. Make sure that ...",
    "This model's maximum context length is 64 tokens. However, you requested 70 tokens (62 in the messages, "
    "8 in the completion). Please reduce the length of the messages or completion.",
    "This model's maximum context length is 64 tokens. However, your prompt contains 70 input tokens",
    "'max_tokens' or 'max_completion_tokens' is too large: 8. This model's maximum context length is 64 "
    "tokens and your request has 62 input tokens (8 > 64 - 62).",
    "The input (70 tokens) is longer than the model's context length (64 tokens).",
    "Requested token count exceeds the model's maximum context length of 64 tokens. You requested a total of "
    "70 tokens: 62 tokens from the input messages and 8 tokens for the completion.",
]


@pytest.mark.parametrize("message", OVERFLOWS)
async def test_a_prompt_beyond_the_context_is_told_from_a_bad_request(backend: Any, message: str) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if len(body["token_ids"]) + body["sampling_params"]["max_tokens"] <= 64:
            return backend.generated(body, finish_reason="length")
        return web.json_response({"error": {"message": message, "code": 400}}, status=400)

    models = [{"id": "tiny", "logprobs_mode": "raw_logprobs"}]
    async with backend(generate=reply, models=models) as server, BackendClient() as client:
        with pytest.raises(ContextOverflow) as caught:
            await server.session(client).turn([1] * 64, 8, 0)
        assert caught.value.limit == 64
        assert len(server.requests) == 1, "asked again though nothing fits"
        sample = await server.session(client).turn([1] * 62, 8, 0)
    assert sample.token_ids == (5, 6)
    assert sample.finish_reason == "length"
    assert server.requests[-1][1]["sampling_params"]["max_tokens"] == 2


def test_seeds_differ_and_repeat() -> None:
    seeds = {
        request_seed(base, task, sample, turn, part)
        for base in (0, 1)
        for task in ("a", "b", "ab")
        for sample in range(8)
        for turn in range(8)
        for part in range(3)
    }
    assert len(seeds) == 2 * 3 * 8 * 8 * 3
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert request_seed(0, "a", 1, 2) == request_seed(0, "a", 1, 2)
