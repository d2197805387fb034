"""Hypothesis strategies for groups of rollouts: several segments, failed members, several policy versions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from rollyard_crds.task import Message
from rollyard_crds.trajectory import Attempt, SamplingRecord, Segment, Timings, Trajectory, Turn

PAD = 999
"""The padding token. No rollout holds it, so that a placeholder can be recognized."""
VERSIONS = ("0", "run-step-1", "run-step-12")

Token = tuple[int, int, float, str]
"""A token of a response: its id, its mask, its log-probability and its version."""


def _token() -> SearchStrategy[Token]:
    sampled = st.tuples(
        st.integers(0, PAD - 1), st.just(1), st.floats(-30.0, 0.0, width=32), st.sampled_from(VERSIONS)
    )
    outside = st.tuples(st.integers(0, PAD - 1), st.just(0), st.just(0.0), st.just(""))
    return st.one_of(sampled, sampled, outside)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Draw a segment. Its prompt is never empty, but its response may be, or hold no sampled token."""
    tokens = draw(st.lists(_token(), max_size=10))
    return Segment(
        prompt_ids=draw(st.lists(st.integers(0, PAD - 1), min_size=1, max_size=5)),
        response_ids=[token[0] for token in tokens],
        loss_mask=[token[1] for token in tokens],
        logprobs=[token[2] for token in tokens],
        policy_versions=[token[3] for token in tokens],
    )


@st.composite
def trajectories(draw: st.DrawFn, group: str, sample: int, most_segments: int = 3) -> Trajectory:
    """Draw a rollout that succeeded, failed or was cancelled."""
    status = draw(st.sampled_from(("succeeded", "succeeded", "succeeded", "failed", "cancelled")))
    scored = status == "succeeded"
    held = draw(st.lists(segments(), max_size=most_segments))
    turns = [
        Turn(segment=place, start=0, end=len(one.response_ids), finish_reason="stop")
        for place, one in enumerate(held)
    ]
    truncated = scored and draw(st.booleans())
    attempts = [
        Attempt(stage="run", attempt=1, reason="BackendUnavailable", started=1.0, seconds=2.5, counted=True)
    ]
    return Trajectory(
        id=f"job.{group}.{sample}",
        job="job",
        task_id=f"task-{group}",
        group_id=group,
        sample_index=sample,
        attempt=0 if scored else 1,
        attempts=[] if scored else attempts,
        status=status,
        reason="" if scored else "BackendUnavailable",
        reward=draw(st.floats(-2.0, 2.0, width=32)) if scored else None,
        reward_components={"tests": 0.5} if scored else {},
        reward_reason=draw(st.sampled_from(("", "TestTimeout"))) if scored else "",
        segments=held,
        messages=[
            Message(role="system", content="Be brief."),
            Message(role="user", content="Count."),
            Message(role="assistant", content="3"),
        ],
        turns=turns,
        sampling=SamplingRecord(temperature=0.5, top_p=1.0, max_tokens=64, seed=3),
        timings=Timings(model_seconds=1.5, tool_seconds=0.25),
        backend="http://127.0.0.1:8000",
        truncated=truncated,
        truncated_reason="MaxTurns" if truncated else "",
        metadata={"family": "count"},
    )


@st.composite
def batches(draw: st.DrawFn, most_segments: int = 3) -> list[Trajectory]:
    """Draw one to three groups of one to four rollouts each."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        for sample in range(draw(st.integers(1, 4))):
            found.append(draw(trajectories(f"g{number}", sample, most_segments)))
    return found


Sampled = Counter[tuple[str, int, int, float]]
"""How often each token is trained on: its rollout, its place in the sequence, its id and log-probability."""


def sampled(batch: Iterable[Trajectory]) -> Sampled:
    """Return the sampled tokens of all scored rollouts, as every adapter must hand them on: each once."""
    return Counter(
        (one.id, len(segment.prompt_ids) + place, segment.response_ids[place], segment.logprobs[place])
        for one in batch
        if one.status == "succeeded" and one.reward is not None
        for segment in one.segments
        for place, mask in enumerate(segment.loss_mask)
        if mask
    )


def trained(
    rollout: str, ids: Sequence[int], mask: Sequence[int | bool], logprobs: Sequence[float], prompt: int = 0
) -> Sampled:
    """Return the tokens of one row that a trainer learns from.

    Args:
        rollout: The rollout of the row.
        ids: The ids of the row.
        mask: The mask, of the same length.
        logprobs: The log-probabilities, of the same length.
        prompt: The number of tokens before the first of the ids.
    """
    assert len(ids) == len(mask) == len(logprobs)
    return Counter(
        (rollout, prompt + place, ids[place], logprobs[place]) for place, learnt in enumerate(mask) if learnt
    )
