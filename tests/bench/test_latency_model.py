"""The pipeline figures' instrument counts turns in the prompt; its template never rewrites history."""

import statistics
from pathlib import Path
from typing import Any

import orjson
import pytest
from rollyard_bench.model_servers import MEAN_TOKENS, LatencyModel, PacedModel, make_tokenizer, write_folder
from rollyard_pipeline.chat.template import ChatTemplate
from rollyard_pipeline.chat.tokenizer import load_folder
from rollyard_pipeline.tool_parsers.json_calls import HermesParser

TURNS = 3


@pytest.mark.parametrize("content", ["hello", "assistant\né<|im_end|>", "a"])
def test_an_episode_takes_as_many_calls_as_asked_and_ends_with_submit(content: str, tmp_path: Path) -> None:
    write_folder(tmp_path)
    tokenizer, source = load_folder(tmp_path)
    template = ChatTemplate(source, tokenizer.variables())
    model = LatencyModel(latency=0.0, turns=TURNS)
    messages = [{"role": "user", "content": "Take four steps."}]
    called = []
    ids: list[int] = []
    for _ in range(TURNS):
        prompt = tokenizer.encode(template.render(messages))
        assert prompt[: len(ids)] == ids
        answer = model.completion({"model": "m", "prompt": prompt})["choices"][0]
        assert answer["prompt_token_ids"] == prompt
        assert len(answer["token_ids"]) == len(answer["logprobs"]["token_logprobs"])
        ids = prompt + answer["token_ids"]
        (call,) = HermesParser().parse(answer["text"]).calls
        called.append(call.name)
        function = {"name": call.name, "arguments": call.arguments}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "content": content})
    assert called == ["bash", "bash", "submit"]


def test_no_more_tokens_than_asked_for() -> None:
    answer = LatencyModel(latency=0.0, turns=1).completion({"prompt": [], "max_tokens": 1})["choices"][0]
    assert len(answer["token_ids"]) == len(answer["logprobs"]["token_logprobs"]) == 1


async def _posted(model: LatencyModel, path: str, body: object) -> tuple[int, Any]:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": orjson.dumps(body)}

    async def send(message: Any) -> None:
        sent.append(message)

    await model({"type": "http", "path": path}, receive, send)
    return sent[0]["status"], orjson.loads(sent[1]["body"])


async def test_what_only_looks_whether_the_server_works_is_answered_at_once() -> None:
    model = LatencyModel(latency=3600.0, turns=1)
    # A worker finds out in this way what a backend can do. A 5xx would open the backend's circuit.
    assert (await _posted(model, "/v1/completions", {}))[0] == 400
    status, answer = await _posted(model, "/v1/completions", {"prompt": [1], "max_tokens": 1})
    assert (status, len(answer["choices"][0]["token_ids"])) == (200, 1)


def test_a_paced_answer_is_the_seed_s_and_is_due_at_its_pace() -> None:
    asks = [{"prompt": [1, 2], "seed": seed, "max_tokens": 200} for seed in range(400)]
    fast, slow = PacedModel(0.001), PacedModel(4.0)
    counts = [fast.count(ask) for ask in asks]
    assert counts == [slow.count(ask) for ask in asks], "two servers give the same answer"
    assert statistics.mean(counts) == pytest.approx(MEAN_TOKENS, rel=0.05)
    assert statistics.stdev(counts) == pytest.approx(6.2, rel=0.1)
    for ask, count in zip(asks[:20], counts, strict=False):
        choice = slow.completion(ask)["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == count
        assert make_tokenizer().decode(choice["token_ids"]) == choice["text"]
    assert slow.count(asks[0] | {"max_tokens": 3}) == 3


async def test_lateness_is_what_an_answer_took_beyond_its_pace() -> None:
    model = PacedModel(0.0)
    assert (await _posted(model, "/v1/completions", {"prompt": [1], "seed": 1}))[0] == 200
    await _posted(model, "/v1/completions", {"prompt": [1], "max_tokens": 1})
    status, answer = await _posted(model, "/late", {})
    assert status == 200
    assert len(answer["seconds"]) == 1, "a probe of the server is not counted"
    assert answer["seconds"][0] >= 0.0
