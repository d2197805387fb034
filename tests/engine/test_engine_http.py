"""Shapes of requests and answers, errors included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_engine.errors import InvalidRequest
from rollyard_engine.serving import protocol
from rollyard_testing.pace import patience


def test_models_names_the_context_and_the_kind_of_logprobs(server: Any, model_dir: Path) -> None:
    card = server.get("/v1/models").json()["data"][0]
    context = json.loads((model_dir / "genai_config.json").read_text())["model"]["context_length"]
    assert card["id"] == "tiny-policy"
    assert Path(card["root"]).samefile(model_dir)
    assert card["max_model_len"] == context
    assert card["logprobs_mode"] == "processed_logprobs"
    assert server.get("/version").json()["logprobs_mode"] == "processed_logprobs"
    assert server.get("/health").status_code == 200


def test_a_completion_has_vllms_fields(server: Any) -> None:
    answer = server.post(
        "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "seed": 1}
    ).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    choice = answer["choices"][0]
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["logprobs"] is choice["token_ids"] is choice["prompt_token_ids"] is None
    assert answer["usage"]["total_tokens"] == 7


def test_a_stop_token_is_among_the_ids_and_not_in_the_text(server: Any) -> None:
    free = server.complete([5, 6, 7], max_tokens=12, seed=4)
    stop = free["token_ids"][7]
    first = free["token_ids"].index(stop)
    stopped = server.complete([5, 6, 7], max_tokens=12, seed=4, stop_token_ids=[stop])
    assert stopped["token_ids"] == free["token_ids"][: first + 1]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["text"] == server.complete([5, 6, 7], max_tokens=max(first, 1), seed=4)["text"] * bool(
        first
    )


def test_top_logprobs_hold_the_sampled_token_and_the_likeliest(server: Any) -> None:
    choice = server.complete([5, 6, 7], max_tokens=6, seed=2, logprobs=3, return_tokens_as_token_ids=True)
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    for token, own, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == own
        assert len(top) in {3, 4}
        assert max(top.values()) >= own


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1e-3}, {"top_p": 1e-6}, {"top_k": 2}], ids=str
)
def test_no_log_probability_stands_for_minus_infinity(server: Any, sampling: dict[str, float]) -> None:
    fields = {
        "max_tokens": 4,
        "logprobs": 20,
        "prompt_logprobs": 20,
        "seed": 1,
        "ignore_eos": True,
        **sampling,
    }
    choice = server.complete([5, 6, 7], **fields)
    generated = server.post(
        "/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": fields}
    ).json()
    content = generated["choices"][0]["logprobs"]["content"]
    for alternatives, entry in zip(choice["logprobs"]["top_logprobs"], content, strict=True):
        assert sorted(alternatives.values()) == sorted(one["logprob"] for one in entry["top_logprobs"])
        assert -9999 not in alternatives.values()
        assert len(alternatives) == {"top_k": 2, "top_p": 1}.get(next(iter(sampling)), len(alternatives))
    assert min(choice["logprobs"]["token_logprobs"]) > -1000


def test_tokenize_and_detokenize_are_each_others_inverse(server: Any) -> None:
    text = "def f(x):\n    return x + 1  # naïve"
    tokens = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_messages_go_through_the_chat_template(server: Any) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "two words"}]}]
    with_prompt = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    without = server.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()[
        "tokens"
    ]
    assert with_prompt[: len(without)] == without
    assert len(with_prompt) > len(without)
    rendered = server.post("/detokenize", {"tokens": with_prompt}).json()["prompt"]
    assert "two words" in rendered
    own = server.post(
        "/tokenize",
        {
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": "bash", "parameters": {}}}],
            "chat_template": "{{ tools[0].function.name }}|{{ messages[0]['content'] }}|{{ depth }}",
            "chat_template_kwargs": {"depth": 3},
        },
    ).json()["tokens"]
    assert server.post("/detokenize", {"tokens": own}).json()["prompt"] == "bash|two words|3"


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("/v1/completions", {"prompt": [5], "max_tokens": "many"}, "body.max_tokens", "valid integer"),
        ("/v1/completions", {"prompt": [5], "max_tokens": 0}, "max_tokens", "at least 1"),
        ("/v1/completions", {"prompt": [5], "temperature": -1}, "temperature", "in [0, 2]"),
        ("/v1/completions", {"prompt": [5], "top_p": 0}, "top_p", "in (0, 1]"),
        ("/v1/completions", {"prompt": [5], "top_k": -2}, "top_k", "top_k"),
        ("/v1/completions", {"prompt": [5], "logprobs": 21}, "logprobs", "greater than max allowed: 20"),
        ("/v1/completions", {"prompt": [5], "prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ("/v1/completions", {"prompt": [5], "prompt_logprobs": -1}, "prompt_logprobs", "from 0 to 20"),
        (
            "/v1/completions",
            {"prompt": [5], "prompt_logprobs": 0, "stream": True},
            "prompt_logprobs",
            "not available when `stream=True`",
        ),
        ("/v1/completions", {"prompt": [5], "n": 2}, "n", "one request a sample"),
        ("/v1/completions", {"prompt": [5], "stop": ["a"]}, "stop", "stop_token_ids"),
        ("/v1/completions", {"prompt": [5], "temprature": 1}, "body.temprature", "Extra inputs"),
        ("/v1/completions", {"prompt": []}, "prompt", "cannot be empty"),
        ("/v1/completions", {"prompt": [[5], [6]]}, "prompt", "one prompt a request"),
        ("/v1/completions", {"prompt": [-1]}, "body.prompt", "greater than or equal to 0"),
        ("/v1/completions", {"prompt": [10**6]}, "prompt", "out of vocabulary"),
        ("/v1/completions", {}, "body.prompt", "Field required"),
        ("/v1/completions", [1], None, "valid dictionary"),
        ("/inference/v1/generate", {"token_ids": [5]}, "body.sampling_params", "Field required"),
        ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "body.token_ids", "at least 1"),
        (
            "/inference/v1/generate",
            {"token_ids": [5], "sampling_params": {"min_p": 0.5}},
            "min_p",
            "not supported",
        ),
        ("/tokenize", {}, None, "either `prompt` or `messages`"),
        ("/collective_rpc", {"method": "sleep"}, "method", "reload_weights"),
        ("/collective_rpc", {"method": "reload_weights"}, "weights_path", "weights_path"),
        ("/update_weight_version", {}, "body.new_version", "Field required"),
        ("/inference/v1/abort_requests", {}, "request_ids", "Missing"),
    ],
)
def test_bad_requests_are_refused_naming_the_field(
    server: Any, path: str, body: Any, param: str | None, said: str
) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400
    assert set(error) == {"message", "type", "param", "code"}
    assert said in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("n", 1, 2),
        ("best_of", 1, 3),
        ("echo", False, True),
        ("suffix", None, "x"),
        ("use_beam_search", False, True),
        ("length_penalty", 1.0, 0.5),
        ("min_p", 0.0, 0.1),
        ("min_tokens", 0, 1),
        ("presence_penalty", 0.0, 0.5),
        ("frequency_penalty", 0.0, -0.5),
        ("repetition_penalty", 1.0, 1.1),
        ("logit_bias", {}, {"5": 1.0}),
        ("bad_words", [], ["x"]),
        ("stop", [], ["x"]),
        ("stop", "", "x"),
        ("include_stop_str_in_output", False, True),
        ("skip_special_tokens", True, False),
        ("spaces_between_special_tokens", True, False),
        ("truncate_prompt_tokens", None, 8),
        ("allowed_token_ids", None, [5]),
        ("logprob_token_ids", None, [5]),
        ("prompt_embeds", None, "x"),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("structured_outputs", None, {"regex": "x"}),
        ("priority", 0, 1),
        ("cache_salt", None, "x"),
    ],
)
def test_what_would_sample_otherwise_is_refused_in_both_calls(name: str, neutral: Any, other: Any) -> None:
    for value in (neutral, None):
        protocol.parse(protocol.CompletionBody, {"prompt": [5], name: value})
        protocol.parse(protocol.GenerateBody, {"token_ids": [5], "sampling_params": {name: value}})
    for kind, body in (
        (protocol.CompletionBody, {"prompt": [5], name: other}),
        (protocol.GenerateBody, {"token_ids": [5], "sampling_params": {name: other}}),
    ):
        with pytest.raises(InvalidRequest, match=f"`{name}` is not supported") as refused:
            protocol.parse(kind, body)
        assert refused.value.param == name


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, (9, 1.0, 1.0, 0)),
        ({"max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "top_k": 3}, (5, 0.0, 0.5, 3)),
        ({"max_tokens": 50, "temperature": 2.0, "top_p": 1.0, "top_k": -1}, (20, 2.0, 1.0, 0)),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_parameters_are_bounded_and_have_vllms_defaults(given: dict[str, Any], found: Any) -> None:
    body = protocol.parse(protocol.CompletionBody, {"prompt": [5], **given})
    if isinstance(found, str):
        with pytest.raises(InvalidRequest) as refused:
            body.to_params(default_max_tokens=9, prompt_tokens=1, room=20)
        assert refused.value.param == found
        return
    made = body.to_params(default_max_tokens=9, prompt_tokens=1, room=20)
    assert (made.max_tokens, made.temperature, made.top_p, made.top_k) == found


def test_a_prompt_too_long_to_be_scored_is_refused() -> None:
    body = protocol.parse(protocol.CompletionBody, {"prompt": [5], "prompt_logprobs": 0})
    body.to_params(default_max_tokens=1, prompt_tokens=4096, room=9)
    with pytest.raises(InvalidRequest, match=r"at most 4096 tokens, this one has 4097"):
        body.to_params(default_max_tokens=1, prompt_tokens=4097, room=9)


def test_neutral_values_of_unsupported_fields_are_accepted(server: Any) -> None:
    body = {"prompt": [5], "max_tokens": 1, "n": 1, "stop": [], "min_p": 0.0, "repetition_penalty": 1.0}
    assert server.post("/v1/completions", {**body, "user": "someone", "logit_bias": None}).status_code == 200


def test_prompts_at_and_over_the_context(server: Any) -> None:
    limit = server.get("/v1/models").json()["data"][0]["max_model_len"]
    over = server.post("/v1/completions", {"prompt": [5] * (limit + 1)})
    assert over.status_code == 400
    assert f"maximum context length is {limit} tokens" in over.json()["error"]["message"]
    exact = server.post("/inference/v1/generate", {"token_ids": [5] * limit, "sampling_params": {}})
    assert exact.status_code == 400
    assert f"longer than the maximum model length of {limit}" in exact.json()["error"]["message"]
    fits = server.complete([5] * (limit - 2), max_tokens=10)
    assert (len(fits["token_ids"]), fits["finish_reason"]) == (2, "length")


def test_another_model_an_unknown_path_and_no_json(server: Any) -> None:
    other = server.post("/v1/completions", {"prompt": [5], "model": "someone-elses"})
    assert (other.status_code, other.json()["error"]["type"]) == (404, "NotFoundError")
    assert "Valid aliases: tiny-policy" in other.json()["error"]["message"]
    unknown = server.get("/v1/unknown")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, 404)
    garbled = httpx.post(server.url + "/v1/completions", content=b"{", timeout=patience(30))
    assert (garbled.status_code, garbled.json()["error"]["param"]) == (400, "body")


def test_counters_add_up(server: Any) -> None:
    names = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
    before = [server.metric(f"vllm:{name}_total") for name in names]
    prompt = [11, 12, 13, 14, 15]
    first = server.complete(prompt, max_tokens=6, seed=1)
    server.complete([*prompt, *first["token_ids"], 9], max_tokens=3, seed=1)
    after = [server.metric(f"vllm:{name}_total") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [5 + 12, 6 + 3, 5 + 12, 10]
    assert server.metric("vllm:prompt_tokens_cached_total") == after[3]
    assert server.metric("vllm:num_requests_running") == 0
