"""Advice about the settings of a job, from what its ended rollouts show.

REST calls, `rollyard`, the page and Kubernetes show these sentences. They are made of numbers, of the job's
name and of words of this module: nothing that a policy has written becomes part of them. They follow from the
row of the job alone, so that a request costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct
from rollyard_crds.fields.dynamic_sampling import MIN_STD

from rollyard_api.machine import signs
from rollyard_api.storage.rows import JobRow

FEWEST: Final = 8
"""The fewest rollouts with a reward, or ended groups, from which anything is concluded."""
SHARE: Final = 0.25
"""The share of the rollouts from which advice concerns them."""
EQUAL_SHARE: Final = 0.75
"""The share of groups with equal rewards from which there is advice. Some such groups are in every job."""
MANY: Final = 32
"""The rollouts with equal rewards, or with malformed calls only, from which a job is said to have no others.
Hard tasks begin with a few zeros."""

_TRUNCATED: Final = {
    signs.MAX_TOKENS: "TruncatedByMaxTokens",
    signs.MAX_CONTEXT: "TruncatedByContext",
    signs.MAX_TURNS: "TruncatedByMaxTurns",
    signs.RUN_TIMEOUT: "TruncatedByTimeLimit",
}
"""The reason of the advice by the reason for which trajectories are truncated."""
_CUTS_THOUGHTS: Final = (signs.MAX_TOKENS, signs.MAX_CONTEXT, signs.RUN_TIMEOUT)
_KINDS: Final = {
    signs.RAW: "are those before temperature, top-p and top-k, not those of the sampling distribution",
    signs.TEMPERATURE: "are those before top-p and top-k, not those of the sampling distribution",
    signs.MIXED: "are of several kinds, because the pool's servers differ",
    signs.UNKNOWN: "may not be those of the sampling distribution, because the server does not say",
}
_NO_THINKING: Final = "set agent.chatTemplateKwargs to {enable_thinking: false} if the chat template has it"
_FLAG: Final = "start vLLM with --logprobs-mode processed_logprobs"
_REMEDIES: Final = {
    signs.RAW: _FLAG,
    signs.TEMPERATURE: "set sampling.topP to 1 and sampling.topK to -1",
    signs.MIXED: f"{_FLAG} on each of them",
    signs.UNKNOWN: f"{_FLAG}, or do not train with ratios of them",
}


LONG_WAIT: Final = 0.25
"""The share of the limit for a trainer's reward from which a wait for it is mentioned."""


def advice_on_wait(job: JobRow, waiting: int, seconds: float) -> list[dict[str, str]]:
    """Return the advice on rollouts that wait for the trainer's rewards, which has at most one entry.

    Args:
        job: The job.
        waiting: The number of rollouts that wait.
        seconds: How long the first of them has waited, in seconds.
    """
    limit = job.limits.trainer_reward_seconds
    if limit is None or not waiting or seconds < LONG_WAIT * limit:
        return []
    message = (
        f"rollouts that wait for the trainer's rewards: {waiting:,}, the first for {seconds:,.0f} s; after "
        f"{limit:,} s they end as Failed (RewardNotGiven): hand their rewards in with client.rewards, or "
        "raise reward.trainer.timeoutSeconds in a new job"
    )
    return [{"reason": "RewardsAwaited", "message": message}]


def advice_on_harness_quota(waiting: int, running: int, most: int) -> list[dict[str, str]]:
    """Return the advice on rollouts of a harness that wait for the quota of their namespace.

    Args:
        waiting: The number of the job's rollouts that wait for Run.
        running: The number of the namespace's rollouts of harnesses that are in Run.
        most: The largest number of these.
    """
    if not waiting or running < most:
        return []
    message = (
        f"rollouts that wait for Run: {waiting:,}; harnesses have {running:,} rollouts in Run in this "
        f"namespace, of all jobs, and may have {most:,} (--max-harness-runs-per-namespace)"
    )
    return [{"reason": "HarnessQuota", "message": message}]


class _Limit(NamedTuple):
    """A limit that truncates rollouts: its name and value, and what raises it."""

    name: str
    field: str


class _Sampling(Struct, rename="camel"):
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None = None

    @property
    def is_plain(self) -> bool:
        """Whether tokens are sampled from the distribution that the model's logits give as they are."""
        return self.temperature == 1.0 and self.top_p == 1.0 and self.top_k <= 0


class _Agent(Struct, rename="camel"):
    type: str
    tool_parser: str
    max_turns: int
    max_context_tokens: int | None = None
    chat_template_kwargs: dict[str, Any] = {}


class _RunStage(Struct, rename="camel"):
    timeout_seconds: int


class _Stages(Struct):
    run: _RunStage


class _Tasks(Struct):
    stream: bool = False


class _Spec(Struct, rename="camel"):
    """The fields of a job's spec that matter here. The others, such as tasks, are passed over."""

    tasks: _Tasks
    agent: _Agent
    sampling: _Sampling
    stages: _Stages

    @property
    def is_for_training(self) -> bool:
        """Whether a trainer may learn from the rollouts: a model samples them, and not greedily."""
        return self.agent.type != "oracle" and self.sampling.temperature > 0.0

    def limit(self, reason: str) -> _Limit:
        """Return the limit of rollouts that were truncated for one of the reasons of _TRUNCATED."""
        match reason:
            case signs.MAX_TOKENS if self.sampling.max_tokens is not None:
                return _Limit(f"maxTokens ({self.sampling.max_tokens:,})", "sampling.maxTokens")
            case signs.MAX_TURNS:
                return _Limit(f"maxTurns ({self.agent.max_turns:,})", "agent.maxTurns")
            case signs.RUN_TIMEOUT:
                seconds = self.stages.run.timeout_seconds
                return _Limit(f"the time limit of Run ({seconds:,} s)", "stages.run.timeoutSeconds")
        own = self.agent.max_context_tokens
        if own is None:
            return _Limit("the server's context", "it (vLLM: --max-model-len)")
        return _Limit(
            f"maxContextTokens ({own:,}) or the server's context",
            "agent.maxContextTokens, or the server's context (vLLM: --max-model-len) if that is smaller",
        )


def advice_on(job: JobRow) -> list[dict[str, str]]:
    """Return the advice on a job, as its status has it."""
    if job.succeeded < FEWEST and (job.limits.samples > 1 or job.total < FEWEST):
        return []  # The spec, which may be large, is not read where there is nothing to say.
    spec = msgspec.json.decode(job.spec, type=_Spec)
    sentences = [*_truncated(job, spec), *_thoughts(job, spec), *_calls(job, spec)]
    if spec.is_for_training:
        sentences += [*_rewards(job), *_group_size(job, spec), *_logprobs(job, spec)]
    return [{"reason": reason, "message": message} for reason, message in sentences]


def _concerns(part: int, whole: int, share: float = SHARE) -> bool:
    return whole >= FEWEST and part >= share * whole


def _truncated(job: JobRow, spec: _Spec) -> Iterator[tuple[str, str]]:
    for reason, name in _TRUNCATED.items():
        part = job.signs.truncated.get(reason, 0)
        if _concerns(part, job.succeeded):
            limit = spec.limit(reason)
            yield (
                name,
                f"{part:,} of {job.succeeded:,} rollouts were truncated by {limit.name}: raise {limit.field}",
            )


def _thoughts(job: JobRow, spec: _Spec) -> Iterator[tuple[str, str]]:
    part = job.signs.open_thoughts
    if not _concerns(part, job.succeeded):
        return
    message = f"{part:,} of {job.succeeded:,} rollouts were cut in a thought that had not ended"
    remedies: list[str] = []
    counts = {reason: job.signs.truncated.get(reason, 0) for reason in _CUTS_THOUGHTS}
    reason = max(counts, key=counts.__getitem__)
    if counts[reason]:
        limit = spec.limit(reason)
        message += f", most of them by {limit.name}"
        remedies.append(f"raise {limit.field}")
    if spec.agent.chat_template_kwargs.get("enable_thinking") is not False:
        remedies.append(_NO_THINKING)
    yield "ThoughtsDoNotEnd", ": ".join([message, *(["; or ".join(remedies)] if remedies else [])])


def _calls(job: JobRow, spec: _Spec) -> Iterator[tuple[str, str]]:
    if job.signs.malformed_rollouts >= MANY and not job.signs.well_formed:
        yield (
            "MalformedCalls",
            f"all {job.signs.malformed_calls:,} tool calls of the first {job.signs.malformed_rollouts:,} "
            f"rollouts that made any were malformed: set agent.toolParser ({spec.agent.tool_parser}) to one "
            "that fits the model",
        )


def _rewards(job: JobRow) -> Iterator[tuple[str, str]]:
    lowest, highest = job.signs.lowest, job.signs.highest
    if lowest is None or highest is None:
        return
    if highest - lowest <= MIN_STD:
        # Hard tasks begin with zeros, so a few are not enough unless no others will come.
        if job.succeeded >= (FEWEST if job.finished_at is not None else MANY):
            shown = f"rollyard view {job.name}"
            shown += "" if job.namespace == "default" else f" -n {job.namespace}"
            shown += " --failed" if highest == 0.0 else ""
            yield (
                "EqualRewards",
                f"the reward is {highest:g} in all of {job.succeeded:,} rollouts, so there is nothing to "
                f"learn from: look at some with `{shown}`",
            )
        return
    equal = job.signs.equal_groups
    whole = equal + job.signs.informative_groups
    if job.limits.samples > 1 and _concerns(equal, whole, EQUAL_SHARE):
        lack, remedy = "no signal", "choose tasks that the model solves sometimes but not always"
        if job.limits.sampling is None:
            lack, remedy = "equal rewards", f"{remedy}, or let dynamicSampling replace such groups"
        yield (
            "GroupsOfEqualRewards",
            f"{equal:,} of {whole:,} groups have {lack} and teach nothing: {remedy}",
        )


def _group_size(job: JobRow, spec: _Spec) -> Iterator[tuple[str, str]]:
    # Trainers that push tasks may make groups of them themselves.
    if job.limits.samples == 1 and job.total >= FEWEST and not spec.tasks.stream:
        yield (
            "GroupsOfOne",
            "each task has one rollout (samplesPerTask: 1), so advantages relative to a group, as in GRPO, "
            "are 0: raise samplesPerTask, unless this is an evaluation or the trainer needs no groups (as "
            "REINFORCE and PPO)",
        )


def _logprobs(job: JobRow, spec: _Spec) -> Iterator[tuple[str, str]]:
    # Without temperature, top-p and top-k, all kinds that are known are the same numbers.
    kinds = (signs.UNKNOWN,) if spec.sampling.is_plain else tuple(_KINDS)
    counts = {kind: job.signs.logprobs.get(kind, 0) for kind in kinds}
    part = sum(counts.values())
    if _concerns(part, job.succeeded):
        kind = max(kinds, key=lambda one: counts[one])
        yield (
            "OtherLogprobs",
            f"the log-probabilities of {part:,} of {job.succeeded:,} rollouts {_KINDS[kind]}: "
            f"{_REMEDIES[kind]}",
        )
