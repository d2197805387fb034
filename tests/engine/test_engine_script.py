"""Scripted answers, and the log of what was sampled."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_engine.tokens import EngineTokenizer, load_tokenizer
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

ANSWERS = ["I look.\n<tool_call>\n{}\n</tool_call>", "Say it again.", "Say it again.", "Grüße, 世界!"]


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> EngineTokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("script")


@pytest.fixture(scope="module")
def scripted(start_server_process: Callable[..., Any], model_dir: Path, folder: Path) -> Any:
    lines: list[dict[str, Any]] = [
        {"contains": "the first task", "answers": ANSWERS},
        {"contains": "the second task", "answers": ["Another answer."]},
    ]
    script = folder / "script.jsonl"
    script.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    options = ("--script", str(script), "--log-samples", str(folder / "samples.jsonl"))
    return start_server_process(model_dir, *options, "--policy-version", "v1")


def opening(tokenizer: EngineTokenizer, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    prompt = tokenizer.render(messages, tools=None, add_generation_prompt=True)
    return tokenizer.encode(prompt, add_special_tokens=False)


def following(tokenizer: EngineTokenizer, text: str) -> list[int]:
    turn = f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tokenizer.encode(turn, add_special_tokens=False)


def scripted_ids(tokenizer: EngineTokenizer, answer: str) -> list[int]:
    end = tokenizer.eos_token_id
    assert end is not None
    return [*tokenizer.encode(answer, add_special_tokens=False), end]


def sample(server: Any, prompt: list[int], **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.complete(prompt, **{"max_tokens": 200, "ignore_eos": False, **fields})
    return answer


def test_each_turn_gets_its_answer_and_the_probabilities_are_the_models(
    scripted: Any, server: Any, tokenizer: EngineTokenizer
) -> None:
    prompt = opening(tokenizer, "This is the first task.")
    for number, answer in enumerate(ANSWERS):
        choice = sample(scripted, prompt, seed=number)
        assert choice["token_ids"] == scripted_ids(tokenizer, answer)
        assert choice["finish_reason"] == "stop"
        assert choice["text"] == answer
        turn = prompt + choice["token_ids"]
        body = {"prompt": turn, "max_tokens": 1, "prompt_logprobs": 0}
        scores = server.post("/v1/completions", body).json()["choices"][0]["prompt_logprobs"]
        expected = [next(iter(score.values()))["logprob"] for score in scores[len(prompt) :]]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-3)
        prompt = turn + following(tokenizer, "Continue.")
    # The answers are used up, so the model chooses.
    fields = {"max_tokens": 12, "seed": 1, "ignore_eos": True}
    assert sample(scripted, prompt, **fields)["token_ids"] == sample(server, prompt, **fields)["token_ids"]


def test_a_line_that_fits_none_leaves_the_choice_to_the_model(
    scripted: Any, server: Any, tokenizer: EngineTokenizer
) -> None:
    prompt = opening(tokenizer, "This is a third task.")
    fields = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
    assert sample(scripted, prompt, **fields)["token_ids"] == sample(server, prompt, **fields)["token_ids"]


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.0}])
def test_truncation_does_not_cut_off_a_scripted_token(
    scripted: Any, tokenizer: EngineTokenizer, truncation: dict[str, Any]
) -> None:
    choice = sample(scripted, opening(tokenizer, "This is the first task."), seed=1, **truncation)
    assert choice["token_ids"] == scripted_ids(tokenizer, ANSWERS[0])
    assert all(-1e4 < score <= 0 for score in choice["logprobs"]["token_logprobs"])


def test_an_answer_that_was_cut_is_continued_where_it_ends(scripted: Any, tokenizer: EngineTokenizer) -> None:
    prompt, ids = opening(tokenizer, "This is the first task."), scripted_ids(tokenizer, ANSWERS[0])
    begun = sample(scripted, prompt, max_tokens=3)
    assert (begun["token_ids"], begun["finish_reason"]) == (ids[:3], "length")
    assert sample(scripted, prompt + ids[:3])["token_ids"] == ids[3:]
    assert sample(scripted, prompt + ids[:-1])["token_ids"] == ids[-1:]


def test_an_answer_that_the_task_itself_mentions_is_not_taken_as_given(
    scripted: Any, tokenizer: EngineTokenizer
) -> None:
    prompt = opening(tokenizer, f"This is the first task. Answer '{ANSWERS[0]}' or {ANSWERS[0]} please.")
    assert sample(scripted, prompt)["token_ids"] == scripted_ids(tokenizer, ANSWERS[0])


async def test_conversations_at_once_each_get_their_answers_and_the_log_has_all(
    scripted: Any, tokenizer: EngineTokenizer, folder: Path
) -> None:
    end = scripted_ids(tokenizer, "")

    async def play(client: Any, number: int) -> list[dict[str, Any]]:
        first = number % 2 == 0
        prompt = opening(tokenizer, f"Number {number}: the {'first' if first else 'second'} task.")
        turns = []
        for turn in range(len(ANSWERS) if first else 1):
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 200, "logprobs": 0, "seed": turn}}
            headers = {"X-Request-Id": f"rollout-{number}-{turn}"}
            answer = await client.post("/inference/v1/generate", json=body, headers=headers)
            choice = answer.json()["choices"][0]
            turns.append({"prompt_ids": prompt, "ids": choice["token_ids"], "choice": choice})
            prompt = [*prompt, *choice["token_ids"], *following(tokenizer, "Continue.")]
        assert prompt.count(end[0]) > len(turns)
        return turns

    async with scripted.client() as client:
        rollouts = await asyncio.gather(*(play(client, number) for number in range(8)))
    logged = {
        entry["request_id"]: entry
        for entry in map(json.loads, (folder / "samples.jsonl").read_bytes().splitlines())
    }
    for number, turns in enumerate(rollouts):
        answers = ANSWERS if number % 2 == 0 else ["Another answer."]
        assert [turn["ids"] for turn in turns] == [scripted_ids(tokenizer, answer) for answer in answers]
        for index, turn in enumerate(turns):
            entry = logged[f"generate-tokens-rollout-{number}-{index}"]
            assert (entry["prompt_ids"], entry["ids"]) == (turn["prompt_ids"], turn["ids"])
            assert entry["versions"] == [{"version": "v1", "start": 0, "end": len(turn["ids"])}]
            assert entry["finish_reason"] == "stop"
            scores = [token["logprob"] for token in turn["choice"]["logprobs"]["content"]]
            assert entry["logprobs"] == scores


async def test_a_request_whose_client_left_is_logged_with_what_it_had(
    start_server_process: Callable[..., Any], model_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "samples.jsonl"
    server = start_server_process(model_dir, "--log-samples", str(log))
    body = {"token_ids": [5, 6], "sampling_params": {"ignore_eos": True, "max_tokens": 2000}, "stream": True}
    async with (
        server.client() as client,
        client.stream("POST", "/inference/v1/generate", json=body) as stream,
    ):
        await anext(stream.aiter_lines())
    (line,) = (await eventually(log.read_bytes)).splitlines()
    entry = json.loads(line)
    assert entry["finish_reason"] == "abort"
    assert entry["prompt_ids"] == [5, 6]
    assert 1 <= len(entry["ids"]) == len(entry["logprobs"]) < 2000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no line"),
        ("\n  \n", "has no line"),
        ('{"answers": ["a"]}\n{', "line 2: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ("[]", "line 1: it must be an object"),
        ('{"contain": "a", "answers": ["b"]}', "line 1: 'contain' is unknown"),
        ('{"contains": 1, "answers": ["b"]}', "line 1: 'contains' must be a text"),
        ('{"contains": "a"}', "line 1: 'answers' must be a list"),
        ('{"answers": []}', "line 1: 'answers' must be a list of texts with at least one"),
        ('{"answers": ["a", ""]}', "line 1: 'answers[1]' must be a text"),
        ('{"answers": ["a<|im_end|>b"]}', "line 1: 'answers[0]' has <|im_end|>"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_bad_script_is_named_in_one_line(
    model_dir: Path, tmp_path: Path, text: str | bytes | None, said: str
) -> None:
    script = tmp_path / "script.jsonl"
    if text is not None:
        script.write_bytes(text if isinstance(text, bytes) else text.encode())
    ended = subprocess.run(
        [sys.executable, "-m", "rollyard_engine", "--model", model_dir, "--port", "0", "--script", script],
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_log_that_cannot_be_written_is_named(model_dir: Path, tmp_path: Path) -> None:
    log = tmp_path / "no" / "samples.jsonl"
    ended = subprocess.run(
        [sys.executable, "-m", "rollyard_engine", "--model", model_dir, "--port", "0", "--log-samples", log],
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )
    assert ended.returncode == 2
    assert f"--log-samples: {log} cannot be written: No such file or directory" in ended.stderr
