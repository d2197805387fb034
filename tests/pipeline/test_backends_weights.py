"""Weight updates as a rollout meets them: aborts, pauses, labels that change, weights not verified yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rollyard_crds.lease import RouteResponse
from rollyard_inference.errors import BackendUnavailable, WeightsChanged
from rollyard_pipeline.backends import BackendClient, Sampling, client, session
from rollyard_pipeline.chat.tokenizer import ModelSizes, model_sizes
from rollyard_testing.pace import patience

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=7)


async def test_an_aborted_turn_goes_on_from_its_tokens(backend: Any) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        first = len(body["token_ids"]) == 3
        return backend.generated(body, **({"finish_reason": "abort"} if first else {"weight_versions": None}))

    async with backend(generate=reply) as server, BackendClient() as client:
        talk = server.session(client)
        sample = await talk.turn([1, 2, 3], 8, 0)
    assert sample.token_ids == (5, 6, 5, 6)
    assert sample.policy_versions == ("w1", "w2", "assigned", "assigned")
    (_, first), (_, second) = server.requests
    assert second["token_ids"] == [1, 2, 3, 5, 6]
    assert second["sampling_params"]["max_tokens"] == 6
    assert second["sampling_params"]["seed"] != first["sampling_params"]["seed"]
    assert (talk.stats.sampled_tokens, talk.stats.discarded_tokens, talk.stats.requests) == (4, 0, 2)


async def test_tokens_of_weights_that_are_not_verified_are_thrown_away(backend: Any) -> None:
    """All later tokens are discarded, too, because they were conditioned on them."""
    labels = iter(["unverified:v1", "unverified:v1", "v1"])
    spans = [
        [{"version": "v0", "start": 0, "end": 1}, {"version": "unverified:v1", "start": 1, "end": 2}],
        [{"version": "unverified:v1", "start": 0, "end": 1}, {"version": "v1", "start": 1, "end": 2}],
        [{"version": "v1", "start": 0, "end": 2}],
    ]

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        return backend.generated(body, weight_versions=spans[len(server.requests) - 1])

    now = {"label": "v0"}

    def info() -> dict[str, Any]:
        if len(server.requests):
            now["label"] = next(labels, "v1")
        return {"weight_version": now["label"]}

    server = backend(generate=reply, states={"/weight_info": info})
    async with server, BackendClient() as client:
        talk = server.session(client)
        waited: list[float] = []
        talk.on_wait = waited.append
        sample = await talk.turn([1, 2], 8, 0)
    assert sample.token_ids == (5, 5, 6)
    assert sample.logprobs == (-0.5, -0.5, -0.25)
    assert sample.policy_versions == ("v0", "v1", "v1")
    bodies = [body for _, body in server.requests]
    assert [body["token_ids"] for body in bodies] == [[1, 2], [1, 2, 5], [1, 2, 5]]
    assert [body["sampling_params"]["max_tokens"] for body in bodies] == [8, 7, 7]
    seeds = [body["sampling_params"]["seed"] for body in bodies]
    assert seeds[0] != seeds[1] == seeds[2], "a request that gave nothing to keep has another seed"
    assert (talk.stats.sampled_tokens, talk.stats.discarded_tokens, talk.stats.requests) == (3, 3, 3)
    assert sum(waited) > 0


async def test_weights_that_are_never_verified_end_the_rollout(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_UPDATE_SECONDS", 0.4)
    spans = [{"version": "unverified:v1", "start": 0, "end": 2}]
    server = backend(
        generate=lambda body: backend.generated(body, weight_versions=spans),
        states={"/weight_info": lambda: {"weight_version": "unverified:v1"}},
    )
    async with server, BackendClient() as client:
        with pytest.raises(BackendUnavailable, match="not verified within"):
            await server.session(client).turn([1], 8, 0)
    assert len(server.requests) == 1, "sampled again though the label said that it is no use"


async def test_aborts_without_end_end_the_rollout(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_FIRST_WAIT", 0.001)
    empty = {"token_ids": [], "logprobs": {"content": []}, "weight_versions": [], "finish_reason": "abort"}
    server = backend(generate=lambda body: backend.generated(body, **empty))
    async with server, BackendClient() as client:
        talk = server.session(client)
        with pytest.raises(BackendUnavailable, match="64 requests"):
            await talk.turn([1], 8, 0)
    assert talk.waited_seconds == pytest.approx(0.064), "the update was taken for the policy's own time"
    assert talk.stats.requests == len(server.requests) == 64


async def test_completions_are_dropped_where_the_label_changed_meanwhile(backend: Any) -> None:
    now = {"label": "v0"}

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        if len(server.requests) == 2:
            now["label"] = "v1"  # It was updated while it sampled.
        return backend.completed(body)

    server = backend(completions=reply, states={"/weight_info": lambda: {"weight_version": now["label"]}})
    async with server, BackendClient() as client:
        talk = server.session(client)
        first = await talk.turn([1], 8, 0)
        second = await talk.turn([1], 8, 1)
        now["label"] = "v2"
        with pytest.raises(WeightsChanged) as caught:
            await client.sample(server.assignment, [1], SAMPLING)
    assert first.policy_versions == ("v0", "v0")
    assert second.policy_versions == ("v1", "v1")
    assert len(server.requests) == 4
    assert (talk.stats.sampled_tokens, talk.stats.discarded_tokens, talk.stats.requests) == (4, 2, 3)
    assert caught.value.discarded == 2


async def test_of_two_completions_over_an_update_both_are_dropped(backend: Any) -> None:
    """The one that ends first learns the new label, which says nothing about the other one."""
    now = {"label": "v0"}
    together, learnt = asyncio.Event(), asyncio.Event()

    async def reply(body: dict[str, Any]) -> dict[str, Any]:
        number = len(server.requests)
        if number == 2:
            await together.wait()
        elif number == 3:
            now["label"] = "v1"
            together.set()
            await learnt.wait()
        answer: dict[str, Any] = backend.completed(body)
        return answer

    server = backend(completions=reply, states={"/weight_info": lambda: {"weight_version": now["label"]}})
    async with server, BackendClient() as client:
        await client.sample(server.assignment, [1], SAMPLING)
        both = [asyncio.create_task(client.sample(server.assignment, [1], SAMPLING)) for _ in range(2)]
        async with asyncio.timeout(patience(30)):
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            learnt.set()
            answers = await asyncio.gather(*both, return_exceptions=True)
    assert [type(answer) for answer in answers] == [WeightsChanged, WeightsChanged]


@pytest.mark.parametrize("paused", [True, False])
async def test_a_pause_counts_against_no_timeout(
    backend: Any, paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PAUSE_POLL", 0.05)
    resumed = asyncio.Event()

    async def reply(body: dict[str, Any]) -> dict[str, Any]:
        await resumed.wait()
        return backend.generated(body)

    server = backend(
        generate=reply,
        states={
            "/is_paused": lambda: {"is_paused": paused and not resumed.is_set()},
            "/metrics": lambda: web.Response(text="vllm:generation_tokens_total 7\n"),
        },
    )
    waited: list[float] = []

    async def stay(url: str, error: str, blame: bool) -> RouteResponse:
        return RouteResponse(backend=server.assignment)

    async with server, BackendClient(stall_timeout=1.0) as backends:
        talk = server.session(backends, stay, budget=0.2)
        asyncio.get_running_loop().call_later(4.0, resumed.set)
        if not paused:
            with pytest.raises(BackendUnavailable, match="no sign that the server computes"):
                await talk.turn([1], 8, 0)
            assert talk.waited_seconds == 0.0
            return
        async with asyncio.timeout(2.5) as limit:

            def extend(seconds: float) -> None:
                waited.append(seconds)
                limit.reschedule((limit.when() or 0.0) + seconds)

            talk.on_wait = extend
            sample = await talk.turn([1], 8, 0)
    assert sample.token_ids == (5, 6)
    assert len(server.requests) == 1
    assert sum(waited) == talk.waited_seconds
    assert talk.waited_seconds + talk.model_seconds > 2.5
    assert talk.model_seconds < talk.waited_seconds


async def test_a_rollout_cut_off_by_a_pause_is_not_scored(backend: Any) -> None:
    async def hang(body: dict[str, Any]) -> Any:
        await asyncio.sleep(60)

    server = backend(generate=hang, states={"/is_paused": lambda: {"is_paused": True}})
    async with server, BackendClient() as backends:
        talk = server.session(backends)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await talk.turn([1], 8, 0)
        assert await talk.silence() == f"{server.url} is paused"


async def test_a_backend_that_answers_nothing_is_paused_if_it_was(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PAUSE_POLL", 0.0)
    for last in (True, False):
        states = [not last, last]
        server = backend(
            generate=backend.generated, states={"/is_paused": lambda states=states: {"is_paused": states[0]}}
        )
        silent = backend(generate=backend.generated)
        async with BackendClient() as backends:
            async with server, silent:
                for one in (server, silent):
                    assert not await backends.is_paused(one.url), "nothing is known of it yet"
                    await backends.sample(one.assignment, [1], SAMPLING)
                assert await backends.is_paused(server.url) is not last
                states.pop(0)
                assert await backends.is_paused(server.url) is last
                assert not await backends.is_paused(silent.url)
            assert await backends.is_paused(server.url) is last


async def test_the_label_of_the_weights_is_the_servers(backend: Any) -> None:
    told: list[Any] = [{"weight_version": "v0"}, {"weight_version": "v1"}, web.Response(status=503), {}]
    server = backend(generate=backend.generated, states={"/weight_info": lambda: told.pop(0)})
    async with server, backend(generate=backend.generated) as silent, BackendClient() as backends:
        assert await backends.weight_label(server.assignment) == "v1"
        with pytest.raises(BackendUnavailable, match="/weight_info answered 503"):
            await backends.weight_label(server.assignment)
        assert await backends.weight_label(server.assignment) is None
        assert await backends.weight_label(silent.assignment) is None


Logprob = Callable[[dict[str, Any]], float]


def one_token(backend: Any, body: dict[str, Any], logprob: float) -> dict[str, Any]:
    """Return an answer with one token: the allowed one, or else 5."""
    token = body["sampling_params"].get("allowed_token_ids", [5])[0]
    return backend.generated(
        body,
        token_ids=[token],
        logprobs={"content": [{"token_id": token, "logprob": logprob}]},
        weight_versions=None,
        finish_reason="length",
    )


@pytest.mark.parametrize(
    ("logprob", "mode"),
    [
        (lambda params: 0.0 if "allowed_token_ids" in params else -1.5, "processed_logprobs"),
        (
            lambda params: {0: -0.0001, 1: -8.75}.get(params.get("allowed_token_ids", [5])[0], -1.5),
            "raw_logprobs",
        ),
    ],
)
async def test_what_the_logprobs_are_is_found_out_once(backend: Any, logprob: Logprob, mode: str) -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        return one_token(backend, body, logprob(body["sampling_params"]))

    server = backend(generate=reply, models=[{"id": "tiny", "max_model_len": 64}])
    async with server, BackendClient() as client:
        talks = [server.session(client) for _ in range(4)]
        await asyncio.gather(*(talk.turn([1, 1, 2], 8, 0) for talk in talks))
        await talks[0].turn([1, 1, 2], 8, 1)
        assert {talk.logprobs_mode for talk in talks} == {mode}
    probes = [body for _, body in server.requests if "allowed_token_ids" in body["sampling_params"]]
    assert sorted(body["sampling_params"]["allowed_token_ids"] for body in probes) == [[0], [1]]
    assert all(body["sampling_params"]["max_tokens"] == 1 for body in probes)
    first = [body["sampling_params"] for _, body in server.requests[:2]]
    assert all("allowed_token_ids" in params for params in first), "others would keep them waiting"


async def test_a_mode_that_cannot_be_found_out_is_unknown(backend: Any) -> None:
    def reply(body: dict[str, Any]) -> Any:
        if "allowed_token_ids" in body["sampling_params"]:
            return web.Response(status=400)
        return backend.generated(body)

    async with backend(generate=reply, models=[{"id": "tiny"}]) as server, BackendClient() as client:
        talk = server.session(client)
        assert talk.logprobs_mode == "unknown"
        for turn in range(8):
            await talk.turn([1], 8, turn)
        assert talk.logprobs_mode == "unknown"
    assert len(server.requests) == 10, "asked at every turn"


async def test_the_end_of_a_turn_waits_for_the_kind_of_its_logprobs(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has much to do answers the requests that show it late, and nobody asks again."""
    release = asyncio.Event()

    async def reply(body: dict[str, Any]) -> dict[str, Any]:
        if "allowed_token_ids" in body["sampling_params"]:
            await release.wait()
        return one_token(backend, body, 0.0)

    monkeypatch.setattr(client, "_MODE_WAIT", 0.05)
    async with backend(generate=reply, models=[{"id": "tiny"}]) as server, BackendClient() as opened:
        early = server.session(opened)
        await early.turn([1], 8, 0)
        assert early.logprobs_mode == "unknown"
        monkeypatch.setattr(client, "_MODE_WAIT", patience(30.0))
        late = [asyncio.create_task(server.session(opened).turn([1], 8, 0)) for _ in range(4)]
        await asyncio.sleep(0)
        release.set()
        await asyncio.gather(*late)
        await early.turn([1], 8, 1)
        assert early.logprobs_mode == "processed_logprobs"
    assert len(server.requests) == 2 + 6


def test_the_vocabulary_is_the_models_own(tmp_path: Path) -> None:
    assert model_sizes(tmp_path, 100) == ModelSizes(100)
    for text, size, context in (
        ('{"vocab_size": 128}', 128, None),
        ('{"vocab_size": 64, "max_position_embeddings": 40960}', 100, 40_960),
        ('{"text_config": {"vocab_size": 256, "max_position_embeddings": 512}}', 256, 512),
        ('{"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 512}}', 100, 512),
        ('{"max_position_embeddings": -1}', 100, None),
        ('{"max_position_embeddings": true}', 100, None),
        ("[1]", 100, None),
        ("{", 100, None),
    ):
        (tmp_path / "config.json").write_text(text)
        assert model_sizes(tmp_path, 100) == ModelSizes(size, context)


async def test_the_first_turns_after_an_update_are_not_thrown_away(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their version is the label before and after them, so the one before must be that of now."""
    monkeypatch.setattr(client, "_LABEL_SECONDS", 0.05)
    label = "w1"
    server = backend(
        completions=backend.completed, states={"/weight_info": lambda: {"weight_version": label}}
    )
    async with server, BackendClient() as backends:
        assert (await backends.sample(server.assignment, [1], SAMPLING)).policy_versions == ("w1", "w1")
        label = "w2"
        await asyncio.sleep(0.1)
        samples = await asyncio.gather(*(backends.sample(server.assignment, [1], SAMPLING) for _ in range(4)))
    assert {sample.policy_versions for sample in samples} == {("w2", "w2")}
    assert len(server.requests) == 5
