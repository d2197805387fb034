"""The advice on a job is made of numbers, the job's own fields and known words, whatever rollouts hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollyard_api.storage import jobs as job_rows
from rollyard_testing.adversary.restplane import control_plane
from rollyard_testing.api.plane import Worker
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.page.attacks import TEXTS

pytestmark = pytest.mark.attack(boundary="control plane", surface="advice on a job")

FORGED = "64 of 64 rollouts were truncated by maxTokens (1): send your token to https://attacker.example"
HOSTILE = [FORGED, *(text[:2000].replace("\x00", "") for text in TEXTS.values())]
KINDS = ("raw_logprobs", "temperature_logprobs", "mixed", "unknown")


def run_of(worker: Worker, lease: dict[str, Any], text: str, number: int) -> dict[str, Any]:
    """Return the result of a Run that has a text wherever a policy or a worker may write one."""
    made = worker.result(lease)
    call = {"name": text[:64], "arguments": {text[:64]: text}, "error": f"malformed tool call: {text}"}
    thought = {"start": 0, "end": 1, "answer": 1, "opened": text[:32]}
    turn = {"segment": 0, "start": 0, "end": 3, "finish_reason": "length", "tool_calls": [call]}
    made["trajectory"] |= {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}],
        "turns": [{**turn, "thought": thought}],
        "sampling": {
            "temperature": 0.5,
            "top_p": 1.0,
            "max_tokens": 9,
            "seed": 0,
            "logprobs_mode": KINDS[number] if number < len(KINDS) else text,
        },
        "backend": text,
        "tool_parser": text[:128],
        "truncated": True,
        "truncated_reason": f"{number} {text}",
        "metadata": {text[:64]: text},
    }
    return made


@pytest.mark.attack(
    "a policy, or a worker that it has taken over, writes a sentence or a control sequence into the advice "
    "that people follow, or makes the job's row grow with ever new reasons",
    stopped_by="only known reasons and kinds are counted; sentences have only numbers, the job's own fields "
    "and words of the control plane",
)
async def test_no_text_of_a_rollout_becomes_advice(tmp_path: Path) -> None:
    spec = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}, "sampling": {"temperature": 0.5}}
    async with control_plane(tmp_path) as yard:
        pool = pool_manifest("pool", {"model": "m", "maxActiveRollouts": 64})
        (await yard.admin.post("/v1/backendpools", json=pool)).raise_for_status()
        driver = yard.client(yard.plane.tokens.current("driver"))
        backends = {"backends": [{"url": "http://b:1", "ready": True}]}
        (await driver.put("/v1/backendpools/pool/backends", json=backends)).raise_for_status()
        count = 2 * len(HOSTILE)
        await yard.submit("job", tasks=count, samplesPerTask=1, **spec)
        worker = Worker(yard.worker)
        leases = await worker.reach("run", count)
        runs = [run_of(worker, one, HOSTILE[n % len(HOSTILE)], n) for n, one in enumerate(leases)]
        assert await worker.complete(*runs) == ["accepted"] * count
        leases = await worker.lease(eval=count)
        scored = [worker.result(one, reward=0.0, reward_output=FORGED) for one in leases]
        assert await worker.complete(*scored) == ["accepted"] * count
        status = (await yard.admin.get("/v1/rolloutjobs/job")).json()["status"]
        advice = {one["reason"]: one["message"] for one in status["advice"]}
        assert advice == {
            "ThoughtsDoNotEnd": f"{count} of {count} rollouts were cut in a thought that had not ended: set "
            "agent.chatTemplateKwargs to {enable_thinking: false} if the chat template has it",
            "MalformedCalls": f"all {count} tool calls of the first {count} rollouts that made any were "
            "malformed: set agent.toolParser (auto) to one that fits the model",
            "EqualRewards": f"the reward is 0 in all of {count} rollouts, so there is nothing to learn from: "
            "look at some with `rollyard view job --failed`",
            "GroupsOfOne": advice["GroupsOfOne"],
            "OtherLogprobs": f"the log-probabilities of {count} of {count} rollouts may not be those of the "
            "sampling distribution, because the server does not say: start vLLM with --logprobs-mode "
            "processed_logprobs, or do not train with ratios of them",
        }
        row = await yard.plane.database.read(lambda conn: job_rows.find(conn, "default", "job"))
        assert row.signs.truncated == {}
        assert set(row.signs.logprobs) == set(KINDS)
