"""Token lists as raw arrays, the form in which they go from a worker to the store and to trainers.

Numbers are little-endian arrays. Their type, in numpy's notation, is the narrowest of `<u1`, `<u2` and `<u4`,
or of `<f4` and `<f8`, that holds every number exactly. Policy versions are runs of equal labels. A list of
8,192 tokens is packed, checked and unpacked in a fraction of the time that its JSON takes.
"""

from __future__ import annotations

import binascii
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress, groupby
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema, model_validator

from rollyard_crds.trajectory import LOWEST_LOGPROB, Record, Segment, SegmentSizes

Dtype = Literal["<u1", "<u2", "<u4", "<f4", "<f8"]
_CODES: Final = {"<u1": "B", "<u2": "H", "<u4": "I", "<f4": "f", "<f8": "d"}
"""The type codes of `array` for the types on the wire."""
_INTEGERS: Final[tuple[Dtype, ...]] = ("<u1", "<u2", "<u4")
"""The narrowest first. A list that does not fit is noticed at its first number that is too large."""
_FLOATS: Final = ("<f4", "<f8")
_MAX_RUN: Final = 1 << 32
"""The largest number of tokens in a run. No list is that long, and sums of such numbers do no harm."""
ID_END: Final = 1 << 32
"""Token ids are smaller than this, in every vocabulary and in the arrays that hold them."""
_FLIP: Final = bytes.maketrans(b"\x00\x01", b"\x01\x00")
_SWAPPED: Final = sys.byteorder == "big"
_PARALLEL: Final = ("loss_mask", "logprobs", "policy_versions")
_ARRAYS: Final = ("prompt_ids", "response_ids", "loss_mask", "logprobs")


def _decoded(data: Any) -> Any:
    if not isinstance(data, str):
        return data
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError as error:
        raise ValueError(f"must be base64: {error}") from error


def _encoded(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode("ascii")


Base64 = Annotated[
    bytes,
    BeforeValidator(_decoded),
    PlainSerializer(_encoded, when_used="json"),
    WithJsonSchema({"type": "string", "contentEncoding": "base64"}),
]
"""Bytes, which are base64 in JSON."""


class TokenArray(Record):
    """Numbers, one for each token."""

    dtype: Dtype
    """The type of the numbers: unsigned integers of 1, 2 or 4 bytes, or floats of 4 or 8 bytes."""
    data: Base64
    """The numbers as a little-endian array."""

    @model_validator(mode="after")
    def _whole(self) -> TokenArray:
        if len(self.data) % int(self.dtype[2]):
            raise ValueError(f"data has {len(self.data)} bytes, which are not whole numbers of {self.dtype}")
        return self

    @classmethod
    def integers(cls, values: Sequence[int]) -> TokenArray:
        """Return integers as an array.

        Raises:
            ValueError: One is negative, or needs more than 32 bits.
        """
        for dtype in _INTEGERS:
            try:
                return cls._of(dtype, array(_CODES[dtype], values))
            except OverflowError:
                continue
        raise ValueError(f"a token id must be from 0 to {ID_END - 1}")

    @classmethod
    def floats(cls, values: Sequence[float]) -> TokenArray:
        """Return floats as an array."""
        # A log-probability that a server computed in float32 fits into half of the bytes.
        narrow = array("f", values)
        if narrow.tolist() == list(values):
            return cls._of("<f4", narrow)
        return cls._of("<f8", array("d", values))

    @classmethod
    def _of(cls, dtype: Dtype, numbers: array[Any]) -> TokenArray:
        if _SWAPPED:
            numbers.byteswap()
        return cls.model_construct(dtype=dtype, data=numbers.tobytes())

    @property
    def is_of_floats(self) -> bool:
        """Whether the numbers are floats."""
        return self.dtype in _FLOATS

    def __len__(self) -> int:
        return len(self.data) // int(self.dtype[2])

    @property
    def numbers(self) -> array[Any]:
        """The numbers, as this machine reads them."""
        numbers: array[Any] = array(_CODES[self.dtype], self.data)
        if _SWAPPED:
            numbers.byteswap()
        return numbers


_RUN_SCHEMA: Final = {
    "type": "array",
    "prefixItems": [{"type": "string"}, {"type": "integer", "minimum": 1, "maximum": _MAX_RUN}],
    "minItems": 2,
    "maxItems": 2,
}


class VersionRuns(Record):
    """A policy version for each token, as runs of equal ones."""

    runs: Annotated[list[Any], WithJsonSchema({"type": "array", "items": _RUN_SCHEMA})]
    """The runs in their order, each as [version, number of tokens]."""

    @model_validator(mode="after")
    def _pairs(self) -> VersionRuns:
        # A body may have millions of runs, and pydantic takes some microseconds for each.
        for index, run in enumerate(self.runs):
            if (
                type(run) is not list
                or len(run) != 2
                or type(run[0]) is not str
                or type(run[1]) is not int
                or not 1 <= run[1] <= _MAX_RUN
            ):
                raise ValueError(f"runs[{index}]: must be [version, number of tokens]")
        return self

    @classmethod
    def of(cls, versions: Iterable[str]) -> VersionRuns:
        """Return versions as runs."""
        return cls.model_construct(runs=[[version, len(list(run))] for version, run in groupby(versions)])

    def __len__(self) -> int:
        return sum(count for _, count in self.runs)

    @property
    def versions(self) -> list[str]:
        """The version of each token."""
        versions: list[str] = []
        for version, count in self.runs:
            versions += [version] * count
        return versions


class PackedSegment(Record):
    """The token lists of one segment as arrays; see `Segment` for what they say.

    Raises:
        pydantic.ValidationError: lengths differ, or a number is one that no trajectory can have.
    """

    prompt_ids: TokenArray
    response_ids: TokenArray
    loss_mask: TokenArray
    logprobs: TokenArray
    policy_versions: VersionRuns

    @model_validator(mode="after")
    def _sound(self) -> PackedSegment:
        n = len(self.response_ids)
        for name in _PARALLEL:
            length = len(getattr(self, name))
            if length != n:
                raise ValueError(f"{name} has {length} entries, response_ids has {n}")
        if self.prompt_ids.is_of_floats or self.response_ids.is_of_floats:
            raise ValueError("prompt_ids and response_ids: every entry must be an integer")
        if not self.logprobs.is_of_floats:
            raise ValueError("logprobs: every entry must be a float")
        mask = self.loss_mask.data
        if self.loss_mask.dtype != "<u1" or mask.translate(None, b"\x00\x01"):
            raise ValueError("loss_mask: every entry must be 0 or 1, of type <u1")
        logprobs = self.logprobs.numbers.tolist()
        if any(compress(logprobs, mask.translate(_FLIP))):
            raise ValueError("logprobs: must be 0.0 where loss_mask is 0")
        low, high = min(logprobs, default=0.0), max(logprobs, default=0.0)
        # A comparison with NaN is false, and `min` and `max` may miss one, but a sum does not.
        if not (low >= LOWEST_LOGPROB and high <= 0) or math.isnan(sum(logprobs)):
            wrong = next(value for value in logprobs if not LOWEST_LOGPROB <= value <= 0)
            raise ValueError(f"logprobs: every entry must be from {LOWEST_LOGPROB:g} to 0 (got {wrong})")
        return self

    @classmethod
    def of(
        cls,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        loss_mask: Sequence[int],
        logprobs: Sequence[float],
        policy_versions: Sequence[str],
    ) -> PackedSegment:
        """Return lists as a segment, which its receiver checks.

        Raises:
            ValueError: An integer is negative, or needs more than 32 bits.
        """
        return cls.model_construct(
            prompt_ids=TokenArray.integers(prompt_ids),
            response_ids=TokenArray.integers(response_ids),
            loss_mask=TokenArray.integers(loss_mask),
            logprobs=TokenArray.floats(logprobs),
            policy_versions=VersionRuns.of(policy_versions),
        )

    @classmethod
    def unchecked(cls, document: Mapping[str, Any]) -> PackedSegment:
        """Return a segment whose dump is `document`, which was checked before."""
        fields: dict[str, Any] = {name: TokenArray.model_construct(**document[name]) for name in _ARRAYS}
        fields["policy_versions"] = VersionRuns.model_construct(**document["policy_versions"])
        return cls.model_construct(None, **fields)

    def lists(self) -> Segment:
        """Return the token lists. They are not checked again."""
        return Segment.model_construct(
            prompt_ids=self.prompt_ids.numbers.tolist(),
            response_ids=self.response_ids.numbers.tolist(),
            loss_mask=list(self.loss_mask.data),
            logprobs=self.logprobs.numbers.tolist(),
            policy_versions=self.policy_versions.versions,
        )

    @property
    def sizes(self) -> SegmentSizes:
        """The numbers of tokens."""
        return SegmentSizes(
            prompt_tokens=len(self.prompt_ids),
            response_tokens=len(self.response_ids),
            sampled_tokens=self.loss_mask.data.count(1),
        )
