"""The reading and the checks of an answer, which comes in one piece or as events while it is sampled.

Anything that an answer lacks or contradicts raises `BackendMismatch`, whose message names the place.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson
from rollyard_crds.token_arrays import ID_END
from rollyard_crds.trajectory import LOWEST_LOGPROB

from rollyard_inference.errors import BackendMismatch
from rollyard_inference.sampling.request import Answer, Sampling

if TYPE_CHECKING:
    from rollyard_crds.trajectory import FinishReason

LOGPROB_TOLERANCE: Final = 1e-3  # This many nats above 0 can be explained by rounding in reduced precision.
_FINISH: Final[dict[str, FinishReason]] = {"stop": "stop", "length": "length", "abort": "abort"}


class AnswerReader(ABC):
    """Reads the events of one answer, and checks each of them as it comes.

    An answer that comes in one piece is a single event.
    """

    def __init__(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self.token_ids: list[int] = []
        """The ids that were sampled so far."""
        self.logprobs: list[float] = []
        """Their log-probabilities in nats, of the same length."""
        self.finish_reason: FinishReason | None = None
        """Why the answer ended, or None if it has not."""
        self.label: str | None = None
        """The weight version that the last event named, if events name it."""
        self.labelled = 0
        """The number of first tokens that came with events which all named the same version."""
        self._relabelled = False
        self._versions: tuple[str | None, ...] | None = None

    @abstractmethod
    def feed(self, event: object) -> None:
        """Read one event, which is decoded JSON.

        Raises:
            BackendMismatch: Something is missing, has another length, or is impossible.
            BackendRefused, BackendUnavailable: The event reports an error.
        """

    def answer(self) -> Answer:
        """Return the answer, all of which was read.

        Raises:
            BackendMismatch: It did not end, or lacks something that one of its events should have.
        """
        if self.finish_reason is None:
            raise BackendMismatch(f"finish_reason is missing, expected one of {', '.join(_FINISH)}")
        return Answer(
            tuple(self.token_ids), tuple(self.logprobs), self.finish_reason, self._versions, self.label
        )

    def _add(self, ids: list[int], values: Sequence[object]) -> None:
        if len(values) != len(ids):
            raise BackendMismatch(f"{len(ids)} token_ids but {len(values)} logprobs")
        count = len(self.token_ids) + len(ids)
        if count > self._sampling.max_tokens:
            raise BackendMismatch(f"{count} tokens sampled, max_tokens was {self._sampling.max_tokens}")
        self.logprobs += _logprobs(ids, values, len(self.token_ids))
        self.token_ids += ids

    def _add_label(self, label: object) -> None:
        """Note the weight version that an event names, after its tokens were added."""
        if not isinstance(label, str):
            return
        self._relabelled |= self.label not in (None, label)
        self.label = label
        if not self._relabelled:
            self.labelled = len(self.token_ids)

    def _end(self, finish: object, versions: tuple[str | None, ...] | None) -> None:
        reason = _FINISH.get(finish) if isinstance(finish, str) else None
        if reason is None:
            raise BackendMismatch(f"finish_reason is {finish!r}, expected one of {', '.join(_FINISH)}")
        if not self.token_ids and reason != "abort":
            raise BackendMismatch(f"no token sampled, finish_reason '{reason}'")
        self.finish_reason = reason
        self._versions = versions


def _logprobs(ids: Sequence[int], values: Sequence[object], first: int) -> tuple[float, ...]:
    floats = tuple(value for value in values if type(value) is float)
    # Nearly all answers are valid, and it is faster to check all values together. A NaN shows in the sum.
    if (
        len(floats) == len(values)
        and math.isfinite(sum(floats))
        and min(floats, default=0.0) >= LOWEST_LOGPROB
        and max(floats, default=0.0) <= 0.0
    ):
        return floats
    return tuple(
        _logprob(index, token, value)
        for index, (token, value) in enumerate(zip(ids, values, strict=True), start=first)
    )


def _logprob(index: int, token: int, value: object) -> float:
    description = f"logprob {index}, of the sampled token {token}, is {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BackendMismatch(f"{description}, expected a number")
    if value > LOGPROB_TOLERANCE:
        raise BackendMismatch(f"{description}, above 0")
    if value >= LOWEST_LOGPROB:
        return min(float(value), 0.0)
    raise BackendMismatch(
        f"{description}, expected a number from {LOWEST_LOGPROB:g} to 0: servers write minus infinity, and "
        "vLLM -9999, for a token that a mask, top-k or top-p excludes from the distribution that they "
        "report, so the token was sampled from another one"
    )


def versions_of(ranges: object, count: int) -> tuple[str | None, ...] | None:
    """Return one label for each token from `[{version, start, end}]`, or None if that is missing or empty.

    Raises:
        BackendMismatch: The ranges do not cover the `count` tokens one after the other.
    """
    if ranges is None or ranges == []:
        return None
    if not isinstance(ranges, list):
        raise BackendMismatch(f"weight_versions is {kind(ranges)}, expected a list")
    labels: list[str | None] = []
    for entry in ranges:
        item = mapping(entry, "an entry of weight_versions")
        start, end, label = item.get("start"), item.get("end"), item.get("version")
        if not (type(start) is int and type(end) is int and len(labels) == start <= end <= count):
            raise BackendMismatch(
                f"weight_versions says tokens {start!r} to {end!r} of {count}, after token {len(labels)}"
            )
        labels += [None if label is None else str(label)] * (end - start)
    if len(labels) != count:
        raise BackendMismatch(f"weight_versions ends at token {len(labels)} of {count}")
    return tuple(labels)


def same_prompt(echoed: object, sent: Sequence[int], field: str = "prompt_token_ids") -> None:
    """Compare the prompt that a backend reports to have read with the one that was sent.

    Raises:
        BackendMismatch: The prompts differ.
    """
    # Comparing the JSON is ten times as fast as checking the type of every id, and equally strict.
    if isinstance(echoed, list) and orjson.dumps(echoed) == orjson.dumps(tuple(sent)):
        return
    ids = token_ids(echoed, field)
    if len(ids) != len(sent):
        raise BackendMismatch(f"the backend read {len(ids)} prompt ids, {len(sent)} were sent")
    index = next(i for i, (a, b) in enumerate(zip(ids, sent, strict=True)) if a != b)
    raise BackendMismatch(f"prompt id {index} is {ids[index]} at the backend, {sent[index]} was sent")


def same_count(count: object, ids: Sequence[int], field: str) -> None:
    """Compare a number of tokens that a backend reports with the number of ids.

    Raises:
        BackendMismatch: The numbers differ.
    """
    if type(count) is not int or count != len(ids):
        raise BackendMismatch(f"{field} is {count!r} at the backend, there are {len(ids)} ids")


def one_choice(body: dict[str, Any]) -> dict[str, Any]:
    """Return the only choice of an answer, or raise BackendMismatch."""
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        count = len(choices) if isinstance(choices, list) else kind(choices)
        raise BackendMismatch(f"choices is {count}, expected a list of one")
    return mapping(choices[0], "choices[0]")


def mapping(value: object, field: str) -> dict[str, Any]:
    """Return the value if it is a JSON object, or raise BackendMismatch."""
    if not isinstance(value, dict):
        raise BackendMismatch(f"{field} is {kind(value)}, expected an object")
    return value


def token_ids(value: object, field: str) -> list[int]:
    """Return the value if it is a list of token ids, or raise BackendMismatch."""
    if not isinstance(value, list):
        raise BackendMismatch(f"{field} is {kind(value)}, expected a list of token ids")
    if set(map(type, value)) <= {int} and min(value, default=0) >= 0 and max(value, default=0) < ID_END:
        return value
    index, item = next(
        (i, token) for i, token in enumerate(value) if type(token) is not int or not 0 <= token < ID_END
    )
    raise BackendMismatch(f"{field}[{index}] is {item!r}, expected a token id")


def kind(value: object) -> str:
    """Return the name of the value's type for messages; None counts as missing."""
    return "missing" if value is None else type(value).__name__
