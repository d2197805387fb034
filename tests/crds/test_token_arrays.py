"""Token lists as raw arrays are, number by number, the lists that they were made of."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rollyard_crds.token_arrays import PackedSegment, TokenArray
from rollyard_crds.trajectory import Segment, SegmentSizes, TokensMissing, Trajectory

ids = st.lists(st.integers(0, 2**32 - 1), max_size=20)
logprobs = st.floats(-1000, 0) | st.floats(-1000, 0, width=32)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """Return any segment that a trajectory can have."""
    sampled = draw(st.lists(st.booleans(), max_size=20))
    return Segment(
        prompt_ids=draw(ids),
        response_ids=[draw(st.integers(0, 2**32 - 1)) for _ in sampled],
        loss_mask=[int(one) for one in sampled],
        logprobs=[draw(logprobs) if one else 0.0 for one in sampled],
        policy_versions=[draw(st.sampled_from(["a", "b"])) if one else "" for one in sampled],
    )


@given(segments())
def test_every_number_is_kept_bit_for_bit(segment: Segment) -> None:
    packed = PackedSegment.of(**dict(segment))
    assert packed.lists() == segment
    assert str(packed.lists()) == str(segment)
    sent = json.loads(packed.model_dump_json())
    assert PackedSegment.model_validate(sent, strict=True) == packed
    assert PackedSegment.unchecked(packed.model_dump()) == packed
    assert packed.sizes == SegmentSizes(
        prompt_tokens=len(segment.prompt_ids),
        response_tokens=len(segment.response_ids),
        sampled_tokens=sum(segment.loss_mask),
    )


def test_the_narrowest_type_is_taken() -> None:
    for ids, dtype in (([255], "<u1"), ([256], "<u2"), ([65536], "<u4"), ([], "<u1")):
        assert TokenArray.integers(ids).dtype == dtype
    for values, dtype in (([-0.5], "<f4"), ([-0.1], "<f8"), ([-0.5, -1e300], "<f8")):
        assert TokenArray.floats(values).dtype == dtype
    for odd in ([-1], [2**32], [5, 2**80]):
        with pytest.raises(ValueError, match="a token id must be from 0 to 4294967295"):
            TokenArray.integers(odd)


def test_an_array_has_whole_numbers() -> None:
    for data in ("AQ", "A Q=", "AQ==AQ==", "=", "é"):
        with pytest.raises(ValidationError, match="must be base64"):
            TokenArray.model_validate({"dtype": "<u1", "data": data})
    with pytest.raises(ValidationError, match="data has 1 bytes, which are not whole numbers of <u2"):
        TokenArray.model_validate({"dtype": "<u2", "data": "AQ=="})


def test_a_trajectory_without_tokens_does_not_look_like_an_empty_one() -> None:
    segment = Segment(
        prompt_ids=[1, 2],
        response_ids=[3, 4],
        loss_mask=[1, 0],
        logprobs=[-0.5, 0.0],
        policy_versions=["v", ""],
    )
    whole = Trajectory(id="r", job="j", task_id="t", group_id="t", sample_index=0, segments=[segment])
    transcript = whole.transcript
    assert transcript.sampled_tokens == whole.sampled_tokens == 1
    assert transcript.segment_sizes == [SegmentSizes(prompt_tokens=2, response_tokens=2, sampled_tokens=1)]
    with pytest.raises(TokensMissing, match="needs_tokens = True"):
        _ = transcript.segments
    with pytest.raises(TokensMissing, match="needs_tokens = True"):
        getattr(transcript, "segments", [])
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        _ = transcript.colour
    assert transcript.with_segments([segment]) == whole
    with pytest.raises(TokensMissing, match="has 1 segments, and the token lists of 0 came"):
        transcript.with_segments([])
