"""What a server lacks for training, read from recorded answers of vLLM 0.32 and from SGLang's contract.

`vllm-0.32.json` holds the answers of two real servers of one model: `bare`, started without any option of
Rollyard's, and `full`, started with all that its driver adds. Answers about metrics and settings are
shortened to what is read of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_inference import metrics
from rollyard_inference.errors import BackendMismatch, BackendUnavailable, ModelNotServed, NotListening
from rollyard_inference.fitness import FitnessCheck, ask, checks, in_a_line, trains
from rollyard_inference.transports.with_httpx import HttpxTransport
from rollyard_testing.inference.scripted import ProrlShaped

RECORDED = json.loads((Path(__file__).parent / "vllm-0.32.json").read_text())
SCALE_OUT = "--enable-scale-out"
RAW = "raw log-probabilities (--logprobs-mode processed_logprobs)"
NO_CALLS = "no calls for pauses and weights (VLLM_SERVER_DEV_MODE=1 in its environment)"

ADAPTERS = "/v1/load_lora_adapter"
RUNTIME = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment"

Answers = Callable[[httpx.Request], httpx.Response]


def recorded(server: str, changes: dict[str, Any] | None = None) -> Answers:
    """Return what a recorded server answers, except to the paths in `changes`.

    A change is a status, or the answer itself.
    """

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        if path in (changes or {}):
            change = (changes or {})[path]
            return httpx.Response(change) if isinstance(change, int) else httpx.Response(200, json=change)
        body = json.loads(request.content) if request.content else None
        for row in RECORDED[server]:
            if (row["method"], row["path"], row["body"]) == (request.method, path, body):
                headers = {"allow": row["allow"]} if "allow" in row else {}
                if isinstance(row["answer"], str):
                    return httpx.Response(row["status"], text=row["answer"], headers=headers)
                return httpx.Response(row["status"], json=row["answer"], headers=headers)
        raise AssertionError(f"nothing was recorded for {request.method} {path} {body}")

    return answer


async def checked(answers: Answers, model: str = "", *, needed_only: bool = False) -> dict[str, FitnessCheck]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(answers)) as client:
        probed = await ask(HttpxTransport(client), "http://server/v1", model, needed_only=needed_only)
    return {row.name: row for row in checks(probed)}


async def test_a_server_with_all_options_lacks_nothing_that_is_needed() -> None:
    rows = await checked(recorded("full"))
    assert in_a_line(rows.values()) == "yes"
    assert {name for name, row in rows.items() if row.state != "good"} == {
        "sleep",
        "weight transfer",
        "adapters",
    }
    assert rows["sleep"].remedy == "--enable-sleep-mode"
    assert rows["weight transfer"].remedy.startswith("--weight-transfer-config ")
    assert rows["token ids"].finding == "in and out by /inference/v1/generate, with log-probabilities"
    assert rows["context"].finding.startswith("2,048 tokens")
    assert rows["KV cache"].finding == "524,288 tokens, 256 rollouts of full length"
    assert all(not row.cost and not row.remedy for row in rows.values() if row.state == "good")


async def test_a_bare_server_lacks_what_its_options_would_give() -> None:
    rows = await checked(recorded("bare"))
    assert trains(rows.values()) == "no"
    assert in_a_line(rows.values()) == f"no: {RAW}; {NO_CALLS}"
    versions = rows["token versions"]
    assert (versions.state, versions.needed, versions.remedy) == ("lacks", False, SCALE_OUT)
    assert (rows["sleep"].state, rows["sleep"].finding) == (
        "unknown",
        "reported only with VLLM_SERVER_DEV_MODE=1",
    )
    assert all(row.cost and row.remedy for row in rows.values() if row.state == "lacks")


async def test_what_is_needed_is_asked_without_the_rest() -> None:
    """The control plane asks every server of every pool, and needs neither metrics nor settings for that."""
    paths = ("/metrics", ADAPTERS, "/server_info?config_format=json", "/get_server_info")
    refused = dict.fromkeys(paths, 500)
    rows = await checked(recorded("bare", refused), needed_only=True)
    assert in_a_line(rows.values()) == f"no: {RAW}; {NO_CALLS}"
    # They are not needed, so a server that fails at them is checked all the same.
    assert in_a_line((await checked(recorded("full", refused))).values()) == "yes"


@pytest.mark.parametrize(
    ("server", "status", "config", "state", "remedy"),
    [
        ("full", 405, {"max_loras": 1}, "good", ""),
        ("full", 405, None, "lacks", "--enable-lora"),
        ("full", 404, {"max_loras": 1}, "lacks", RUNTIME),
        ("full", 404, None, "lacks", f"--enable-lora, and {RUNTIME}"),
        ("full", 403, {"max_loras": 1}, "unknown", RUNTIME),
        ("bare", 405, None, "unknown", "--enable-lora"),
        ("bare", 404, None, "lacks", f"--enable-lora, and {RUNTIME}"),
        ("bare", 403, None, "unknown", f"--enable-lora, and {RUNTIME}"),
    ],
)
async def test_a_server_that_loads_no_adapters_while_it_runs(
    server: str, status: int, config: dict[str, Any] | None, state: str, remedy: str
) -> None:
    """The server `bare` shows no settings. One that refuses the call by 403 says nothing about it."""
    changes: dict[str, Any] = {ADAPTERS: status}
    if server == "full":
        changes["/server_info?config_format=json"] = {"vllm_config": {"lora_config": config}}
    row = (await checked(recorded(server, changes)))["adapters"]
    assert (row.state, row.needed, row.remedy) == (state, False, remedy)
    assert bool(row.cost) == (state != "good")


async def test_a_prefix_cache_that_is_switched_off_or_not_reported() -> None:
    lines = next(row["answer"] for row in RECORDED["full"] if row["path"] == "/metrics")

    def served(text: str) -> Answers:
        answers = recorded("full")
        return lambda request: (
            httpx.Response(200, text=text) if request.url.path == "/metrics" else answers(request)
        )

    off = (await checked(served(lines.replace('prefix_caching="True"', 'prefix_caching="False"'))))[
        "prefix cache"
    ]
    assert (off.state, off.finding, off.remedy) == ("lacks", "switched off", "--enable-prefix-caching")
    silent = await checked(served(""))
    assert silent["prefix cache"].remedy == silent["KV cache"].remedy == "without --disable-log-stats"
    assert silent["prefix cache"].state == silent["KV cache"].state == "unknown"
    counted = "vllm:prefix_cache_queries_total 200\nvllm:prefix_cache_hits_total 150\n"
    assert (await checked(served(counted)))["prefix cache"].finding.startswith("on; 75% of prompt tokens")


def test_the_size_of_the_kv_cache_is_the_sum_over_the_engines() -> None:
    line = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="%d",%s} 1.0\n'
    sized = "".join(line % (no, 'kv_cache_size_tokens="1000",num_gpu_blocks="9"') for no in (0, 1))
    assert metrics.cache_config(sized.encode()) == metrics.CacheConfig(True, 2000)
    # Older versions name no tokens. vLLM adds up the blocks of all engines, and repeats the sum in each line.
    blocks = "".join(line % (no, 'num_gpu_blocks="100"') for no in (0, 1))
    assert metrics.cache_config(blocks.encode()) == metrics.CacheConfig(True, 1600)
    unknown = line % (0, 'kv_cache_size_tokens="None",num_gpu_blocks="None"')
    assert metrics.cache_config(unknown.encode()) == metrics.CacheConfig(True, None)
    assert metrics.cache_config(b"") == metrics.CacheConfig(None, None)


async def test_a_paused_server_is_not_sampled_from() -> None:
    sampling = {"/inference/v1/generate": 500, "/is_paused": {"is_paused": True}}
    rows = await checked(recorded("full", sampling))
    assert in_a_line(rows.values()).startswith(
        "unknown: the server is paused, so nothing could be sampled (POST"
    )
    assert rows["weight updates"].state == "good"


async def test_a_server_without_token_ids_is_named_with_its_reason() -> None:
    """A server of OpenAI's API has a call of the same name, whose answers hold texts only."""
    texts = {"choices": [{"text": "x", "finish_reason": "length", "logprobs": None}]}
    answers = recorded("bare")

    def other(request: httpx.Request) -> httpx.Response:
        sampling = request.url.path == "/v1/completions" and request.method == "POST"
        return httpx.Response(200, json=texts) if sampling else answers(request)

    rows = await checked(other)
    assert in_a_line(rows.values()).startswith(
        "no: no token ids with log-probabilities (vLLM 0.30 or SGLang 0.5"
    )
    assert "no prompt_token_ids in the answer" in rows["token ids"].detail

    def without_calls(request: httpx.Request) -> httpx.Response:
        return answers(request) if request.url.path in ("/health", "/v1/models") else httpx.Response(404)

    rows = await checked(without_calls)
    assert list(rows) == ["token ids"]
    assert "no call with token ids in and out" in rows["token ids"].detail


def test_unknown_log_probabilities_are_no_verdict() -> None:
    rows = [
        FitnessCheck("a", "good", "", needed=True),
        FitnessCheck("b", "unknown", "b is not known", needed=True),
        FitnessCheck("c", "lacks", "c is missing"),
    ]
    assert in_a_line(rows) == "unknown: b is not known"
    assert (
        in_a_line([*rows, FitnessCheck("d", "lacks", "no d", needed=True, remedy="--d")]) == "no: no d (--d)"
    )


@pytest.mark.parametrize(
    ("answers", "error", "message"),
    [
        (
            lambda _: httpx.Response(200, html="<h1>hello</h1>"),
            BackendMismatch,
            "gave no list of models, but status 200",
        ),
        (recorded("full", {"/v1/models": 401}), BackendMismatch, "status 401; Rollyard sends no API key"),
        (lambda _: httpx.Response(503, text="busy"), BackendUnavailable, "answered 503"),
        (recorded("full", {"/inference/v1/generate": 500}), BackendUnavailable, "answered 500"),
    ],
    ids=["page", "key", "failing", "sampling fails"],
)
async def test_what_is_no_server_of_a_model_is_an_error(
    answers: Answers, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await checked(answers)


async def test_another_model_and_no_server_at_all_are_errors() -> None:
    with pytest.raises(ModelNotServed, match="does not serve 'other'; it serves: /models/tiny"):
        await checked(recorded("full"), "other")

    def refused(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with pytest.raises(NotListening):
        await checked(refused)


async def test_prorl_servers_show_neither_versions_nor_the_kind_of_log_probabilities() -> None:
    server = ProrlShaped()
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            probed = await ask(HttpxTransport(client, connect_seconds=30.0), server.url)
    finally:
        server.close()
    rows = checks(probed)
    assert [row.name for row in rows] == ["token ids", "log-probabilities", "weight updates"]
    assert in_a_line(rows) == "unknown: log-probabilities of an unknown kind"


SGLANG_INFO: dict[str, Any] = {
    "disable_radix_cache": False,
    "enable_memory_saver": False,
    "max_total_num_tokens": 81_920,
}
SGLANG_METRICS = 'sglang:prompt_tokens_total{tp="0"} 100\nsglang:cached_tokens_total{tp="0"} 40\n'


def sglang(
    logprobs: dict[float, tuple[float, float]], info: dict[str, Any], counters: str, **meta: Any
) -> Answers:
    """Return what a server answers by SGLang's documentation.

    Args:
        logprobs: The log-probabilities of the ids 0 and 1, by temperature.
        info: The answer of `/server_info`.
        counters: The answer of `/metrics`.
        meta: What `meta_info` has in addition.
    """

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        documents: dict[str, Any] = {
            "/health": {},
            "/v1/models": {"data": [{"id": "tiny", "root": "tiny", "max_model_len": 40_960}]},
            "/model_info": {"model_path": "tiny", "weight_version": "default"},
            "/server_info": info,
        }
        if path == "/metrics":
            return httpx.Response(200, text=counters) if counters else httpx.Response(404)
        if path == "/generate":
            body = json.loads(request.content)
            return httpx.Response(200, json=sampled(body)) if body else httpx.Response(400)
        return httpx.Response(200, json=documents[path]) if path in documents else httpx.Response(404)

    def sampled(body: dict[str, Any]) -> dict[str, Any]:
        values = logprobs.get(body["sampling_params"]["temperature"], (-1.0, -2.0))
        info = {
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": 1,
            "output_token_logprobs": [[values[0], 0, None]],
            "weight_version": "default",
            **meta,
        }
        if "token_ids_logprob" in body:
            info["output_token_ids_logprobs"] = [[[values[0], 0, None], [values[1], 1, None]]]
        return {"text": "x", "output_ids": [0], "meta_info": info}

    return answer


async def test_sglang_after_temperature_trains() -> None:
    tempered = {1.0: (-1.0, -1.5), 0.25: (-0.1, -2.1)}
    versions = [{"version": "default", "start": 0, "end": 1}]
    rows = await checked(sglang(tempered, SGLANG_INFO, SGLANG_METRICS, weight_versions=versions))
    assert in_a_line(rows.values()) == "yes"
    assert rows["log-probabilities"].finding.endswith("train with topP 1 and topK -1")
    assert rows["prefix cache"].finding.startswith("on; 40%")
    assert rows["KV cache"].finding == "81,920 tokens, 2 rollouts of full length"
    assert rows["token versions"].state == "good"
    assert rows["sleep"].remedy == "--enable-memory-saver"
    assert not {"weight transfer", "adapters"} & set(rows), "both are checked for vLLM only"


async def test_sglang_lacks_what_its_own_options_would_give() -> None:
    same = {1.0: (-1.0, -1.5), 0.25: (-1.0, -1.5)}
    info = SGLANG_INFO | {"disable_radix_cache": True}
    rows = await checked(sglang(same, info, ""))
    assert in_a_line(rows.values()) == "no: raw log-probabilities (without SGLANG_RETURN_ORIGINAL_LOGPROB=1)"
    assert rows["prefix cache"].remedy == "without --disable-radix-cache"
    assert rows["token versions"].remedy == "a newer SGLang"
    without_metrics = await checked(sglang(same, SGLANG_INFO, ""))
    assert without_metrics["prefix cache"].remedy == "--enable-metrics"
