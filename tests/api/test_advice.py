"""What a job says about its settings, from what its ended rollouts show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rollyard_api.core.codec import dumps, loads
from rollyard_api.jobs import manifests
from rollyard_api.jobs.advice import FEWEST, MANY, advice_on
from rollyard_api.machine.events import RunCounts, RunDone
from rollyard_api.machine.signs import NO_SIGNS, Signs, doubtful_kind
from rollyard_api.rollouts import reports
from rollyard_api.storage.rows import JobRow
from rollyard_crds.rolloutjob import Advice, RolloutJob
from rollyard_testing.api.plane import SEGMENT, Worker, make_manifest, serving
from rollyard_testing.crds.segments import reported
from rollyard_testing.manifests import pool_manifest

POLICY = {"agent": {"type": "tools"}, "backendRef": {"name": "pool"}}
"""The part of a spec that lets a model sample."""
POOL = pool_manifest("pool", {"model": "tiny", "maxActiveRollouts": 64})
MALFORMED = {"name": "", "error": "malformed tool call: </tool_call> is missing"}
CUT = {"name": "", "error": "only the first 64 calls of a turn are run"}
UNKNOWN = {"name": "bsh", "error": "unknown tool 'bsh'; tools: bash"}
GOOD = {"name": "bash", "arguments": {"command": "ls"}}


def turn(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"segment": 0, "start": 0, "end": 3, "finish_reason": "stop", "tool_calls": list(calls), **fields}


REPLAYED = turn(GOOD, finish_reason="replayed", start=0, end=0)
OPEN = {"start": 7, "end": 10, "answer": 10}
CLOSED = {"start": 7, "end": 10, "answer": 18}


def counts_of(**fields: Any) -> RunCounts:
    """Return what the control plane counts in a Run's report whose trajectory has these fields."""
    names = dict.fromkeys(("id", "job", "task_id", "group_id"), "x")
    trajectory = names | {"sample_index": 0, "segments": [SEGMENT], **fields}
    item = reported({"rollout": "x", "token": 1, "stage": "run", "trajectory": trajectory})
    (report,), _ = reports.check_results({"worker": "w", "results": [item]})
    assert isinstance(report.event, RunDone)
    return report.event.counts


@pytest.mark.parametrize(
    ("turns", "total", "malformed"),
    [
        ([], 0, 0),
        ([turn()], 0, 0),
        ([turn(MALFORMED, MALFORMED), turn(MALFORMED)], 3, 3),
        ([turn(MALFORMED, CUT)], 1, 1),
        ([turn(MALFORMED), REPLAYED], 1, 1),
        ([turn({**MALFORMED, "name": "bash"}), turn(GOOD)], 2, 1),
        ([turn(UNKNOWN)], 1, 0),
    ],
)
def test_what_counts_as_a_call(turns: list[dict[str, Any]], total: int, malformed: int) -> None:
    counts = counts_of(turns=turns)
    assert (counts.written_calls, counts.malformed_calls) == (total, malformed)


@pytest.mark.parametrize(
    ("turns", "is_open"),
    [
        ([], False),
        ([turn(finish_reason="length")], False),
        ([turn(finish_reason="length", thought=OPEN)], True),
        ([turn(finish_reason="abort", thought=OPEN)], True),
        ([turn(finish_reason="length", thought=CLOSED)], False),
        ([turn(finish_reason="stop", thought=OPEN)], False),
        ([turn(finish_reason="length", thought=OPEN), turn(finish_reason="length")], False),
    ],
)
def test_what_counts_as_a_thought_that_was_cut(turns: list[dict[str, Any]], is_open: bool) -> None:
    assert counts_of(turns=turns).open_thought is is_open


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("processed_logprobs", ""),
        ("", ""),
        ("raw_logprobs", "raw_logprobs"),
        ("temperature_logprobs", "temperature_logprobs"),
        ("mixed", "mixed"),
        ("unknown", "unknown"),
        ("raw_logits", "unknown"),
        ("\x1b[31mwhatever a server says", "unknown"),
    ],
)
def test_which_log_probabilities_are_doubtful(mode: str, kind: str) -> None:
    sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 9, "seed": 0, "logprobs_mode": mode}
    assert doubtful_kind(mode) == kind
    assert counts_of(sampling=sampling).logprobs == kind
    assert counts_of().logprobs == "", "no model was asked"


def row(signs: Signs, succeeded: int = 64, *, ended: bool = False, **spec: Any) -> JobRow:
    """Return the row of a job with 64 rollouts of which some have a reward."""
    tasks = {"inline": [{"id": "t", "prompt": "p"}]}
    manifest = make_manifest(**{"tasks": tasks, "samplesPerTask": 8, **POLICY, **spec})
    job = RolloutJob.model_validate(manifest)
    known = {
        "id": 1,
        "uid": "u",
        "generation": 1,
        "created_at": 0.0,
        "cancel_reason": None,
        "finished_at": 9.0 if ended else None,
        "deleted_at": None,
        "outage_began": None,
        "total": 64,
        "succeeded": succeeded,
        "signs": signs,
    }
    return JobRow(**(manifests.created(manifests.prepare(job), 0.0, None) | known))


def advice(signs: Signs, succeeded: int = 64, **spec: Any) -> dict[str, str]:
    """Return the messages of the advice on such a job by their reasons."""
    found = [Advice.model_validate(one) for one in advice_on(row(signs, succeeded, **spec))]
    by_reason = {one.reason: one.message for one in found}
    assert len(by_reason) == len(found)
    return by_reason


@pytest.mark.parametrize(
    ("cut", "reason", "message", "spec"),
    [
        (
            "MaxTokens",
            "TruncatedByMaxTokens",
            "60 of 64 rollouts were truncated by maxTokens (1,024): raise sampling.maxTokens",
            {"sampling": {"maxTokens": 1024}},
        ),
        (
            "MaxContext",
            "TruncatedByContext",
            "60 of 64 rollouts were truncated by maxContextTokens (9,000) or the server's context: raise "
            "agent.maxContextTokens, or the server's context (vLLM: --max-model-len) if that is smaller",
            {"agent": {"type": "tools", "maxContextTokens": 9000}},
        ),
        (
            "MaxTurns",
            "TruncatedByMaxTurns",
            "60 of 64 rollouts were truncated by maxTurns (3): raise agent.maxTurns",
            {"agent": {"type": "tools", "maxTurns": 3}},
        ),
        (
            "RunTimeout",
            "TruncatedByTimeLimit",
            "60 of 64 rollouts were truncated by the time limit of Run (1,800 s): raise "
            "stages.run.timeoutSeconds",
            {"stages": {"run": {"timeoutSeconds": 1800}}},
        ),
    ],
)
def test_truncated_rollouts_name_the_limit_and_its_value(
    cut: str, reason: str, message: str, spec: dict[str, Any]
) -> None:
    differing = Signs(lowest=0.0, highest=1.0)
    assert advice(Signs(lowest=0.0, highest=1.0, truncated={cut: 60}), **spec) == {reason: message}
    assert advice(Signs(lowest=0.0, highest=1.0, truncated={cut: 15}), **spec) == {}, "less than a quarter"
    few = Signs(lowest=0.0, highest=1.0, truncated={cut: FEWEST - 1})
    assert advice(few, FEWEST - 1, **spec) == {}, "too few to tell"
    assert reason in advice(few, FEWEST, **spec)
    assert advice(differing, **spec) == {}


def test_a_context_that_is_the_servers_is_named_as_such() -> None:
    job = row(Signs(lowest=0.0, highest=1.0, truncated={"MaxContext": 16}))
    spec = loads(job.spec)
    spec["agent"].pop("maxContextTokens", None)
    (found,) = advice_on(replace(job, spec=dumps(spec)))
    assert found["message"] == (
        "16 of 64 rollouts were truncated by the server's context: raise it (vLLM: --max-model-len)"
    )


def test_thoughts_that_do_not_end_name_the_limit_that_cut_them() -> None:
    signs = Signs(lowest=0.0, highest=1.0, truncated={"MaxTokens": 4, "RunTimeout": 1}, open_thoughts=16)
    sampling = {"maxTokens": 2048}
    assert advice(signs, sampling=sampling) == {
        "ThoughtsDoNotEnd": "16 of 64 rollouts were cut in a thought that had not ended, most of them by "
        "maxTokens (2,048): raise sampling.maxTokens; or set agent.chatTemplateKwargs to "
        "{enable_thinking: false} if the chat template has it"
    }
    agent = {"type": "tools", "chatTemplateKwargs": {"enable_thinking": False}}
    assert advice(signs, sampling=sampling, agent=agent) == {
        "ThoughtsDoNotEnd": "16 of 64 rollouts were cut in a thought that had not ended, most of them by "
        "maxTokens (2,048): raise sampling.maxTokens"
    }
    late = Signs(lowest=0.0, highest=1.0, truncated={"RunTimeout": 15}, open_thoughts=16)
    assert "by the time limit of Run" in advice(late)["ThoughtsDoNotEnd"]


@pytest.mark.parametrize(
    ("lowest", "highest", "succeeded", "ended", "shown"),
    [
        (0.0, 0.0, 64, False, "the reward is 0 in all of 64 rollouts, so there is nothing to learn from: "
         "look at some with `rollyard view job --failed`"),
        (1.0, 1.0, 64, False, "the reward is 1 in all of 64 rollouts, so there is nothing to learn from: "
         "look at some with `rollyard view job`"),
        (0.3, 0.1 + 0.2, MANY, False, "the reward is 0.3 in all of 32 rollouts, so there is nothing to "
         "learn from: look at some with `rollyard view job`"),
        (0.0, 0.0, MANY - 1, False, None),
        (0.0, 0.0, FEWEST, True, "the reward is 0 in all of 8 rollouts, so there is nothing to learn from: "
         "look at some with `rollyard view job --failed`"),
        (0.0, 0.0, FEWEST - 1, True, None),
        (0.0, 1.0, 64, False, None),
    ],
)  # fmt: skip
def test_rewards_that_are_all_equal(
    lowest: float, highest: float, succeeded: int, ended: bool, shown: str | None
) -> None:
    # A group without a signal is no news where all rewards are equal.
    signs = Signs(lowest=lowest, highest=highest, equal_groups=0 if highest > 0.5 > lowest else 64)
    expected = {} if shown is None else {"EqualRewards": shown}
    assert advice(signs, succeeded, ended=ended) == expected


def test_equal_rewards_are_no_news_where_nobody_learns() -> None:
    equal = Signs(lowest=0.0, highest=0.0, equal_groups=8)
    assert "EqualRewards" in advice(equal)
    other = replace(row(equal), namespace="team")
    assert "`rollyard view job -n team --failed`" in advice_on(other)[0]["message"]
    assert advice(equal, agent={"type": "oracle"}) == {}
    assert advice(equal, sampling={"temperature": 0.0}) == {}, "an evaluation of the likeliest answers"


def test_most_groups_have_equal_rewards() -> None:
    def of(equal: int, informative: int, **spec: Any) -> dict[str, str]:
        signs = Signs(lowest=0.0, highest=1.0, equal_groups=equal, informative_groups=informative)
        return advice(signs, **spec)

    assert of(14, 2) == {
        "GroupsOfEqualRewards": "14 of 16 groups have equal rewards and teach nothing: choose tasks that the "
        "model solves sometimes but not always, or let dynamicSampling replace such groups"
    }
    assert of(14, 2, dynamicSampling={"targetGroups": 1, "metric": "answered"}) == {
        "GroupsOfEqualRewards": "14 of 16 groups have no signal and teach nothing: choose tasks that the "
        "model solves sometimes but not always"
    }
    assert of(11, 5) == {}
    assert of(FEWEST - 1, 0) == {}
    assert of(14, 2, samplesPerTask=1, tasks={"stream": True}) == {}, "there are no groups"


def test_groups_of_one_are_said_at_once_but_not_where_the_trainer_makes_groups() -> None:
    message = (
        "each task has one rollout (samplesPerTask: 1), so advantages relative to a group, as in GRPO, are "
        "0: raise samplesPerTask, unless this is an evaluation or the trainer needs no groups (as REINFORCE "
        "and PPO)"
    )
    assert advice(NO_SIGNS, 0, samplesPerTask=1) == {"GroupsOfOne": message}
    assert advice(NO_SIGNS, 0, samplesPerTask=2) == {}
    assert advice(NO_SIGNS, 0, samplesPerTask=1, tasks={"stream": True}) == {}
    assert advice(NO_SIGNS, 0, samplesPerTask=1, agent={"type": "oracle"}) == {}
    assert advice(NO_SIGNS, 0, samplesPerTask=1, sampling={"temperature": 0.0}) == {}


COOL = {"temperature": 0.7}
CUT_OFF = {"topP": 0.9}


@pytest.mark.parametrize(
    ("kinds", "sampling", "words"),
    [
        ({"raw_logprobs": 64}, COOL, "are those before temperature, top-p and top-k, not those of the "
         "sampling distribution: start vLLM with --logprobs-mode processed_logprobs"),
        ({"raw_logprobs": 64}, {"topK": 20}, "are those before temperature"),
        ({"raw_logprobs": 64}, {}, None),
        ({"raw_logprobs": 15}, COOL, None),
        ({"raw_logprobs": 64}, {"temperature": 0.0}, None),
        ({"temperature_logprobs": 64}, CUT_OFF, "are those before top-p and top-k, not those of the "
         "sampling distribution: set sampling.topP to 1 and sampling.topK to -1"),
        ({"mixed": 10, "raw_logprobs": 6}, COOL, "are of several kinds, because the pool's servers differ: "
         "start vLLM with --logprobs-mode processed_logprobs on each of them"),
        ({"mixed": 64}, {}, None),
        ({"unknown": 16}, {}, "may not be those of the sampling distribution, because the server does "
         "not say: start vLLM with --logprobs-mode processed_logprobs, or do not train with ratios of them"),
    ],
)  # fmt: skip
def test_log_probabilities_that_are_not_those_of_the_sampling_distribution(
    kinds: Mapping[str, int], sampling: dict[str, Any], words: str | None
) -> None:
    found = advice(Signs(lowest=0.0, highest=1.0, logprobs=kinds), sampling=sampling)
    if words is None:
        assert found == {}
        return
    part = sum(kinds.values())
    begin = f"the log-probabilities of {part} of 64 rollouts {words}"
    assert found["OtherLogprobs"].startswith(begin)


def test_calls_that_are_all_malformed() -> None:
    signs = Signs(lowest=0.0, highest=1.0, malformed_rollouts=MANY, malformed_calls=1057)
    assert advice(signs, agent={"type": "tools", "toolParser": "hermes"}) == {
        "MalformedCalls": "all 1,057 tool calls of the first 32 rollouts that made any were malformed: set "
        "agent.toolParser (hermes) to one that fits the model"
    }
    few = Signs(lowest=0.0, highest=1.0, malformed_rollouts=MANY - 1, malformed_calls=99)
    assert advice(few) == {}


def test_the_longest_messages_fit_into_a_status() -> None:
    most = 10**9
    truncated = dict.fromkeys(("MaxTokens", "MaxContext", "MaxTurns", "RunTimeout"), most)
    signs = Signs(
        lowest=-1e-6, highest=-1e-6, truncated=truncated, open_thoughts=most, logprobs={"mixed": most},
        equal_groups=most, malformed_rollouts=most, malformed_calls=most,
    )  # fmt: skip
    limits = {"type": "tools", "maxTurns": 10_000, "maxContextTokens": 10_000_000, "toolParser": "x" * 63}
    sampling = {"maxTokens": 1_000_000, "temperature": 0.5}
    found = advice(signs, most, samplesPerTask=1, agent=limits, sampling=sampling)
    assert len(found) == 9


# The counts of a control plane.


async def play(served: Any, turns: Sequence[Mapping[str, Any]], rollouts: int, **fields: Any) -> None:
    """Take so many rollouts to their reward; each has these turns and these further fields of its record."""
    worker, reward = Worker(served.worker), fields.pop("reward", 0.0)
    results = [worker.result(lease) for lease in await worker.reach("run", rollouts)]
    assert len(results) == rollouts
    for result in results:
        result["trajectory"] |= {"turns": list(turns), **fields}
    assert set(await worker.complete(*results)) == {"accepted"}
    assert set(await worker.complete(*results)) == {"repeated"}
    leases = await worker.lease(eval=rollouts)
    scored = [worker.result(lease, reward=reward) for lease in leases]
    assert await worker.complete(*scored) == ["accepted"] * rollouts
    assert await worker.complete(*scored) == ["repeated"] * rollouts


async def said(served: Any) -> dict[str, str]:
    """Return the advice that REST answers have, in the job and in the list of jobs."""
    status = (await served.admin.get("/v1/rolloutjobs/job")).json()["status"]
    (listed,) = (await served.admin.get("/v1/rolloutjobs")).json()["items"]
    assert listed["status"].get("advice") == status.get("advice")
    return {one["reason"]: one["message"] for one in status.get("advice", [])}


def tasks_of(count: int) -> dict[str, Any]:
    return {"inline": [{"id": f"t{n}", "prompt": "p"} for n in range(count)]}


async def test_advice_comes_while_the_job_runs_and_goes_when_it_no_longer_applies(settings: Any) -> None:
    sampled = {"temperature": 0.7, "top_p": 1.0, "max_tokens": 9, "seed": 0, "logprobs_mode": "raw_logprobs"}
    cut = {"truncated": True, "truncated_reason": "MaxTokens", "sampling": sampled}
    thinking = [turn(finish_reason="length", thought=OPEN)]
    async with serving(settings) as served:
        await served.admin.post("/v1/backendpools", json=POOL)
        await served.report_backends("http://b:1")
        sampling = {"temperature": 0.7, "maxTokens": 9}
        await served.submit(tasks=tasks_of(16), samplesPerTask=4, sampling=sampling, **POLICY)
        assert await said(served) == {}
        await play(served, thinking, 4, **cut)
        assert await said(served) == {}, "too few to tell"
        await play(served, thinking, 4, **cut)
        first = {"TruncatedByMaxTokens", "ThoughtsDoNotEnd", "OtherLogprobs"}
        found = await said(served)
        assert set(found) == first
        assert found["TruncatedByMaxTokens"].startswith("8 of 8 rollouts were truncated by maxTokens (9)")
    async with serving(settings) as served:
        assert await said(served) == found, "it is kept over a restart"
        await play(served, thinking, 24, **cut)
        found = await said(served)
        assert set(found) == {*first, "EqualRewards"}
        assert "the reward is 0 in all of 32 rollouts" in found["EqualRewards"]
        await play(served, [turn()], 28, reward=1.0)
        assert set(await said(served)) == {*first, "GroupsOfEqualRewards"}
        await play(served, [turn()], 4, reward=1.0)
        assert (await said(served))["GroupsOfEqualRewards"].startswith("16 of 16 groups have equal rewards")
    async with serving(settings) as served:
        await served.submit("other", tasks=tasks_of(2), samplesPerTask=8, **POLICY)
        status = (await served.admin.get("/v1/rolloutjobs/other")).json()["status"]
        assert "advice" not in status, "another job's rollouts are no concern of this one"


async def test_a_job_without_a_well_formed_call(settings: Any) -> None:
    async with serving(settings) as served:
        await served.submit(tasks=tasks_of(3 * MANY))
        await play(served, [turn()], 4)
        await play(served, [turn(MALFORMED), turn(MALFORMED)], MANY - 1)
        assert "MalformedCalls" not in await said(served), "too few to tell"
        await play(served, [turn(MALFORMED, CUT)], 1)
        expected = f"all {2 * MANY - 1} tool calls of the first {MANY} rollouts that made any were malformed"
        assert (await said(served))["MalformedCalls"].startswith(expected)
    async with serving(settings) as served:
        assert (await said(served))["MalformedCalls"].startswith(expected)
        await play(served, [turn(MALFORMED), turn(GOOD)], 1)
        assert "MalformedCalls" not in await said(served)
        await play(served, [turn(MALFORMED)], MANY)
        assert "MalformedCalls" not in await said(served), "one well-formed call shows that the parser fits"


async def test_rollouts_without_a_reward_are_not_counted(settings: Any) -> None:
    async with serving(settings) as served:
        await served.submit(tasks=tasks_of(8), stages={"eval": {"maxAttempts": 1}})
        worker = Worker(served.worker)
        results = [worker.result(lease) for lease in await worker.reach("run", 8)]
        for result in results:
            result["trajectory"]["truncated_reason"] = "MaxTurns"
        assert set(await worker.complete(*results)) == {"accepted"}
        assert set(await worker.fail_all(await worker.lease(eval=8))) == {"accepted"}
        assert (await served.counts())["failed"] == 8
        assert await said(served) == {}
