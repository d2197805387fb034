"""SGLang's native `/generate` as its documentation has it: literal answers, and a strict server.

SGLang itself does not run here. The answers below have the form of those that its pages "Native
APIs" and "Sampling Parameters" and its request and answer types describe; the server refuses every
field and parameter that those do not have.
"""

from __future__ import annotations

import asyncio
import copy
import math
from typing import Any

import pytest
from aiohttp import web
from rollyard_inference.errors import BackendMismatch, BackendRefused, BackendUnavailable, ContextOverflow
from rollyard_inference.sampling.call import parsed
from rollyard_inference.sampling.request import ServedModel
from rollyard_inference.sampling.sglang import SglangGenerate
from rollyard_pipeline.backends import BackendClient, Sampling
from rollyard_testing.pace import patience

SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=-1, max_tokens=8, seed=7)
PROMPT = [785, 6722, 315, 9625, 374]

# This is one answer of `POST /generate` with `return_logprob: true`, cut to few tokens.
ANSWER: dict[str, Any] = {
    "text": " Paris.",
    "output_ids": [12095, 13, 151645],
    "meta_info": {
        "id": "1b3f4a1c0d4f4e3b9e2c8c1f3d0a7e55",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 5,
        "weight_version": "default",
        "total_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [
            [-0.5267709493637085, 12095, None],
            [-1.1920928244535389e-07, 13, None],
            [-0.035150304436683655, 151645, None],
        ],
        "completion_tokens": 3,
        "cached_tokens": 4,
        "e2e_latency": 0.0461270809173584,
    },
}
MODEL_INFO = {
    "model_path": "qwen/qwen2.5-0.5b-instruct",
    "tokenizer_path": "qwen/qwen2.5-0.5b-instruct",
    "is_generation": True,
    "preferred_sampling_params": None,
    "weight_version": "default",
    "has_image_understanding": False,
    "has_audio_understanding": False,
}
REQUEST = {
    "text", "input_ids", "input_embeds", "image_data", "audio_data", "sampling_params", "rid",
    "return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob",
    "return_text_in_logprobs", "stream", "lora_path", "custom_logit_processor", "return_hidden_states",
}  # fmt: skip
PARAMETERS = {
    "max_new_tokens": int, "stop": list, "stop_token_ids": list, "temperature": float, "top_p": float,
    "top_k": int, "min_p": float, "frequency_penalty": float, "presence_penalty": float,
    "repetition_penalty": float, "min_new_tokens": int, "json_schema": str, "regex": str, "ebnf": str,
    "n": int, "ignore_eos": bool, "skip_special_tokens": bool, "no_stop_trim": bool, "sampling_seed": int,
    "stream_interval": int,
}  # fmt: skip


def refused(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)


class Sglang:
    """A server that samples from three logits as the contract says, and is strict about what it is asked."""

    logits = (1.0, 0.25, -0.75)

    def __init__(self, *, original_logprobs: bool = False, context: int = 64) -> None:
        self.original = original_logprobs
        self.context = context
        self.label = "default"
        self.spans = False

    def __call__(self, body: dict[str, Any]) -> Any:
        params = body.get("sampling_params") or {}
        if unknown := (set(body) - REQUEST) | (set(params) - set(PARAMETERS)):
            return refused(f"unexpected keyword argument {sorted(unknown)}")
        for name, value in params.items():
            if type(value) is not PARAMETERS[name]:
                return refused(f"{name} must be of type {PARAMETERS[name].__name__}, got {value!r}")
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids) or "text" in body:
            return refused("either text or input_ids should be provided")
        if len(ids) >= self.context:
            limit = f"the model's context length ({self.context} tokens)."
            return refused(f"The input ({len(ids)} tokens) is longer than {limit}")
        if not 0.0 < params["top_p"] <= 1.0 or (params["top_k"] < 1 and params["top_k"] != -1):
            return refused("top_p must be in (0, 1], top_k -1 or at least 1")
        return self._answer(body, len(ids))

    def _answer(self, body: dict[str, Any], read: int) -> dict[str, Any]:
        params = body["sampling_params"]
        count = min(params["max_new_tokens"], 3)
        scale = 1.0 if self.original else params["temperature"] or 1.0
        total = math.log(sum(math.exp(logit / scale) for logit in self.logits))
        logprobs = [logit / scale - total for logit in self.logits]
        answer = copy.deepcopy(ANSWER)
        meta = answer["meta_info"]
        answer["output_ids"] = list(range(count))
        finish = {"type": "length", "length": count}
        entries = [[logprobs[one], one, None] for one in range(count)]
        meta |= {"prompt_tokens": read, "completion_tokens": count, "finish_reason": finish}
        meta |= {"weight_version": self.label, "output_token_logprobs": entries}
        if not body.get("return_logprob"):
            del meta["output_token_logprobs"], meta["input_token_logprobs"]
        if (wanted := body.get("token_ids_logprob")) is not None:
            meta["output_token_ids_logprobs"] = [[[logprobs[one % 3], one, None] for one in wanted]] * count
        return answer


def served(backend: Any, sglang: Any, **states: Any) -> Any:
    """Return a scripted server with SGLang's calls, and its own `/v1/completions` without token ids."""
    info = {"/model_info": lambda: {**MODEL_INFO, "weight_version": getattr(sglang, "label", "default")}}
    models = [{"id": "tiny", "object": "model", "owned_by": "sglang", "root": "tiny", "max_model_len": 64}]
    return backend(
        sglang=sglang, completions=lambda body: {"choices": []}, models=models, states={**info, **states}
    )


def test_the_documented_answer_is_read() -> None:
    answer = parsed(SglangGenerate(), ANSWER, PROMPT, SAMPLING)
    assert answer.token_ids == (12095, 13, 151645)
    assert answer.logprobs == (-0.5267709493637085, -1.1920928244535389e-07, -0.035150304436683655)
    assert (answer.finish_reason, answer.versions, answer.label) == ("stop", None, "default")


def test_later_answers_name_the_version_of_every_token() -> None:
    spans = [{"version": "a", "start": 0, "end": 2}, {"version": "b", "start": 2, "end": 3}]
    meta = {**ANSWER["meta_info"], "weight_versions": spans, "weight_version": "b"}
    assert parsed(SglangGenerate(), {**ANSWER, "meta_info": meta}, PROMPT, SAMPLING).versions == (
        "a",
        "a",
        "b",
    )


def test_the_end_of_turn_may_be_trimmed_from_output_ids_only() -> None:
    trimmed = {**ANSWER, "output_ids": [12095, 13]}
    assert parsed(SglangGenerate(), trimmed, PROMPT, SAMPLING).token_ids == (12095, 13, 151645)
    with pytest.raises(BackendMismatch, match="output_ids"):
        parsed(SglangGenerate(), {**ANSWER, "output_ids": [12095, 151645]}, PROMPT, SAMPLING)


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ({"prompt_tokens": 6}, "prompt_tokens is 6 at the backend, there are 5"),
        ({"completion_tokens": 2}, "completion_tokens is 2"),
        ({"output_token_logprobs": None}, "output_token_logprobs is missing"),
        ({"output_token_logprobs": [[-0.5], [-0.5, 13, None], [-0.1, 151645, None]]}, "expected [logprob"),
        (
            {"output_token_logprobs": [[None, 12095, None], [-0.5, 13, None], [-0.1, 151645, None]]},
            "logprob 0",
        ),
        ({"output_token_logprobs": [[-0.5, 1, None], [-0.5, 13, None], [-0.1, 151645, None]]}, "output_ids"),
        ({"finish_reason": None}, "finish_reason is missing"),
        ({"finish_reason": {"type": "odd"}}, "finish_reason is 'odd'"),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 2}]}, "ends at token 2 of 3"),
    ],
)
def test_answers_against_the_contract_are_refused(meta: dict[str, Any], says: str) -> None:
    answer = {**ANSWER, "meta_info": {**ANSWER["meta_info"], **meta}}
    with pytest.raises(BackendMismatch) as caught:
        parsed(SglangGenerate(), answer, PROMPT, SAMPLING)
    assert says in str(caught.value)


@pytest.mark.parametrize(("status", "error"), [(400, BackendRefused), (503, BackendUnavailable)])
def test_an_abort_for_an_error_is_that_error(status: int, error: type[Exception]) -> None:
    finish = {"type": "abort", "message": "no room", "status_code": status, "err_type": "E"}
    answer = {**ANSWER, "meta_info": {**ANSWER["meta_info"], "finish_reason": finish}}
    with pytest.raises(error, match="no room"):
        parsed(SglangGenerate(), answer, PROMPT, SAMPLING)


def test_a_lora_adapter_is_named_by_its_path_field() -> None:
    adapter = ServedModel("tuned", parent="tiny")
    assert SglangGenerate().body(adapter, PROMPT, SAMPLING)["lora_path"] == "tuned"
    assert "lora_path" not in SglangGenerate().body(ServedModel("tiny"), PROMPT, SAMPLING)


async def test_a_strict_server_takes_our_requests(backend: Any) -> None:
    async with served(backend, Sglang()) as server, BackendClient() as client:
        sample = await client.sample(server.assignment, PROMPT, SAMPLING)
        assert await client.max_model_len(server.assignment) == 64
    assert sample.token_ids == (0, 1, 2)
    assert sample.policy_versions == ("default",) * 3
    path, body = server.requests[-1]  # After those that show the kind of log-probabilities.
    assert path == "/generate"
    assert body["input_ids"] == PROMPT
    assert body["sampling_params"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "max_new_tokens": 8, "sampling_seed": 7, "stream_interval": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("original", "sampling", "mode"),
    [
        (False, {}, "processed_logprobs"),
        (False, {"topP": 0.9}, "temperature_logprobs"),
        (False, {"topK": 5}, "temperature_logprobs"),
        (True, {"topP": 0.9}, "raw_logprobs"),
        (True, {}, "raw_logprobs"),
    ],
)
async def test_the_record_says_which_logprobs_they_are(
    backend: Any, original: bool, sampling: dict[str, Any], mode: str
) -> None:
    async with served(backend, Sglang(original_logprobs=original)) as server, BackendClient() as client:
        talk = server.session(client, sampling={"temperature": 0.5, **sampling})
        await talk.turn([1, 2], 8, 0)
        await talk.turn([1, 2], 8, 1)
    assert talk.logprobs_mode == mode
    assert len(server.requests) == 4


async def test_an_answer_across_an_update_is_asked_again(backend: Any) -> None:
    sglang = Sglang()
    async with served(backend, sglang) as server, BackendClient() as client:
        talk = server.session(client)
        await talk.turn([1, 2], 8, 0)
        sglang.label = "v1"
        sample = await talk.turn([1, 2], 8, 1)
    assert sample.policy_versions == ("v1",) * 3
    assert (talk.stats.sampled_tokens, talk.stats.discarded_tokens) == (6, 3)


async def test_an_aborted_answer_goes_on_and_an_overflow_is_truncated(backend: Any) -> None:
    inner = Sglang()

    def reply(body: dict[str, Any]) -> Any:
        answer = inner(body)
        if isinstance(answer, dict) and len(body["input_ids"]) == 2:
            answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
        return answer

    async with served(backend, reply) as server, BackendClient() as client, asyncio.timeout(patience(20)):
        sample = await server.session(client).turn([1, 2], 6, 0)
        assert sample.token_ids == (0, 1, 2, 0, 1, 2)
        with pytest.raises(ContextOverflow) as caught:
            await server.session(client).turn([1] * 64, 8, 0)
    assert caught.value.limit == 64
