"""What the server says it sampled is compared with forward passes made here."""

from __future__ import annotations

import asyncio
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

TOLERANCE = 1e-3
PROMPT = [int(x) for x in np.random.default_rng(1).integers(3, 300, 150)]


def all_logits(model_dir: Path, token_ids: list[int]) -> NDArray[np.float64]:
    """Return one plain forward pass over all ids (shape ``[length, vocabulary]``) by onnxruntime alone."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model_dir / "model.onnx", options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {
        "input_ids": np.array([token_ids], dtype=np.int64),
        "attention_mask": np.ones((1, len(token_ids)), dtype=np.int64),
    }
    config = json.loads((model_dir / "genai_config.json").read_text())["model"]["decoder"]
    shape = (1, config["num_key_value_heads"], 0, config["head_size"])
    for entry in session.get_inputs():
        if entry.name.startswith("past_key_values"):
            feeds[entry.name] = np.zeros(shape, dtype=np.float32)
        elif entry.name == "position_ids":
            feeds[entry.name] = np.arange(len(token_ids), dtype=np.int64)[None]
    logits: NDArray[np.float64] = session.run(["logits"], feeds)[0][0].astype(np.float64)
    return logits


def reference(
    model_dir: Path, prompt: list[int], sampled: list[int], temperature: float, top_k: int = 0
) -> list[float]:
    """Return the log-probabilities of ``sampled`` after ``prompt``."""
    logits = all_logits(model_dir, [*prompt, *sampled])[len(prompt) - 1 : -1] / temperature
    if top_k:
        kth = np.sort(logits, axis=-1)[:, -top_k]
        logits[logits < kth[:, None]] = -np.inf
    logprobs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    return [float(logprobs[index, token]) for index, token in enumerate(sampled)]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 0), (1.3, 20)])
def test_logprobs_are_those_of_an_independent_forward_pass(
    server: Any, model_dir: Path, temperature: float, top_k: int
) -> None:
    choice = server.complete(PROMPT, max_tokens=60, temperature=temperature, top_k=top_k, seed=5)
    assert choice["prompt_token_ids"] == PROMPT
    assert len(choice["token_ids"]) == 60
    expected = reference(model_dir, PROMPT, choice["token_ids"], temperature, top_k)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def test_greedy_takes_the_likeliest_token_and_reports_its_plain_logprob(server: Any, model_dir: Path) -> None:
    choice = server.complete(PROMPT, max_tokens=30, temperature=0.0, seed=5)
    logits = all_logits(model_dir, [*PROMPT, *choice["token_ids"]])[len(PROMPT) - 1 : -1]
    assert choice["token_ids"] == logits.argmax(axis=-1).tolist()
    expected = reference(model_dir, PROMPT, choice["token_ids"], 1.0)
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)


def prompt_scores(answer: dict[str, Any]) -> tuple[list[int], list[dict[str, Any]]]:
    """Return the ids and entries of ``prompt_logprobs``. Each object starts with the prompt's own token."""
    first, *others = answer["prompt_logprobs"]
    assert first is None
    pairs = [next(iter(entry.items())) for entry in others]
    return [int(token) for token, _ in pairs], [entry for _, entry in pairs]


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_prompt_logprobs_are_the_raw_ones_of_an_independent_forward_pass(
    server: Any, model_dir: Path, path: str
) -> None:
    # It leaves a kept cache of this prompt, which must not serve.
    server.complete(PROMPT, max_tokens=3, seed=1)
    sampling = {"max_tokens": 2, "temperature": 0.5, "top_k": 3, "prompt_logprobs": 2, "seed": 1}
    if path == "/v1/completions":
        body = {"prompt": PROMPT, **sampling}
    else:
        body = {"token_ids": PROMPT, "sampling_params": sampling}
    answer = server.post(path, body).json()
    scored = answer if "prompt_logprobs" in answer else answer["choices"][0]
    ids, entries = prompt_scores(scored)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ids == PROMPT[1:]
    expected = reference(model_dir, PROMPT[:1], ids, 1.0)
    assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=TOLERANCE)
    logits = all_logits(model_dir, PROMPT)
    for position, (entry, whole) in enumerate(zip(entries, scored["prompt_logprobs"][1:], strict=True)):
        assert entry["rank"] == int((logits[position] >= logits[position, ids[position]]).sum())
        likeliest = [int(token) for token in np.argsort(-logits[position])[:2]]
        assert {str(token) for token in (ids[position], *likeliest)} == set(whole)
        assert [whole[str(token)]["rank"] for token in likeliest] == [1, 2]
    piece = server.post("/detokenize", {"tokens": [ids[0]]}).json()["prompt"]
    assert entries[0]["decoded_token"] == piece


async def test_a_scored_prompt_disturbs_no_other_sequence(server: Any) -> None:
    sampled = {"token_ids": [4, 4, 4], "sampling_params": {"max_tokens": 200, "seed": 1, "temperature": 2.0}}
    sampled["sampling_params"] |= {"logprobs": 0, "ignore_eos": True}
    scored = {"token_ids": [5, *PROMPT], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    async with server.client() as client:

        async def choice() -> Any:
            answer = (await client.post("/inference/v1/generate", json=sampled)).json()["choices"][0]
            return answer["token_ids"], answer["logprobs"]

        server.post("/reset_prefix_cache")
        alone = await choice()
        server.post("/reset_prefix_cache")
        beside, *answers = await asyncio.gather(
            choice(), *(client.post("/inference/v1/generate", json=scored) for _ in range(4))
        )
    assert beside == alone
    scores = [answer.json()["prompt_logprobs"] for answer in answers]
    assert all(score == scores[0] for score in scores)
    assert len(scores[0]) == len(PROMPT) + 1


def test_the_next_turn_continues_from_the_kept_cache_with_the_same_numbers(
    server: Any, model_dir: Path
) -> None:
    outside = [int(x) for x in np.random.default_rng(2).integers(3, 300, 20)]
    prompt = [7, 8, *PROMPT[:90]]
    first = server.complete(prompt, max_tokens=25, seed=1)
    turn = [*prompt, *first["token_ids"], *outside]
    second = server.complete(turn, max_tokens=25, seed=2)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) + 24
    expected = reference(model_dir, turn, second["token_ids"], 1.0)
    assert second["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)

    assert server.post("/reset_prefix_cache").json() == {"success": True}
    again = server.complete(turn, max_tokens=25, seed=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["token_ids"] == second["token_ids"]
    assert again["logprobs"]["token_logprobs"] == pytest.approx(
        second["logprobs"]["token_logprobs"], abs=TOLERANCE
    )


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(server: Any) -> None:
    def body(seed: int) -> dict[str, Any]:
        return {
            "token_ids": [seed + 3, *PROMPT],
            "sampling_params": {
                "max_tokens": 30,
                "seed": seed,
                # This is hot enough that the sharp policy does not sample the same twice.
                "temperature": 2.0,
                "logprobs": 0,
                "ignore_eos": True,
            },
        }

    async with server.client() as client:

        async def generate(seed: int) -> tuple[list[int], list[float]]:
            answer = await client.post("/inference/v1/generate", json=body(seed))
            choice = answer.json()["choices"][0]
            return choice["token_ids"], [item["logprob"] for item in choice["logprobs"]["content"]]

        server.post("/reset_prefix_cache")
        alone = [await generate(seed) for seed in range(4)]
        server.post("/reset_prefix_cache")
        crowd = await asyncio.gather(*(generate(seed) for seed in range(24)))
    assert crowd[:4] == alone
    assert len({tuple(tokens) for tokens, _ in crowd}) == 24


def test_a_stream_adds_up_to_the_whole_answer(server: Any) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 40, "seed": 9, "logprobs": 1, "return_token_ids": True}
    server.post("/reset_prefix_cache")
    whole = server.post("/v1/completions", fields).json()
    server.post("/reset_prefix_cache")
    streamed = server.post(
        "/v1/completions", {**fields, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert chunks.pop()["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks]
    expected = whole["choices"][0]
    assert choices[0]["prompt_token_ids"] == PROMPT
    assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for choice in choices for item in choice["logprobs"][name]] == expected["logprobs"][name]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == expected["finish_reason"]


def test_a_stream_may_have_many_tokens_in_an_event(server: Any) -> None:
    params = {"max_tokens": 40, "seed": 9, "logprobs": 0, "ignore_eos": True, "stream_interval": 16}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"token_ids": PROMPT, "sampling_params": params, "stream": True, "stream_options": options}
    lines = server.post("/inference/v1/generate", body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {len(PROMPT)}
    sizes = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks if chunk["choices"]]
    # The first token is sent at once. What the engine has sampled when an event is written is part of it.
    assert sum(sizes) == 40
    assert len(sizes) <= 4
    assert all(total > 16 * index for index, total in enumerate(accumulate(sizes[:-1])))


def test_reloaded_weights_sample_and_the_old_ones_come_back(
    own_server: Any, model_dir: Path, other_weights: Path
) -> None:
    for folder in (other_weights, model_dir):
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        answer = own_server.post("/collective_rpc", rpc)
        assert (answer.status_code, answer.json()) == (200, {"results": [None]})
        choice = own_server.complete(PROMPT, max_tokens=20, seed=3)
        assert choice["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        measured = choice["logprobs"]["token_logprobs"]
        assert measured == pytest.approx(reference(folder, PROMPT, choice["token_ids"], 1.0), abs=TOLERANCE)
        other = model_dir if folder is other_weights else other_weights
        stale = reference(other, PROMPT, choice["token_ids"], 1.0)
        assert np.abs(np.array(measured) - stale).max() > 10 * TOLERANCE
