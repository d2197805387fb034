"""The backend client and its session on real vLLM servers, with and without `/inference/v1/generate`."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rollyard_engine
from rollyard.main import main
from rollyard_api.backends.router import places_of
from rollyard_crds.lease import BackendAssignment, RouteResponse
from rollyard_crds.rolloutjob import SamplingSpec
from rollyard_inference import metrics
from rollyard_inference.errors import BackendRefused, ContextOverflow, ModelNotServed
from rollyard_pipeline.backends import BackendClient, BackendSession, Sampling
from rollyard_pipeline.backends import client as clients
from rollyard_pipeline.backends.client import SampleRequest
from rollyard_pipeline.trajectories.recorder import Sample
from rollyard_testing.pace import patience
from rollyard_testing.vllm import servers
from rollyard_testing.vllm.servers import MAX_MODEL_LEN, VllmServer

StartVllm = Callable[..., VllmServer]

TOKENIZER = Path(rollyard_engine.__file__).parent / "models" / "tiny-policy"
PROMPT = (5, 6, 7, 8)
LONG = 600
SLOW = 900
"""The tokens of a turn that takes 45 seconds at twenty tokens a second."""
SLOW_STEPS = Path(servers.__file__).parent / "slow_steps"
ENDLESS = 3000
SHARE = 0.1
"""The share of the time for which a server computes where a test acts in the middle of a turn.

Its 600 tokens then take ten seconds, also where nothing else runs.
"""


@pytest.fixture(params=["generate", pytest.param("completions", marks=pytest.mark.nightly)])
def server(request: pytest.FixtureRequest, vllm_servers: list[VllmServer]) -> VllmServer:
    """Return one server of either kind, running and with its first label."""
    if request.param == "generate":
        return vllm_servers[0]
    completions: VllmServer = request.getfixturevalue("completions_server")
    return completions


class EndlessClient(BackendClient):
    """A client that lets the model sample two ids only, so that a turn ends at its limit and not before."""

    async def sample(
        self,
        backend: BackendAssignment,
        prompt: Sequence[int],
        sampling: Sampling,
        paused: Callable[[float], None] | None = None,
        traceparent: str | None = None,
        request: SampleRequest | None = None,
    ) -> Sample:
        narrow = replace(sampling, allowed=(5, 9))
        return await super().sample(backend, prompt, narrow, paused, traceparent, request)


def assigned(server: VllmServer, model: str = "tiny") -> BackendAssignment:
    return BackendAssignment(pool="p", url=server.url, model=model, tokenizer="t", policy_version="assigned")


def talk_to(
    client: BackendClient, server: VllmServer, to: VllmServer | None = None, **sampling: Any
) -> BackendSession:
    """Return a rollout's session on a server, which moves to another one if it may."""

    async def route(url: str, error: str, blame: bool) -> RouteResponse:
        assert to is not None, f"asked for a route away from {url}: {error}"
        assert blame
        return RouteResponse(backend=assigned(to))

    spec = SamplingSpec(seed=11, **sampling)
    return BackendSession(client, assigned(server), route, spec, task_id="t", sample_index=0)


def sampling(max_tokens: int, **changes: Any) -> Sampling:
    return Sampling(
        **({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "seed": 3} | changes), max_tokens=max_tokens
    )


async def metric(server: VllmServer, name: str) -> float:
    """Return the sum of a metric over its labels, or over those that hold what stands in its braces."""
    name, _, label = name.partition("{")
    lines = str(await asyncio.to_thread(server.call, "/metrics", method="GET")).splitlines()
    found = [
        line for line in lines if line.startswith((name + "{", name + " ")) and label.rstrip("}") in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


async def until(
    number: Callable[[], Awaitable[float]], true: Callable[[float], bool], seconds: float = 30.0
) -> None:
    """Wait for a number of which something is true.

    Raises:
        TimeoutError: It is not true for too long.
    """
    async with asyncio.timeout(patience(seconds)):
        while not true(await number()):  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(0.02)


async def test_samples_repeat_and_say_their_version(server: VllmServer) -> None:
    async with BackendClient() as client:
        first = await client.sample(assigned(server), PROMPT, sampling(24))
        again = await client.sample(assigned(server), PROMPT, sampling(24))
        other = await client.sample(assigned(server), PROMPT, sampling(24, seed=4))
        assert await client.max_model_len(assigned(server)) == MAX_MODEL_LEN
        label = await client.weight_label(assigned(server))
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
    assert set(first.policy_versions) == {label}
    assert label == server.version()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
async def test_the_mode_that_is_recorded_is_the_servers(
    server: VllmServer, temperature: float, request: pytest.FixtureRequest
) -> None:
    """The check does not use the product's probe: it takes the logprob of one token at two temperatures."""
    async with BackendClient() as client:
        talk = talk_to(client, server, temperature=temperature)
        await talk.turn(PROMPT, 4, 0)
        body = {"model": "tiny", "prompt": list(PROMPT), "max_tokens": 1, "logprobs": 5, "seed": 1}
        tops = []
        for value in (1.0, 2.0):
            answer = server.call(
                "/v1/completions", {**body, "temperature": value, "return_tokens_as_token_ids": True}
            )
            tops.append(answer["choices"][0]["logprobs"]["top_logprobs"][0])
    same = max(abs(tops[0][name] - tops[1][name]) for name in set(tops[0]) & set(tops[1]))
    assert talk.logprobs_mode == ("raw_logprobs" if same < 1e-3 else "processed_logprobs")
    assert (same < 1e-3) == ("completions" in request.node.callspec.id)


def test_check_backend_says_what_its_options_would_give(
    server: VllmServer, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["check-backend", server.url, "--json", "--tokenizer", str(TOKENIZER)])
    document = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in document["checks"]}
    assert (document["engine"], document["model"]) == ("vLLM", "tiny")
    assert document["version"].count(".") >= 2
    if "completions" in request.node.callspec.id:
        assert status == 1
        assert document["summary"] == "no: raw log-probabilities (--logprobs-mode processed_logprobs)"
        assert rows["token versions"]["remedy"] == "--enable-scale-out"
    else:
        assert (status, document["summary"]) == (0, "yes")
    good = {name for name, row in rows.items() if row["state"] == "good"}
    assert good >= {"token ids", "weight updates", "prefix cache", "context", "KV cache", "tokenizer"}
    assert rows["context"]["finding"].startswith(f"{MAX_MODEL_LEN:,} tokens")
    # All are reported in developer mode, and none is switched on here.
    assert {rows[name]["state"] for name in ("sleep", "weight transfer", "adapters")} == {"lacks"}
    assert rows["adapters"]["remedy"].startswith("--enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True")


async def test_what_a_server_refuses_is_told_apart(server: VllmServer) -> None:
    async with BackendClient() as client:
        with pytest.raises(ModelNotServed, match=r"'nope'; it serves tiny"):
            await client.sample(assigned(server, "nope"), PROMPT, sampling(4))
        with pytest.raises(BackendRefused, match="vocabulary") as caught:
            await client.sample(assigned(server), [5, 10_000_000], sampling(4))
        assert not isinstance(caught.value, ContextOverflow)
        for length in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 2 * MAX_MODEL_LEN):
            with pytest.raises(ContextOverflow):
                await talk_to(client, server).turn((5,) * length, 8, 0)


async def test_a_context_is_used_to_its_last_token(server: VllmServer) -> None:
    """A prompt that leaves room for one or two tokens gets them, cut by length."""
    async with EndlessClient() as client:
        for room in (2, 1):
            sample = await talk_to(client, server).turn(
                (5, 6, 7) * 1000 + (8,) * (MAX_MODEL_LEN - 3000 - room), 8, 0
            )
            assert len(sample.token_ids) == room
            assert sample.finish_reason == "length"


async def test_a_model_that_went_away_is_named_by_the_server_itself(server: VllmServer) -> None:
    """The client listed the models before, so only the answer says it."""
    async with BackendClient() as client:
        await client.sample(assigned(server), PROMPT, sampling(1))
        known = client._known[server.url].facts
        known.models["gone"] = known.models["tiny"].__class__("gone")
        with pytest.raises(ModelNotServed, match=r"`gone` does not exist.*it serves"):
            await client.sample(assigned(server, "gone"), PROMPT, sampling(1))


async def test_a_cancelled_turn_frees_its_slot_at_once(server: VllmServer) -> None:
    """The engine's own numbers show it: nothing runs, no block is held, no further token comes.

    vLLM counts an abort in `request_success_total{finished_reason="abort"}` only where the engine ended the
    request (`/pause?mode=abort`), and not where its client went away. Such a request shows as a first token
    (`time_to_first_token_seconds_count`) that no finished request, whatever its reason, follows.
    """

    async def running() -> float:
        return await metric(server, "vllm:num_requests_running")

    async def blocks() -> float:
        return await metric(server, "vllm:kv_cache_usage_perc")

    async def numbers() -> tuple[float, float, float]:
        begun = await metric(server, "vllm:time_to_first_token_seconds_count")
        ended = await metric(server, "vllm:request_success_total")
        return begun, ended, await metric(server, "vllm:generation_tokens_total")

    async with EndlessClient() as client:
        await client.sample(assigned(server), PROMPT, sampling(1))
        begun, ended, tokens = await numbers()
        with server.slowed(SHARE):
            turn = asyncio.ensure_future(talk_to(client, server).turn(PROMPT, ENDLESS, 0))

            async def sampled() -> float:
                return await metric(server, "vllm:generation_tokens_total") - tokens

            await until(sampled, lambda number: number >= 10.0)
            assert await running() == 1.0
            turn.cancel()
            await until(running, lambda number: number == 0.0)
            await until(blocks, lambda number: number == 0.0)
            with pytest.raises(asyncio.CancelledError):
                await turn
        begun_then, ended_then, tokens_then = await numbers()
        assert begun_then - begun == 1.0
        assert ended_then == ended
        assert tokens_then - tokens < ENDLESS / 2
        # The engine continues for others; all that it samples now is theirs.
        other = await client.sample(assigned(server), PROMPT, sampling(24))
        assert (await numbers())[2] - tokens_then == len(other.token_ids)


@pytest.mark.parametrize(
    ("server", "mode"),
    # The control plane refuses `keep` where tokens have no versions.
    [
        pytest.param("generate", "abort", marks=pytest.mark.nightly),
        ("generate", "keep"),
        pytest.param("completions", "abort", marks=pytest.mark.nightly),
    ],
    indirect=["server"],
)
async def test_an_update_in_the_middle_of_a_turn(server: VllmServer, mode: str) -> None:
    """Every token has its version; those of weights not verified yet are not in the record."""

    async def tokens() -> float:
        return await metric(server, "vllm:generation_tokens_total")

    async def call(path: str, **body: Any) -> None:
        await asyncio.to_thread(server.call, path, body)

    async with EndlessClient() as client:
        talk = talk_to(client, server)
        await talk.turn(PROMPT, 2, 0)
        before = await tokens()
        with server.slowed(SHARE):
            turn = asyncio.ensure_future(talk.turn(PROMPT, LONG, 1))
            await until(tokens, lambda number: number > before + 50)
            await call(f"/pause?mode={mode}")
            if mode == "abort":  # Loading weights takes longer than the answer's way here.

                async def answered() -> float:
                    return talk.stats.requests

                await until(answered, lambda number: number == 2)
            await call("/update_weight_version", new_version="unverified:v1")
            await call("/resume")
            at = await tokens()
            await until(tokens, lambda number: number > at + 30)
            await call("/update_weight_version", new_version="v1")
        sample = await turn
    assert len(sample.token_ids) == LONG
    pairs = zip(sample.policy_versions, sample.policy_versions[1:], strict=False)
    assert [pair for pair in pairs if pair[0] != pair[1]] == [("default", "v1")]
    assert sample.policy_versions.count("default") >= 50
    assert talk.stats.sampled_tokens == LONG + 2
    assert talk.stats.discarded_tokens >= 30


async def test_a_paused_server_is_waited_for(server: VllmServer) -> None:
    async with BackendClient(stall_timeout=4.0) as client:
        talk = talk_to(client, server)
        await talk.turn(PROMPT, 2, 0)
        await asyncio.to_thread(server.call, "/pause?mode=abort")
        try:
            turn = asyncio.ensure_future(talk.turn(PROMPT, 2, 1))

            async def waited() -> float:
                return talk.waited_seconds

            await until(waited, lambda number: number >= 8.0)
            assert not turn.done()
        finally:
            await asyncio.to_thread(server.call, "/resume")
        async with asyncio.timeout(patience(60)):
            sample = await turn
    assert sample.token_ids
    assert talk.stats.requests == 2
    assert talk.waited_seconds >= 8.0
    assert talk.failing is None


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> float:
    """Scale the times of a client down, and return by how much."""
    scale = 20.0
    for name in ("_PAUSE_POLL", "_LABEL_POLL", "_PULSE_POLL", "_LONGEST_SILENCE"):
        monkeypatch.setattr(clients, name, getattr(clients, name) / scale)
    return scale


@pytest.mark.nightly
@pytest.mark.parametrize("call", ["generate", "completions"])
async def test_a_turn_of_fifteen_minutes_at_twenty_tokens_a_second(
    start_vllm: StartVllm, vllm_model: Path, call: str, scaled: float
) -> None:
    """No token is thrown away and nothing is blamed, however long the turn is."""
    arguments = ["--logits-processors", "rollyard_slow_steps:SlowSteps"]
    arguments += ["--no-enable-scale-out"] if call == "completions" else []
    server = start_vllm(vllm_model, 0, arguments=arguments, environment={"PYTHONPATH": str(SLOW_STEPS)})
    try:
        async with EndlessClient(stall_timeout=20.0 / scaled) as client:
            talk = talk_to(client, server)
            before = time.monotonic()
            sample = await talk.turn(PROMPT, SLOW, 0)
            took = time.monotonic() - before
    finally:
        server.stop()
    assert took > 300.0 / scaled, "a turn that is over soon shows nothing"
    assert len(sample.token_ids) == SLOW
    assert sample.finish_reason == "length"
    assert (talk.stats.sampled_tokens, talk.stats.discarded_tokens, talk.stats.requests) == (SLOW, 0, 1)


@pytest.mark.parametrize("what", ["engine", "server"])
async def test_a_server_that_freezes_in_the_middle_of_a_stream(
    vllm_servers: list[VllmServer], what: str, scaled: float
) -> None:
    """It is left with what it gave, in less than the thirty seconds that this stands for."""
    frozen, sound = vllm_servers
    async with EndlessClient(stall_timeout=20.0 / scaled) as client:
        talk = talk_to(client, frozen, sound)
        with frozen.slowed(SHARE):
            turn = asyncio.ensure_future(talk.turn(PROMPT, LONG, 0))

            async def sampled() -> float:
                return len((talk.sampled_now() or ((), 0.0))[0])

            await until(sampled, lambda number: number >= 64.0)
        with frozen.frozen(engine_only=what == "engine"):
            held = len((talk.sampled_now() or ((), 0.0))[0])
            async with asyncio.timeout(patience(30.0)):
                sample = await turn
            assert talk.backend.url == sound.url
    assert len(sample.token_ids) == LONG
    assert talk.stats.sampled_tokens == LONG
    assert talk.stats.discarded_tokens < held, "nothing of the frozen server was kept"
    assert set(sample.policy_versions) <= {"default", sound.version()}
    assert set(sample.token_ids) <= {5, 9}


def test_its_metrics_say_how_many_tokens_its_cache_holds(server: VllmServer) -> None:
    """The places of a backend follow from that number, which vLLM also writes into its log."""
    read = metrics.parse(str(server.call("/metrics", method="GET")).encode())
    logged = re.findall(r"KV cache size: ([\d,]+) tokens", server.log.read_text(errors="replace"))
    assert read.cache_tokens == int(logged[-1].replace(",", ""))
    assert places_of(read.cache_tokens, MAX_MODEL_LEN) == min(1024, 4 * read.cache_tokens // MAX_MODEL_LEN)
