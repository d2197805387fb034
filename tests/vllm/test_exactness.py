"""Every token of random dialogues over many chat templates is what a real vLLM server sampled.

The jobs run through the product's own path: control plane, stage worker, router, two servers. A proxy
before each server records what was said; the checker compares it with what the REST API answers, and
transformers computes every log-probability again. An agent that makes ids of text once more is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rollyard_testing.families import FAMILIES
from rollyard_testing.invariants import invariant
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.vllm.checker import Answer, compare, judge, passes
from rollyard_testing.vllm.forward import Forward
from rollyard_testing.vllm.servers import MAX_MODEL_LEN, VllmServer
from rollyard_testing.vllm.stage import MAX_TOKENS, Stage, Trajectory, tasks

MakeStage = Callable[..., AbstractContextManager[Stage]]

PLAYED = ("qwen3", "qwen3_coder", "llama3", "mistral_v3", "deepseek_v3", "gpt_oss", "chatml")
TASKS, SAMPLES = 2, 6
TEMPERATURES = (1.0, 0.7)
SECONDS = patience(240.0)


@dataclass(frozen=True, slots=True)
class Played:
    """The results of a run: what the REST API answers, and what the proxies recorded."""

    trajectories: list[Trajectory]
    served: list[Answer]
    family: dict[str, str]
    """The family of each job."""


@pytest.fixture(scope="module")
def played(vllm_fleet: list[VllmServer], stage: MakeStage) -> Played:
    """Return groups of dialogues in every family's template, at two temperatures, over both servers."""
    for server in vllm_fleet:
        server.heal()
    family_of: dict[str, str] = {}
    expected: dict[str, set[tuple[str, int]]] = {}
    with stage() as there:
        there.product.worker("w0")
        for family in PLAYED:
            pool, parser = there.pool(family), FAMILIES[family].parser
            for temperature in TEMPERATURES:
                job = f"{pool}-{int(temperature * 10)}"
                family_of[job] = family
                expected[job] = there.product.job(
                    job, pool, tasks(job, TASKS, turns=5), SAMPLES,
                    parser="auto", tools=("lookup",) if parser else (),
                    sampling={"temperature": temperature, "maxTokens": MAX_TOKENS, "seed": 7},
                )  # fmt: skip
        found = [one for job, pairs in expected.items() for one in there.product.results(job, pairs, SECONDS)]
        return Played(found, there.served(), family_of)


def test_every_sampled_token_is_the_servers(played: Played) -> None:
    failed = [
        (one["id"], one["reason"], one["message"])
        for one in played.trajectories
        if one["status"] != "succeeded"
    ]
    assert failed == []
    assert len(played.trajectories) == len(PLAYED) * len(TEMPERATURES) * TASKS * SAMPLES
    verdict = judge(played.trajectories, played.served)
    with invariant():
        assert verdict.findings == []
        assert verdict.unused == []
    masked_in = sum(sum(segment["loss_mask"]) for one in played.trajectories for segment in one["segments"])
    assert verdict.tokens == masked_in
    assert verdict.turns == sum(len(one["turns"]) for one in played.trajectories)
    # The dialogues are what they are meant to be: many turns, in every family, over both servers.
    for job, family in played.family.items():
        mine = [one for one in played.trajectories if one["job"] == job]
        assert sum(len(one["turns"]) for one in mine) >= 3 * len(mine), family
    assert {answer.server for answer in played.served} == {one["backend"] for one in played.trajectories}
    assert len({answer.server for answer in played.served}) == 2
    if any(FAMILIES[family].think for family in PLAYED):
        assert any(one["template_breaks"] for one in played.trajectories)
    calls = sum(len(turn["tool_calls"]) for one in played.trajectories for turn in one["turns"])
    assert calls > len(played.trajectories) / 4


def test_a_fresh_forward_pass_agrees(played: Played, forward: Forward, vllm_model: Path) -> None:
    asked = list(passes(played.trajectories))
    agreement = compare(asked, forward.logprobs(vllm_model, asked))
    assert agreement.findings == []
    assert agreement.tokens == sum(
        sum(segment["loss_mask"]) for one in played.trajectories for segment in one["segments"]
    )
    # It would agree with nothing in particular if the model were indifferent.
    recorded = [value for one in asked for value in one.recorded]
    mean = sum(recorded) / len(recorded)
    assert sum((value - mean) ** 2 for value in recorded) / len(recorded) >= 1.0


def test_without_options_nothing_cuts_a_thought(vllm_servers: list[VllmServer], stage: MakeStage) -> None:
    questions = [{"id": f"q{n}", "prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    with stage() as there:
        there.product.worker("w0")
        spec = {
            "tasks": {"inline": questions},
            "handler": "math",
            "samplesPerTask": 4,
            "agent": {"type": "single_turn"},
            "backendRef": {"name": there.pool("qwen3")},
        }
        with there.product.http() as http:
            http.post("/v1/rolloutjobs", json=job_manifest("plain", spec)).raise_for_status()
        expected = {(question["id"], sample) for question in questions for sample in range(4)}
        found = there.product.results("plain", expected, SECONDS)
        served = there.served()
    assert judge(found, served).findings == []
    assert {(one["status"], one["truncated_reason"]) for one in found} == {("succeeded", "")}
    assert {turn["finish_reason"] for one in found for turn in one["turns"]} == {"stop"}
    # Each request could have had all that its prompt left of the server's context.
    asked = [answer for answer in served if answer.parameters["max_tokens"] > 1]
    assert {len(answer.prompt) + answer.parameters["max_tokens"] for answer in asked} == {MAX_MODEL_LEN}


def forward_checks(forward: Forward, model: Path, trajectories: list[Trajectory]) -> tuple[int, int]:
    """Return how many tokens a fresh forward pass disagrees with, and of how many."""
    asked = list(passes(trajectories))
    agreement = compare(asked, forward.logprobs(model, asked))
    return len(agreement.findings), agreement.tokens


def test_it_fails_when_an_agent_retokenizes(
    vllm_servers: list[VllmServer], stage: MakeStage, forward: Forward, vllm_model: Path
) -> None:
    """A wrong agent runs in the real product: text of the sampled turn is made into ids once more."""
    with stage() as there:
        there.product.worker("w0")
        pool = there.pool("qwen3")
        expected = there.product.job(
            "wrong", pool, tasks("wrong", 2, turns=4, tokenizer=str(vllm_model / "tokenizer.json")), 4,
            agent="retokenizing",
            sampling={"temperature": 1.0, "maxTokens": MAX_TOKENS},
        )  # fmt: skip
        found = there.product.results("wrong", expected, SECONDS)
        verdict = judge(found, there.served())
    assert "ids" in verdict.checks
    assert "unused" in verdict.checks
    wrong, _ = forward_checks(forward, vllm_model, found)
    assert wrong >= 1


@pytest.mark.nightly
def test_it_finds_out_a_server_with_raw_logprobs(
    completions_server: VllmServer, stage: MakeStage, forward: Forward, vllm_model: Path
) -> None:
    """With log-probabilities before the temperature the record is faithful, says so, and fits no trainer."""
    with stage([completions_server]) as there:
        there.product.worker("w0")
        pool = there.pool("chatml")
        expected = there.product.job(
            "raw", pool, tasks("raw", 2, turns=3), 4, tools=(),
            sampling={"temperature": 0.7, "maxTokens": MAX_TOKENS},
        )  # fmt: skip
        found = there.product.results("raw", expected, SECONDS)
        # Through /v1/completions, which such a server has instead, every id is exact all the same.
        assert judge(found, there.served()).findings == []
    completions_server.stop()
    assert {one["sampling"]["logprobs_mode"] for one in found} == {"raw_logprobs"}
    wrong, tokens = forward_checks(forward, vllm_model, found)
    assert wrong > tokens / 4
    for one in found:
        one["sampling"]["temperature"] = 1.0
    assert forward_checks(forward, vllm_model, found) == (0, tokens)
